package dtype

import (
	"encoding/binary"
	"math/bits"
)

// NotFinite counts the elements of a list, as it stands in a file, that are infinite or NaN:
// those whose exponent has all its bits set. It looks at eight bytes at a time, so that memory and
// not the processor is what it waits for. Types without such elements have none.
func (d DType) NotFinite(src []byte) (n int64) {
	// With its exponent alone, an element plus the exponent's lowest bit reaches the place of the sign
	// exactly where all bits of the exponent are set, and no sum leaves its element.
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
