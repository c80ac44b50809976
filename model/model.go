// Package model turns the configuration of a Transformer into its graph, its parameters and its
// counts.
//
// A [Config] says everything that changes the mathematics of a decoder and nothing else. It comes
// from a preset ([Find]) or from a Hugging Face config.json ([Parse]), which is read strictly: a
// key that would change the numbers and is not understood is an error that names it.
//
//	preset, err := model.Find("llama3.1-8b")
//	...
//	g, err := preset.Config.Graph(model.Shape{Batch: 1, Seq: 8192, Elem: dtype.BF16})
//
// Layers of one kind are stacked: a parameter of the graph is the same weight of many layers, and
// the graph is some lines before, one repeat, and some lines after, whatever the depth. Where
// layers differ in turn, as windows and whole attention do in Gemma, the body of the repeat holds
// one whole turn and each place in it has a stack of its own.
//
// A [Param] knows the tensors of a checkpoint that it is made of, and where each of its elements
// stands in them. Reading and writing checkpoints both follow that one mapping, so an export cannot
// disagree with an import.
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

// Captured is the model_type of what stands for config.json in checkpoints of a program that was
// captured from PyTorch.
const Captured = "torch.export"

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
