package replay

import (
	"math"

	"github.com/deepwell/deepwell/kernels/fused"
)

// A nvfp4Kernel is the call of a kernel of our own that quantizes to NVFP4, or finds the largest
// magnitudes for it.
type nvfp4Kernel struct {
	*ownKernel
	fused.Spec
	beside []*value // the operands after the expression's
}

// newNVFP4 takes the operands beside an expression's.
func newNVFP4(k *ownKernel, s fused.Spec) *nvfp4Kernel {
	return &nvfp4Kernel{k, s, k.values[len(s.Expr.In):s.Operands()]}
}

// results are what the kernel makes of the parts of its source, [batch·rows, cols].
func (k *nvfp4Kernel) results(parts []*value) (out []*value) {
	batch, rows, cols := int64(k.Batch), int64(k.Rows), int64(k.Cols)
	in := k.beside
	largest := func() *value {
		v := in[0]
		in = in[1:]
		return v
	}
	for part, y := range parts {
		y = k.reshape(y, batch, rows, cols)
		if k.Keep {
			out = append(out, y)
		}
		y = k.convert(y, typeF32)
		across := func() *value { return k.transpose(y, 0, 2, 1) }
		if k.Amax {
			if k.Along {
				out = append(out, k.largest(y))
			}
			if k.Across {
				out = append(out, k.largest(k.hadamard(across())))
			}
			continue
		}
		var amax *value
		if k.Along || k.Tile {
			amax = largest()
		}
		if k.Along {
			out = append(out, k.quantize(y, amax, k.draw(part, 0))...)
		}
		switch {
		case k.Across && k.Tile:
			out = append(out, k.quantize(across(), amax, nil)...)
		case k.Across:
			out = append(out, k.quantize(k.hadamard(across()), largest(), k.draw(part, 1))...)
		}
	}
	return out
}

// largest are the bits of the largest magnitude of each matrix, for each program that gives its
// tile's.
func (k *nvfp4Kernel) largest(y *value) *value {
	batch := y.shape.dims[0]
	programs := elements(k.shape.results()[0].dims) / batch
	for _, s := range k.shape.results() {
		if s.typ == typeS32 {
			programs = elements(s.dims) / batch
		}
	}
	top := k.reduce(k.magnitude(y), "maximum", 0, 1, 2)
	return k.bitcastConvert(k.broadcast(top, []int64{batch, programs}, 0), typeS32)
}

// magnitude gives the bits of float32 numbers without their signs, rounded to bfloat16 also where
// that is held as float32: bits are read.
func (w *writer) magnitude(x *value) *value {
	x = w.convertExactly(w.convertExactly(x, typeBF16), typeF32)
	return w.withInt("and", w.bitcastConvert(x, typeU32), 0x7fffffff)
}

// withInt applies an operation to whole numbers and one.
func (w *writer) withInt(opcode string, x *value, n int64) *value {
	return w.elementwise(opcode, x, w.fullInt(x.shape.typ, x.shape.dims, n))
}

// quantize gives codes and scales of blocks along the last dimension of x [batch, n, m]; draw has
// random bits for four elements each, [batch, n, m/4], or is nil.
func (k *nvfp4Kernel) quantize(x, amax, draw *value) []*value {
	w, dims := k.writer, x.shape.dims
	blocks := []int64{dims[0], dims[1], dims[2] / 16, 16}
	scales := blocks[:3]
	top := w.reduce(w.reshape(w.magnitude(x), blocks...), "maximum", 0, 3)
	if k.Tile {
		tiles := []int64{dims[0], dims[1] / 16, 16, dims[2] / 16}
		top = w.reduce(w.reshape(top, tiles...), "maximum", 0, 2)
		top = w.reshape(w.broadcast(top, tiles, 0, 1, 3), scales...)
	}
	number := func(v float64) *value { return w.full(typeF32, scales, v) }
	most := number(math.MaxFloat32)
	finite := func(x *value) *value { return w.choose(w.compare("GT", x, most), most, x) }
	a := k.perLayer(amax, scales)
	in := finite(w.elementwise("divide", number(6*448), a))
	none := w.elementwise("or", w.compare("EQ", a, number(0)), w.compare("EQ", in, number(0)))
	in = w.choose(none, number(1), in)
	s := w.elementwise("multiply", w.bitcastConvert(top, typeF32),
		w.elementwise("multiply", in, number(float64(float32(1.0/6)))))
	s = w.choose(w.compare("GT", s, number(448)), number(448), s) // the conversion does not saturate
	code := w.convertExactly(s, typeE4M3)
	nan := w.compare("NE", s, s)
	step := w.elementwise("multiply", w.convertExactly(code, typeF32),
		w.elementwise("divide", number(1), in))
	factor := finite(w.elementwise("divide", number(1), step))
	scale := w.choose(nan, w.fullInt(typeU8, scales, 0x7f), w.bitcastConvert(code, typeU8))
	codes := k.e2m1(w.reshape(x, blocks...), w.broadcast(factor, blocks, 0, 1, 2), draw)
	codes = w.choose(w.broadcast(w.compare("NE", factor, factor), blocks, 0, 1, 2),
		w.fullInt(typeU32, blocks, 7), codes)
	return []*value{k.pairs(codes, dims), scale}
}

