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
	var layouts [2][]string
	for i, a := range k.Args {
		t := ir.Type{Elem: dtype.U8}
		for d, n := range a.Shape {
			t.Dims = append(t.Dims, ir.Dim{Name: fmt.Sprintf("d%d", d), Size: int64(n)})
		}
		side := 0
		if a.Result {
			side = 1
			out = append(out, &stablehlo.Value{Name: fmt.Sprintf("%s#%d", name, len(out)), Type: t})
		} else {
			in[i] = w.Reshape(in[i], ir.Type{Dims: t.Dims})
		}
		layouts[side] = append(layouts[side], rowMajorLayout(len(a.Shape)))
	}
	names, types := stablehlo.Spell(in)
	_, results := stablehlo.Spell(out)
	w.Line("%s:%d = stablehlo.custom_call @__gpu$xla.gpu.triton(%s) {api_version = 4 : i32, "+
		"backend_config = %s, operand_layouts = [%s], result_layouts = [%s]} : (%s) -> (%s)", name,
		len(out), names, k.Config(), stablehlo.List(layouts[0]), stablehlo.List(layouts[1]), types,
		results)
	return out
}

// quantizeOnce prints the kernel that quantizes a source in one read.
func quantizeOnce(w writer, op *ir.Op, in []val) []val {
	m := rewrite.MatricesOf(op)
	s, err := fused.Find("quantize")
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	k, err := fused.MXFP8(fused.Matrix{Batch: int(m.Batch), Rows: int(m.Rows), Cols: int(m.Cols)}, s,
		fused.Form{Along: m.Along, Across: m.Across})
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	out := w.tritonCall(k, in[0])
	for i, t := range op.Out {
		out[i] = w.Reshape(out[i], ir.Type{Dims: t.Type.Dims})
	}
	return out
}
