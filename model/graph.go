package model

import (
	"math"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// The names of the inputs of a graph that are not parameters. Labels stand where the logits that
// they judge stand: the label of a place is the token that follows it, or a negative number where
// nothing is to be learned.
const (
	InputIDs       = "ids"
	InputLabels    = "labels"
	InputPositions = "positions"
)

// Graph gives the mean loss over labels that are not negative, as a graph of ids, labels,
// positions and the parameters of [Config.Params] in their order.
func (c *Config) Graph(batch, seq int64, elem dtype.DType) (*ir.Graph, error) {
	return c.build(batch, seq, elem, true)
}

// Logits gives the scores of the tokens that may follow each place, as a graph of ids, positions
// and the parameters.
func (c *Config) Logits(batch, seq int64, elem dtype.DType) (*ir.Graph, error) {
	return c.build(batch, seq, elem, false)
}

func (c *Config) build(batch, seq int64, elem dtype.DType, loss bool) (*ir.Graph, error) {
	if c == nil {
		return nil, diag.New(diag.NotSupported, "the sizes of this model are not known")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	switch {
	case c.MoE != nil || c.MLA != nil:
		return nil, diag.New(diag.NotSupported, "models of type %s can be counted, but not built yet",
			c.Arch)
	case elem.Kind() != dtype.Float:
		return nil, bad("a model cannot be made of %s", elem)
	case batch < 1 || seq < 1 || batch > maxContext/seq:
		return nil, bad("a batch of %d sequences of %d tokens", batch, seq)
	case c.Learned && seq > c.Context:
		return nil, bad("sequences of %d tokens do not fit %d learned positions", seq, c.Context).
			Try("use sequences of at most %d tokens", c.Context)
	}
	m := &maker{c: c, b: ir.NewBuilder("model"), elem: elem,
		rows: []ir.Dim{{Name: "batch", Size: batch}, {Name: ir.Seq, Size: seq}},
		at:   map[string]*ir.Value{}}
	return m.graph(loss)
}

// A maker builds one graph.
type maker struct {
	c    *Config
	b    *ir.Builder
	elem dtype.DType
	rows []ir.Dim
	at   map[string]*ir.Value // parameters by name
	err  error                // of a body
}

func (m *maker) graph(withLoss bool) (*ir.Graph, error) {
	b, c := m.b, m.c
	whole := ir.Type{Elem: dtype.S32, Dims: m.rows}
	ids := b.Input(InputIDs, ir.Data, whole, "")
	var labels *ir.Value
	if withLoss {
		labels = b.Input(InputLabels, ir.Data, whole, "")
	}
	positions := b.Input(InputPositions, ir.Data, whole, "")
	params := c.Params()
	for _, p := range params {
		m.at[p.Name] = b.Input(p.Name, ir.Param, ir.Type{Elem: m.elem, Dims: p.Dims}, p.Source)
	}
	x := m.embed(ids, positions)
	for _, s := range c.segments() {
		x = m.repeat(s, params, x, positions)
	}
	x = m.norm(x, "norm", dimEmbed)
	y := m.head(x)
	if withLoss {
		y = m.loss(y, labels)
	}
	if m.err != nil {
		return nil, m.err
	}
	return b.Graph(y)
}

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

// repeat runs the layers of a segment.
func (m *maker) repeat(s segment, params []Param, x, positions *ir.Value) *ir.Value {
	body := &maker{c: m.c, b: ir.NewBuilder(s[0].name), elem: m.elem, at: map[string]*ir.Value{}}
	y := body.b.Input("x", ir.Data, x.Type, "")
	var stacks []*ir.Value
	for _, p := range params {
		for _, one := range s {
			if p.Stacked() && p.First == one.first {
				t := ir.Type{Elem: m.elem, Dims: p.Dims[1:]}
				body.at[p.Name] = body.b.Input(p.Name, ir.Param, t, p.Source)
				stacks = append(stacks, m.at[p.Name])
			}
		}
	}
	pos := body.b.Input(InputPositions, ir.Data, positions.Type, "")
	for _, one := range s {
		y = body.block(one, y, pos)
	}
	block, err := body.b.Graph(y)
	if err != nil {
		m.err = err
		return x
	}
	return m.b.Repeat(s[0].count, block, []*ir.Value{x}, stacks, []*ir.Value{positions})[0]
}

// block is one layer: what attention adds, then what the MLP adds.
func (m *maker) block(s slot, x, positions *ir.Value) *ir.Value {
	h := m.norm(x, s.name+".norm1", dimEmbed)
	h = m.attend(s, h, positions)
	if m.c.PostNorms {
		h = m.norm(h, s.name+".post1", dimEmbed)
	}
	x = m.b.Add(x, h)
	h = m.norm(x, s.name+".norm2", dimEmbed)
	h = m.feed(s, h)
	if m.c.PostNorms {
		h = m.norm(h, s.name+".post2", dimEmbed)
	}
	return m.b.Add(x, h)
}

func (m *maker) attend(s slot, x, positions *ir.Value) (y *ir.Value) {
	c := m.c
	m.b.Tagged(ir.Attn, func() {
		q, k := m.linear(x, s.name+".q"), m.linear(x, s.name+".k")
		v := m.linear(x, s.name+".v")
		if c.QKNorm {
			q = m.b.RMSNorm(q, m.at[s.name+".q_norm"], ir.HeadDim, c.Norm.Eps, c.Norm.Shift)
			k = m.b.RMSNorm(k, m.at[s.name+".k_norm"], ir.HeadDim, c.Norm.Eps, c.Norm.Shift)
		}
		if !c.Learned {
			q, k = m.rotate(s, q, positions), m.rotate(s, k, positions)
		}
		how := ir.Attention{Scale: c.AttnScale, Causal: true, SoftCap: c.AttnCap}
		if s.windowed {
			how.Window = c.Window
		}
		k, v = m.b.Rename(k, ir.Seq, ir.Keys), m.b.Rename(v, ir.Seq, ir.Keys)
		y = m.linear(m.b.Attend(q, k, v, how), s.name+".o")
	})
	return y
}

// rotate turns the first elements of every head by position.
func (m *maker) rotate(s slot, x, positions *ir.Value) *ir.Value {
	rope, turned := m.c.Rope, m.c.Rotary
	if s.windowed {
		rope = m.c.LocalRope
	}
	if turned == m.c.HeadDim {
		return m.b.Rope(x, positions, rope)
	}
	return m.b.Concat(ir.HeadDim,
		m.b.Rope(m.b.Slice(x, ir.HeadDim, 0, turned), positions, rope),
		m.b.Slice(x, ir.HeadDim, turned, m.c.HeadDim))
}

func (m *maker) feed(s slot, x *ir.Value) (y *ir.Value) {
	m.b.Tagged(ir.MLP, func() {
		h := m.linear(x, s.name+".up")
		if m.c.Gated {
			h = m.b.Mul(m.activate(m.linear(x, s.name+".gate")), h)
		} else {
			h = m.activate(h)
		}
		y = m.linear(h, s.name+".down")
	})
	return y
}

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
	y := m.b.Linear(x, m.at[name])
	if bias := m.at[name+".bias"]; bias != nil {
		y = m.b.Add(y, bias)
	}
	return y
}

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

// head gives logits, bounded where the model says so.
func (m *maker) head(x *ir.Value) (y *ir.Value) {
	m.b.Tagged(ir.Head, func() {
		table := m.at["head"]
		if m.c.Tied {
			table = m.at["embed"]
		}
		y = m.b.Linear(x, table)
		if limit := m.c.LogitCap; limit != 0 {
			y = m.b.Scale(m.b.Tanh(m.b.Scale(y, 1/limit)), limit)
		}
	})
	return y
}

// loss is the mean over labels that are not negative, and 0 where there is none.
func (m *maker) loss(logits, labels *ir.Value) (y *ir.Value) {
	b := m.b
	b.Tagged(ir.Head, func() {
		sum := b.Sum(b.CrossEntropy(logits, labels, dimVocab), "batch", ir.Seq)
		f32 := ir.Type{Elem: dtype.F32, Dims: m.rows}
		counts := b.Compare("ge", labels, b.Fill(labels.Type, 0))
		n := b.Sum(b.Select(counts, b.Fill(f32, 1), b.Fill(f32, 0)), "batch", ir.Seq)
		one := b.Fill(ir.Type{Elem: dtype.F32}, 1)
		y = b.Div(sum, b.Select(b.Compare("ge", n, one), n, one))
	})
	return y
}
