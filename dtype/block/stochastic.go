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

// Round rounds one number of E2M1's range at a place of the whole matrix.
func (k Key) Round(v float32, row, col uint32) byte { return roll(v, mix(mix(row^k.A)^k.B^col)) }

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
// its fraction, so that the mean is exact. Window counts rows and columns of the matrix as it is
// stored; a transposed copy counts its own.
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
	for i := range q {
		low := roll(x[2*i]*factor, mix(line^(col+uint32(2*i))))
		high := roll(x[2*i+1]*factor, mix(line^(col+uint32(2*i+1))))
		q[i] = low | high<<4
	}
}

// roll rounds to E2M1 by random bits: v stands on the grid of its binade, whose step is 0.5 below
// 2, 1 below 4 and 2 from there, and goes up with a chance of what is left over.
func roll(v float32, random uint32) byte {
	if v != v {
		return dtype.E2M1FromF32(v)
	}
	bits := math.Float32bits(v)
	sign, a := byte(bits>>28)&8, min(math.Float32frombits(bits&signless), 6)
	u := float32(random>>8) * 0x1p-24
	var code uint32 // sums are positive, so a conversion is the floor
	switch {
	case a < 2:
		code = uint32(float32(a*2) + u)
	case a < 4:
		code = uint32(a+u) + 2
	default:
		code = uint32(float32(a*.5)+u) + 4
	}
	return sign | byte(min(code, 7))
}
