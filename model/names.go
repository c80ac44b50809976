package model

import (
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// dimPlace is the dimension of the rows of the table of learned positions.
const dimPlace = "place"

// The dimensions of parameters.

// The dimensions of parameters, by the names that plans shard along.
func (c *Config) embed() ir.Dim { return ir.Dim{Name: ir.EmbedDim, Size: c.Hidden} }
func (c *Config) mlp() ir.Dim   { return ir.Dim{Name: ir.MLPDim, Size: c.MLP} }
func (c *Config) vocab() ir.Dim { return ir.Dim{Name: ir.Vocab, Size: c.Vocab} }
func (c *Config) head() ir.Dim  { return ir.Dim{Name: ir.HeadDim, Size: c.HeadDim} }
func (c *Config) heads() ir.Dim { return ir.Dim{Name: ir.Heads, Size: c.Heads} }
func (c *Config) kv() ir.Dim    { return ir.Dim{Name: ir.KVHeads, Size: c.KVHeads} }

// experts is the dimension of a layer's experts.
func (m *MoE) experts() ir.Dim { return ir.Dim{Name: ir.ExpertDim, Size: m.Experts} }

// Params lists the parameters of the model in the order of the inputs of its graph.
func (c *Config) Params() []Param {
	w := &writer{c: c}
	n := c.names()
	w.add("embed", ir.Embed, n.embed, matrix(c.vocab(), c.embed()))
	if c.Learned {
		places := ir.Dim{Name: dimPlace, Size: c.Context}
		w.add("position", ir.Embed, n.position, matrix(places, c.embed()))
	}
	for _, s := range c.segments() {
		for i := range s {
			w.slot = &s[i]
			w.block(n)
		}
	}
	w.slot = nil
	w.norm("norm", n.norm, c.embed())
	if !c.Tied {
		w.add("head", ir.Head, "lm_head.weight", matrix(c.vocab(), c.embed()))
	}
	return w.list
}

// names are a family's names of tensors. Names inside layers begin with layer.
type names struct {
	embed, position, norm, layer             string
	norm1, post1, norm2, post2, qNorm, kNorm string
	q, k, v, o, gate, up, down               string
	conv                                     bool // matrices are in, out: GPT-2's Conv1D
	experts                                  expertNames
}

// expertNames are a family's names of experts, routers and shared experts inside a layer.
type expertNames struct {
	router, correction, gate, up, down string
	// together: a tensor has all experts, as in, out; gate and up take turns in its columns.
	together                         bool
	sharedGate, sharedUp, sharedDown string
}

// names returns the family's. Weights and biases of a layer differ in their last word only. A
// family that keeps several weights in one tensor names it for each of them, in the order in which
// they stand.
func (c *Config) names() names {
	n := names{embed: "model.embed_tokens.weight", norm: "model.norm", layer: "model.layers.{}.",
		norm1: "input_layernorm", norm2: "post_attention_layernorm",
		qNorm: "self_attn.q_norm", kNorm: "self_attn.k_norm",
		q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj", o: "self_attn.o_proj",
		gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj", experts: expertNames{
			router: "mlp.gate", correction: "mlp.gate.e_score_correction_bias",
			gate: "mlp.experts.{expert}.gate_proj", up: "mlp.experts.{expert}.up_proj",
			down: "mlp.experts.{expert}.down_proj", sharedGate: "mlp.shared_experts.gate_proj",
			sharedUp: "mlp.shared_experts.up_proj", sharedDown: "mlp.shared_experts.down_proj"}}
	if c.PostNorms {
		n.post1, n.norm2, n.post2 = "post_attention_layernorm", "pre_feedforward_layernorm",
			"post_feedforward_layernorm"
	}
	switch c.Arch {
	case "mixtral":
		n.experts = expertNames{router: "block_sparse_moe.gate",
			gate: "block_sparse_moe.experts.{expert}.w1", up: "block_sparse_moe.experts.{expert}.w3",
			down: "block_sparse_moe.experts.{expert}.w2"}
	case "gpt_oss":
		n.experts = expertNames{router: "mlp.router", gate: "mlp.experts.gate_up_proj",
			up: "mlp.experts.gate_up_proj", down: "mlp.experts.down_proj", together: true}
	case "phi3":
		n.q, n.k, n.v = "self_attn.qkv_proj", "self_attn.qkv_proj", "self_attn.qkv_proj"
		n.gate, n.up = "mlp.gate_up_proj", "mlp.gate_up_proj"
	case "gpt2":
		n = names{embed: "transformer.wte.weight", position: "transformer.wpe.weight",
			norm: "transformer.ln_f", layer: "transformer.h.{}.", norm1: "ln_1", norm2: "ln_2",
			q: "attn.c_attn", k: "attn.c_attn", v: "attn.c_attn", o: "attn.c_proj",
			up: "mlp.c_fc", down: "mlp.c_proj", conv: true}
	}
	return n
}

