package gpu

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// blockDotKernels are cuDNN's block-scaled matmuls, on GPUs whose tensor cores have them.
func blockDotKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.CuDNN, Kinds: []string{"block_dot"}, Print: on(cudnnBlockDot),
		Applies: func(s *kernels.Selector, op *ir.Op) (string, bool) {
			f := ir.Format(op.Attrs.Text("format"))
			return "cuDNN multiplies blocks", s.Blocks() && cudnnScales[f.Codes()] == f.Scales()
		},
	}}
}

// cudnnScales has the scale type that XLA's call of cuDNN takes with an element type
// (xla/service/gpu/transforms/block_scaling_rewriter.cc).
var cudnnScales = map[dtype.DType]dtype.DType{
	dtype.F8E4M3FN: dtype.F8E8M0FNU,
	dtype.F4E2M1FN: dtype.F8E4M3FN,
}

// cudnnBlockDot calls cuDNN's block-scaled matmul directly: XLA's own rewriter silently multiplies
// in bf16 where it does not like a layout. Operands are [rows, sum] with the summed dimension last,
// padded to 128 rows; scales are swizzled into the order in which tensor cores read them. Experts,
// which both operands have, go side by side: [experts, rows, sum].
func cudnnBlockDot(w writer, op *ir.Op, in []val) []val {
	format, n, over := ir.Format(op.Attrs.Text("format")), len(in)/2, op.Attrs.List("over")
	out := op.Out[0].Type
	side, first := []ir.Dim(nil), func(v val) val { return v }
	if a, b := in[0].Type, in[n].Type; a.Index(ir.ExpertDim) >= 0 && b.Index(ir.ExpertDim) >= 0 {
		side = []ir.Dim{{Name: ir.ExpertDim, Size: a.Size(ir.ExpertDim)}}
		first = w.expertsFirst // which fsdp's gather has behind what it gathers along
	}
	var args, scales [2]val
	var rows [2]int64
	for i := range 2 {
		codes, s := first(in[i*n]), first(in[i*n+1])
		at := len(codes.Type.Dims) - len(over)
		rows[i] = elements(codes.Type.Dims[len(side):at])
		matrix := func(v val) val {
			return w.Reshape(v, ir.Type{Dims: slices.Concat(side, []ir.Dim{{Name: "rows", Size: rows[i]},
				{Name: "cols", Size: elements(v.Type.Dims[at:])}})})
		}
		args[i] = w.bitcastElements(format, w.Pad(matrix(codes), "rows", 0, padTo(rows[i], tileRows)))
		scales[i] = w.Bitcast(w.swizzled(matrix(s)), format.Scales())
	}
	t := ir.Type{Elem: out.Elem, Dims: slices.Concat(side, []ir.Dim{
		{Name: "rows", Size: args[0].Type.Size("rows")},
		{Name: "cols", Size: args[1].Type.Size("rows")}})}
	order := rowMajorLayout(len(t.Dims))
	v := w.call("__cudnn$blockScaledDot", `""`, []val{args[0], args[1], scales[0], scales[1]},
		[]string{order, order, order, order}, []ir.Type{t}, []string{order})[0]
	v = w.Slice(w.Slice(v, "rows", 0, rows[0]), "cols", 0, rows[1])
	rest := ir.Without(out.Dims, ir.Names(side)...)
	v = w.Transpose(w.Reshape(v, ir.Type{Dims: slices.Concat(side, rest)}), ir.Names(out.Dims))
	if format.TensorScale() {
		v = w.Unscale(v, w.tensorScale(in[2]).Decode, w.tensorScale(in[n+2]).Decode)
		v = w.Convert(v, out.Elem)
	}
	return []val{v}
}

// expertsFirst puts the experts of a value first.
func (w writer) expertsFirst(v val) val {
	rest := ir.Names(ir.Without(v.Type.Dims, ir.ExpertDim))
	return w.Transpose(v, append([]string{ir.ExpertDim}, rest...))
}

// rowMajorLayout spells the layout of n dimensions in their order.
func rowMajorLayout(n int) string {
	order := make([]int, n)
	for i := range order {
		order[i] = n - 1 - i
	}
	return fmt.Sprintf("dense<[%s]> : tensor<%dxindex>", stablehlo.List(order), n)
}

// Tensor cores read scales in tiles of 128 rows and 4 columns.
const (
	tileRows = 128
	tileCols = 4
)

// padTo is how many elements are missing to a multiple of a tile.
func padTo(n, tile int64) int64 { return (tile - n%tile) % tile }

// bitcastElements views bytes [rows, bytes] as the format's elements.
func (w writer) bitcastElements(format ir.Format, codes val) val {
	if format.Codes().Bits() == 8 {
		return w.Bitcast(codes, format.Codes())
	}
	codes = w.rowMajor(codes) // or XLA:GPU transposes 4-bit elements one by one
	t := ir.Type{Elem: format.Codes(), Dims: append(slices.Clone(codes.Type.Dims),
		ir.Dim{Name: "half", Size: 2})}
	v := w.Apply(t, "stablehlo.bitcast_convert ", "", codes)
	dims := slices.Clone(codes.Type.Dims)
	dims[len(dims)-1].Size *= 2
	return w.Reshape(v, ir.Type{Dims: dims})
}

// rowMajor pins a value's layout to the order of its dimensions. XLA:GPU chooses layouts by itself,
// and inserts a copy where a consumer wants another.
func (w writer) rowMajor(v val) val {
	layout := rowMajorLayout(len(v.Type.Dims))
	return w.Apply(v.Type, "stablehlo.custom_call @LayoutConstraint(", fmt.Sprintf(
		") {api_version = 2 : i32, operand_layouts = [%s], result_layouts = [%[1]s]}", layout), v)
}

// swizzled puts scales [..., rows, cols] in the order in which tensor cores read them: tiles of 128
// rows and 4 columns, one after the other; in each, 32 lines of 16 bytes with rows i, i+32, i+64
// and i+96 side by side. Missing rows and columns are zeros.
func (w writer) swizzled(scales val) val {
	v := w.Pad(scales, "rows", 0, padTo(scales.Type.Size("rows"), tileRows))
	v = w.Pad(v, "cols", 0, padTo(scales.Type.Size("cols"), tileCols))
	side := v.Type.Dims[:len(v.Type.Dims)-2]
	cut := ir.Type{Dims: slices.Concat(side, []ir.Dim{
		{Name: "tile", Size: v.Type.Size("rows") / tileRows}, {Name: "quarter", Size: 4},
		{Name: "line", Size: 32}, {Name: "across", Size: v.Type.Size("cols") / tileCols},
		{Name: "col", Size: tileCols}})}
	order := append(ir.Names(side), "tile", "across", "line", "quarter", "col")
	return w.Reshape(w.Transpose(w.Reshape(v, cut), order), v.Type)
}

// elements is the number of elements of some dimensions.
func elements(dims []ir.Dim) int64 {
	return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
}
