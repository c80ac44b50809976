package quantize

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
)

// sums is what the quantization of some elements did to them.
type sums struct {
	n, zeros, empty int64 // elements compared; those that were zero; those that are zero now
	power, noise    float64
	amax            float32 // of all
}

func (s *sums) add(o sums) {
	s.n, s.zeros, s.empty = s.n+o.n, s.zeros+o.zeros, s.empty+o.empty
	s.power, s.noise, s.amax = s.power+o.power, s.noise+o.noise, max(s.amax, o.amax)
}

// finite reports whether all elements were.
func (s *sums) finite() bool { return s.amax <= math.MaxFloat32 }

// decibel is the signal-to-noise ratio, rounded to a thousandth; nil if signal or noise is zero.
func decibel(power, noise float64) *float64 {
	if power == 0 || noise == 0 {
		return nil
	}
	db := math.Round(1000*10*math.Log10(power/noise)) / 1000
	return &db
}

// halves returns a chunk as bfloat16 bits.
func halves(raw []byte, b *buffers) []uint16 {
	x := grow(&b.half, int64(len(raw))/2)
	n := len(x) / 4 * 4
	for i := 0; i < n; i += 4 {
		word := binary.LittleEndian.Uint64(raw[2*i:])
		x := x[i : i+4 : i+4]
		x[0], x[1] = uint16(word), uint16(word>>16)
		x[2], x[3] = uint16(word>>32), uint16(word>>48)
	}
	for i := n; i < len(x); i++ {
		x[i] = binary.LittleEndian.Uint16(raw[2*i:])
	}
	return x
}

// widen converts a chunk of another type to float32, exactly.
func widen(t dtype.DType, raw []byte, b *buffers) []float32 {
	x := grow(&b.wide, int64(len(raw))*8/int64(t.Bits()))
	t.Decode(x, raw)
	return x
}

// largest is the amax of a chunk, or NaN.
func largest(t dtype.DType, raw []byte, b *buffers) float32 {
	if t == dtype.BF16 {
		return block.Amax(halves(raw, b))
	}
	return block.Amax(widen(t, raw, b))
}

// A coder quantizes chunks of a tensor.
type coder struct {
	format dtype.Format
	every  int     // one block in every is compared
	amax   float32 // of the tensor, for NVFP4
	empty  byte    // scale of a block of zeros, for NVFP4
}

// encode quantizes a chunk, and compares.
func (c coder) encode(q, scale []byte, t dtype.DType, raw []byte, b *buffers) (sums, error) {
	if t == dtype.BF16 {
		return encode(c, q, scale, halves(raw, b))
	}
	return encode(c, q, scale, widen(t, raw, b))
}

func encode[T block.Number](c coder, q, scale []byte, x []T) (sums, error) {
	s := sums{amax: block.Amax(x)}
	if c.format == dtype.MXFP8 {
		err := block.MXFP8(q, scale, x)
		if err == nil && s.finite() {
			compare8(&s, q, scale, x, c.every)
		}
		return s, err
	}
	err := block.NVFP4(q, scale, x, c.amax)
	if err == nil && s.finite() {
		_, out := block.Global(c.amax)
		mend(q, scale, x, out, c.empty)
		compare4(&s, q, scale, x, out, c.every)
	}
	return s, err
}

// smallest is 2⁻⁹, the smallest scale that is not zero, in E4M3.
const smallest = 1

// mend gives a scale to blocks whose scale is zero, as the package comment says.
func mend[T block.Number](q, scale []byte, x []T, out float32, empty byte) {
	var wide [16]float32
	for k := 0; ; k++ {
		next := bytes.IndexByte(scale[k:], 0)
		if next < 0 {
			return
		}
		k += next
		block.Widen(wide[:], x[k*16:])
		if wide == [16]float32{} { // its elements are zero already
			scale[k] = empty
			continue
		}
		scale[k] = smallest
		block.Pack(q[k*8:][:8], wide[:], min(1/(dtype.F32FromE4M3(scale[k])*out), math.MaxFloat32))
	}
}

// difference compares numbers with what their codes stand for, both in units of their block's
// scale, so that no square leaves the range of float32. Sums go four ways, for the processor's
// sake.
func difference(x, y []float32, inverse float32) (power, noise float32, zeros int64) {
	var p, d [4]float32
	for i := 0; i+4 <= len(x); i += 4 {
		x, y := x[i:i+4:i+4], y[i:i+4:i+4]
		for j := range 4 {
			v := x[j] * inverse
			e := v - y[j]
			p[j] += float32(v * v)
			d[j] += float32(e * e)
			if v == 0 {
				zeros++
			}
		}
	}
	return p[0] + p[1] + (p[2] + p[3]), d[0] + d[1] + (d[2] + d[3]), zeros
}

// compare8 adds up what MXFP8 did.
func compare8[T block.Number](s *sums, q, scale []byte, x []T, every int) {
	var table [256]float32
	for i := range table {
		table[i] = dtype.F32FromE4M3(byte(i))
	}
	var wide, back [32]float32
	for k := 0; k < len(scale); k += every {
		e := scale[k]
		s.n += 32
		block.Widen(wide[:], x[k*32:])
		codes := q[k*32:][:32]
		for i, c := range codes {
			back[i] = table[c]
		}
		for i := 0; i < 32; i += 8 {
			// Codes are zero where no bit but the sign is set. Such a byte gives its upper bit here.
			word := binary.LittleEndian.Uint64(codes[i:]) & 0x7f7f7f7f7f7f7f7f
			s.empty += 8 - int64(bits.OnesCount64((word+0x7f7f7f7f7f7f7f7f)&0x8080808080808080))
		}
		// 2⁻¹²⁷ has an inverse too; what is smaller than it was flushed.
		inverse := math.Float32frombits((254 - uint32(e)) << 23)
		p, d, zeros := difference(wide[:], back[:], inverse)
		s.tally(p, d, zeros, dtype.F32FromE8M0(e))
	}
}

func (s *sums) tally(power, noise float32, zeros int64, unit float32) {
	square := float64(unit) * float64(unit)
	s.power += float64(power) * square
	s.noise += float64(noise) * square
	s.zeros += zeros
}

// compare4 adds up what NVFP4 did.
func compare4[T block.Number](s *sums, q, scale []byte, x []T, out float32, every int) {
	var table [256][2]float32
	for i := range table {
		table[i] = [2]float32{dtype.F32FromE2M1(byte(i)), dtype.F32FromE2M1(byte(i >> 4))}
	}
	var units [256]float32
	for i := range units {
		units[i] = dtype.F32FromE4M3(byte(i)) * out
	}
	var wide, back [16]float32
	for k := 0; k < len(scale); k += every {
		e := scale[k]
		s.n += 16
		block.Widen(wide[:], x[k*16:])
		codes := q[k*8:][:8]
		for i, c := range codes {
			back[2*i], back[2*i+1] = table[c][0], table[c][1]
		}
		word := binary.LittleEndian.Uint64(codes)
		s.empty += 16 - int64(bits.OnesCount64((word|word>>1|word>>2)&0x1111111111111111))
		unit := units[e]
		p, d, zeros := difference(wide[:], back[:], min(1/unit, math.MaxFloat32))
		s.tally(p, d, zeros, unit)
	}
}
