package dtype

import "math"

// rounded gives the code of the nearest number, ties to even, of a magnitude given as float32 bits.
// It adds the power of two whose last bit weighs as much as the code's, so the processor does the
// rounding, and subnormal codes need no case of their own. least is the smallest normal number;
// shift is 23 less the bits of the fraction.
func rounded(magnitude, least uint32, shift, exponent uint) uint32 {
	wide := max(magnitude, least)&0x7f800000 + uint32(shift)<<23
	sum := math.Float32frombits(magnitude) + math.Float32frombits(wide)
	return math.Float32bits(sum) - wide + wide>>shift - uint32(exponent<<(23-shift))
}

// E4M3FromF32 rounds to the nearest F8E4M3FN, ties to even. Beyond 448 it saturates, infinity too,
// as the satfinite conversions of GPUs do; ml_dtypes turns larger numbers into NaN. NaN stays NaN.
func E4M3FromF32(f float32) byte {
	bits := math.Float32bits(f)
	sign, magnitude := byte(bits>>24)&0x80, bits&0x7fffffff
	if magnitude > 0x7f800000 {
		return sign | 0x7f
	}
	return sign | byte(rounded(min(magnitude, 0x43e00000), 0x3c800000, 20, 141))
}

// E5M2FromF32 rounds to the nearest F8E5M2, ties to even, and saturates at 57344 as E4M3FromF32
// does at 448.
func E5M2FromF32(f float32) byte {
	bits := math.Float32bits(f)
	sign, magnitude := byte(bits>>24)&0x80, bits&0x7fffffff
	if magnitude > 0x7f800000 {
		return sign | 0x7e
	}
	return sign | byte(rounded(min(magnitude, 0x47600000), 0x38800000, 21, 134))
}

// E2M1FromF32 rounds to the nearest F4E2M1FN, ties to even, and saturates at 6. The type has no
// NaN: the code is then 7, which is +6, as on a GPU.
func E2M1FromF32(f float32) byte {
	bits := math.Float32bits(f)
	sign, magnitude := byte(bits>>28)&8, bits&0x7fffffff
	if magnitude > 0x7f800000 {
		return 7
	}
	return sign | byte(rounded(min(magnitude, 0x40c00000), 0x3f800000, 22, 149))
}

// E8M0FromF32 rounds a scale up to a power of two, so that what is divided by it never grows past
// the largest element. 2⁻¹²⁷ is the smallest, infinity becomes the largest, 2¹²⁷, and negative
// numbers and NaN become NaN, 0xff.
func E8M0FromF32(f float32) byte {
	switch bits := math.Float32bits(f); {
	case f != f || f < 0:
		return 0xff
	case bits&0x7fffffff <= 0x400000:
		return 0
	case bits < 0x800000: // subnormal, and above 2⁻¹²⁷
		return 1
	default:
		return byte(min((bits+0x7fffff)>>23, 0xfe))
	}
}

// F32FromE4M3 widens an F8E4M3FN: 1 sign, 4 exponent and 3 fraction bits. It is exact.
func F32FromE4M3(b byte) float32 {
	sign, exp, frac := uint32(b>>7)<<31, uint32(b>>3&15), uint32(b&7)
	switch {
	case b&0x7f == 0x7f:
		return math.Float32frombits(sign | 0x7fc00000)
	case exp == 0:
		return math.Float32frombits(math.Float32bits(float32(frac)*0x1p-9) | sign)
	}
	return math.Float32frombits(sign | (exp+127-7)<<23 | frac<<20)
}

// F32FromE5M2 widens an F8E5M2, which is the upper byte of a half. It is exact.
func F32FromE5M2(b byte) float32 { return F32FromF16(uint16(b) << 8) }

// F32FromE8M0 is 2 to the power of b less 127; 0xff is NaN.
func F32FromE8M0(b byte) float32 {
	switch b {
	case 0:
		return math.Float32frombits(0x400000) // 2⁻¹²⁷ is subnormal
	case 0xff:
		return math.Float32frombits(0x7fc00000)
	}
	return math.Float32frombits(uint32(b) << 23)
}

// F32FromE2M1 widens the F4E2M1FN in the low half of a byte. It is exact.
func F32FromE2M1(b byte) float32 {
	return [16]float32{0, .5, 1, 1.5, 2, 3, 4, 6,
		float32(math.Copysign(0, -1)), -.5, -1, -1.5, -2, -3, -4, -6}[b&15]
}

// FromCode widens one element of 8 bits or fewer, in the low bits of a byte; NaN for other types.
func (d DType) FromCode(b byte) float32 {
	switch d {
	case F8E4M3FN:
		return F32FromE4M3(b)
	case F8E5M2:
		return F32FromE5M2(b)
	case F8E8M0FNU:
		return F32FromE8M0(b)
	case F4E2M1FN:
		return F32FromE2M1(b)
	}
	return float32(math.NaN())
}

// MaxCode is the code of the largest finite element of 8 bits or fewer; 0 for other types.
func (d DType) MaxCode() byte {
	switch d {
	case F8E4M3FN:
		return 0x7e // 448
	case F8E5M2:
		return 0x7b // 57344
	case F8E8M0FNU:
		return 0xfe // 2¹²⁷
	case F4E2M1FN:
		return 7 // 6
	}
	return 0
}

// Saturate rounds to the nearest element of 8 bits or fewer, ties to even, and what is beyond the
// largest finite one becomes that, as the satfinite conversions of GPUs do. It gives 0 for other
// types.
func (d DType) Saturate(f float32) byte {
	switch d {
	case F8E4M3FN:
		return E4M3FromF32(f)
	case F8E5M2:
		return E5M2FromF32(f)
	case F8E8M0FNU:
		return E8M0FromF32(f)
	case F4E2M1FN:
		return E2M1FromF32(f)
	}
	return 0
}
