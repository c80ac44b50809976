package lower

import (
	"math"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A grid is what all blocks of an NVFP4 tensor share: the factor on the way in, 2688 over the
// largest magnitude (the largest element, 6, times the largest scale, 448), and the one on the way
// out. They are float32 numbers, but those that XLA:CPU would take for zero are kept in float64.
type grid struct{ in, out val }

// grid gives a tensor of zeros the factor 1.
func (w *writer) grid(top val) grid {
	bits := w.bits(top, dtype.U32)
	reach := w.constant(ir.Type{Elem: dtype.F64, Dims: top.t.Dims}, 2688)
	in := w.rounded(w.elementwise("divide", reach, w.exact(bits)))
	most := w.constant(in.t, math.MaxFloat32)
	in = w.choose(w.compare("GT", in, most), most, in)
	none := w.elementwise("or", w.compare("EQ", in, w.constant(in.t, 0)),
		w.compare("EQ", bits, w.constant(bits.t, 0)))
	in = w.choose(none, w.constant(in.t, 1), in)
	return grid{in, w.rounded(w.elementwise("divide", w.constant(in.t, 1), in))}
}

// exact gives in float64 the numbers that bits of magnitudes stand for.
func (w *writer) exact(bits val) val {
	small := w.convert(w.bits(bits, dtype.S32), dtype.F64)
	small = w.elementwise("multiply", small, w.constant(small.t, 0x1p-149))
	return w.choose(w.least(bits, 0x800000), w.convert(w.float(bits), dtype.F64), small)
}

// rounded rounds float64 numbers to those of float32, of which the least are multiples of 2^-149.
func (w *writer) rounded(v val) val {
	wide := w.convert(w.convert(v, dtype.F32), dtype.F64)
	small := w.elementwise("multiply", v, w.constant(v.t, 0x1p149))
	small = w.elementwise("round_nearest_even", small)
	small = w.elementwise("multiply", small, w.constant(v.t, 0x1p-149))
	return w.choose(w.compare("LT", v, w.constant(v.t, 0x1p-126)), small, wide)
}

// nvfp4 gives a scale in E4M3 to each block or tile, under that of the tensor.
func (q *quantizer) nvfp4(x, tensorTop val) (codes, scales val) {
	w := q.w
	bits, top := w.wideBits(x), w.top(x, inside)
	sizes := w.with(bits, "and", magnitude)
	if q.tile {
		top = q.tiles(top)
	}
	g := w.grid(tensorTop)
	// in/6 is rounded once: (top/6)*in would round twice and give other bytes.
	sixth := w.elementwise("multiply", g.in, w.constant(g.in.t, float64(float32(1.0/6))))
	sixth = w.rounded(sixth)
	y := w.elementwise("multiply", w.exact(top), w.as(sixth, top.t))
	y = w.convert(y, dtype.F32)
	none := w.compare("NE", y, y)
	scale := w.choose(none, w.constant(top.t, 0x7f), w.nearest(y, e4m3))
	step := w.convert(w.wideE4M3(scale), dtype.F64)
	step = w.rounded(w.elementwise("multiply", step, w.as(g.out, top.t)))
	factor := w.convert(w.elementwise("divide", w.constant(step.t, 1), step), dtype.F32)
	most := w.float(w.constant(scale.t, mostFloat))
	factor = w.choose(w.compare("GT", factor, most), most, factor)
	small := w.with(w.bits(factor, dtype.U32), "maximum", 149<<23)
	small = w.float(w.with(small, "subtract", 149<<23)) // times 2^-149
	v := w.elementwise("multiply", w.float(sizes), w.as(factor, sizes.t))
	v = w.lifted(v, sizes, small)
	code := w.elementwise("or", q.e2m1(v, all), w.signs(bits, 28))
	code = w.choose(w.as(none, code.t), w.constant(code.t, 7), code)
	return w.convert(code, dtype.U8), w.convert(scale, dtype.U8)
}

// tiles gives the largest of 16 rows to each of them: rows are the last of what is not summed over.
func (q *quantizer) tiles(top val) val {
	w := q.w
	at := top.t.Index(q.lastKept().Name)
	all := w.reshape(top, ir.Type{Dims: cutDim(top.t.Dims, at, q.block, "row")})
	return w.reshape(w.as(w.reduce(all, "maximum", 0, "row"), all.t), top.t)
}

// wideE4M3 gives the numbers of codes without a sign, in 32 bits. A code of the lower eight has no
// leading one: with one, less its worth, it is a number that no processor flushes.
func (w *writer) wideE4M3(code val) val {
	low := w.compare("LT", code, w.constant(code.t, 8))
	bits := w.elementwise("add", w.with(code, "shift_left", 20),
		w.choose(low, w.constant(code.t, 121<<23), w.constant(code.t, 120<<23)))
	v := w.float(bits)
	zero, one := w.constant(v.t, 0), w.constant(v.t, 0x1p-6)
	v = w.elementwise("subtract", v, w.choose(low, one, zero))
	nan := w.float(w.constant(code.t, noNumber))
	return w.choose(w.compare("EQ", code, w.constant(code.t, 0x7f)), nan, v)
}

// all picks every element.
func all(v val) val { return v }

// e2m1 gives the codes of magnitudes, of all elements or of those that are picked.
func (q *quantizer) e2m1(v val, pick func(val) val) val {
	if q.op.Attrs.Bool("stochastic") {
		return q.dithered(q.w.float(q.w.with(q.w.bits(v, dtype.U32), "minimum", e2m1.most)), pick)
	}
	return q.w.nearest(v, e2m1)
}

// packed puts two codes of a block into a byte, the first in the lower half.
func (w *writer) packed(code val) val {
	at := code.t.Index(inside)
	pairs := w.reshape(code, ir.Type{Dims: cutDim(code.t.Dims, at, 2, "half")})
	half := ir.Type{Dims: ir.Without(pairs.t.Dims, "half")}
	low := w.reshape(w.slice(pairs, "half", 0, 1), half)
	high := w.reshape(w.slice(pairs, "half", 1, 2), half)
	return w.elementwise("or", low, w.with(high, "shift_left", 4))
}

// dithered rounds up as often as a number is near the one above: it adds a number from 0 to 1 that
// depends on the place of an element and nothing else, in steps of the grid.
func (q *quantizer) dithered(v val, pick func(val) val) val {
	w := q.w
	t := ir.Type{Dims: v.t.Dims}
	if v.t.Size(inside) == q.block {
		t.Dims = q.op.In[0].Type.Dims
	}
	u := w.convert(w.with(q.places(t, pick), "shift_right_logical", 8), dtype.F32)
	u = w.elementwise("multiply", w.reshape(u, v.t), w.constant(v.t, 0x1p-24))
	two := w.compare("LT", v, w.constant(v.t, 2))
	four := w.compare("LT", v, w.constant(v.t, 4))
	by := func(low, middle, high float64, elem dtype.DType) val {
		t := ir.Type{Elem: elem, Dims: v.t.Dims}
		return w.choose(two, w.constant(t, low),
			w.choose(four, w.constant(t, middle), w.constant(t, high)))
	}
	steps := w.elementwise("multiply", v, by(2, 1, 0.5, dtype.F32))
	count := w.convert(w.elementwise("floor", w.elementwise("add", steps, u)), dtype.U32)
	return w.with(w.elementwise("add", count, by(0, 2, 4, dtype.U32)), "minimum", 7)
}

// tensors is how many tensors of one layer may be rounded stochastically.
const tensors = 64

// places hashes the places of elements, or of those that are picked, with the key of the tensor in
// this step of this run.
func (q *quantizer) places(t ir.Type, pick func(val) val) val {
	w := q.w
	in := q.op.In[len(q.op.In)-3:]
	noise, rows, cols := w.use(in[0]), w.use(in[1]), w.use(in[2])
	word := func(at int64) val {
		v := w.slice(noise, noise.t.Dims[0].Name, at, at+1)
		return w.bits(w.reshape(v, ir.Type{}), dtype.U32)
	}
	number := w.with(w.with(word(2), "multiply", tensors), "add", uint32(q.op.Attrs.Int("tensor")))
	key := w.mixed(w.elementwise("xor", word(1), w.mixed(number)))
	key = w.mixed(w.elementwise("xor", word(0), key))
	other := w.mixed(w.with(key, "xor", 0x85ebca6b))
	row := w.bits(rows, dtype.U32)
	row = w.mixed(w.elementwise("xor", row, w.as(key, row.t)))
	col := w.bits(cols, dtype.U32)
	col = w.elementwise("xor", col, w.as(other, col.t))
	return w.mixed(w.elementwise("xor", w.as(pick(row), t), w.as(pick(col), t)))
}

// mixed spreads bits, as the last step of MurmurHash3 does.
func (w *writer) mixed(h val) val {
	fold := func(by uint32) {
		h = w.elementwise("xor", h, w.with(h, "shift_right_logical", by))
	}
	fold(16)
	h = w.with(h, "multiply", 0x85ebca6b)
	fold(13)
	h = w.with(h, "multiply", 0xc2b2ae35)
	fold(16)
	return h
}

// signed tells which of 16 elements change their sign before they are spread (TransformerEngine's).
const signed = "+++-+------+-+--"

// hadamard spreads each element over the 16 around it, along a dimension. Sums are made in f32 of
// numbers in bf16, neighbours first, and rounded to bf16. Each of the 16 is a sum of all, in which
// the second of two terms is added or taken away: so no term is made twice, and XLA makes one loop
// of it.
func (w *writer) hadamard(x val, dim string) val {
	x = w.convert(x, dtype.BF16)
	groups := w.reshape(x, ir.Type{Dims: cutDim(x.t.Dims, x.t.Index(dim), 16, "of16")})
	all := ir.Type{Elem: dtype.F32, Dims: groups.t.Dims}
	one := ir.Type{Dims: ir.Without(groups.t.Dims, "of16")}
	terms := make([]val, 16)
	for i := range terms {
		v := w.convert(w.reshape(w.slice(groups, "of16", int64(i), int64(i)+1), one), dtype.F32)
		if signed[i] == '-' {
			v = w.elementwise("negate", v)
		}
		terms[i] = w.as(v, all)
	}
	for bit := 1; len(terms) > 1; bit *= 2 {
		signs := w.as(w.ones("of16", func(i int) bool { return i&bit == 0 }), all)
		for i := range len(terms) / 2 {
			second := w.elementwise("multiply", terms[2*i+1], signs)
			terms[i] = w.elementwise("add", terms[2*i], second)
		}
		terms = terms[:len(terms)/2]
	}
	y := w.elementwise("multiply", terms[0], w.constant(all, 0.25))
	return w.reshape(w.convert(y, dtype.BF16), x.t)
}

// ones lists 16 ones along a dimension, and -1 where they are not positive.
func (w *writer) ones(dim string, positive func(i int) bool) val {
	list := make([]string, 16)
	for i := range list {
		list[i] = number(dtype.F32, -1)
		if positive(i) {
			list[i] = number(dtype.F32, 1)
		}
	}
	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: dim, Size: int64(len(list))}}}
	return w.emit(t, "stablehlo.constant dense<[%s]> : %s", strings.Join(list, ", "), tensor(t))
}

