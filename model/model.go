package model

import "github.com/deepwell/deepwell/ir"

// A Model is what programs are made of: the graph of its loss, its parameters, and facts by which
// plans and policies are checked. A [Config] is one maker of it.
type Model interface {
	// Graph is the loss of a batch; its parameters are Params, in their order.
	Graph(Shape) (*ir.Graph, error)
	Params() []Param
	Facts() Facts
}

// Facts are the sizes of a model that others than its graph ask for.
type Facts struct {
	Vocab, Hidden, Layers int64
	Heads, KVHeads        int64
	HeadDim, MLP          int64
	Context, Window       int64   // Window is 0 where no layer has one
	AttnCap               float64 // 0 for none
	Gated                 bool
	MoE                   *MoE
	MLA                   *MLA
}

// Facts implements [Model].
func (c *Config) Facts() Facts {
	return Facts{Vocab: c.Vocab, Hidden: c.Hidden, Layers: c.Layers, Heads: c.Heads,
		KVHeads: c.KVHeads, HeadDim: c.HeadDim, MLP: c.MLP, Context: c.Context, Window: c.Window,
		AttnCap: c.AttnCap, Gated: c.Gated, MoE: c.MoE, MLA: c.MLA}
}
