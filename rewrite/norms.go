package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// writeNorms writes a norm that is quantized as the statistics of its rows and what follows from
// them element by element, so that the latter goes into the kernel that quantizes.
func writeNorms(g *ir.Graph) error {
	by := readers(g)
	return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) (out []*ir.Value) {
		if op.Kind != "rms_norm" && op.Kind != "layer_norm" ||
			!slices.ContainsFunc(by[op.Out[0]], func(q *ir.Op) bool { return q.Kind == QuantizeOnce }) {
			return nil
		}
		r.Tagged(op.Tag, func() { out = []*ir.Value{writtenNorm(r.Builder, op)} })
		return out
	})
}

// writtenNorm computes a norm in float32 and rounds it once.
func writtenNorm(b *ir.Builder, op *ir.Op) *ir.Value {
	wide := func(v *ir.Value) *ir.Value { return b.Convert(v, dtype.F32) }
	dim := op.Attrs.Text("dim")
	x, w := wide(op.In[0]), wide(op.In[1])
	mean := func(v *ir.Value) *ir.Value { return b.Scale(b.Sum(v, dim), 1/float64(v.Type.Size(dim))) }
	if s := op.Attrs.Float("shift"); s != 0 {
		w = b.Shift(w, s)
	}
	if op.Kind == "layer_norm" {
		x = b.Sub(x, mean(x))
	}
	y := b.Mul(b.Mul(x, b.Rsqrt(b.Shift(mean(b.Mul(x, x)), op.Attrs.Float("eps")))), w)
	if op.Kind == "layer_norm" {
		y = b.Add(y, wide(op.In[2]))
	}
	return b.Convert(y, op.In[0].Type.Elem)
}
