package lower

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// blockDot is the product of two values in blocks, by their numbers: those are exact in bf16, and
// so is every product of two of them in f32.
func blockDot(w *writer, op *ir.Op, in []val) []val {
	format, n := ir.Format(op.Attrs.Text("format")), len(in)/2
	a := w.argument(format, in[0], in[1])
	b := w.argument(format, in[n], in[n+1])
	out, over := op.Out[0].Type, op.Attrs.List("over")
	var v val
	if w.kernels != nil && w.kernels.FusesOneOutput() {
		v = w.matmul(a, b, dtype.F32, ir.Names(out.Dims), over...)
	} else {
		v = w.transpose(w.dot(a, b, dtype.F32, over...), ir.Names(out.Dims))
	}
	if format == ir.NVFP4 {
		v = w.unscaled(v, w.grid(in[2]).out, w.grid(in[n+2]).out)
	}
	return []val{w.convert(v, out.Elem)}
}

// unscaled takes the factors of two whole tensors back from their product, one after the other:
// their own product may be too small for a float32.
func (w *writer) unscaled(v, a, b val) val {
	v = w.convert(v, dtype.F32)
	for _, by := range []val{a, b} {
		v = w.elementwise("multiply", v, w.as(w.convert(by, dtype.F32), v.t))
	}
	return v
}

// argument gives the numbers of an argument, in the layout that it has.
func (w *writer) argument(format ir.Format, v, scales val) val {
	if v.t.Index(inside) >= 0 {
		return w.numbers(format, v, scales)
	}
	if format == ir.NVFP4 {
		v = w.unpacked(v)
	}
	n := len(v.t.Dims)
	v = w.reshape(v, ir.Type{Dims: cutDim(v.t.Dims, n-1, format.Block(), inside)})
	return w.numbers(format, v, scales)
}

// numbers gives the elements of a value in blocks, times their scales, in bf16.
func (w *writer) numbers(format ir.Format, codes, scales val) val {
	var v, by val
	scale := w.convert(scales, dtype.U32)
	if format == ir.MXFP8 {
		v = w.elements(codes, e4m3Wide)
		by = w.float(w.choose(w.least(scale, 255), w.constant(scale.t, noNumber),
			w.with(scale, "shift_left", 23)))
	} else {
		v = w.elements(codes, e2m1Wide)
		by = w.wideE4M3(scale)
	}
	v = w.elementwise("multiply", v, w.as(by, v.t))
	at := v.t.Index(inside)
	dims := slices.Clone(ir.Without(v.t.Dims, inside))
	dims[at-1].Size *= v.t.Dims[at].Size
	return w.reshape(w.convert(v, dtype.BF16), ir.Type{Dims: dims})
}

// A wide says how codes become float32 bits: moved to the left so far, and with that exponent.
type wide struct{ normal, shift, exponent, sign uint32 }

var (
	e4m3Wide = wide{8, 20, 120, 0x80}
	e2m1Wide = wide{2, 22, 126, 8}
)

// elements gives the numbers of codes with their signs. What has no leading one gets one that is
// taken off again, since subnormal bits would count as zero.
func (w *writer) elements(codes val, e wide) val {
	c := w.convert(codes, dtype.U32)
	size := w.with(c, "and", e.sign-1)
	low := w.compare("LT", size, w.constant(size.t, float64(e.normal)))
	bits := w.elementwise("add", w.with(size, "shift_left", e.shift), w.choose(low,
		w.constant(size.t, float64((e.exponent+1)<<23)), w.constant(size.t, float64(e.exponent<<23))))
	one := w.float(w.constant(size.t, float64((e.exponent+1)<<23)))
	v := w.float(bits)
	v = w.elementwise("subtract", v, w.choose(low, one, w.constant(v.t, 0)))
	if e == e4m3Wide {
		nan := w.float(w.constant(size.t, noNumber))
		v = w.choose(w.compare("EQ", size, w.constant(size.t, 0x7f)), nan, v)
	}
	minus := w.compare("NE", w.with(c, "and", e.sign), w.constant(c.t, 0))
	return w.choose(minus, w.elementwise("negate", v), v)
}

// unpacked gives codes of four bits one to a byte.
func (w *writer) unpacked(codes val) val {
	n := len(codes.t.Dims)
	last := codes.t.Dims[n-1]
	one := ir.Type{Dims: append(slices.Clone(codes.t.Dims), ir.Dim{Name: "half", Size: 1})}
	two := ir.Type{Dims: append(slices.Clone(codes.t.Dims), ir.Dim{Name: "half", Size: 2})}
	both := w.concat("half", two, w.reshape(w.with(codes, "and", 15), one),
		w.reshape(w.with(codes, "shift_right_logical", 4), one))
	return w.reshape(both, ir.Type{Dims: append(slices.Clone(codes.t.Dims[:n-1]),
		ir.Dim{Name: last.Name, Size: 2 * last.Size})})
}

