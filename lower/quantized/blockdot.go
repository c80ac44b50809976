package quantized

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// blockDot multiplies two quantized values of numbers that were decoded to bf16.
func blockDot(w Writer, op *ir.Op, in []val) []val {
	return w.BlockDot(op, in, func(a, b val, order, over []string) val {
		return w.Transpose(w.Dot(a, b, dtype.F32, over...), order)
	})
}

// dequantized decodes codes and scales to the type of the result.
func dequantized(w Writer, op *ir.Op, in []val) []val {
	v := w.Operand(ir.Format(op.Attrs.Text("format")), in[0], in[1])
	return []val{w.Convert(v, op.Out[0].Type.Elem)}
}

// BlockDot decodes the arguments of a block_dot and multiplies them by dot, which sums over the
// named dimensions in f32 and returns its result in an order. Codes times block scales are exact in
// bf16, and so is every product of two of them in f32.
func (w Writer) BlockDot(op *ir.Op, in []val, dot func(a, b val, order, over []string) val) []val {
	format, n := ir.Format(op.Attrs.Text("format")), len(in)/2
	a := w.Operand(format, in[0], in[1])
	b := w.Operand(format, in[n], in[n+1])
	out := op.Out[0].Type
	v := dot(a, b, ir.Names(out.Dims), op.Attrs.List("over"))
	if format.TensorScale() {
		v = w.Unscale(v, w.tensorScale(in[2]).Decode, w.tensorScale(in[n+2]).Decode)
	}
	return []val{w.Convert(v, out.Elem)}
}

// Unscale multiplies a product by the two tensors' decode scales, one after the other: their own
// product may underflow a float32.
func (w Writer) Unscale(v, a, b val) val {
	v = w.Convert(v, dtype.F32)
	for _, by := range []val{a, b} {
		v = w.Elementwise("multiply", v, w.BroadcastTo(w.Convert(by, dtype.F32), v.Type))
	}
	return v
}

// Operand decodes an argument of a block_dot to bf16, in the layout that it has: codes are [...,
// n/block, in_block, ...] where the same graph quantized them, or packed [..., n].
func (w Writer) Operand(format ir.Format, v, scales val) val {
	if v.Type.Index(inside) >= 0 {
		return w.dequantize(format, v, scales)
	}
	if format.Codes().Bits() == 4 {
		v = w.Unpack(v)
	}
	n := len(v.Type.Dims)
	v = w.Reshape(v, ir.Type{Dims: SplitDim(v.Type.Dims, n-1, format.Block(), inside)})
	return w.dequantize(format, v, scales)
}

// dequantize multiplies the elements of blocks [..., n/block, block, ...] by their scales; the
// result is bf16 [..., n, ...].
func (w Writer) dequantize(format ir.Format, codes, scales val) val {
	e, _ := EncodingOf(format.Codes())
	scale := w.Convert(scales, dtype.U32)
	v := w.decode(codes, e)
	var by val
	if format.Scales() == dtype.F8E8M0FNU {
		by = w.Float(w.Select(w.AtLeast(scale, 255), w.Constant(scale.Type, NaNBits),
			w.WithInt(scale, "shift_left", 23)))
	} else {
		by = w.wideE4M3(scale)
	}
	v = w.Elementwise("multiply", v, w.BroadcastTo(by, v.Type))
	at := v.Type.Index(inside)
	dims := slices.Clone(ir.Without(v.Type.Dims, inside))
	dims[at-1].Size *= v.Type.Dims[at].Size
	return w.Reshape(w.Convert(v, dtype.BF16), ir.Type{Dims: dims})
}

// decode gives signed float32 numbers. Subnormal codes get a leading one that is subtracted again,
// since XLA:CPU flushes subnormal float32 bits to zero.
func (w Writer) decode(codes val, e Encoding) val {
	c := w.Convert(codes, dtype.U32)
	size := w.WithInt(c, "and", e.sign-1)
	low := w.Compare("LT", size, w.Constant(size.Type, float64(e.normal)))
	bits := w.Elementwise("add", w.WithInt(size, "shift_left", e.shift), w.Select(low,
		w.Constant(size.Type, float64((e.exponent+1)<<23)), w.Constant(size.Type,
			float64(e.exponent<<23))))
	one := w.Float(w.Constant(size.Type, float64((e.exponent+1)<<23)))
	v := w.Float(bits)
	v = w.Elementwise("subtract", v, w.Select(low, one, w.Constant(v.Type, 0)))
	if e.hasNaN {
		nan := w.Float(w.Constant(size.Type, NaNBits))
		v = w.Select(w.Compare("EQ", size, w.Constant(size.Type, float64(e.nan))), nan, v)
	}
	minus := w.Compare("NE", w.WithInt(c, "and", e.sign), w.Constant(c.Type, 0))
	return w.Select(minus, w.Elementwise("negate", v), v)
}

// Unpack splits each byte into two 4-bit codes, the lower half first: [..., n/2] becomes [..., n].
func (w Writer) Unpack(codes val) val {
	n := len(codes.Type.Dims)
	last := codes.Type.Dims[n-1]
	one := ir.Type{Dims: append(slices.Clone(codes.Type.Dims), ir.Dim{Name: "half", Size: 1})}
	two := ir.Type{Dims: append(slices.Clone(codes.Type.Dims), ir.Dim{Name: "half", Size: 2})}
	both := w.Concat("half", two, w.Reshape(w.WithInt(codes, "and", 15), one),
		w.Reshape(w.WithInt(codes, "shift_right_logical", 4), one))
	return w.Reshape(both, ir.Type{Dims: append(slices.Clone(codes.Type.Dims[:n-1]),
		ir.Dim{Name: last.Name, Size: 2 * last.Size})})
}
