package lower

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

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

// topsSpread is tops after the Hadamard transform.
func (q *quantizer) topsSpread() val {
	list := q.spread(q.w.use(q.op.In[0]))
	for i, v := range list {
		list[i] = q.w.with(q.w.bits(v, dtype.U16), "and", magnitude>>16)
	}
	return q.whole(q.w.highest(list))
}

// whole leaves out the dimension of 1 of parts.
func (q *quantizer) whole(v val) val {
	return q.w.reshape(v, ir.Type{Dims: ir.Without(v.t.Dims, inside)})
}

// words gives the codes of blocks, as bytes with what is summed over last.
func (q *quantizer) words(x, scale val, g grid) val {
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