// amax gives the largest magnitude. One that is no number or infinite makes it no number, which
// then reaches all that is made with it.
func amax(w *writer, op *ir.Op, in []val) []val {
	x, dim := in[0], ""
	if n := len(x.t.Dims); n > 0 {
		dim = x.t.Dims[n-1].Name
	}
	if op.Attrs.Bool("hadamard") {
		along := op.Attrs.List("along")
		dim = along[len(along)-1]
		if x = w.hadamard(x, dim); w.oneResult() {
			x = w.held(x)
		}
	}
	var top val
	switch n, size := x.t.Size(dim), ir.NVFP4.Block(); {
	case n > 0 && n%size == 0 && w.oneResult():
		// By blocks first, as they are found for their scales.
		x = w.reshape(x, ir.Type{Dims: cutDim(x.t.Dims, x.t.Index(dim), size, inside)})
		top = w.held(w.top(x, inside))
	default:
		top = w.with(w.wideBits(x), "and", magnitude)
	}
	return []val{w.amaxOf(op, top)}
}

// amaxOf gives the largest of the bits of magnitudes over all devices.
func (w *writer) amaxOf(op *ir.Op, top val) val {
	out := op.Out[0].Type
	top = w.reduce(top, "maximum", 0, ir.Names(ir.Without(top.t.Dims, ir.Names(out.Dims)...))...)
	if axes := op.Axes(); len(axes) > 0 {
		top = w.allReduce(top, "maximum", axes...)
	}
	finite := w.compare("LT", top, w.constant(top.t, infinity))
	return w.float(w.choose(finite, top, w.constant(top.t, noNumber)))
}
