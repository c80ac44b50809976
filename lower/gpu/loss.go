package gpu

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// lossKernels are losses whose gradients take the place of logits.
func lossKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Triton, Kinds: []string{rewrite.LossInPlace}, Print: on(lossInPlace),
		Applies: func(_ *kernels.Selector, op *ir.Op) (string, bool) { return rewrite.WhyOf(op), true },
	}}
}

// lossInPlace prints a loss and the gradient of its logits as one kernel.
func lossInPlace(w writer, op *ir.Op, in []val) []val {
	n := elements(in[1].Type.Dims)
	l := fused.Loss{Rows: int(n), Cols: int(elements(in[0].Type.Dims) / n)}
	k, err := l.Kernel()
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	out := w.tritonCall(k, in...)
	for i, v := range op.Out {
		out[i] = w.Reshape(out[i], ir.Type{Dims: v.Type.Dims})
	}
	return out
}
