package lower

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// windowed is quantize for a card: largest magnitudes by reduce_window, of 16 bits where the source
// has no more (after a Hadamard transform by the sums themselves, see words), and a barrier on the
// scales, so that XLA:GPU makes two kernels of it, one for the scales and one for the codes, and
// keeps nothing wide in memory between them (reference/quantize_fusion.md, 2). Where a source is
// written both ways, both have one barrier.
func windowed(w *writer, op *ir.Op, in []val) []val {
	q := newQuantizer(w, op)
	x, scale := in[0], q.rows(in[1])
	order := append(ir.Names(ir.Without(x.t.Dims, q.along...)), q.along...)
	var codes val
	switch {
	case q.format == ir.MXFP8:
		codes = w.cardE4M3(q.blocks(x), scale)
	case q.hadamard:
		codes = q.pack64(x, scale, w.cardGrid(in[2]))
	default:
		// Packed as they lie: XLA:GPU would turn the two halves of bytes one after the other.
		factor := w.cardFactor(scale, w.cardGrid(in[2]))
		codes = q.cardE2M1(q.blocks(x), factor, all)
		none := w.as(w.compare("NE", factor, factor), codes.t)
		codes = w.choose(none, w.constant(codes.t, 7), codes)
		codes = w.rowMajor(w.packed(w.convert(codes, dtype.U8)))
	}
	return []val{w.merged(codes, order, op.Out[0].Type), w.merged(scale, order, op.Out[1].Type)}
}

// window is the size of what shares a scale: a block, or a tile.
func (q *quantizer) window() map[string]int64 {
	size := map[string]int64{q.last(): q.block}
	if q.tile {
		size[q.lastKept().Name] = q.block
	}
	return size
}

// blockAmax gives the bits of the largest magnitudes of blocks, or tiles, in the order of the
// source.
func blockAmax(w *writer, op *ir.Op, in []val) []val {
	q, x := newQuantizer(w, op), in[0]
	if q.hadamard {
		return []val{q.hadamardAmax(x)}
	}
	as, mask := dtype.U32, uint32(magnitude)
	if x.t.Elem == dtype.BF16 {
		as, mask = dtype.U16, magnitude>>16
	}
	return []val{w.window(w.with(w.bits(x, as), "and", mask), q.window())}
}

// amaxOfBlocks is the largest of what the blocks are found to have.
func amaxOfBlocks(w *writer, op *ir.Op, in []val) []val {
	return []val{w.amaxOf(op, w.fromHalf(in[0]))}
}

// fromHalf gives bits of 16 bits in 32.
func (w *writer) fromHalf(top val) val {
	if top.t.Elem == dtype.U32 {
		return top
	}
	return w.with(w.convert(top, dtype.U32), "shift_left", 16)
}

// blockScale gives the scales of one quantize as bytes, in the order of the source.
func blockScale(w *writer, op *ir.Op, in []val) []val {
	if ir.Format(op.Attrs.Text("format")) == ir.MXFP8 {
		return []val{w.convert(w.powers(in[0]), dtype.U8)}
	}
	top := w.float(w.fromHalf(in[0]))
	return []val{w.convert(w.cardE4M3Scale(top, w.cardGrid(in[1])), dtype.U8)}
}

// rows repeats the scale of a tile for each of its rows.
func (q *quantizer) rows(scale val) val {
	if !q.tile {
		return scale
	}
	at := scale.t.Index(q.lastKept().Name)
	t := ir.Type{Dims: cutDim(scale.t.Dims, at, 1, "row")}
	one := q.w.reshape(scale, ir.Type{Dims: ir.Without(t.Dims, "row")})
	t.Dims[at+1].Size = q.block
	dims := ir.Without(t.Dims, "row")
	dims[at].Size *= q.block
	return q.w.reshape(q.w.as(one, t), ir.Type{Dims: dims})
}

