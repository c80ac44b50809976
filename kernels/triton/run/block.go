package run

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// A block is a value: integers, floats, or places in an array. Floats of all types are held as
// float32, which has them all.
type block struct {
	typ
	ints   []int64 // integers, sign-extended; 0 and 1 of i1; places of pointers
	floats []float32
	array  *array
	desc   *descriptor
}

func (t typ) count() int {
	n := 1
	for _, k := range t.shape {
		n *= k
	}
	return n
}

func (t typ) float() bool { return t.kind == "" && (t.elem[0] == 'f' || t.elem[0] == 'b') }

// make gives an empty block of a type.
func (t typ) block() *block {
	b := &block{typ: t}
	if t.float() {
		b.floats = make([]float32, t.count())
	} else {
		b.ints = make([]int64, t.count())
	}
	return b
}

// bits is the size of an element.
func bits(elem string) int {
	switch elem {
	case "i1":
		return 1
	case "i8", "ui8", "f8E4M3FN", "f8E5M2":
		return 8
	case "i16", "bf16":
		return 16
	case "i64":
		return 64
	}
	return 32
}

// wrap keeps as many bits of an integer as its type has.
func wrap(n int64, elem string) int64 {
	if elem == "i1" {
		return n & 1
	}
	s := 64 - bits(elem)
	return n << s >> s
}

// round gives the nearest float of a type. A NaN loses its sign in 8 bits (PTX ISA, cvt: "the
// canonical NaN").
func round(f float32, elem string) float32 {
	if f != f && bits(elem) == 8 {
		return float32(math.NaN())
	}
	switch elem {
	case "bf16":
		return dtype.F32FromBF16(dtype.BF16FromF32(f))
	case "f8E4M3FN":
		return dtype.F32FromE4M3(dtype.E4M3FromF32(f))
	case "f8E5M2":
		return dtype.F32FromE5M2(dtype.E5M2FromF32(f))
	}
	return f
}

// encode gives the bits of one element.
func (b *block) encode(i int) uint64 {
	if b.ints != nil {
		return uint64(b.ints[i]) & (1<<bits(b.elem) - 1)
	}
	f := b.floats[i]
	switch b.elem {
	case "bf16":
		return uint64(dtype.BF16FromF32(f))
	case "f8E4M3FN":
		return uint64(dtype.E4M3FromF32(f))
	case "f8E5M2":
		return uint64(dtype.E5M2FromF32(f))
	}
	return uint64(math.Float32bits(f))
}

// decode sets one element from its bits.
func (b *block) decode(i int, u uint64) {
	switch b.elem {
	case "bf16":
		b.floats[i] = dtype.F32FromBF16(uint16(u))
	case "f8E4M3FN":
		b.floats[i] = dtype.F32FromE4M3(byte(u))
	case "f8E5M2":
		b.floats[i] = dtype.F32FromE5M2(byte(u))
	case "f32":
		b.floats[i] = math.Float32frombits(uint32(u))
	default:
		b.ints[i] = wrap(int64(u), b.elem)
	}
}

// take makes a block of which element i is element from(i) of b.
func (b *block) take(shape []int, from func(i int) int) *block {
	out := typ{b.elem, b.kind, shape}.block()
	out.array, out.desc = b.array, b.desc
	for i := range out.count() {
		if b.floats != nil {
			out.floats[i] = b.floats[from(i)]
		} else {
			out.ints[i] = b.ints[from(i)]
		}
	}
	return out
}

// strides are the distances of neighbours along each dimension, the last fastest.
func strides(shape []int) []int {
	list := make([]int, len(shape))
	for i, n := len(shape)-1, 1; i >= 0; i-- {
		list[i], n = n, n*shape[i]
	}
	return list
}

// broadcast repeats dimensions of size 1, or a scalar.
func (b *block) broadcast(shape []int) *block {
	if b.shape == nil {
		return b.take(shape, func(int) int { return 0 })
	}
	mine, theirs := strides(b.shape), strides(shape)
	return b.take(shape, func(i int) (at int) {
		for d, n := range theirs {
			if b.shape[d] > 1 {
				at += i / n % shape[d] * mine[d]
			}
		}
		return at
	})
}

// trans puts dimensions in another order.
func (b *block) trans(order []int) *block {
	shape, mine := make([]int, len(order)), strides(b.shape)
	for i, d := range order {
		shape[i] = b.shape[d]
	}
	theirs := strides(shape)
	return b.take(shape, func(i int) (at int) {
		for d, n := range theirs {
			at += i / n % shape[d] * mine[order[d]]
		}
		return at
	})
}

// reshape keeps the order of elements.
func (b *block) reshape(shape []int) *block {
	out := *b
	out.shape = shape
	return &out
}

// halves takes the axis apart: the first half of its elements and the second.
func (b *block) halves(axis int) (x, y *block) {
	shape := slices.Clone(b.shape)
	shape[axis] /= 2
	inner := strides(b.shape)[axis]
	half := shape[axis] * inner
	side := func(second int) *block {
		return b.take(shape, func(i int) int { return i/half*2*half + second*half + i%half })
	}
	return side(0), side(1)
}
