package softgpu

import (
	"math"
	"math/big"
	"math/bits"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// A ptxOp is an instruction and its meaning in Go, for inputs of a kind.
type ptxOp struct {
	body   string
	result byte
	inputs func() [][3]uint64
	want   func(a, b, c uint64) uint64
}

var (
	ints = []uint64{0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7fff, 0x8000, 0xffff,
		0x10000, 0x12345678, 0x7fffffff, 0x80000000, 0xfffffff5, 0xffffffff, 0x100000000,
		0x123456789abcdef0, math.MaxInt64, 1 << 63, math.MaxUint64 - 6, math.MaxUint64}
	floats = []float32{0, float32(math.Copysign(0, -1)), 1, -1, 0.5, -0.5, 1.5, 2.5, 3.5, -2.5, 3, 0.1,
		-0.7, 1e-3, 123456.7, -8388609, 16777217, 2147483648, -2147483649, 4294967296, 1e20, -1e20,
		math.MaxFloat32, -math.MaxFloat32, 0x1p-126, 0x1p-127, -0x1.8p-127, 0x1p-149, -0x1p-149,
		0x1.fffffep-127, 0x1.000002p0, 0x1.fffffep-1, 448, 449, 464, 465, 6, 5, 57344, 61440, 0x1p-9,
		0x1p-10, 0x1.8p-10, 65504, 65520, 0x1p-24, 0x1p-25, 3.3895314e38, 0.25, 0.75, 1.25, 1.75,
		float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
)

func pairs(values []uint64) func() [][3]uint64 {
	return func() [][3]uint64 {
		var out [][3]uint64
		for i, a := range values {
			for j, b := range values {
				out = append(out, [3]uint64{a, b, values[(i*7+j*3+1)%len(values)]})
			}
		}
		return out
	}
}

func f32bits(values []float32) []uint64 {
	var out []uint64
	for _, f := range values {
		out = append(out, uint64(math.Float32bits(f)))
	}
	return out
}

func f64bits() []uint64 {
	var out []uint64
	for _, f := range floats {
		out = append(out, math.Float64bits(float64(f)))
	}
	for _, f := range []float64{math.MaxFloat64, 0x1p-1074, 0x1p-1022, 1 + 0x1p-52, 0x1p63, -0x1p63,
		1 + 0x1p-24, 1 + 0x1p-24 + 0x1p-50, 0x1p64, 9.3e18} {
		out = append(out, math.Float64bits(f))
	}
	return out
}

func halves(encode func(float32) uint16) []uint64 {
	var out []uint64
	for _, f := range floats {
		out = append(out, uint64(encode(f)))
	}
	return append(out, 0x0001, 0x8001, 0x007f, 0x03ff)
}

var (
	manyInts   = pairs(ints)
	manyFloats = pairs(f32bits(floats))
	manyF64    = pairs(f64bits())
	manyBF16   = pairs(halves(dtype.BF16FromF32))
	manyF16    = pairs(halves(dtype.F16FromF32))
)

func f(bits uint64) float32  { return math.Float32frombits(uint32(bits)) }
func fd(bits uint64) float64 { return math.Float64frombits(bits) }

// u gives a float's bits, with the GPU's canonical NaN.
func u(x float32) uint64 {
	if x != x {
		return 0x7fffffff
	}
	return uint64(math.Float32bits(x))
}

func flush(x float32) float32 {
	if math.Abs(float64(x)) < 0x1p-126 {
		return float32(math.Copysign(0, float64(x)))
	}
	return x
}

func truth(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// fma32 gives a*b + c rounded once, with exact arithmetic.
func fma32(a, b, c float32, mode big.RoundingMode) uint64 {
	plain := float64(a)*float64(b) + float64(c)
	if math.IsInf(plain, 0) || math.IsNaN(plain) {
		return u(float32(plain))
	}
	x := new(big.Float).SetPrec(2000).SetFloat64(float64(a))
	x.Mul(x, new(big.Float).SetPrec(2000).SetFloat64(float64(b)))
	sum := new(big.Float).SetPrec(2000).Add(x, new(big.Float).SetPrec(2000).SetFloat64(float64(c)))
	if sum.Sign() == 0 {
		zero := float64(a) * float64(b)
		if x.Sign() == 0 && c == 0 && math.Signbit(zero) == math.Signbit(float64(c)) {
			return u(float32(math.Copysign(0, zero)))
		}
		if mode == big.ToNegativeInf {
			return 0x80000000
		}
		return 0
	}
	return uint64(round32(sum, mode))
}

// round32 rounds a nonzero number to a float of 24 bits, subnormals included.
func round32(x *big.Float, mode big.RoundingMode) uint32 {
	exponent := max(x.MantExp(nil)-24, -149)
	scaled := new(big.Float).SetPrec(3000).SetMantExp(x, -exponent)
	whole, _ := scaled.Int(nil)
	below := new(big.Float).SetPrec(3000).SetInt(whole)
	rest := new(big.Float).SetPrec(3000).Sub(scaled, below)
	rest.Abs(rest)
	half := big.NewFloat(0.5).Cmp(rest)
	var up bool
	switch mode {
	case big.ToNegativeInf:
		up = x.Sign() < 0 && rest.Sign() > 0
	case big.ToPositiveInf:
		up = x.Sign() > 0 && rest.Sign() > 0
	case big.AwayFromZero:
		up = rest.Sign() > 0
	case big.ToZero:
	default:
		up = half < 0 || half == 0 && whole.Bit(0) == 1
	}
	whole.Abs(whole)
	if up {
		whole.Add(whole, big.NewInt(1))
	}
	f := math.Ldexp(float64(whole.Int64()), exponent)
	sign := uint32(0)
	if x.Sign() < 0 {
		sign = 1 << 31
	}
	if f > math.MaxFloat32 {
		away := mode == big.ToNearestEven || mode == big.AwayFromZero || mode == big.ToNegativeInf && x.Sign() < 0 ||
			mode == big.ToPositiveInf && x.Sign() > 0
		if !away {
			return sign | 0x7f7fffff
		}
		return sign | 0x7f800000
	}
	return sign | math.Float32bits(float32(f))
}

func lesser(a, b float32) float32 {
	switch {
	case a != a:
		return b
	case b != b:
		return a
	}
	return float32(math.Min(float64(a), float64(b)))
}

func greater(a, b float32) float32 {
	switch {
	case a != a:
		return b
	case b != b:
		return a
	}
	return float32(math.Max(float64(a), float64(b)))
}

func sat(x float32) float32 {
	if !(x > 0) {
		return 0
	}
	return min(x, 1)
}

var integerOps = []ptxOp{
	{"add.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(a + b)) }},
	{"add.u64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return a + b }},
	{"add.s16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a + b)) }},
	{"sub.s64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return a - b }},
	{"sub.s16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a - b)) }},
	{"add.sat.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		s := int64(int32(a)) + int64(int32(b))
		return uint64(uint32(max(math.MinInt32, min(math.MaxInt32, s))))
	}},
	{"mul.lo.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(a * b)) }},
	{"mul.lo.s16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a * b)) }},
	{"mul.lo.u64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return a * b }},
	{"mul.hi.u32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint32(a)) * uint64(uint32(b)) >> 32
	}},
	{"mul.hi.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint32(int64(int32(a)) * int64(int32(b)) >> 32))
	}},
	{"mul.hi.u16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint16(uint32(uint16(a)) * uint32(uint16(b)) >> 16))
	}},
	{"mul.hi.u64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { hi, _ := bits.Mul64(a, b); return hi }},
	{"mul.hi.s64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 {
		p := new(big.Int).Mul(big.NewInt(int64(a)), big.NewInt(int64(b)))
		return uint64(p.Rsh(p, 64).Int64())
	}},
	{"mul.wide.u32 %q0, %r1, %r2;", 'q', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint32(a)) * uint64(uint32(b))
	}},
	{"mul.wide.s32 %q0, %r1, %r2;", 'q', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(int64(int32(a)) * int64(int32(b)))
	}},
	{"mul.wide.u16 %r0, %h1, %h2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint32(uint16(a)) * uint32(uint16(b)))
	}},
	{"mad.lo.s32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 { return uint64(uint32(a*b + c)) }},
	{"mad.wide.s32 %q0, %r1, %r2, %q3;", 'q', manyInts, func(a, b, c uint64) uint64 {
		return uint64(int64(int32(a))*int64(int32(b))) + c
	}},
	{"mad.hi.u32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		return uint64(uint32(uint64(uint32(a))*uint64(uint32(b))>>32 + c))
	}},
	{"mad.lo.cc.u32 %r4, %r1, %r2, %r3; madc.hi.u32 %r5, %r1, %r2, 0; mov.b64 %q0, {%r4, %r5};", 'q',
		manyInts, func(a, b, c uint64) uint64 {
			return uint64(uint32(a))*uint64(uint32(b)) + uint64(uint32(c))
		}},
	{"mov.b64 {%r4, %r5}, %q1; mov.b64 {%r6, %r7}, %q2; add.cc.u32 %r4, %r4, %r6; addc.u32 %r5, %r5, %r7; mov.b64 %q0, {%r4, %r5};",
		'q', manyInts, func(a, b, _ uint64) uint64 { return a + b }},
	{"mov.b64 {%r4, %r5}, %q1; mov.b64 {%r6, %r7}, %q2; sub.cc.u32 %r4, %r4, %r6; subc.u32 %r5, %r5, %r7; mov.b64 %q0, {%r4, %r5};",
		'q', manyInts, func(a, b, _ uint64) uint64 { return a - b }},
	{"div.u32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		if uint32(b) == 0 {
			return 0xffffffff
		}
		return uint64(uint32(a) / uint32(b))
	}},
	{"rem.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		if uint32(b) == 0 {
			return uint64(uint32(a))
		}
		return uint64(uint32(int32(a) % int32(b)))
	}},
	{"div.s64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 {
		if b == 0 {
			return math.MaxUint64
		}
		return uint64(int64(a) / int64(b))
	}},
	{"neg.s32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint32(-a)) }},
	{"abs.s32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(uint32(max(int32(a), -int32(a)))) | uint64(uint32(a)&(1<<31)&uint32(-a))
	}},
	{"min.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(min(int32(a), int32(b)))) }},
	{"max.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(max(int32(a), int32(b)))) }},
	{"max.u32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(max(uint32(a), uint32(b))) }},
	{"max.u16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(max(uint16(a), uint16(b))) }},
	{"min.s64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return uint64(min(int64(a), int64(b))) }},
	{"and.b32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(a & b)) }},
	{"or.b64 %q0, %q1, %q2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return a | b }},
	{"xor.b16 %h0, %h1, %h2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a ^ b)) }},
	{"not.b32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(^uint32(a)) }},
	{"cnot.b32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return truth(uint32(a) == 0) }},
	{"shl.b32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(a) << uint32(b)) }},
	{"shl.b16 %h0, %h1, %r2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a) << uint32(b)) }},
	{"shr.u64 %q0, %q1, %r2;", 'q', manyInts, func(a, b, _ uint64) uint64 { return a >> uint32(b) }},
	{"shr.s32 %r0, %r1, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint32(int32(a) >> uint32(b))) }},
	{"shr.u16 %h0, %h1, %r2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(a) >> uint32(b)) }},
	{"shr.s16 %h0, %h1, %r2;", 'h', manyInts, func(a, b, _ uint64) uint64 { return uint64(uint16(int16(a) >> uint32(b))) }},
	{"shf.l.wrap.b32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		return (b<<32 | uint64(uint32(a))) << (c & 31) >> 32
	}},
	{"shf.r.clamp.b32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		return uint64(uint32((b<<32 | uint64(uint32(a))) >> min(uint32(c), 32)))
	}},
	{"brev.b32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(bits.Reverse32(uint32(a))) }},
	{"brev.b64 %q0, %q1;", 'q', manyInts, func(a, _, _ uint64) uint64 { return bits.Reverse64(a) }},
	{"popc.b64 %r0, %q1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(bits.OnesCount64(a)) }},
	{"clz.b32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(bits.LeadingZeros32(uint32(a))) }},
	{"bfind.u32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint32(bits.Len32(uint32(a)) - 1)) }},
	{"bfe.u32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		return uint64(uint32(a)) >> min(b&255, 63) & (1<<min(c&255, 63) - 1)
	}},
	{"bfi.b32 %r0, %r1, %r2, 8, 8;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return b&0xffff00ff | a&255<<8
	}},
	{"prmt.b32 %r0, %r1, %r2, 0x7632U;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return a>>16&0xffff | b>>16&0xffff<<16
	}},
	{"prmt.b32 %r0, %r1, %r2, 0xB800;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		sign := func(x uint64) uint64 { return truth(x&128 != 0) * 255 }
		return a&255 | a&255<<8 | sign(a)<<16 | sign(a>>24)<<24
	}},
	{"lop3.b32 %r0, %r1, %r2, %r3, 0x96;", 'r', manyInts, func(a, b, c uint64) uint64 { return uint64(uint32(a ^ b ^ c)) }},
	{"dp4a.s32.u32 %r0, %r1, %r2, %r3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		sum := int32(c)
		for n := 0; n < 32; n += 8 {
			sum += int32(int8(a>>n)) * int32(uint8(b>>n))
		}
		return uint64(uint32(sum))
	}},
	{"setp.gt.s32 %p0, %r1, %r2;", 'p', manyInts, func(a, b, _ uint64) uint64 { return truth(int32(a) > int32(b)) }},
	{"setp.gt.u16 %p0, %h1, %h2;", 'p', manyInts, func(a, b, _ uint64) uint64 { return truth(uint16(a) > uint16(b)) }},
	{"setp.gt.or.u32 %p0, %r1, %r2, %p3;", 'p', manyInts, func(a, b, c uint64) uint64 {
		return truth(uint32(a) > uint32(b) || c&1 == 1)
	}},
	{"setp.lt.and.u32 %p0, %r1, %r2, !%p3;", 'p', manyInts, func(a, b, c uint64) uint64 {
		return truth(uint32(a) < uint32(b) && c&1 == 0)
	}},
	{"setp.ls.u64 %p0, %q1, %q2;", 'p', manyInts, func(a, b, _ uint64) uint64 { return truth(a <= b) }},
	{"setp.eq.s64 %p4|%p0, %q1, %q2;", 'p', manyInts, func(a, b, _ uint64) uint64 { return truth(a != b) }},
	{"xor.pred %p0, %p1, %p2;", 'p', manyInts, func(a, b, _ uint64) uint64 { return (a ^ b) & 1 }},
	{"not.pred %p0, %p1;", 'p', manyInts, func(a, _, _ uint64) uint64 { return ^a & 1 }},
	{"selp.b32 %r0, %r1, %r2, %p3;", 'r', manyInts, func(a, b, c uint64) uint64 {
		return uint64(uint32(map[bool]uint64{true: a, false: b}[c&1 == 1]))
	}},
	{"mov.b32 %r0, 7; @%p1 mov.b32 %r0, %r2;", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return uint64(uint32(map[bool]uint64{true: b, false: 7}[a&1 == 1]))
	}},
	{"mov.b64 {%h4, %h5, %h6, %h7}, %q1; mov.b64 %q0, {%h7, %h6, %h5, %h4};", 'q', manyInts,
		func(a, _, _ uint64) uint64 { return a>>48 | a>>32&0xffff<<16 | a>>16&0xffff<<32 | a<<48 }},
	{"mov.b32 {%h4, _}, %r1; mov.b32 %r0, {%h4, %h2};", 'r', manyInts, func(a, b, _ uint64) uint64 {
		return a&0xffff | b&0xffff<<16
	}},
	{"mov.u64 %q0, 5; @%p1 bra $a; mov.u64 %q0, 9; bra.uni $b; $a: add.s64 %q0, %q0, %q2; $b:", 'q',
		manyInts, func(a, b, _ uint64) uint64 { return map[bool]uint64{true: 5 + b, false: 9}[a&1 == 1] }},
}

func testOps(t *testing.T, ops []ptxOp) {
	p := startPTX(t)
	for _, op := range ops {
		inputs := op.inputs()
		wrong := 0
		for n, got := range p.lanes(t, op.body, op.result, inputs) {
			in := inputs[n]
			if want := op.want(in[0], in[1], in[2]); got != want && wrong < 5 {
				t.Errorf("%s of %#x, %#x, %#x is %#x, want %#x", op.body, in[0], in[1], in[2], got, want)
				wrong++
			}
		}
	}
}

func TestIntegerInstructions(t *testing.T) { testOps(t, integerOps) }
