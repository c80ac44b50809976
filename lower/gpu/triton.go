package gpu

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// tritonCall prints the call of a kernel of our own. Arrays are row-major matrices of the kernel's
// shapes; codes and scales are bytes.
func (w writer) tritonCall(k *triton.Kernel, in ...val) (out []val) {
	name := w.Fresh()
	var operands []val
	var layouts [2][]string
	for i, a := range k.Args {
		t := ir.Type{Elem: dtype.U8}
		if a.Elem == triton.BF16 {
			t.Elem = dtype.BF16
		}
		for d, n := range a.Shape {
			t.Dims = append(t.Dims, ir.Dim{Name: fmt.Sprintf("d%d", d), Size: int64(n)})
		}
		side := 0
		if a.Result {
			side = 1
			out = append(out, &stablehlo.Value{Name: fmt.Sprintf("%s#%d", name, len(out)), Type: t})
		} else {
			operands = append(operands, w.Reshape(in[i], ir.Type{Dims: t.Dims}))
		}
		layouts[side] = append(layouts[side], rowMajorLayout(len(a.Shape)))
	}
	names, types := stablehlo.Spell(operands)
	_, results := stablehlo.Spell(out)
	w.Line("%s:%d = stablehlo.custom_call @__gpu$xla.gpu.triton(%s) {api_version = 4 : i32, "+
		"backend_config = %s, operand_layouts = [%s], result_layouts = [%s]} : (%s) -> (%s)", name,
		len(out), names, k.Config(), stablehlo.List(layouts[0]), stablehlo.List(layouts[1]), types,
		results)
	return out
}

// quantizeOnce prints the kernel that computes sources and quantizes them in one read.
func quantizeOnce(w writer, op *ir.Op, in []val) []val {
	m, err := rewrite.MatricesOf(op)
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	e, err := rewrite.ExprOf(op)
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	k, err := fused.MXFP8(fused.Matrix{Batch: int(m.Batch), Rows: int(m.Rows), Cols: int(m.Cols)},
		fused.Of(e), fused.Form{Along: m.Along, Across: m.Across, Keep: m.Keep})
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	out := w.tritonCall(k, in...)
	for i, t := range op.Out {
		out[i] = w.Reshape(out[i], ir.Type{Dims: t.Type.Dims})
	}
	return out
}
