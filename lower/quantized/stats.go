package quantized

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// scaleStats prints, of the scale bytes of each argument: the largest, then the sums, then the
// counts of those that are not zero; one number per layer of a stack.
func scaleStats(w Writer, op *ir.Op, in []val) []val {
	var tops, sums, some []val
	for _, v := range in {
		x := w.Convert(v, dtype.S32)
		each := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: "stat", Size: x.Type.StackDepth()}}}
		over := ir.Names(x.Type.Dims)
		if each.Dims[0].Size > 1 {
			over = over[1:]
		}
		for _, to := range []struct {
			list *[]val
			of   val
			how  string
		}{
			{&tops, x, "maximum"}, {&sums, x, "add"},
			{&some, w.Elementwise("minimum", x, w.Constant(x.Type, 1)), "add"},
		} {
			*to.list = append(*to.list, w.Reshape(w.Reduce(to.of, to.how, 0, over...), each))
		}
	}
	return []val{w.Concat("stat", op.Out[0].Type, slices.Concat(tops, sums, some)...)}
}

// joinStats all-reduces statistics: two collectives (maximum and sum), or one for sums alone, for
// any number of GEMMs.
func joinStats(w Writer, op *ir.Op, in []val) []val {
	joined := func(how string) val {
		if len(op.Axes()) == 0 {
			return in[0]
		}
		return w.AllReduce(in[0], how, op.Axes()...)
	}
	if op.Attrs.Bool("sum") {
		return []val{joined("add")}
	}
	top, sum := joined("maximum"), joined("add")
	return []val{w.Concat("stat", op.Out[0].Type, top, sum)}
}

// quantizeStats measures the rounding error of a source; see [ir.ErrorSums]. Signs are left out: an
// element has its source's. Elements are compared as multiples of what code 1 of their block stands
// for, in float32; only sums over blocks are in float64, which throughout took four times as long.
func quantizeStats(w Writer, op *ir.Op, in []val) []val {
	g := newErrorMeter(w, op, in)
	off := w.Elementwise("subtract", g.was, g.is)
	none := w.Elementwise("and", w.Compare("NE", g.bits, w.Constant(g.bits.Type, 0)),
		w.Compare("EQ", g.is, w.Constant(g.is.Type, 0)))
	beyond := w.Elementwise("and", w.Compare("EQ", g.is, w.Constant(g.is.Type, g.most)),
		w.Compare("GT", g.was, w.Constant(g.was.Type, g.most*(1+0x1p-20))))
	// Both counts of a block are one whole number, added up once.
	marks := w.Elementwise("add", w.Convert(none, dtype.U32),
		w.WithInt(w.Convert(beyond, dtype.U32), "shift_left", 16))
	marks = w.Reduce(marks, "add", 0, inside)
	top := w.Reduce(g.bits, "maximum", 0, inside)
	zero := w.Compare("EQ", g.bits, w.Constant(g.bits.Type, 0))
	least := w.Select(zero, w.Constant(g.bits.Type, MagnitudeBits), g.bits)
	least = w.Reduce(least, "minimum", MagnitudeBits, inside)
	some := w.Compare("NE", top, w.Constant(top.Type, 0))
	ratio := w.Elementwise("divide", w.exact(top), w.exact(least))
	span := w.Elementwise("log", w.Select(some, ratio, w.Constant(ratio.Type, 1)))
	span = w.Elementwise("multiply", span, w.Constant(span.Type, 1/math.Ln2))
	return []val{w.Concat("stat", op.Out[0].Type, g.sum(w.WithInt(marks, "and", 0xffff)),
		g.sum(w.WithInt(marks, "shift_right_logical", 16)), g.squares(g.was), g.squares(off), g.sum(span),
		g.sum(some))}
}

// An errorMeter holds the magnitudes of blocks [..., n/block, block, ...] before and after
// rounding, as multiples of units.
type errorMeter struct {
	w       Writer
	bits    val // of magnitudes before
	was, is val
	units   val     // in float64, of blocks
	most    float64 // the largest element
	layers  int64
}