// perLayer gives each of some elements [batch, ...] its layer's number.
func (k *nvfp4Kernel) perLayer(x *value, dims []int64) *value {
	layers := int64(max(k.Layers, 1))
	spread := []int64{layers, elements(dims) / layers}
	return k.reshape(k.broadcast(k.reshape(x, layers), spread, 0), dims...)
}

// e2m1 rounds blocks x times their factors to codes of 4 bits: to the nearest, ties to even, or by
// random bits.
func (k *nvfp4Kernel) e2m1(x, factor, draw *value) *value {
	w, dims := k.writer, x.shape.dims
	number := func(v float64) *value { return w.full(typeF32, dims, v) }
	v := w.elementwise("multiply", w.elementwise("abs", x), factor)
	var code *value
	if draw == nil {
		code = w.fullInt(typeU32, dims, 0)
		for i, middle := range []float64{0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5} {
			how := "GT"
			if i%2 == 1 { // the code above is even
				how = "GE"
			}
			code = w.elementwise("add", code, w.convertExactly(w.compare(how, v, number(middle)), typeU32))
		}
	} else {
		v = w.elementwise("minimum", v, number(6))
		two, four := w.compare("LT", v, number(2)), w.compare("LT", v, number(4))
		steps := w.choose(two, number(512), w.choose(four, number(256), number(128)))
		u32 := func(n int64) *value { return w.fullInt(typeU32, dims, n) }
		first := w.choose(two, u32(0), w.choose(four, u32(2), u32(4)))
		parts := w.convertExactly(w.elementwise("floor", w.elementwise("multiply", v, steps)), typeU32)
		sum := w.elementwise("add", parts, w.reshape(k.bytes(draw), dims...))
		code = w.elementwise("add", w.withInt("shift-right-logical", sum, 8), first)
	}
	sign := w.withInt("shift-right-logical", w.bitcastConvert(x, typeU32), 28)
	return w.elementwise("or", code, w.withInt("and", sign, 8))
}

// bytes gives each of four elements its 8 of 32 random bits: from the lowest, bits 0, 16, 8 and 24
// on.
func (k *nvfp4Kernel) bytes(draw *value) *value {
	w := k.writer
	dims := append(append([]int64{}, draw.shape.dims...), 4)
	last := int64(len(dims) - 1)
	i := w.iota(typeU32, dims, last)
	shift := w.elementwise("add", w.withInt("shift-left", w.withInt("and", i, 1), 4),
		w.withInt("shift-left", w.withInt("shift-right-logical", i, 1), 3))
	at := make([]int64, last)
	for n := range at {
		at[n] = int64(n)
	}
	bits := w.elementwise("shift-right-logical", w.broadcast(draw, dims, at...), shift)
	return w.withInt("and", bits, 0xff)
}

// pairs packs two codes to a byte, the first in the lower half: [batch·n, m/2].
func (k *nvfp4Kernel) pairs(codes *value, dims []int64) *value {
	w := k.writer
	two := w.reshape(codes, dims[0]*dims[1], dims[2]/2, 2)
	shift := w.withInt("shift-left", w.iota(typeU32, two.shape.dims, 2), 2)
	both := w.reduce(w.elementwise("shift-left", two, shift), "add", 0, 2)
	return w.convertExactly(both, typeU8)
}

