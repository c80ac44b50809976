package gpu

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
)

// withOffsets tells a call with lengths and offsets of segments: for documents, or ranges of keys.
func withOffsets(op *ir.Op) bool {
	documents, _ := op.MaskArgs()
	return len(documents) > 0
}

// sameOffsets pads values, and what has their size, with zeros to the size of a head of keys
// (latent attention): in calls with offsets XLA gives values the offsets of keys, and the output
// the offsets of queries. It returns the operation on padded values, its arguments, and what takes
// its results back to the operation's own size.
func (w writer) sameOffsets(op *ir.Op, in []val) (*ir.Op, []val, func([]val) []val) {
	size, own := op.In[0].Type.Size(ir.HeadDim), op.In[2].Type.Size(ir.HeadDim)
	back := func(out []val) []val { return out }
	if !withOffsets(op) || size == own {
		return op, in, back
	}
	wide := func(v *ir.Value) *ir.Value {
		c := *v
		c.Type.Dims = slices.Clone(v.Type.Dims)
		c.Type.Dims[len(c.Type.Dims)-1].Size = size
		return &c
	}
	same := *op
	same.In, same.Out, in = slices.Clone(op.In), slices.Clone(op.Out), slices.Clone(in)
	args, result := []int{2}, 0 // V, and O
	if op.Kind == "attention_grad" {
		args, result = []int{2, 3, 5}, 2 // V, O and dO, and dV
	}
	for _, i := range args {
		same.In[i], in[i] = wide(op.In[i]), w.Pad(in[i], ir.HeadDim, 0, size-own)
	}
	same.Out[result] = wide(op.Out[result])
	return &same, in, func(out []val) []val {
		out = slices.Clone(out)
		out[result] = w.Slice(out[result], ir.HeadDim, 0, own)
		return out
	}
}