// A writer collects the list of parameters.
type writer struct {
	c    *Config
	slot *slot // of the layers now written; nil outside
	list []Param
}

// add appends a parameter, stacked within layers. like gives what is left of it.
func (w *writer) add(name string, tag ir.Tag, source string, like Param) {
	p := like
	p.Name, p.Tag, p.Source = name, tag, source
	if w.slot != nil {
		p.Name = w.slot.name + "." + name
		p.Dims = append([]ir.Dim{{Name: ir.Layer, Size: w.slot.count}}, p.Dims...)
		p.First, p.Step = w.slot.first, w.slot.step
	}
	w.list = append(w.list, p)
}

// matrix is a tensor that is a parameter as it stands.
func matrix(dims ...ir.Dim) Param {
	shape := lists.Map(dims, func(d ir.Dim) int64 { return d.Size })
	return Param{Dims: dims, Shape: shape, To: shape[0]}
}

// block appends the parameters of a layer.
func (w *writer) block(n names) {
	c := w.c
	at := func(name string) string { return n.layer + name }
	w.norm("norm1", at(n.norm1), c.embed())
	if c.MLA != nil {
		w.latent(n)
	} else {
		w.attention(n)
	}
	if c.PostNorms {
		w.norm("post1", at(n.post1), c.embed())
	}
	w.norm("norm2", at(n.norm2), c.embed())
	if w.slot.experts {
		w.sparse(n)
	} else {
		w.dense(n, "", c.mlp(), at(n.gate), at(n.up), at(n.down))
	}
	if c.PostNorms {
		w.norm("post2", at(n.post2), c.embed())
	}
}

// attention appends the parameters of a layer's attention.
func (w *writer) attention(n names) {
	c := w.c
	e, q, kv := []ir.Dim{c.embed()}, []ir.Dim{c.heads(), c.head()}, []ir.Dim{c.kv(), c.head()}
	at := func(name string) string { return n.layer + name }
	w.linears(n, ir.Attn, c.QKVBias,
		part{"q", at(n.q), e, q}, part{"k", at(n.k), e, kv}, part{"v", at(n.v), e, kv})
	if c.QKNorm {
		one := []ir.Dim{c.head()}
		over := [][]ir.Dim{one, one}
		if c.WideQKNorm {
			over = [][]ir.Dim{q, kv}
		}
		for i, norm := range []string{"q_norm", "k_norm"} {
			size := elements(over[i])
			w.add(norm, ir.Attn, at([]string{n.qNorm, n.kNorm}[i])+".weight",
				Param{Dims: over[i], Shape: []int64{size}, To: size})
		}
	}
	w.linears(n, ir.Attn, c.OutBias, part{"o", at(n.o), q, e})
	if c.Sinks {
		w.add("sinks", ir.Attn, at("self_attn.sinks"), matrix(c.heads()))
	}
}

// dense appends an MLP of one size.
func (w *writer) dense(n names, prefix string, size ir.Dim, gate, up, down string) {
	c, e, hidden := w.c, []ir.Dim{w.c.embed()}, []ir.Dim{size}
	parts := []part{{prefix + "up", up, e, hidden}}
	if c.Gated {
		parts = []part{{prefix + "gate", gate, e, hidden}, parts[0]}
	}
	w.linears(n, ir.MLP, c.MLPBias, parts...)
	w.linears(n, ir.MLP, c.MLPBias, part{prefix + "down", down, hidden, e})
}

