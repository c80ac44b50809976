package gpu

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// expertKernels print the positions of choices without a sort, which XLA:GPU makes 15 kernels of,
// where it has no device to ask CUB on (reference/moe_lowering.md, section 3).
func expertKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Windowed, Kinds: []string{"expert_positions"}, Print: on(runningPositions),
		Applies: kernels.OnGPU("7 kernels of one-hot rows; a sort without CUB is 15"),
	}}
}

// runningPositions adds up one-hot rows [..., flat, router] so far: at a choice's own expert
// that is its position and itself. A dropped choice has no expert, and -1.
func runningPositions(w writer, op *ir.Op, in []val) []val {
	t := in[0].Type
	last := len(t.Dims) - len(op.Attrs.List("over"))
	flat := ir.Dim{Name: "flat", Size: 1}
	for _, d := range t.Dims[last:] {
		flat.Size *= d.Size
	}
	idx := w.Reshape(in[0], ir.Type{Elem: t.Elem, Dims: append(t.Dims[:last:last], flat)})
	hit := w.OneHot(idx, op.Attrs.Int("experts"), dtype.S32)
	so := w.Elementwise("multiply", hit, w.Running(hit, "add", flat.Name))
	pos := w.Reshape(w.Reduce(so, "add", 0, ir.RouterDim), t)
	return []val{w.Elementwise("subtract", pos, w.Constant(t, 1))}
}
