package lower

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// scaleStats gives the largest byte of each argument, then the sum of each, then how many are not
// zero.
func scaleStats(w *writer, op *ir.Op, in []val) []val {
	var tops, sums, some []val
	for _, v := range in {
		x := w.convert(v, dtype.S32)
		each := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: "stat", Size: x.t.StackDepth()}}}
		over := ir.Names(x.t.Dims)
		if each.Dims[0].Size > 1 {
			over = over[1:]
		}
		for _, to := range []struct {
			list *[]val
			of   val
			how  string
		}{
			{&tops, x, "maximum"}, {&sums, x, "add"},
			{&some, w.elementwise("minimum", x, w.constant(x.t, 1)), "add"},
		} {
			*to.list = append(*to.list, w.reshape(w.reduce(to.of, to.how, 0, over...), each))
		}
	}
	return []val{w.concat("stat", op.Out[0].Type, slices.Concat(tops, sums, some)...)}
}

// joinStats takes two collectives, or one for sums alone, however many products report.
func joinStats(w *writer, op *ir.Op, in []val) []val {
	joined := func(how string) val {
		if len(op.Axes()) == 0 {
			return in[0]
		}
		return w.allReduce(in[0], how, op.Axes()...)
	}
	if op.Attrs.Bool("sum") {
		return []val{joined("add")}
	}
	top, sum := joined("maximum"), joined("add")
	return []val{w.concat("stat", op.Out[0].Type, top, sum)}
}

// quantizeStats measures what rounding did to a source. Signs are left out: that of an element is
// that of its source. Elements are compared as multiples of what their block's code 1 stands for,
// in float32, and only what comes of blocks is in float64: in float64 throughout it took four times
// as long.
func quantizeStats(w *writer, op *ir.Op, in []val) []val {
	g := newGauge(w, op, in)
	off := w.elementwise("subtract", g.was, g.is)
	none := w.elementwise("and", w.compare("NE", g.bits, w.constant(g.bits.t, 0)),
		w.compare("EQ", g.is, w.constant(g.is.t, 0)))
	beyond := w.elementwise("and", w.compare("EQ", g.is, w.constant(g.is.t, g.most)),
		w.compare("GT", g.was, w.constant(g.was.t, g.most*(1+0x1p-20))))
	// Both counts of a block are one whole number, added up once.
	marks := w.elementwise("add", w.convert(none, dtype.U32),
		w.with(w.convert(beyond, dtype.U32), "shift_left", 16))
	marks = w.reduce(marks, "add", 0, inside)
	top := w.reduce(g.bits, "maximum", 0, inside)
	zero := w.compare("EQ", g.bits, w.constant(g.bits.t, 0))
	least := w.choose(zero, w.constant(g.bits.t, magnitude), g.bits)
	least = w.reduce(least, "minimum", magnitude, inside)
	some := w.compare("NE", top, w.constant(top.t, 0))
	ratio := w.elementwise("divide", w.exact(top), w.exact(least))
	span := w.elementwise("log", w.choose(some, ratio, w.constant(ratio.t, 1)))
	span = w.elementwise("multiply", span, w.constant(span.t, 1/math.Ln2))
	return []val{w.concat("stat", op.Out[0].Type, g.sum(w.with(marks, "and", 0xffff)),
		g.sum(w.with(marks, "shift_right_logical", 16)), g.squares(g.was), g.squares(off), g.sum(span),
		g.sum(some))}
}

// A gauge holds the magnitudes of blocks before and after they were rounded, as multiples of units.
type gauge struct {
	w       *writer
	bits    val // of magnitudes before
	was, is val
	units   val     // in float64, of blocks
	most    float64 // the largest element
	layers  int64
}

func newGauge(w *writer, op *ir.Op, in []val) *gauge {
	q, g := newQuantizer(w, op), &gauge{w: w, layers: in[0].t.StackDepth()}
	x, codes, scales := in[0], in[1], in[2]
	if q.hadamard {
		x = w.hadamard(x, q.last())
	}
	order := append(ir.Names(ir.Without(x.t.Dims, q.along...)), q.along...)
	switch ok := codes.t.Index(inside) >= 0; {
	case ok && slices.Equal(ir.Names(x.t.Dims), order):
		// The sums read them, and do not round all again. Whole numbers are the same however they are
		// come by, so that this makes no difference to the product.
		codes = w.held(codes)
	case ok: // they are held
	default:
		x = w.transpose(x, order)
		if q.format == ir.NVFP4 {
			codes = w.unpacked(codes)
		}
		codes = w.reshape(codes, ir.Type{Dims: cutDim(codes.t.Dims, len(order)-1, q.block, inside)})
	}
	g.bits = w.with(w.wideBits(q.blocks(x)), "and", magnitude)
	if q.format == ir.MXFP8 {
		g.mxfp8(q, codes, w.convert(scales, dtype.U32))
	} else {
		g.nvfp4(codes, w.convert(scales, dtype.U32), w.grid(in[3]).out)
	}
	return g
}

func (g *gauge) mxfp8(q *quantizer, codes, scale val) {
	w := g.w
	g.is, g.most = w.elements(w.with(codes, "and", 0x7f), e4m3Wide), 448
	g.was = q.scaled(g.bits, scale)
	const bias = 1023 - 127 // that of float64 over that of E8M0
	g.units = w.with(w.convert(scale, dtype.U64), "add", bias)
	g.units = w.bits(w.with(g.units, "shift_left", 52), dtype.F64)
}

// nvfp4 measures blocks whose scale is zero by the least that is not.
func (g *gauge) nvfp4(codes, scale, out val) {
	w := g.w
	wide := w.wideE4M3(scale)
	least := w.elementwise("maximum", wide, w.constant(wide.t, 0x1p-9))
	least = w.choose(w.compare("EQ", wide, wide), least, wide) // no number stays none
	g.units = w.convert(least, dtype.F64)
	g.units = w.elementwise("multiply", g.units, w.as(out, least.t))
	factor := w.elementwise("divide", w.constant(g.units.t, 1), g.units)
	factor = w.elementwise("minimum", factor, w.constant(factor.t, math.MaxFloat32))
	g.was = w.elementwise("multiply", w.float(g.bits), w.as(w.convert(factor, dtype.F32), g.bits.t))
	g.is, g.most = w.elements(w.with(codes, "and", 7), e2m1Wide), 6
	nothing := w.compare("EQ", scale, w.constant(scale.t, 0))
	g.is = w.choose(w.as(nothing, g.is.t), w.constant(g.is.t, 0), g.is)
}

// squares adds up those of elements.
func (g *gauge) squares(v val) val {
	w := g.w
	s := w.convert(w.reduce(w.elementwise("multiply", v, v), "add", 0, inside), dtype.F64)
	return g.sum(w.elementwise("multiply", s, w.elementwise("multiply", g.units, g.units)))
}

// sum adds up what the blocks of each layer have.
func (g *gauge) sum(v val) val {
	v = g.w.convert(v, dtype.F64)
	over := ir.Names(v.t.Dims)
	if g.layers > 1 {
		over = over[1:]
	}
	each := ir.Type{Dims: []ir.Dim{{Name: "stat", Size: g.layers}}}
	return g.w.reshape(g.w.reduce(v, "add", 0, over...), each)
}