// sparse appends a router, its experts, and the shared experts.
func (w *writer) sparse(n names) {
	c, m, own := w.c, w.c.MoE, n.experts
	at := func(name string) string { return n.layer + name }
	scores, hidden := ir.Dim{Name: ir.RouterDim, Size: m.Experts}, ir.Dim{Name: ir.MLPDim, Size: m.MLP}
	w.linears(n, ir.Router, m.Bias,
		part{"router", at(own.router), []ir.Dim{c.embed()}, []ir.Dim{scores}})
	if m.Correction {
		correction := matrix(scores)
		correction.Buffer = true
		w.add("router.correction", ir.Router, at(own.correction), correction)
	}
	if c.Gated {
		w.expert("expert_gate", at(own.gate), own, hidden, 0)
	}
	w.expert("expert_up", at(own.up), own, hidden, 1)
	w.expert("expert_down", at(own.down), own, hidden, 0)
	if m.Shared > 0 {
		shared := ir.Dim{Name: ir.MLPDim, Size: m.Shared}
		w.dense(n, "shared_", shared, at(own.sharedGate), at(own.sharedUp), at(own.sharedDown))
	}
}

// expert appends a linear layer of all experts, [experts, embed, mlp] whichever of the two it sums
// over, and its biases. Of a tensor that has gate and up, columns turn, 1+turn of each two are its.
func (w *writer) expert(name, source string, own expertNames, hidden ir.Dim, turn int64) {
	m, embed := w.c.MoE, w.c.embed()
	in, out := embed, hidden
	if name == "expert_down" {
		in, out = hidden, embed
	}
	like := Param{Dims: []ir.Dim{m.experts(), embed, hidden}, To: out.Size,
		Shape: []int64{out.Size, in.Size}, Transposed: out == hidden}
	bias := Param{Dims: []ir.Dim{m.experts(), out}, To: out.Size, Shape: []int64{out.Size}}
	weight, suffix := source+".weight", ".bias"
	if own.together {
		every := int64(1)
		if out == hidden && w.c.Gated {
			every = 2
			like.From, bias.From = turn, turn
		}
		like.Every, bias.Every = every, every
		like.Axis, like.To = 1, every*out.Size
		like.Shape, like.Transposed = []int64{m.Experts, in.Size, like.To}, out == embed
		bias.Axis, bias.To, bias.Shape = 1, like.To, []int64{m.Experts, like.To}
		weight, suffix = source, "_bias"
	}
	w.add(name, ir.Experts, weight, like)
	if m.Bias {
		w.add(name+".bias", ir.Experts, source+suffix, bias)
	}
}

// norm appends the weights of a norm over a dimension.
func (w *writer) norm(name, source string, dim ir.Dim) {
	w.add(name, ir.Norm, source+".weight", matrix(dim))
	if w.c.Norm.Layer {
		w.add(name+".bias", ir.Norm, source+".bias", matrix(dim))
	}
}

// A part is one linear layer: what it is called here and in a checkpoint, and what it sums over and
// gives.
type part struct {
	name, source string
	in, out      []ir.Dim
}

// linears appends linear layers. Layers of one source are stored one after the other in its tensor.
//
// Weights are laid out as in, out, except for the MLP's down projection, which is out, in: on CPU
// its gradient is then a matmul whose shorter side is transposed (reference/
// xla_cpu_speed.md, rule 7).
func (w *writer) linears(n names, tag ir.Tag, bias bool, parts ...part) {
	whole := map[string]int64{}
	for _, p := range parts {
		whole[p.source] += elements(p.out)
	}
	done := map[string]int64{}
	for _, p := range parts {
		in, out, all := elements(p.in), elements(p.out), whole[p.source]
		from := done[p.source]
		done[p.source] += out
		like := Param{Dims: append(append([]ir.Dim{}, p.in...), p.out...), From: from, To: from + out,
			Shape: []int64{all, in}, Transposed: true}
		if n.conv {
			like.Shape, like.Axis, like.Transposed = []int64{in, all}, 1, false
		}
		if strings.HasSuffix(p.name, "down") {
			like.Dims = append(append([]ir.Dim{}, p.out...), p.in...)
			like.Transposed = !like.Transposed
		}
		w.add(p.name, tag, p.source+".weight", like)
		if bias {
			b := Param{Dims: p.out, Shape: []int64{all}, From: from, To: from + out}
			w.add(p.name+".bias", tag, p.source+".bias", b)
		}
	}
}

// elements is the product of the dimensions' sizes.
func elements(dims []ir.Dim) int64 {
	return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
}