// window gives the largest in windows that do not overlap.
func (w *writer) window(v val, size map[string]int64) val {
	t := ir.Type{Elem: v.t.Elem}
	sizes := make([]int64, len(v.t.Dims))
	for i, d := range v.t.Dims {
		sizes[i] = max(size[d.Name], 1)
		t.Dims = append(t.Dims, ir.Dim{Name: d.Name, Size: d.Size / sizes[i]})
	}
	return w.apply(t, `"stablehlo.reduce_window"(`, fmt.Sprintf(
		`) <{window_dimensions = array<i64: %s>, window_strides = array<i64: %[1]s>}> (%s)`,
		list(sizes), folder("maximum", v.t.Elem)), v, w.constant(ir.Type{Elem: v.t.Elem}, 0))
}

// powers is the scale of MXFP8 of the bits of a magnitude, in as many bits.
func (w *writer) powers(top val) val {
	fraction, none := uint32(23), uint32(infinity)
	if top.t.Elem == dtype.U16 {
		fraction, none = 7, infinity>>16
	}
	scale := w.with(w.with(top, "add", 1<<(fraction-2)-1), "shift_right_logical", fraction)
	scale = w.with(w.with(scale, "maximum", 8), "subtract", 8)
	scale = w.choose(w.least(top, none), w.constant(top.t, 254), scale)
	return w.choose(w.least(top, none+1), w.constant(top.t, 255), scale)
}

// cardE4M3 rounds the elements of MXFP8. A card computes with subnormal numbers, and what is no
// number makes its whole block so.
func (w *writer) cardE4M3(x, scale val) val {
	s := w.convert(scale, dtype.U32)
	factor := w.with(w.elementwise("subtract", w.constant(s.t, 254), s), "shift_left", 23)
	factor = w.choose(w.least(s, 254), w.constant(s.t, 0x400000), factor)
	factor = w.choose(w.least(s, 255), w.constant(s.t, noNumber), factor)
	x = w.convert(x, dtype.F32)
	y := w.elementwise("multiply", x, w.as(w.float(factor), x.t))
	return w.bits(w.convert(y, dtype.F8E4M3FN), dtype.U8)
}

// cardGrid is grid in float32.
func (w *writer) cardGrid(top val) grid {
	in := w.elementwise("divide", w.constant(top.t, 2688), top)
	most := w.constant(in.t, math.MaxFloat32)
	in = w.choose(w.compare("GT", in, most), most, in)
	zero := w.constant(in.t, 0)
	none := w.elementwise("or", w.compare("EQ", in, zero), w.compare("EQ", top, zero))
	in = w.choose(none, w.constant(in.t, 1), in)
	return grid{in, w.elementwise("divide", w.constant(in.t, 1), in)}
}

// cardE4M3Scale gives the scales of NVFP4 of largest magnitudes.
func (w *writer) cardE4M3Scale(top val, g grid) val {
	sixth := w.elementwise("multiply", g.in, w.constant(g.in.t, float64(float32(1.0/6))))
	y := w.elementwise("multiply", top, w.as(sixth, top.t))
	scale := w.nearest(y, e4m3)
	return w.choose(w.compare("NE", y, y), w.constant(scale.t, 0x7f), scale)
}

// cardFactor gives what the elements of blocks are multiplied by.
func (w *writer) cardFactor(scale val, g grid) val {
	wide := w.convert(w.bits(scale, dtype.F8E4M3FN), dtype.F32)
	step := w.elementwise("multiply", wide, w.as(g.out, wide.t))
	factor := w.elementwise("divide", w.constant(step.t, 1), step)
	return w.elementwise("minimum", factor, w.constant(factor.t, math.MaxFloat32))
}

