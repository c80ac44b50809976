package aten

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// tagWords tell the part of a block by words of a module's path: the last word, and of words that
// end together the longest.
var tagWords = []struct {
	word string
	tag  ir.Tag
}{
	{"norm", ir.Norm}, {"ln_", ir.Norm}, {"router", ir.Router}, {"experts", ir.Experts},
	{"shared_expert", ir.MLP}, {"shared_experts", ir.MLP},
	{"attn", ir.Attn}, {"attention", ir.Attn}, {"attention.output.dense", ir.Attn},
	{"mlp", ir.MLP}, {"feed_forward", ir.MLP}, {"ffn", ir.MLP}, {"intermediate", ir.MLP},
	{"output.dense", ir.MLP}, {"embed", ir.Embed}, {"wte", ir.Embed}, {"wpe", ir.Embed},
	{"lm_head", ir.Head}, {"unembed", ir.Head}, {"classifier", ir.Head}, {"predictions", ir.Head},
}

// tag is the tag of what stands at a path: a module's, or a parameter's.
func (m *Model) tag(path string) ir.Tag {
	const gate = ".gate" // chooses experts if these stand beside it
	if i := strings.LastIndex(path+".", gate+"."); i >= 0 && m.sparse[path[:i]] {
		return ir.Router
	}
	best, end, length := ir.Tag(""), -1, 0
	low := strings.ToLower(path)
	for _, w := range tagWords {
		i, n := strings.LastIndex(low, w.word), len(w.word)
		if i >= 0 && (i+n > end || i+n == end && n > length) {
			best, end, length = w.tag, i+n, n
		}
	}
	return best
}

// Facts implements [model.Model].
func (m *Model) Facts() model.Facts { return m.facts }

// describe finds the facts of a model in the graph of its loss and in its parameters.
func (m *Model) describe(g *ir.Graph) {
	f := &m.facts
	f.Context = m.context
	from := map[*ir.Value][]string{} // which linear layers, or parts of them
	gated := map[*ir.Value]bool{}
	visit(g, func(op *ir.Op) {
		if op.Body != nil {
			return
		}
		var sources []string
		for _, v := range op.In {
			sources = append(sources, from[v]...)
		}
		switch op.Kind {
		case "attention":
			q, k, v := op.In[0].Type, op.In[1].Type, op.In[2].Type
			f.Heads, f.KVHeads = max(f.Heads, q.Size(ir.Heads)), max(f.KVHeads, k.Size(ir.KVHeads))
			f.HeadDim = max(f.HeadDim, v.Size(ir.HeadDim))
			f.Window, f.AttnCap = max(f.Window, op.Attrs.Int("window")), op.Attrs.Float("softcap")
			if n := v.Size(ir.HeadDim); n != q.Size(ir.HeadDim) {
				// What kernels ask for; how much of it is rotated is the program's business.
				f.MLA = &model.MLA{NoPE: q.Size(ir.HeadDim), Value: n}
			}
		case "dispatch":
			if c := op.In[1].Type.Size(ir.Choice); c > 0 {
				f.MoE = &model.MoE{Experts: op.Attrs.Int("experts"), TopK: c}
			}
		case "mul":
			gate, up := from[op.In[0]], from[op.In[1]]
			gated[op.Out[0]] = gated[op.In[0]] || len(gate) > 0 && len(up) > 0 &&
				!slices.ContainsFunc(gate, func(s string) bool { return slices.Contains(up, s) })
		case "linear":
			f.Gated = f.Gated || gated[op.In[0]] && slices.Contains(op.Attrs.List("over"), ir.MLPDim)
			sources = []string{fmt.Sprint(len(from))}
		case "slice":
			for i := range sources {
				sources[i] += fmt.Sprint(":", op.Attrs.Int("from"))
			}
		}
		slices.Sort(sources)
		for _, v := range op.Out {
			from[v] = slices.Compact(sources)
		}
	})
	m.sized(f)
}

// sized takes the sizes of parameters.
func (m *Model) sized(f *model.Facts) {
	layers, routed := map[place]bool{}, map[place]bool{}
	for _, p := range m.params {
		for _, d := range p.Dims {
			switch {
			case d.Name == ir.Vocab:
				f.Vocab = max(f.Vocab, d.Size)
			case d.Name == ir.EmbedDim:
				f.Hidden = max(f.Hidden, d.Size)
			case d.Name == ir.MLPDim && p.Tag == ir.Experts && f.MoE != nil:
				f.MoE.MLP = max(f.MoE.MLP, d.Size)
			case d.Name == ir.MLPDim && f.MoE != nil && strings.Contains(p.Source, "shared_expert"):
				f.MoE.Shared = max(f.MoE.Shared, d.Size)
			case d.Name == ir.MLPDim:
				f.MLP = max(f.MLP, d.Size)
			}
		}
		for _, name := range p.Tensors() {
			if at, _ := placeOf(name); at.list != "" {
				layers[at] = true
				routed[at] = routed[at] || p.Tag == ir.Experts
			}
		}
	}
	f.Layers = int64(len(layers))
	if f.MoE == nil {
		return
	}
	for at := range layers {
		if !routed[at] {
			f.MoE.Dense++
		}
	}
	if f.MLP == 0 {
		f.MLP = f.MoE.MLP
	}
}

// visit calls f for every operation of a graph and of its loops.
func visit(g *ir.Graph, f func(op *ir.Op)) {
	for _, op := range g.Ops {
		f(op)
		if op.Body != nil {
			visit(op.Body, f)
		}
	}
}

// An expertLoad is what the experts of a layer had to do, a result of the graph of a loss.
type expertLoad struct {
	v      *ir.Value
	router string // the parameter that chooses; "" if it was not found
}

// count makes the load of experts a result, as [model.LoadPrefix] says. idx are choices [tokens,
// choice] of count experts, and pos their places.
func (m *maker) count(idx, pos *ir.Value, experts, slots int64) {
	b, over := m.b, ir.Names(idx.Type.Dims)
	one := func(v *ir.Value) *ir.Value {
		return b.Broadcast(v, 0, ir.Dim{Name: ir.RouterDim, Size: 1})
	}
	zero := b.Fill(ir.Type{Elem: dtype.F32}, 0)
	entropy := zero
	if l := m.router.logits; l != nil {
		i := len(l.axes) - 1
		x := m.whole(l, i)
		along := m.name(x.axes[i].dims[0])
		p := b.Softmax(b.Convert(b.StopGradient(x.v), dtype.F32), along)
		tiny := b.Fill(ir.Type{Elem: dtype.F32}, 1e-30)
		entropy = b.Neg(b.Sum(b.Mul(p, b.Log(b.Add(p, tiny))), ir.Names(p.Type.Dims)...))
	}
	seen := b.Concat(ir.RouterDim, b.ExpertCounts(idx, experts, over...), one(zero), one(entropy))
	v := b.Concat(ir.RouterDim, seen, one(b.ExpertOverflow(pos, slots, m.shape.Experts.Blocks)))
	m.loads = append(m.loads, expertLoad{v, m.router.name})
	m.router = router{}
}

// A router is the linear layer that scored experts last.
type router struct {
	logits *tensor
	name   string // of its weight
}