// newErrorMeter decodes what a source became.
func newErrorMeter(w Writer, op *ir.Op, in []val) *errorMeter {
	q, g := NewQuantizer(w, op), &errorMeter{w: w, layers: in[0].Type.StackDepth()}
	x, codes, scales := in[0], in[1], in[2]
	if q.Transform {
		x = w.Hadamard(x, q.BlockDim())
	}
	order := append(ir.Names(ir.Without(x.Type.Dims, q.Along...)), q.Along...)
	switch ok := codes.Type.Index(inside) >= 0; {
	case ok && slices.Equal(ir.Names(x.Type.Dims), order):
		// The sums read them, and do not round all again. Whole numbers are the same however they are
		// come by, so that this makes no difference to the product.
		codes = w.Materialize(codes)
	case ok: // they are held
	default:
		x = w.Transpose(x, order)
		if q.Format.Codes().Bits() == 4 {
			codes = w.Unpack(codes)
		}
		codes = w.Reshape(codes, ir.Type{Dims: SplitDim(codes.Type.Dims, len(order)-1, q.Block, inside)})
	}
	g.bits = w.WithInt(w.WideBits(q.SplitBlocks(x)), "and", MagnitudeBits)
	if q.Format.TensorScale() {
		g.nvfp4(codes, w.Convert(scales, dtype.U32), w.tensorScale(in[3]).Decode)
	} else {
		g.powerScaled(q, codes, w.Convert(scales, dtype.U32))
	}
	return g
}

// powerScaled has units of two to the power of the scale.
func (g *errorMeter) powerScaled(q *Quantizer, codes, scale val) {
	w, elem := g.w, q.Format.Codes()
	e, _ := EncodingOf(elem)
	g.is = w.decode(w.WithInt(codes, "and", e.sign-1), e)
	g.most = float64(elem.FromCode(elem.MaxCode()))
	g.was = q.scaled(g.bits, scale)
	const bias = 1023 - 127 // of float64 and of E8M0
	g.units = w.WithInt(w.Convert(scale, dtype.U64), "add", bias)
	g.units = w.Bitcast(w.WithInt(g.units, "shift_left", 52), dtype.F64)
}

// nvfp4 measures blocks whose scale is zero in units of the smallest scale that is not.
func (g *errorMeter) nvfp4(codes, scale, out val) {
	w := g.w
	wide := w.wideE4M3(scale)
	least := w.Elementwise("maximum", wide, w.Constant(wide.Type, 0x1p-9))
	least = w.Select(w.Compare("EQ", wide, wide), least, wide) // NaN stays NaN
	g.units = w.Convert(least, dtype.F64)
	g.units = w.Elementwise("multiply", g.units, w.BroadcastTo(out, least.Type))
	factor := w.Elementwise("divide", w.Constant(g.units.Type, 1), g.units)
	factor = w.Elementwise("minimum", factor, w.Constant(factor.Type, math.MaxFloat32))
	g.was = w.Elementwise("multiply", w.Float(g.bits), w.BroadcastTo(w.Convert(factor, dtype.F32),
		g.bits.Type))
	g.is, g.most = w.decode(w.WithInt(codes, "and", 7), E2M1), 6
	nothing := w.Compare("EQ", scale, w.Constant(scale.Type, 0))
	g.is = w.Select(w.BroadcastTo(nothing, g.is.Type), w.Constant(g.is.Type, 0), g.is)
}

// squares adds up the squares of elements, in absolute terms.
func (g *errorMeter) squares(v val) val {
	w := g.w
	s := w.Convert(w.Reduce(w.Elementwise("multiply", v, v), "add", 0, inside), dtype.F64)
	return g.sum(w.Elementwise("multiply", s, w.Elementwise("multiply", g.units, g.units)))
}

// sum adds up the blocks of each layer.
func (g *errorMeter) sum(v val) val {
	v = g.w.Convert(v, dtype.F64)
	over := ir.Names(v.Type.Dims)
	if g.layers > 1 {
		over = over[1:]
	}
	each := ir.Type{Dims: []ir.Dim{{Name: "stat", Size: g.layers}}}
	return g.w.Reshape(g.w.Reduce(v, "add", 0, over...), each)
}
