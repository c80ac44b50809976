package model

import (
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Count is how many parameters a model has.
type Count struct {
	Total int64
	// Active is without the experts that a token does not see.
	Active int64
	// Embed is the tables of tokens and positions, Head the output layer where it is not the table
	// of tokens. Both are part of the other figures.
	Embed, Head int64
}

// Count gives the number of parameters.
func (c *Config) Count() Count {
	var n Count
	for _, p := range c.Params() {
		if p.Buffer {
			continue
		}
		size := p.Size()
		n.Total += size
		switch p.Tag {
		case ir.Embed:
			n.Embed += size
		case ir.Head:
			n.Head += size
		case ir.Experts:
			size = size / c.MoE.Experts * c.MoE.TopK
		}
		n.Active += size
	}
	return n
}

// linears lists the model's linear layers, with the output layer and the router.
func (c *Config) linears() []Linear {
	f := c.Facts()
	return f.Linears(c.Params())
}

// Flops is the work of one token: two operations for each product and its sum.
type Flops struct {
	Linear float64 // linear layers and the output layer; table lookups do not count
	// Attention is scores and weighted values over the keys that the masks let through.
	Attention float64
	// Square is the same as if each query saw every key of its sequence, as most published
	// utilizations count it.
	Square float64
}

// Forward gives the work of one token of a sequence, the mean over its places.
func (c *Config) Forward(seq int64) Flops {
	weights := lists.Sum(c.linears(), func(l Linear) float64 {
		return float64(l.In*l.Out*l.Times) * float64(max(1, len(l.Layers)))
	})
	perKey := 4 * float64(c.Heads*c.HeadDim)
	if a := c.MLA; a != nil {
		perKey = 2 * float64(c.Heads*(a.NoPE+a.Rope+a.Value))
	}
	f := Flops{Linear: 2 * weights, Square: perKey * float64(seq) * float64(c.Layers)}
	for i := range c.Layers {
		f.Attention += perKey * c.keys(i, seq)
	}
	return f
}

// keys is the mean number of keys that a query of a layer sees.
func (c *Config) keys(layer, seq int64) float64 {
	w := seq
	if c.windowed(layer) {
		w = min(seq, c.Window)
	}
	return ir.MeanKeys(float64(seq), float64(w))
}

// Sum is linear layers and attention under its masks.
func (f Flops) Sum() float64 { return f.Linear + f.Attention }

// Training is the work of a token's step: forward, and backward twice as much, once for inputs and
// once for weights. Recomputation is not counted.
func (f Flops) Training() Flops {
	return Flops{Linear: 3 * f.Linear, Attention: 3 * f.Attention, Square: 3 * f.Square}
}

// A Linear is the linear layers of a model that share a name and a shape.
type Linear struct {
	Name    string
	Tag     ir.Tag
	In, Out int64
	Head    int64 // elements of a head, where one side is made of heads
	// Copies is how many there are in a layer, which are experts, and Times how many of them a token
	// passes through.
	Copies, Times int64
	Layers        []int // none where it stands outside of layers
}

// Linears lists the linear layers of a model, given its parameters, with the output layer and the
// router.
func (c *Facts) Linears(params []Param) []Linear {
	var list []Linear
	for _, p := range params {
		if !p.Stacked() || p.Vector() {
			continue
		}
		b := p.box()
		l := Linear{Name: LinearName(p.Stem()), Tag: p.Tag, Out: b.rows,
			In: b.width, Copies: 1, Times: 1}
		if p.Axis == 1 {
			l.In, l.Out = b.rows, b.width
		}
		switch p.Tag {
		case ir.Attn:
			l.Head = headSize(p.Dims)
		case ir.Experts:
			at := p.expertDim()
			if at < 0 {
				break // of all experts together, as a captured program may have it
			}
			l.Copies = p.Dims[at].Size
			if l.Times = l.Copies; c.MoE != nil { // else it is not known how many a token chooses
				l.Times = c.MoE.TopK
			}
		}
		for i := range p.Dims[0].Size {
			l.Layers = append(l.Layers, int(p.First+i*p.Step))
		}
		list = append(list, l)
	}
	return append(list, Linear{Name: "head", Tag: ir.Head, In: c.Hidden, Out: c.Vocab, Copies: 1,
		Times: 1})
}

// headSize is the elements of a head of a parameter; 0 of one without heads.
func headSize(dims []ir.Dim) int64 {
	return lists.Find(dims, func(d ir.Dim) bool { return d.Name == ir.HeadDim }).Size
}
