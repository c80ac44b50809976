package dtype

import (
	"encoding/binary"
	"math"
	"math/bits"
)

// Decode brings elements of a float type, or of F8E8M0FNU, to float32. Only F64 can lose anything:
// it is rounded to the nearest. Of two F4E2M1FN in a byte the low half comes first. Elements of
// other types are not read.
func (d DType) Decode(dst []float32, src []byte) {
	switch d {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F64:
		for i := range dst {
			dst[i] = float32(math.Float64frombits(binary.LittleEndian.Uint64(src[8*i:])))
		}
	case BF16:
		for i := range dst {
			dst[i] = F32FromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = F32FromF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case F8E4M3FN:
		for i := range dst {
			dst[i] = F32FromE4M3(src[i])
		}
	case F8E5M2:
		for i := range dst {
			dst[i] = F32FromE5M2(src[i])
		}
	case F8E8M0FNU:
		for i := range dst {
			dst[i] = F32FromE8M0(src[i])
		}
	case F4E2M1FN:
		for i := range dst {
			dst[i] = F32FromE2M1(src[i/2] >> (i % 2 * 4))
		}
	}
}

// Encode rounds float32 to the nearest element of F32, BF16 or F16, ties to even. It returns the
// index of the first finite number that would become infinite, or -1. Types of 8 bits and less are
// not written: they need a scale, see package block.
func (d DType) Encode(dst []byte, src []float32) int {
	over := -1
	switch d {
	case F32:
		for i, f := range src {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(f))
		}
	case BF16:
		for i, f := range src {
			h := BF16FromF32(f)
			binary.LittleEndian.PutUint16(dst[2*i:], h)
			if h&0x7fff == 0x7f80 && over < 0 && !math.IsInf(float64(f), 0) {
				over = i
			}
		}
	case F16:
		for i, f := range src {
			h := F16FromF32(f)
			binary.LittleEndian.PutUint16(dst[2*i:], h)
			if h&0x7fff == 0x7c00 && over < 0 && !math.IsInf(float64(f), 0) {
				over = i
			}
		}
	}
	return over
}

// Append writes numbers as elements; for float types other than F64 they are rounded to float32
// first. It writes nothing for types that Go cannot represent: complex ones, and floats of 8 bits
// and less.
func (d DType) Append(dst []byte, list ...float64) []byte {
	for _, v := range list {
		switch {
		case d == F64:
			dst = binary.LittleEndian.AppendUint64(dst, math.Float64bits(v))
		case d == F32:
			dst = binary.LittleEndian.AppendUint32(dst, math.Float32bits(float32(v)))
		case d == BF16:
			dst = binary.LittleEndian.AppendUint16(dst, BF16FromF32(float32(v)))
		case d == F16:
			dst = binary.LittleEndian.AppendUint16(dst, F16FromF32(float32(v)))
		case d.Bits() >= 8 && (d.Kind() == Bool || d.Kind() == Signed || d.Kind() == Unsigned):
			word := binary.LittleEndian.AppendUint64(nil, uint64(int64(v)))
			dst = append(dst, word[:d.Bits()/8]...)
		}
	}
	return dst
}

// Values reads what Append writes, and F8E5M2.
func (d DType) Values(src []byte) []float64 {
	width := max(d.Bits()/8, 1)
	list := make([]float64, len(src)/width)
	for i := range list {
		list[i] = d.Value(src[i*width : (i+1)*width])
	}
	return list
}

// Value is the number of one element. A packed pair, a complex number and a block format's part
// are only bits, and not a number.
func (d DType) Value(elem []byte) float64 {
	var word [8]byte
	copy(word[:], elem)
	raw := binary.LittleEndian.Uint64(word[:])
	shift := 64 - d.Bits()
	switch {
	case d.Bits() < 8:
		return math.NaN()
	case d.Kind() == Bool || d.Kind() == Unsigned:
		return float64(raw)
	case d.Kind() == Signed:
		return float64(int64(raw<<shift) >> shift)
	}
	switch d {
	case F64:
		return math.Float64frombits(raw)
	case F32, BF16, F16, F8E5M2:
		var f [1]float32
		d.Decode(f[:], elem)
		return float64(f[0])
	}
	return math.NaN()
}

// BF16FromF32 rounds to the nearest bfloat16, ties to even; a NaN stays a quiet NaN.
func BF16FromF32(f float32) uint16 {
	bits := math.Float32bits(f)
	if f != f {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// F32FromBF16 widens a bfloat16, which is exact.
func F32FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// F16FromF32 rounds to the nearest half, ties to even; a NaN stays a quiet NaN.
func F16FromF32(f float32) uint16 {
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

// F32FromF16 widens an IEEE 754 half: 1 sign, 5 exponent and 10 fraction bits. It is exact.
func F32FromF16(h uint16) float32 {
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

// NotFinite counts the elements of a list, as it stands in a file, that are infinite or NaN:
// those whose exponent has all its bits set. It looks at eight bytes at a time, so that memory and
// not the processor is what it waits for. Types without such elements have none.
func (d DType) NotFinite(src []byte) (n int64) {
	// With its exponent alone, an element plus the exponent's lowest bit reaches the place of the
	// sign exactly where all bits of the exponent are set, and no sum leaves its element.
	var exponent, lowest uint64
	switch d {
	case F64:
		exponent, lowest = 0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000
	case F32:
		exponent, lowest = 0x7f80_0000_7f80_0000, 0x0080_0000_0080_0000
	case BF16:
		exponent, lowest = 0x7f80_7f80_7f80_7f80, 0x0080_0080_0080_0080
	case F16:
		exponent, lowest = 0x7c00_7c00_7c00_7c00, 0x0400_0400_0400_0400
	default:
		return 0
	}
	signs := exponent + lowest
	word := func(at int) uint64 {
		return (binary.LittleEndian.Uint64(src[at:])&exponent + lowest) & signs
	}
	at := 0
	for ; at+64 <= len(src); at += 64 {
		s := src[at : at+64 : at+64]
		any := (binary.LittleEndian.Uint64(s)&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[8:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[16:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[24:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[32:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[40:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[48:])&exponent + lowest) |
			(binary.LittleEndian.Uint64(s[56:])&exponent + lowest)
		if any&signs == 0 {
			continue
		}
		for i := at; i < at+64; i += 8 {
			n += int64(bits.OnesCount64(word(i)))
		}
	}
	for ; at+8 <= len(src); at += 8 {
		n += int64(bits.OnesCount64(word(at)))
	}
	if at < len(src) {
		var rest [8]byte // zeros are finite
		copy(rest[:], src[at:])
		n += d.NotFinite(rest[:])
	}
	return n
}