// cardE2M1 rounds elements of NVFP4: all, or one of each block, which then is picked from their
// places, too. What is no number is so in the factor of its block, since it is the largest.
func (q *quantizer) cardE2M1(x, factor val, pick func(val) val) val {
	w := q.w
	bits := w.wideBits(x)
	v := w.elementwise("multiply", w.float(w.with(bits, "and", magnitude)), w.as(factor, bits.t))
	return w.elementwise("or", q.e2m1(v, pick), w.signs(bits, 28))
}

// Blocks of NVFP4 that are spread first, which mostly lie across rows, are written as words of 64
// bits, one for each. Each of a block's 16 elements is then a value of its own, with one element
// for each block: a thread of a card makes every sum once, reads rows side by side with its
// neighbours and writes what XLA:GPU turns in one piece, and the transform is never in memory. With
// elements that are not spread that moves hardly less, and takes a compiler twice as long.

// part picks an element of each block, or all if blocks do not lie along a value. It keeps the
// dimension of 1: XLA counts what is read through a reshape as often as it is read, and then splits
// the kernel.
func (q *quantizer) part(v val, i int) val {
	at := v.t.Index(q.last())
	if at < 0 {
		return v
	}
	cut := q.w.reshape(v, ir.Type{Dims: cutDim(v.t.Dims, at, q.block, inside)})
	return q.w.slice(cut, inside, int64(i), int64(i)+1)
}

// spread gives the elements of blocks after the Hadamard transform: the sums of hadamard, in the
// same order, but each made once.
func (q *quantizer) spread(x val) []val {
	w := q.w
	x = w.convert(x, dtype.BF16)
	list := make([]val, q.block)
	for i := range list {
		if list[i] = w.convert(q.part(x, i), dtype.F32); signed[i] == '-' {
			list[i] = w.elementwise("negate", list[i])
		}
	}
	for step := 1; step < len(list); step *= 2 {
		for i := range list {
			if i&step == 0 {
				a, b := list[i], list[i+step]
				list[i], list[i+step] = w.elementwise("add", a, b), w.elementwise("subtract", a, b)
			}
		}
	}
	for i, v := range list {
		list[i] = w.convert(w.elementwise("multiply", v, w.constant(v.t, 0.25)), dtype.BF16)
	}
	return list
}

// hadamardAmax is tops after the Hadamard transform.
func (q *quantizer) hadamardAmax(x val) val {
	list := q.spread(x)
	for i, v := range list {
		list[i] = q.w.with(q.w.bits(v, dtype.U16), "and", magnitude>>16)
	}
	return q.whole(q.w.highest(list))
}

// whole leaves out the dimension of 1 of parts.
func (q *quantizer) whole(v val) val {
	return q.w.reshape(v, ir.Type{Dims: ir.Without(v.t.Dims, inside)})
}

// pack64 gives the codes of blocks, as bytes with what is summed over last.
func (q *quantizer) pack64(x, scale val, g grid) val {
	w, factor := q.w, q.w.cardFactor(scale, g)
	var word val
	for i, v := range q.spread(x) {
		code := q.cardE2M1(v, factor, func(v val) val { return q.part(v, i) })
		if code = w.convert(code, dtype.U64); i == 0 {
			word = code
			continue
		}
		word = w.elementwise("or", word, w.with(code, "shift_left", uint32(4*i)))
	}
	none, sevens := w.compare("NE", factor, factor), w.constant(word.t, 0x77777777)
	sevens = w.elementwise("or", sevens, w.with(sevens, "shift_left", 32)) // as one it is no float64
	word = w.choose(w.as(none, word.t), sevens, word)
	// As it lies first, or XLA:GPU would turn each of the elements.
	word = w.rowMajor(q.whole(word))
	order := append(ir.Names(ir.Without(word.t.Dims, q.along...)), q.along...)
	word = w.rowMajor(w.transpose(word, order))
	t := ir.Type{Elem: dtype.U8, Dims: append(slices.Clone(word.t.Dims),
		ir.Dim{Name: inside, Size: q.block / 2})}
	return w.apply(t, "stablehlo.bitcast_convert ", "", word)
}
