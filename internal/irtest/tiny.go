package irtest

import "github.com/deepwell/deepwell/ir"

// Tiny is a model of a few layers with everything that matters: a repeat over stacked weights, a
// value that every round sees, attention, a norm, and a loss.
func Tiny(layers int64) (*ir.Graph, error) {
	const tokens, embed, heads, head, mlp, vocab = 5, 4, 2, 2, 6, 7
	e, seq := D("embed", embed), D(ir.Seq, tokens)
	body := ir.NewBuilder("block")
	x := body.Input("x", ir.Data, F32(seq, e), "")
	wq := body.Input("wq", ir.Param, F32(e, D("proj", heads*head)), "")
	wk := body.Input("wk", ir.Param, F32(e, D("proj", head)), "")
	w1 := body.Input("w1", ir.Param, F32(e, D("mlp", mlp)), "")
	w2 := body.Input("w2", ir.Param, F32(D("mlp", mlp), e), "")
	scale := body.Input("scale", ir.Param, F32(e), "")
	pos := body.Input("pos", ir.Data, S32(seq), "")
	var h, y *ir.Value
	body.Tagged(ir.Norm, func() { h = body.RMSNorm(x, scale, "embed", 1e-3, 0) })
	body.Tagged(ir.Attn, func() {
		q := body.Rope(body.Split(body.Linear(h, wq), "proj", ir.Heads, ir.HeadDim, head), pos,
			ir.Rope{Theta: 100})
		k := body.Rename(body.Split(body.Linear(h, wk), "proj", ir.KVHeads, ir.HeadDim, head),
			ir.Seq, ir.Keys)
		o := body.Attend(q, k, k, ir.Attention{Scale: 0.7, Causal: true})
		h = body.Add(x, body.Rename(body.Merge(o, "proj", ir.Heads, ir.HeadDim), "proj", "embed"))
	})
	body.Tagged(ir.MLP, func() { y = body.Add(h, body.Linear(body.Silu(body.Linear(h, w1)), w2)) })
	block, err := body.Graph(y)
	if err != nil {
		return nil, err
	}
	b := ir.NewBuilder("tiny")
	stack := func(name string, like *ir.Value) *ir.Value {
		typ := like.Type
		typ.Dims = append([]ir.Dim{D(ir.Layer, layers)}, typ.Dims...)
		return b.Input(name, ir.Param, typ, "model.layers."+name)
	}
	ids := b.Input("ids", ir.Data, S32(seq), "")
	labels := b.Input("labels", ir.Data, S32(seq), "")
	table := b.Input("table", ir.Param, F32(D("vocab", vocab), e), "model.embed")
	stacks := []*ir.Value{stack("wq", wq), stack("wk", wk), stack("w1", w1), stack("w2", w2)}
	shared := b.Input("scale", ir.Param, F32(e), "model.scale")
	positions := b.Input("pos", ir.Data, S32(seq), "")
	var hidden, loss *ir.Value
	b.Tagged(ir.Embed, func() { hidden = b.Embedding(ids, table) })
	hidden = b.Repeat(layers, block, []*ir.Value{hidden}, stacks, []*ir.Value{shared, positions})[0]
	b.Tagged(ir.Head,
		func() { loss = b.Sum(b.CrossEntropy(b.Linear(hidden, table), labels, "vocab"), ir.Seq) })
	return b.Graph(loss)
}
