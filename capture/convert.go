package capture

import (
	"encoding/binary"
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// decode brings elements to float32. Only F64 can lose anything: it is rounded to the nearest.
func decode(dst []float32, t dtype.DType, src []byte) {
	switch t {
	case dtype.F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case dtype.F64:
		for i := range dst {
			dst[i] = float32(math.Float64frombits(binary.LittleEndian.Uint64(src[8*i:])))
		}
	case dtype.BF16:
		for i := range dst {
			dst[i] = dtype.F32FromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case dtype.F16:
		for i := range dst {
			dst[i] = fromHalf(binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
}

// encode rounds float32 to the nearest element of a type, ties to even. It gives the place of the
// first finite element that would become infinite, or -1.
func encode(dst []byte, t dtype.DType, src []float32) int {
	over := -1
	switch t {
	case dtype.F32:
		for i, f := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(f))
		}
	case dtype.BF16:
		for i, f := range src {
			h := dtype.BF16FromF32(f)
			binary.LittleEndian.PutUint16(dst[2*i:], h)
			if h&0x7fff == 0x7f80 && over < 0 && !math.IsInf(float64(f), 0) {
				over = i
			}
		}
	case dtype.F16:
		for i, f := range src {
			h := toHalf(f)
			binary.LittleEndian.PutUint16(dst[2*i:], h)
			if h&0x7fff == 0x7c00 && over < 0 && !math.IsInf(float64(f), 0) {
				over = i
			}
		}
	}
	return over
}

// fromHalf widens an IEEE 754 half: 1 sign, 5 exponent and 10 fraction bits. It is exact.
func fromHalf(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exp {
	case 0: // zero, or a fraction of 2⁻²⁴
		f := float32(frac) * 0x1p-24
		return math.Float32frombits(math.Float32bits(f) | sign)
	case 0x1f:
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+127-15)<<23 | frac<<13)
}

// toHalf rounds to the nearest half, ties to even; a NaN stays a quiet NaN.
func toHalf(f float32) uint16 {
	bits := math.Float32bits(f)
	sign, bits := uint16(bits>>16&0x8000), bits&0x7fffffff
	switch {
	case bits > 0x7f800000: // NaN
		return sign | 0x7e00 | uint16(bits>>13&0x1ff)
	case bits >= 0x47800000: // 65536 and more, and infinity
		return sign | 0x7c00
	case bits < 0x38800000: // below 2⁻¹⁴ halves are multiples of 2⁻²⁴
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(bits))*0x1p24))
	}
	bits += 0xfff + bits>>13&1
	return sign | uint16((bits-(127-15)<<23)>>13)
}
