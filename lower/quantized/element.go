package quantized

import "github.com/deepwell/deepwell/dtype"

// An Encoding says how one element type is rounded from, and decoded to, the bits of a float32. A
// new element type is a row of the table below.
type Encoding struct {
	// Rounding: fraction bits; the smallest normal number; what the code is biased by, shifted by the
	// fraction; the largest finite number. The numbers are float32 bits.
	fraction, least, bias, most uint32
	// Decoding: the first code with a leading one; how far the fraction moves left; the float32
	// exponent of code 0; the sign bit.
	normal, shift, exponent, sign uint32
	// nan is the code that a NaN gets; without hasNaN it is the largest finite number.
	nan    uint32
	hasNaN bool
}

// The element types of block-scaled formats.
var (
	E4M3 = Encoding{3, 0x3c800000, 141 << 3, 0x43e00000, 8, 20, 120, 0x80, 0x7f, true}
	E2M1 = Encoding{1, 0x3f800000, 149 << 1, 0x40c00000, 2, 22, 126, 8, 7, false}
)

// EncodingOf gives the row of an element type; ok is false if it has none.
func EncodingOf(elem dtype.DType) (e Encoding, ok bool) {
	switch elem {
	case dtype.F8E4M3FN:
		return E4M3, true
	case dtype.F4E2M1FN:
		return E2M1, true
	}
	return Encoding{}, false
}

// signShift moves the sign of a float32 to the sign bit of a code.
func (e Encoding) signShift() uint32 {
	shift := uint32(0)
	for bit := uint32(1) << 31; bit != e.sign; bit >>= 1 {
		shift++
	}
	return shift
}

// powerOf splits the largest finite number m·2ᵉ: carry, when added to bits with fraction mantissa
// bits, makes a mantissa above m carry into the exponent, and exponent is e.
func (e Encoding) powerOf(fraction uint32) (carry, exponent uint32) {
	m := e.most & 0x7fffff >> (23 - fraction)
	return 1<<fraction - 1 - m, e.most>>23 - 127
}