// cudnnBlockDot calls cuDNN's product of values in blocks, past XLA's own rewriter, which would
// quietly multiply wide numbers where it does not like a layout. Arguments are matrices with what
// is summed over last; their scales are in the order in which tensor cores read them.
func cudnnBlockDot(w *writer, op *ir.Op, in []val) []val {
	format, n, over := ir.Format(op.Attrs.Text("format")), len(in)/2, op.Attrs.List("over")
	out := op.Out[0].Type
	var args, scales [2]val
	var rows [2]int64
	for i := range 2 {
		codes, s := in[i*n], in[i*n+1]
		at := len(codes.t.Dims) - len(over)
		rows[i] = count(codes.t.Dims[:at])
		matrix := func(v val) val {
			return w.reshape(v, ir.Type{Dims: []ir.Dim{{Name: "rows", Size: rows[i]},
				{Name: "cols", Size: count(v.t.Dims[at:])}}})
		}
		args[i] = w.cardElements(format, w.padded(matrix(codes), "rows", 0, toTile(rows[i], tileRows)))
		scales[i] = w.bits(w.swizzled(matrix(s)), format.Scales())
	}
	t := ir.Type{Elem: out.Elem, Dims: []ir.Dim{{Name: "rows", Size: args[0].t.Dims[0].Size},
		{Name: "cols", Size: args[1].t.Dims[0].Size}}}
	v := w.call("__cudnn$blockScaledDot", `""`, []val{args[0], args[1], scales[0], scales[1]},
		[]string{rowMajor2, rowMajor2, rowMajor2, rowMajor2}, []ir.Type{t}, []string{rowMajor2})[0]
	v = w.slice(w.slice(v, "rows", 0, rows[0]), "cols", 0, rows[1])
	v = w.reshape(v, out)
	if format == ir.NVFP4 {
		v = w.unscaled(v, w.cardGrid(in[2]).out, w.cardGrid(in[n+2]).out)
		v = w.convert(v, out.Elem)
	}
	return []val{v}
}

const rowMajor2 = "dense<[1, 0]> : tensor<2xindex>"

// Tensor cores read scales in tiles of 128 rows and 4 columns.
const (
	tileRows = 128
	tileCols = 4
)

// toTile is what is missing to whole tiles.
func toTile(n, tile int64) int64 { return (tile - n%tile) % tile }

// cardElements sees bytes as the elements that they are.
func (w *writer) cardElements(format ir.Format, codes val) val {
	if format == ir.MXFP8 {
		return w.bits(codes, format.Codes())
	}
	codes = w.rowMajor(codes) // or XLA:GPU turns elements of four bits, one by one
	t := ir.Type{Elem: format.Codes(), Dims: append(slices.Clone(codes.t.Dims),
		ir.Dim{Name: "half", Size: 2})}
	v := w.apply(t, "stablehlo.bitcast_convert ", "", codes)
	dims := slices.Clone(codes.t.Dims)
	dims[len(dims)-1].Size *= 2
	return w.reshape(v, ir.Type{Dims: dims})
}

// rowMajor gives a value that lies in memory in the order of its dimensions: XLA:GPU chooses a
// layout for what it makes, and moves what was made where another is asked for.
func (w *writer) rowMajor(v val) val {
	order := make([]int, len(v.t.Dims))
	for i := range order {
		order[i] = len(order) - 1 - i
	}
	layout := fmt.Sprintf("dense<[%s]> : tensor<%dxindex>", list(order), len(order))
	return w.apply(v.t, "stablehlo.custom_call @LayoutConstraint(", fmt.Sprintf(
		") {api_version = 2 : i32, operand_layouts = [%s], result_layouts = [%[1]s]}", layout), v)
}

// swizzled puts scales in the order in which tensor cores read them: tiles of 128 rows and 4
// columns one after the other, in each 32 lines of 16 bytes, rows i, i+32, i+64 and i+96 side by
// side. What a tile lacks is zeros.
func (w *writer) swizzled(scales val) val {
	v := w.padded(scales, "rows", 0, toTile(scales.t.Size("rows"), tileRows))
	v = w.padded(v, "cols", 0, toTile(scales.t.Size("cols"), tileCols))
	rows, cols := v.t.Dims[0].Size, v.t.Dims[1].Size
	cut := ir.Type{Dims: []ir.Dim{{Name: "tile", Size: rows / tileRows}, {Name: "quarter", Size: 4},
		{Name: "line", Size: 32}, {Name: "across", Size: cols / tileCols}, {Name: "col", Size: tileCols}}}
	order := []string{"tile", "across", "line", "quarter", "col"}
	return w.reshape(w.transpose(w.reshape(v, cut), order), v.t)
}
