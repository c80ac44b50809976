package model

import "github.com/deepwell/deepwell/ir"

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
	if c.MoE != nil || c.MLA != nil {
		return c.countExperts()
	}
	var n Count
	for _, p := range c.Params() {
		n.Total += p.Size()
		switch p.Tag {
		case ir.Embed:
			n.Embed += p.Size()
		case ir.Head:
			n.Head += p.Size()
		}
	}
	n.Active = n.Total
	return n
}

// countExperts counts models that have no list of parameters yet: RMS norms, gated experts, and
// rotary positions, as all of them have.
func (c *Config) countExperts() Count {
	attn, attnRest := c.attention()
	n := Count{Embed: c.Vocab * c.Hidden}
	if !c.Tied {
		n.Head = n.Embed
	}
	n.Total = n.Embed + n.Head + c.Hidden + c.Layers*(attn+attnRest+2*c.Hidden)
	m := c.experts()
	sparse := c.Layers - m.Dense
	router, expert := m.Experts*c.Hidden, 3*c.Hidden*m.MLP
	if m.Bias {
		router, expert = router+m.Experts, expert+2*m.MLP+c.Hidden
	}
	n.Total += m.Dense*3*c.Hidden*c.MLP + sparse*(3*c.Hidden*m.Shared+router)
	n.Active = n.Total + sparse*m.TopK*expert
	n.Total += sparse * m.Experts * expert
	return n
}

// experts is the MoE of the model, or one whose layers are all dense.
func (c *Config) experts() MoE {
	if c.MoE == nil {
		return MoE{Dense: c.Layers}
	}
	return *c.MoE
}

// attention counts the parameters of one layer's attention: those of linear layers, and the rest.
func (c *Config) attention() (linear, rest int64) {
	if a := c.MLA; a != nil {
		query := c.Heads * (a.NoPE + a.Rope)
		linear = c.Hidden*a.QRank + a.QRank*query + c.Hidden*(a.KVRank+a.Rope) +
			a.KVRank*c.Heads*(a.NoPE+a.Value) + c.Heads*a.Value*c.Hidden
		return linear, a.QRank + a.KVRank // norms of the low ranks
	}
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	linear = 2*c.Hidden*q + 2*c.Hidden*kv
	if c.QKVBias {
		rest += q + 2*kv
	}
	if c.OutBias {
		rest += c.Hidden
	}
	if c.QKNorm {
		rest += 2 * c.HeadDim
	}
	if c.MoE != nil && c.MoE.Sinks {
		rest += c.Heads
	}
	return linear, rest
}

// Flops is the work of one token: two operations for each product and its sum.
type Flops struct {
	Linear float64 // linear layers and the output layer; a table lookup is none
	// Attention is scores and weighted values over the keys that the masks let through.
	Attention float64
	// Square is the same as if each query saw every key of its sequence, as most published
	// utilizations count it.
	Square float64
}

// Forward gives the work of one token of a sequence, the mean over its places.
func (c *Config) Forward(seq int64) Flops {
	m := c.experts()
	attn, _ := c.attention()
	mats := float64(2)
	if c.Gated {
		mats = 3
	}
	h := float64(c.Hidden)
	weights := float64(c.Layers)*float64(attn) + mats*h*float64(m.Dense*c.MLP) +
		float64(c.Vocab)*h
	if c.MoE != nil {
		seen := mats*float64(m.TopK*m.MLP+m.Shared) + float64(m.Experts)
		weights += float64(c.Layers-m.Dense) * h * seen
	}
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
