package block

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// Encode quantizes src in a format whose blocks have power-of-two scales (E8M0): one element a byte
// to q, whatever its bits, and one scale for each block. MXFP8 takes its kernel; other element
// types are rounded one by one, which is meant for small tensors.
func Encode(f dtype.Format, q, scales []byte, src []float32) error {
	if f == dtype.MXFP8 {
		return MXFP8(q, scales, src)
	}
	n := int(f.Block())
	if err := check(string(f), len(src), len(q), len(scales), n, 1); err != nil {
		return err
	}
	for i := range scales {
		scales[i] = encodeBlock(f.Codes(), q[i*n:][:n], src[i*n:][:n])
	}
	return nil
}

// encodeBlock rounds one block. A NaN in it makes the whole block NaN by its scale.
func encodeBlock(elem dtype.DType, q []byte, src []float32) (scale byte) {
	scale, factor := powerScale(largest(src), elem.FromCode(elem.MaxCode()))
	for i, x := range src {
		if q[i] = elem.Saturate(x * factor); scale == 0xff {
			q[i] = elem.Saturate(float32(math.NaN()))
		}
	}
	return scale
}

// powerScale gives the E8M0 scale of a block whose greatest magnitude has the bits amax, and what
// its numbers are multiplied by: amax/most rounded up, so that no element saturates. With most =
// m·2ᵉ the exponent of amax grows by one where its fraction is above m: adding 2²³-1 less m's
// fraction makes such a fraction carry.
func powerScale(amax uint32, most float32) (scale byte, factor float32) {
	switch {
	case amax > infinity:
		return 0xff, float32(math.NaN())
	case amax == infinity:
		return 0xfe, 0x1p-127
	}
	bits := math.Float32bits(most)
	fraction, exponent := bits&0x7fffff, bits>>23-127
	s := max((amax+0x7fffff-fraction)>>23, exponent) - exponent
	return byte(s), math.Float32frombits((254 - s) << 23)
}