// draw hashes the random bits of one orientation of a part, or gives nil where it is rounded to the
// nearest.
func (k *nvfp4Kernel) draw(part, way int) *value {
	if !k.Stochastic[way] {
		return nil
	}
	w, batch := k.writer, int64(k.Batch)
	last := k.beside[len(k.beside)-3:]
	noise := w.bitcastConvert(w.reshape(last[0], 3), typeU32)
	word := func(at int64) *value {
		is := w.compare("EQ", w.iota(typeU32, []int64{3}, 0), w.fullInt(typeU32, []int64{3}, at))
		return w.reduce(w.choose(is, noise, w.fullInt(typeU32, []int64{3}, 0)), "add", 0, 0)
	}
	number := w.withInt("add", w.withInt("multiply", word(2), 64), int64(k.Tensors[part][way]))
	key := w.mix(w.elementwise("xor", word(1), w.mix(number)))
	key = w.mix(w.elementwise("xor", word(0), key))
	other := w.mix(w.withInt("xor", key, murmur1))
	high, wide := int64(k.Rows), int64(k.Cols)
	rows := w.bitcastConvert(w.reshape(last[1], batch, high), typeU32)
	cols := w.bitcastConvert(w.reshape(last[2], wide), typeU32)
	// Four elements along rows, or along columns, share bits.
	all, rowAt, colAt := []int64{batch, high, wide / 4}, []int64{0, 1}, []int64{2}
	if way == 0 {
		cols = w.reshape(w.slice(w.reshape(cols, wide/4, 4), wide/4, 1), wide/4)
	} else {
		all, rowAt, colAt = []int64{batch, wide, high / 4}, []int64{0, 2}, []int64{1}
		rows = w.slice(w.reshape(rows, batch, high/4, 4), batch, high/4, 1)
		rows = w.reshape(rows, batch, high/4)
	}
	rows = w.mix(w.elementwise("xor", rows, w.broadcast(key, rows.shape.dims)))
	cols = w.elementwise("xor", cols, w.broadcast(other, cols.shape.dims))
	return w.mix(w.elementwise("xor", w.broadcast(rows, all, rowAt...),
		w.broadcast(cols, all, colAt...)))
}

// The factors of MurmurHash3's finalizer.
const (
	murmur1 = 0x85ebca6b
	murmur2 = 0xc2b2ae35
)

// mix is MurmurHash3's finalizer.
func (w *writer) mix(h *value) *value {
	fold := func(by int64) { h = w.elementwise("xor", h, w.withInt("shift-right-logical", h, by)) }
	fold(16)
	h = w.withInt("multiply", h, murmur1)
	fold(13)
	h = w.withInt("multiply", h, murmur2)
	fold(16)
	return h
}

// hadamardSigns has a bit for each of 16 elements that change their sign before the transform.
const hadamardSigns = 0b1101_0111_1110_1000

// hadamard transforms each 16 elements along the last dimension: sums in float32 of numbers
// of bfloat16, neighbours first, rounded to bfloat16.
func (w *writer) hadamard(x *value) *value {
	dims := x.shape.dims
	n := elements(dims) / 16
	groups := []int64{n, 16}
	x = w.reshape(x, groups...)
	bit := w.elementwise("shift-right-logical", w.fullInt(typeU32, groups, hadamardSigns),
		w.iota(typeU32, groups, 1))
	x = w.negated(x, w.withInt("and", bit, 1))
	for step := int64(1); step < 16; step *= 2 {
		// Of two elements, the sum and the difference.
		all := []int64{n, 8 / step, 2, 2, step}
		terms := w.broadcast(w.reshape(x, n, 8/step, 2, step), all, 0, 1, 3, 4)
		odd := w.elementwise("and", w.iota(typeU32, all, 2), w.iota(typeU32, all, 3))
		x = w.reshape(w.reduce(w.negated(terms, odd), "add", 0, 3), groups...)
	}
	x = w.elementwise("multiply", x, w.full(typeF32, groups, 0.25))
	return w.reshape(w.convert(w.convert(x, typeBF16), typeF32), dims...)
}

// negated changes the sign where a number is 1.
func (w *writer) negated(x, where *value) *value {
	one := w.fullInt(typeU32, where.shape.dims, 1)
	return w.choose(w.compare("EQ", where, one), w.elementwise("negate", x), x)
}
