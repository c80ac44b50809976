package model

import (
	"math"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// The names of the inputs of a graph that are not parameters. Labels stand where the logits that
// they judge stand: the label of a place is the token that follows it, or a negative number where
// nothing is to be learned.
//
// Share is one over the number of labels that count in a whole step. The loss is the sum over the
// labels times the share, so that the losses and gradients of microbatches and devices
// add up to the loss and gradients of the step.
const (
	InputIDs       = "ids"
	InputLabels    = "labels"
	InputPositions = "positions"
	InputSegments  = "segments"
	InputShare     = "share"
)

// A Shape is what a graph of a model has beside the model: the sizes of its batch, and the types
// it computes in.
type Shape struct {
	Batch, Seq int64
	// Elem is the type of parameters and activations.
	Elem dtype.DType
	// MatmulType is the type that matmul operands are rounded to; Invalid keeps Elem. Elem f32 with
	// MatmulType bf16 is autocast: everything but the matmuls is f32.
	MatmulType dtype.DType
	// PlainAttention asks for attention without a kernel of its own.
	PlainAttention bool
	// Documents is how many documents a sequence may pack, which do not attend to each other. More
	// than one adds the input segments [B, S], which numbers them in each sequence from 0 on.
	Documents int64
	// Experts is how tokens go to experts.
	Experts ExpertShape
}

// An ExpertShape is how many tokens the experts of a layer take.
type ExpertShape struct {
	// Slots is the number of rows that an expert has room for, in parts of its mean load. A graph
	// counts what has no slot as [LoadOverflow], and is then wrong. 0 is room for every token.
	Slots float64
	// Blocks makes the slots of an expert whole blocks, which quantized GEMMs of experts need.
	Blocks bool
	// Capacity is the capacity factor: of each sequence, an expert drops the choices behind Capacity
	// times its mean load. 0 drops none.
	Capacity float64
	// AuxLoss replaces the model's factor of the load-balancing loss; nil leaves it. ZLoss is added
	// to the model's factor of the z loss.
	AuxLoss *float64
	ZLoss   float64
}

// losses are the factors of the router's two losses in a model.
func (s ExpertShape) losses(e *MoE) (aux, z float64) {
	if e == nil {
		return 0, 0
	}
	aux = e.AuxLoss
	if s.AuxLoss != nil {
		aux = *s.AuxLoss
	}
	return aux, e.ZLoss + s.ZLoss
}

// Graph gives the loss over labels that are not negative, as a graph of ids, labels, positions,
// segments if the shape has documents, share, and the parameters of [Config.Params] in their
// order.
func (c *Config) Graph(s Shape) (*ir.Graph, error) { return c.build(s, true) }

// Logits gives the scores of the tokens that may follow each place, as a graph of ids, positions,
// segments if the shape has documents, and the parameters.
func (c *Config) Logits(s Shape) (*ir.Graph, error) { return c.build(s, false) }

// build checks a shape and builds the graph, with the loss or with logits [B, S, V] as its result.
func (c *Config) build(s Shape, loss bool) (*ir.Graph, error) {
	if c == nil {
		return nil, diag.New(diag.NotSupported, "the sizes of this model are not known")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	switch {
	case s.Experts.Slots < 0 || s.Experts.Capacity < 0:
		return nil, bad("experts with %v slots and a capacity factor of %v", s.Experts.Slots,
			s.Experts.Capacity)
	case s.Elem.Kind() != dtype.Float:
		return nil, bad("a model cannot be made of %s", s.Elem)
	case s.MatmulType.Valid() && s.MatmulType.Kind() != dtype.Float:
		return nil, bad("matmuls cannot be computed in %s", s.MatmulType)
	case s.Batch < 1 || s.Seq < 1 || s.Batch > maxContext/s.Seq:
		return nil, bad("a batch of %d sequences of %d tokens", s.Batch, s.Seq).
			Try("use 1 sequence or more, of 1 token or more, and %d tokens at most", int64(maxContext))
	case c.Learned && s.Seq > c.Context:
		return nil, bad("sequences of %d tokens do not fit %d learned positions", s.Seq, c.Context).
			Try("use sequences of at most %d tokens", c.Context)
	}
	m := &maker{c: c, b: ir.NewBuilder("model"), elem: s.Elem, matmulType: s.MatmulType,
		plainAttention: s.PlainAttention,
		rows:           []ir.Dim{{Name: ir.Batch, Size: s.Batch}, {Name: ir.Seq, Size: s.Seq}},
		at:             map[string]*ir.Value{}, documents: s.Documents, experts: s.Experts}
	if m.matmulType == m.elem {
		m.matmulType = dtype.Invalid
	}
	return m.graph(loss)
}

// A maker builds one graph.
type maker struct {
	c    *Config
	b    *ir.Builder
	elem dtype.DType
	rows []ir.Dim             // [batch, seq]
	at   map[string]*ir.Value // parameters by name
	err  error                // of a body

	matmulType     dtype.DType // of matmul operands, Invalid for elem
	documents      int64       // that a sequence may pack
	plainAttention bool
	experts        ExpertShape
	loads          []*ir.Value // of the layers so far
}

// tokenInfo has the inputs of a batch that every layer takes: positions and document numbers [B,
// S], and the share of a label where routers have losses.
type tokenInfo struct{ positions, segments, share *ir.Value }

// list returns the inputs that exist.
func (p tokenInfo) list() []*ir.Value {
	return lists.Filter([]*ir.Value{p.positions, p.segments, p.share}, func(v *ir.Value) bool {
		return v != nil
	})
}

// inside gives the same inputs to the body of a loop.
func (p tokenInfo) inside(b *ir.Builder) tokenInfo {
	take := func(v *ir.Value, name string) *ir.Value {
		if v == nil {
			return nil
		}
		return b.Input(name, ir.Data, v.Type, "")
	}
	return tokenInfo{positions: take(p.positions, InputPositions),
		segments: take(p.segments, InputSegments), share: take(p.share, InputShare)}
}

// graph builds the model: embedding, one repeat per group of equal layers, final norm, output
// layer. Inputs come in a fixed order, then parameters in the order of [Config.Params].
func (m *maker) graph(withLoss bool) (*ir.Graph, error) {
	b, c := m.b, m.c
	// Everything that comes from the batch is s32 [B, S], except share, a scalar.
	whole := ir.Type{Elem: dtype.S32, Dims: m.rows}
	ids := b.Input(InputIDs, ir.Data, whole, "")
	var labels *ir.Value
	if withLoss {
		labels = b.Input(InputLabels, ir.Data, whole, "")
	}
	at := tokenInfo{positions: b.Input(InputPositions, ir.Data, whole, "")}
	if m.documents > 1 {
		at.segments = b.Input(InputSegments, ir.Data, whole, "")
	}
	var share *ir.Value
	if withLoss {
		share = b.Input(InputShare, ir.Data, ir.Type{Elem: dtype.F32}, "")
	}
	// Parameters are inputs, too: stacked ones [layer, ...] feed the loops below.
	params := c.Params()
	for _, p := range params {
		m.at[p.Name] = b.Input(p.Name, ir.Param, ir.Type{Elem: m.typeOf(p), Dims: p.Dims}, p.Source)
	}
	inside := at // share, for routers
	if aux, z := m.experts.losses(c.MoE); aux != 0 || z != 0 {
		inside.share = share
	}
	// x is the residual stream [B, S, E] from here to the output layer.
	x := m.embed(ids, at.positions)
	for _, s := range c.segments() {
		x = m.repeat(s, params, x, inside)
	}
	x = m.norm(x, "norm", ir.EmbedDim)
	y := m.head(x)
	if withLoss {
		y = m.loss(y, labels, share)
	}
	if m.err != nil {
		return nil, m.err
	}
	return b.Graph(append([]*ir.Value{y}, m.loads...)...)
}

// typeOf is the element type that a parameter has in the graph: routers compute in f32, since the
// order of scores that are nearly equal decides where a token goes.
func (m *maker) typeOf(p Param) dtype.DType {
	if p.Tag == ir.Router && m.elem != dtype.F64 {
		return dtype.F32
	}
	return m.elem
}

// embed looks tokens [B, S] up in the table [V, E], and adds learned positions if there are any.
func (m *maker) embed(ids, positions *ir.Value) (x *ir.Value) {
	m.b.Tagged(ir.Embed, func() {
		x = m.b.Embedding(ids, m.at["embed"])
		if m.c.ScaledEmbed {
			x = m.b.Scale(x, rounded(math.Sqrt(float64(m.c.Hidden)), m.elem))
		}
		if m.c.Learned {
			x = m.b.Add(x, m.b.Embedding(positions, m.at["position"]))
		}
	})
	return x
}

// rounded is a number as the element type holds it. transformers rounds Gemma's √hidden so, and
// checkpoints were trained with what came of it: √3584 is 59.867, and 59.75 in bf16.
func rounded(x float64, elem dtype.DType) float64 {
	digits := map[dtype.DType]int{dtype.BF16: 8, dtype.F16: 11, dtype.F32: 24}[elem]
	if digits == 0 {
		return x
	}
	part, exponent := math.Frexp(x)
	return math.Ldexp(math.RoundToEven(math.Ldexp(part, digits)), exponent-digits)
}

// repeat runs the layers of a segment as one loop. The activation [B, S, E] is carried, parameters
// are stacked along the layer dimension, positions and documents are the same in every iteration.
func (m *maker) repeat(s segment, params []Param, x *ir.Value, at tokenInfo) *ir.Value {
	body := &maker{c: m.c, b: ir.NewBuilder(s[0].name), elem: m.elem, matmulType: m.matmulType,
		plainAttention: m.plainAttention, documents: m.documents, rows: m.rows, experts: m.experts,
		at: map[string]*ir.Value{}}
	y := body.b.Input("x", ir.Data, x.Type, "")
	var stacks []*ir.Value
	for _, p := range params {
		for _, one := range s {
			if p.Stacked() && p.First == one.first {
				t := ir.Type{Elem: m.typeOf(p), Dims: p.Dims[1:]}
				body.at[p.Name] = body.b.Input(p.Name, ir.Param, t, p.Source)
				stacks = append(stacks, m.at[p.Name])
			}
		}
	}
	inner := at.inside(body.b)
	for _, one := range s {
		y = body.block(one, y, inner)
	}
	block, err := body.b.Graph(append([]*ir.Value{y}, body.loads...)...)
	if err != nil {
		m.err = err
		return x
	}
	out := m.b.Repeat(s[0].count, block, []*ir.Value{x}, stacks, at.list())
	for i, one := range lists.Filter(s, func(one slot) bool { return one.experts }) {
		m.loads = append(m.loads, AsLoad(out[1+i], one.name))
	}
	return out[0]
}

// block is one pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), each with a second
// norm before the sum if PostNorms is set.
func (m *maker) block(s slot, x *ir.Value, at tokenInfo) *ir.Value {
	h := m.norm(x, s.name+".norm1", ir.EmbedDim)
	h = m.attend(s, h, at)
	if m.c.PostNorms {
		h = m.norm(h, s.name+".post1", ir.EmbedDim)
	}
	x = m.b.Add(x, h)
	h = m.norm(x, s.name+".norm2", ir.EmbedDim)
	if s.experts {
		var load *ir.Value
		h, load = m.sparse(s, h, at.share)
		m.loads = append(m.loads, load)
	} else {
		m.b.Tagged(ir.MLP, func() { h = m.mlp(s.name+".", h) })
	}
	if m.c.PostNorms {
		h = m.norm(h, s.name+".post2", ir.EmbedDim)
	}
	return m.b.Add(x, h)
}

// projected gives queries [B, S, H, D], keys and values [B, S, KV, D] of x [B, S, E].
func (m *maker) projected(s slot, x *ir.Value, at tokenInfo) (q, k, v *ir.Value) {
	c := m.c
	q, k = m.linear(x, s.name+".q"), m.linear(x, s.name+".k")
	v = m.linear(x, s.name+".v")
	if c.QKNorm {
		q, k = m.normHeads(q, s.name+".q_norm"), m.normHeads(k, s.name+".k_norm")
	}
	if c.ClipQKV > 0 {
		q, k, v = m.clamp(q, c.ClipQKV), m.clamp(k, c.ClipQKV), m.clamp(v, c.ClipQKV)
	}
	if !c.Learned {
		q, k = m.rotate(s, q, at.positions), m.rotate(s, k, at.positions)
	}
	return q, k, v
}

// attend is causal self-attention: q [B, S, H, D], k and v [B, K, KV, D] with the sequence renamed
// to keys, then the output projection back to [B, S, E].
func (m *maker) attend(s slot, x *ir.Value, at tokenInfo) (y *ir.Value) {
	c := m.c
	m.b.Tagged(ir.Attn, func() {
		project := m.projected
		if c.MLA != nil {
			project = m.latent
		}
		q, k, v := project(s, x, at)
		how := ir.Attention{Scale: c.AttnScale, Causal: true, SoftCap: c.AttnCap,
			OperandType: m.matmulType, Plain: m.plainAttention, Sinks: m.at[s.name+".sinks"]}
		if s.windowed {
			how.Window = c.Window
		}
		k, v = m.b.Rename(k, ir.Seq, ir.Keys), m.b.Rename(v, ir.Seq, ir.Keys)
		if at.segments != nil {
			how.Segments, how.KeySegments = at.segments, m.b.Rename(at.segments, ir.Seq, ir.Keys)
			how.Documents = m.documents
		}
		y = m.linear(m.b.Attend(q, k, v, how), s.name+".o")
	})
	return y
}

// normHeads is RMSNorm over each head of x [B, S, H, D], or over all of them together, in f32, with
// a weight [H, D].
func (m *maker) normHeads(x *ir.Value, name string) *ir.Value {
	b, n, w := m.b, m.c.Norm, m.at[name]
	if !m.c.WideQKNorm {
		return b.RMSNorm(x, w, ir.HeadDim, n.Eps, n.Shift)
	}
	heads, wide := x.Type.Dims[2], x
	if m.elem.Bits() < dtype.F32.Bits() {
		wide = b.Convert(x, dtype.F32)
	}
	size := float64(heads.Size * m.c.HeadDim)
	mean := b.Scale(b.Sum(b.Mul(wide, wide), heads.Name, ir.HeadDim), 1/size)
	wide = b.Mul(wide, b.Rsqrt(b.Shift(mean, n.Eps)))
	return b.Mul(b.Convert(wide, m.elem), w)
}

// clamp bounds x on both sides, and below from above.
func (m *maker) clamp(x *ir.Value, limit float64) *ir.Value {
	return m.b.Neg(m.below(m.b.Neg(m.below(x, limit)), limit))
}

func (m *maker) below(x *ir.Value, limit float64) *ir.Value {
	return m.b.Sub(x, m.b.Relu(m.b.Shift(x, -limit)))
}

// rotate applies rotary embeddings to the first Rotary elements of every head of x [B, S, H, D].
func (m *maker) rotate(s slot, x, positions *ir.Value) *ir.Value {
	rope, rotary := m.c.Rope, m.c.Rotary
	if s.windowed {
		rope = m.c.LocalRope
	}
	if rotary == m.c.HeadDim {
		return m.b.Rope(x, positions, rope)
	}
	return m.b.Concat(ir.HeadDim,
		m.b.Rope(m.b.Slice(x, ir.HeadDim, 0, rotary), positions, rope),
		m.b.Slice(x, ir.HeadDim, rotary, m.c.HeadDim))
}

// mlp is down(act(up(x))), or down(act(gate(x))·up(x)) if gated, of the weights whose names have a
// prefix.
func (m *maker) mlp(prefix string, x *ir.Value) *ir.Value {
	h := m.linear(x, prefix+"up")
	if m.c.Gated {
		h = m.b.Mul(m.activate(m.linear(x, prefix+"gate")), h)
	} else {
		h = m.activate(h)
	}
	return m.linear(h, prefix+"down")
}

// activate applies the activation; relu2 is the square of ReLU.
func (m *maker) activate(x *ir.Value) *ir.Value {
	switch m.c.Activation {
	case SiLU:
		return m.b.Silu(x)
	case GELU:
		return m.b.Gelu(x)
	}
	r := m.b.Relu(x)
	return m.b.Mul(r, r)
}

// linear multiplies by a weight and adds its bias, if it has one.
func (m *maker) linear(x *ir.Value, name string) *ir.Value {
	y := m.b.LinearIn(x, m.at[name], m.matmulType)
	if bias := m.at[name+".bias"]; bias != nil {
		y = m.b.Add(y, bias)
	}
	return y
}

// norm is RMSNorm or LayerNorm along dim. Shift is added to the weight first.
func (m *maker) norm(x *ir.Value, name, dim string) (y *ir.Value) {
	n, w := m.c.Norm, m.at[name]
	m.b.Tagged(ir.Norm, func() {
		switch {
		case !n.Layer:
			y = m.b.RMSNorm(x, w, dim, n.Eps, n.Shift)
		case n.Shift != 0:
			y = m.b.LayerNorm(x, m.b.Shift(w, n.Shift), m.at[name+".bias"], dim, n.Eps)
		default:
			y = m.b.LayerNorm(x, w, m.at[name+".bias"], dim, n.Eps)
		}
	})
	return y
}

// head computes logits [B, S, V] with the output layer, or the embedding table if tied, and bounds
// them by LogitCap·tanh(x/LogitCap).
func (m *maker) head(x *ir.Value) (y *ir.Value) {
	m.b.Tagged(ir.Head, func() {
		table := m.at["head"]
		if m.c.Tied {
			table = m.at["embed"]
		}
		y = m.b.LinearIn(x, table, m.matmulType)
		if limit := m.c.LogitCap; limit != 0 {
			y = m.b.Scale(m.b.Tanh(m.b.Scale(y, 1/limit)), limit)
		}
	})
	return y
}

// loss is the sum over labels that are not negative, times their share in the step.
func (m *maker) loss(logits, labels, share *ir.Value) (y *ir.Value) {
	b := m.b
	b.Tagged(ir.Head, func() {
		y = b.Mul(b.Sum(b.CrossEntropy(logits, labels, ir.Vocab), ir.Batch, ir.Seq), share)
	})
	return y
}
