package block

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// A Key makes the random bits of a tensor. The same key gives the same bits to the same element on
// every machine, however the tensor is shared out.
type Key struct{ A, B uint32 }

// NewKey derives the key of a tensor in a step of a run.
func NewKey(seed, step, tensor uint32) Key {
	a := mix(seed ^ mix(step^mix(tensor)))
	return Key{a, mix(a ^ 0x85ebca6b)}
}

// RoundingVersion numbers what stochastic rounding draws. 1: 24 bits hashed for each element. 2: 8
// bits, of 32 hashed for each four elements, as the conversion of GPUs takes them.
const RoundingVersion = 2

// Draw gives the random bits of four elements that follow each other in a block, by the place of
// the first in the whole matrix.
func (k Key) Draw(row, col uint32) uint32 { return mix(mix(row^k.A) ^ k.B ^ col) }

// Round rounds the i-th of four elements, a number of E2M1's range, by the bits of all four. It
// does what a GPU does (PTX ISA, cvt.rs.satfinite.e2m1x4.f32, elements in the order 3, 2, 1, 0).
func Round(v float32, i int, draw uint32) byte { return roll(v, draw>>shifts[i&3]&0xff) }

// shifts say where the 8 bits of each of four elements are. The conversion takes them two by two:
// the upper pair's are the upper bytes of both halves of the word, the lower pair's the lower ones,
// and the upper half is for the second of a pair.
var shifts = [4]uint32{0, 16, 8, 24}

// mix is the finalizer of MurmurHash3: every bit of its argument changes half of the result's.
func mix(h uint32) uint32 {
	h = (h ^ h>>16) * 0x85ebca6b
	h = (h ^ h>>13) * 0xc2b2ae35
	return h ^ h>>16
}

// A Window says which part of a matrix a source is: whole rows of Cols elements, the first of which
// stands at Row and Col of the whole.
type Window struct {
	Row, Col uint32
	Cols     int
}

// Stochastic is NVFP4 with stochastic rounding: an element is rounded up with the probability of
// its fraction, truncated to 8 bits, so that the mean is exact but for 1/512 of a step on average.
// Window counts rows and columns of the matrix as it is stored; a transposed copy counts its own.
func Stochastic[T Number](q, scales []byte, src []T, amax float32, key Key, at Window) error {
	if err := check("NVFP4", len(src), len(q), len(scales), NVFP4Size, 2); err != nil {
		return err
	}
	if at.Cols <= 0 {
		return checkMatrix("NVFP4", 0, at.Cols, 1, NVFP4Size, len(src))
	}
	rows := len(src) / at.Cols
	if err := checkMatrix("NVFP4", rows, at.Cols, 1, NVFP4Size, len(src)); err != nil {
		return err
	}
	g := newGrid(amax)
	var x [NVFP4Size]float32
	for r := range rows {
		line := mix((at.Row + uint32(r)) ^ key.A)
		for c := 0; c < at.Cols; c += NVFP4Size {
			i := r*at.Cols + c
			Widen(x[:], src[i:i+NVFP4Size])
			scale, factor := g.scale(largest(x[:]))
			scales[i/NVFP4Size] = scale
			chance(q[i/2:i/2+NVFP4Size/2], &x, factor, line^key.B, at.Col+uint32(c))
		}
	}
	return nil
}

// chance writes the elements of a block whose first column is col.
func chance(q []byte, x *[NVFP4Size]float32, factor float32, line, col uint32) {
	for i := 0; i < len(q); i += 2 {
		draw := mix(line ^ (col + uint32(2*i)))
		for k := range 2 {
			at := 2 * (i + k)
			q[i+k] = Round(x[at]*factor, at, draw) | Round(x[at+1]*factor, at+1, draw)<<4
		}
	}
}

// roll rounds to E2M1 by 8 random bits: v stands on the grid of its binade, whose step is 0.5 below
// 2, 1 below 4 and 2 from there. The bits are added to the first 8 bits of what is left over, and
// the sum is truncated: an element goes up with a chance of k/256.
func roll(v float32, random uint32) byte {
	if v != v {
		return dtype.E2M1FromF32(v)
	}
	bits := math.Float32bits(v)
	sign, a := byte(bits>>28)&8, min(math.Float32frombits(bits&signless), 6)
	switch {
	case a < 2:
		return sign | byte((uint32(a*512)+random)>>8)
	case a < 4:
		return sign | byte((uint32(a*256)+random)>>8+2)
	}
	return sign | byte((uint32(a*128)+random)>>8+4)
}
