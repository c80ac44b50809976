package softgpu

import (
	"math"
	"math/big"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
)

// binary32 wraps a function of floats of 32 bits.
func binary32(op func(a, b float32) float32) func(a, b, c uint64) uint64 {
	return func(a, b, _ uint64) uint64 { return u(op(f(a), f(b))) }
}

// approximate wraps what a GPU approximates: the interpreter rounds the double result.
func approximate(op func(a float64) float64) func(a, b, c uint64) uint64 {
	return func(a, _, _ uint64) uint64 { return u(float32(op(float64(f(a))))) }
}

func binaryBF16(op func(a, b float32) float32) func(a, b, c uint64) uint64 {
	return func(a, b, _ uint64) uint64 {
		return uint64(bf16(op(dtype.F32FromBF16(uint16(a)), dtype.F32FromBF16(uint16(b)))))
	}
}

// bf16 and f16 round, with the GPU's canonical NaN.
func bf16(x float32) uint16 {
	if x != x {
		return 0x7fff
	}
	return dtype.BF16FromF32(x)
}

func f16(x float32) uint16 {
	if x != x {
		return 0x7fff
	}
	return dtype.F16FromF32(x)
}

func add(a, b float32) float32 { return a + b }
func sub(a, b float32) float32 { return a - b }
func mul(a, b float32) float32 { return a * b }

// each applies a function of 16-bit elements to both halves of 32 bits.
func each(op func(a, b, c uint64) uint64) func(a, b, c uint64) uint64 {
	return func(a, b, c uint64) uint64 {
		high := op(a>>16&0xffff, b>>16&0xffff, c>>16&0xffff)
		return high<<16 | op(a&0xffff, b&0xffff, c&0xffff)
	}
}

// doubled makes inputs of pairs from inputs of elements.
func doubled(inputs func() [][3]uint64, bits int) func() [][3]uint64 {
	return func() [][3]uint64 {
		all := inputs()
		var out [][3]uint64
		for n, low := range all {
			high := all[(n*5+3)%len(all)]
			out = append(out, [3]uint64{high[0]<<bits | low[0], high[1]<<bits | low[1], high[2]<<bits | low[2]})
		}
		return out
	}
}

// fmaBF16 rounds a*b + c once: to odd with more bits than two roundings could confuse, then to bf16.
func fmaBF16(a, b, c uint64) uint64 {
	x, y, z := dtype.F32FromBF16(uint16(a)), dtype.F32FromBF16(uint16(b)), dtype.F32FromBF16(uint16(c))
	down := math.Float32frombits(uint32(fma32(x, y, z, big.ToZero)))
	if nearest := math.Float32frombits(uint32(fma32(x, y, z, big.ToNearestEven))); nearest != nearest ||
		math.IsInf(float64(nearest), 0) && (math.IsInf(float64(x), 0) || math.IsInf(float64(y), 0) || math.IsInf(float64(z), 0)) {
		return uint64(bf16(nearest))
	}
	up := math.Float32frombits(uint32(fma32(x, y, z, big.AwayFromZero)))
	if down != up {
		down = math.Float32frombits(math.Float32bits(down) | 1)
	}
	return uint64(bf16(down))
}

var floatOps = []ptxOp{
	{"add.rn.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(add)},
	{"sub.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(sub)},
	{"mul.rn.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(mul)},
	{"add.sat.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(func(a, b float32) float32 { return sat(a + b) })},
	{"mul.ftz.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(func(a, b float32) float32 {
		return flush(flush(a) * flush(b))
	})},
	{"add.rz.f32 %r0, %r1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		return fma32(f(a), 1, f(b), big.ToZero)
	}},
	{"add.rp.f32 %r0, %r1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		return fma32(f(a), 1, f(b), big.ToPositiveInf)
	}},
	{"fma.rn.f32 %r0, %r1, %r2, %r3;", 'r', manyFloats, func(a, b, c uint64) uint64 {
		return fma32(f(a), f(b), f(c), big.ToNearestEven)
	}},
	{"fma.rm.f32 %r0, %r1, %r2, %r3;", 'r', manyFloats, func(a, b, c uint64) uint64 {
		return fma32(f(a), f(b), f(c), big.ToNegativeInf)
	}},
	{"fma.rz.f32 %r0, %r1, %r2, %r3;", 'r', manyFloats, func(a, b, c uint64) uint64 {
		return fma32(f(a), f(b), f(c), big.ToZero)
	}},
	{"add.rn.f32x2 %q0, %q1, %q2;", 'q', doubled(manyFloats, 32), func(a, b, _ uint64) uint64 {
		return u(f(a>>32)+f(b>>32))<<32 | u(f(a)+f(b))
	}},
	{"fma.rn.f32x2 %q0, %q1, %q2, %q3;", 'q', doubled(manyFloats, 32), func(a, b, c uint64) uint64 {
		return fma32(f(a>>32), f(b>>32), f(c>>32), big.ToNearestEven)<<32 |
			fma32(f(a), f(b), f(c), big.ToNearestEven)
	}},
	{"div.rn.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(func(a, b float32) float32 { return a / b })},
	{"div.full.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(func(a, b float32) float32 { return a / b })},
	{"sqrt.approx.f32 %r0, %r1;", 'r', manyFloats, approximate(math.Sqrt)},
	{"rcp.approx.f32 %r0, %r1;", 'r', manyFloats, approximate(func(a float64) float64 { return 1 / a })},
	{"rcp.approx.ftz.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 { return u(flush(1 / flush(f(a)))) }},
	{"rsqrt.approx.f32 %r0, %r1;", 'r', manyFloats, approximate(func(a float64) float64 { return 1 / math.Sqrt(a) })},
	{"neg.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 { return a ^ 0x80000000 }},
	{"abs.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 { return a & 0x7fffffff }},
	{"abs.ftz.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		if f(a) != f(a) {
			return a & 0x7fffffff
		}
		return u(flush(f(a))) & 0x7fffffff
	}},
	{"min.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(lesser)},
	{"max.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(greater)},
	{"max.NaN.f32 %r0, %r1, %r2;", 'r', manyFloats, binary32(greaterNaN)},
	{"min.f32 %r0, %r1, %r2, %r3;", 'r', manyFloats, func(a, b, c uint64) uint64 {
		return u(lesser(lesser(f(a), f(b)), f(c)))
	}},
	{"copysign.f32 %r0, %r1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		return a&0x80000000 | b&0x7fffffff
	}},
	{"sub.rn.f32.bf16 %r0, %h1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		return u(dtype.F32FromBF16(uint16(a)) - f(b))
	}},
	{"add.rn.f64 %q0, %q1, %q2;", 'q', manyF64, func(a, b, _ uint64) uint64 { return d(fd(a) + fd(b)) }},
	{"mul.rn.f64 %q0, %q1, %q2;", 'q', manyF64, func(a, b, _ uint64) uint64 { return d(fd(a) * fd(b)) }},
	{"fma.rn.f64 %q0, %q1, %q2, %q3;", 'q', manyF64, func(a, b, c uint64) uint64 {
		return d(math.FMA(fd(a), fd(b), fd(c)))
	}},
	{"div.rn.f64 %q0, %q1, %q2;", 'q', manyF64, func(a, b, _ uint64) uint64 { return d(fd(a) / fd(b)) }},
	{"setp.lt.f32 %p0, %r1, %r2;", 'p', manyFloats, func(a, b, _ uint64) uint64 { return truth(f(a) < f(b)) }},
	{"setp.ltu.f32 %p0, %r1, %r2;", 'p', manyFloats, func(a, b, _ uint64) uint64 { return truth(!(f(a) >= f(b))) }},
	{"setp.ne.f32 %p0, %r1, %r2;", 'p', manyFloats, func(a, b, _ uint64) uint64 {
		return truth(f(a) < f(b) || f(a) > f(b))
	}},
	{"setp.neu.f32 %p0, %r1, %r2;", 'p', manyFloats, func(a, b, _ uint64) uint64 { return truth(f(a) != f(b)) }},
	{"setp.le.and.f32 %p0, %r1, %r2, %p3;", 'p', manyFloats, func(a, b, c uint64) uint64 {
		return truth(f(a) <= f(b) && c&1 == 1)
	}},
	{"setp.nan.f32 %p0, %r1, %r2;", 'p', manyFloats, func(a, b, _ uint64) uint64 {
		return truth(f(a) != f(a) || f(b) != f(b))
	}},
	{"setp.gt.bf16 %p0, %h1, %h2;", 'p', manyBF16, func(a, b, _ uint64) uint64 {
		return truth(dtype.F32FromBF16(uint16(a)) > dtype.F32FromBF16(uint16(b)))
	}},
	{"testp.subnormal.f32 %p0, %r1;", 'p', manyFloats, func(a, _, _ uint64) uint64 {
		return truth(f(a) != 0 && flush(f(a)) == 0)
	}},
	{"add.rn.bf16 %h0, %h1, %h2;", 'h', manyBF16, binaryBF16(add)},
	{"sub.rn.bf16 %h0, %h1, %h2;", 'h', manyBF16, binaryBF16(sub)},
	{"mul.rn.bf16 %h0, %h1, %h2;", 'h', manyBF16, func(a, b, _ uint64) uint64 { return fmaBF16(a, b, mulZero(a, b)) }},
	{"fma.rn.bf16 %h0, %h1, %h2, %h3;", 'h', manyBF16, fmaBF16},
	{"add.rn.bf16x2 %r0, %r1, %r2;", 'r', doubled(manyBF16, 16), each(binaryBF16(add))},
	{"fma.rn.bf16x2 %r0, %r1, %r2, %r3;", 'r', doubled(manyBF16, 16), each(fmaBF16)},
	{"max.NaN.bf16 %h0, %h1, %h2;", 'h', manyBF16, func(a, b, _ uint64) uint64 {
		x, y := dtype.F32FromBF16(uint16(a)), dtype.F32FromBF16(uint16(b))
		return uint64(bf16(greaterNaN(x, y)))
	}},
	{"neg.bf16 %h0, %h1;", 'h', manyBF16, func(a, _, _ uint64) uint64 { return a ^ 0x8000 }},
	{"abs.bf16x2 %r0, %r1;", 'r', doubled(manyBF16, 16), func(a, _, _ uint64) uint64 { return a & 0x7fff7fff }},
	{"add.f16 %h0, %h1, %h2;", 'h', manyF16, func(a, b, _ uint64) uint64 {
		return uint64(f16(dtype.F32FromF16(uint16(a)) + dtype.F32FromF16(uint16(b))))
	}},
	{"mul.f16x2 %r0, %r1, %r2;", 'r', doubled(manyF16, 16), each(func(a, b, _ uint64) uint64 {
		return uint64(f16(dtype.F32FromF16(uint16(a)) * dtype.F32FromF16(uint16(b))))
	})},
}

// greaterNaN is NaN when one of two numbers is; math.Max prefers an infinity.
func greaterNaN(a, b float32) float32 {
	if a != a || b != b {
		return float32(math.NaN())
	}
	return float32(math.Max(float64(a), float64(b)))
}

// mulZero is the zero that keeps a product's sign when it is added.
func mulZero(a, b uint64) uint64 { return (a ^ b) & 0x8000 }

// d gives a double's bits with the NaN of x86, which the interpreter leaves as it is.
func d(x float64) uint64 {
	if x != x {
		return 0x7ff8000000000001
	}
	return math.Float64bits(x)
}

func TestFloatInstructions(t *testing.T) {
	p := startPTX(t)
	for _, op := range floatOps {
		inputs := op.inputs()
		wrong := 0
		for n, got := range p.lanes(t, op.body, op.result, inputs) {
			in := inputs[n]
			want := op.want(in[0], in[1], in[2])
			if want == d(math.NaN()) && op.result == 'q' && fd(got) != fd(got) {
				continue
			}
			if got != want && wrong < 5 {
				t.Errorf("%s of %#x, %#x, %#x is %#x, want %#x", op.body, in[0], in[1], in[2], got, want)
				wrong++
			}
		}
	}
}

// Approximate instructions are within one unit in the last place of Go's functions.
func TestApproximateInstructions(t *testing.T) {
	p := startPTX(t)
	for body, op := range map[string]func(float64) float64{
		"ex2.approx.f32 %r0, %r1;":     math.Exp2,
		"lg2.approx.f32 %r0, %r1;":     math.Log2,
		"sin.approx.f32 %r0, %r1;":     math.Sin,
		"cos.approx.f32 %r0, %r1;":     math.Cos,
		"tanh.approx.f32 %r0, %r1;":    math.Tanh,
		"ex2.approx.ftz.f32 %r0, %r1;": func(a float64) float64 { return float64(flush(float32(math.Exp2(a)))) },
	} {
		inputs := manyFloats()
		for n, got := range p.lanes(t, body, 'r', inputs) {
			want := float32(op(float64(f(inputs[n][0]))))
			if math.Abs(float64(f(inputs[n][0]))) > 1e15 { // arguments that Go reduces differently
				continue
			}
			gap := int64(int32(got)) - int64(int32(math.Float32bits(want)))
			if want != want && got != 0x7fffffff || want == want && (gap > 1 || gap < -1) {
				t.Errorf("%s of %v is %v, want %v", body, f(inputs[n][0]), f(got), want)
			}
		}
	}
}

func clampInt(x float64, least, most float64) float64 { return math.Max(least, math.Min(most, x)) }

func pairFrom(code func(float32) byte, shift int) func(a, b, c uint64) uint64 {
	return func(a, b, _ uint64) uint64 { return uint64(code(f(a)))<<shift | uint64(code(f(b))) }
}

// finite saturates at the largest number of a format; NaN is what the format has for it.
func finite(most float32, nan byte, code func(float32) byte) func(float32) byte {
	return func(x float32) byte {
		if x != x {
			return nan
		}
		return code(max(-most, min(most, x)))
	}
}

var convertOps = []ptxOp{
	{"cvt.f32.bf16 %r0, %h1;", 'r', manyBF16, func(a, _, _ uint64) uint64 { return a & 0xffff << 16 }},
	{"cvt.rn.bf16.f32 %h0, %r1;", 'h', manyFloats, func(a, _, _ uint64) uint64 { return uint64(bf16(f(a))) }},
	{"cvt.rz.bf16.f32 %h0, %r1;", 'h', manyFloats, func(a, _, _ uint64) uint64 {
		if f(a) != f(a) {
			return 0x7fff
		}
		return a >> 16
	}},
	{"cvt.rn.bf16x2.f32 %r0, %r1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		return uint64(bf16(f(a)))<<16 | uint64(bf16(f(b)))
	}},
	{"cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2;", 'r', manyFloats, func(a, b, _ uint64) uint64 {
		relu := func(x float32) uint64 {
			if math.Signbit(float64(x)) && x == x {
				return 0
			}
			return uint64(bf16(x))
		}
		return relu(f(a))<<16 | relu(f(b))
	}},
	{"cvt.rn.f16.f32 %h0, %r1;", 'h', manyFloats, func(a, _, _ uint64) uint64 { return uint64(f16(f(a))) }},
	{"cvt.f32.f16 %r0, %h1;", 'r', manyF16, func(a, _, _ uint64) uint64 { return u(dtype.F32FromF16(uint16(a))) }},
	{"cvt.rn.f32.f64 %r0, %q1;", 'r', manyF64, func(a, _, _ uint64) uint64 { return u(float32(fd(a))) }},
	{"cvt.f64.f32 %q0, %r1;", 'q', manyFloats, func(a, _, _ uint64) uint64 {
		if f(a) != f(a) {
			return math.Float64bits(float64(f(a)))
		}
		return math.Float64bits(float64(f(a)))
	}},
	{"cvt.sat.f32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 { return u(sat(f(a))) }},
	{"cvt.rni.f32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		return u(float32(math.RoundToEven(float64(f(a)))))
	}},
	{"cvt.rmi.ftz.f32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		return u(float32(math.Floor(float64(flush(f(a))))))
	}},
	{"cvt.rni.s32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		x := clampInt(math.RoundToEven(float64(f(a))), math.MinInt32, math.MaxInt32)
		if x != x {
			return 0
		}
		return uint64(uint32(int32(x)))
	}},
	{"cvt.rzi.u32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		x := clampInt(math.Trunc(float64(f(a))), 0, math.MaxUint32)
		if x != x {
			return 0
		}
		return uint64(uint32(x))
	}},
	{"cvt.rzi.s64.f64 %q0, %q1;", 'q', manyF64, func(a, _, _ uint64) uint64 {
		x := math.Trunc(fd(a))
		switch {
		case x != x || x < -0x1p63:
			return 1 << 63
		case x >= 0x1p63:
			return math.MaxInt64
		}
		return uint64(int64(x))
	}},
	{"cvt.rpi.s8.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		x := clampInt(math.Ceil(float64(f(a))), -128, 127)
		if x != x {
			return 0
		}
		return uint64(uint32(int32(x)))
	}},
	{"cvt.rn.f32.s32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return u(float32(int32(a))) }},
	{"cvt.rn.f32.u64 %r0, %q1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return u(float32(a)) }},
	{"cvt.rz.f32.u32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return fma32(float32(uint32(a)&0xffff0000), 1, float32(uint32(a)&0xffff), big.ToZero)
	}},
	{"cvt.rn.f64.s64 %q0, %q1;", 'q', manyInts, func(a, _, _ uint64) uint64 { return math.Float64bits(float64(int64(a))) }},
	{"cvt.rn.bf16.s32 %h0, %r1;", 'h', manyInts, func(a, _, _ uint64) uint64 {
		x := float32(math.Abs(float64(int32(a))))
		if float64(x) > math.Abs(float64(int32(a))) { // to odd, towards zero first
			x = math.Nextafter32(x, 0)
		}
		if float64(x) != math.Abs(float64(int32(a))) {
			x = math.Float32frombits(math.Float32bits(x) | 1)
		}
		return uint64(bf16(x)) | a>>16&0x8000
	}},
	{"cvt.u64.u32 %q0, %r1;", 'q', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint32(a)) }},
	{"cvt.s64.s32 %q0, %r1;", 'q', manyInts, func(a, _, _ uint64) uint64 { return uint64(int64(int32(a))) }},
	{"cvt.u16.u32 %h0, %r1;", 'h', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint16(a)) }},
	{"cvt.u32.u16 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint16(a)) }},
	{"cvt.s32.s8 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 { return uint64(uint32(int8(a))) }},
	{"cvt.u8.u32 %h0, %r1;", 'h', manyInts, func(a, _, _ uint64) uint64 { return a & 255 }},
	{"cvt.sat.s8.s32 %r0, %r1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(uint32(max(-128, min(127, int32(a)))))
	}},
	{"cvt.sat.u16.s64 %h0, %q1;", 'h', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(max(0, min(65535, int64(a))))
	}},
	{"cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", 'h', manyFloats,
		pairFrom(finite(448, 0x7f, dtype.E4M3FromF32), 8)},
	{"cvt.rn.satfinite.e5m2x2.f32 %h0, %r1, %r2;", 'h', manyFloats,
		pairFrom(finite(57344, 0x7f, dtype.E5M2FromF32), 8)},
	{"cvt.rn.satfinite.e2m1x2.f32 %h0, %r1, %r2;", 'h', manyFloats,
		pairFrom(finite(6, 7, dtype.E2M1FromF32), 4)},
	{"{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %r1, %r2; cvt.u16.u8 %h0, t; }", 'h', manyFloats,
		pairFrom(finite(6, 7, dtype.E2M1FromF32), 4)},
	{"cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, %r2, %r3, %r1}, %r3;", 'h', manyFloats, fourRandomly},
	{"{ .reg .f32 t; cvt.rn.f32.s16 t, %r1; mul.f32 t, t, 0f3A000000; " +
		"cvt.rs.satfinite.e2m1x4.f32 %h0, {t, t, t, t}, %r2; }", 'h', manyInts,
		func(a, b, _ uint64) (word uint64) {
			for i := range 4 {
				word |= uint64(block.Round(float32(int16(a))*0x1p-11, i, uint32(b))) << (4 * i)
			}
			return word
		}},
	{"cvt.rn.f16x2.e4m3x2 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(f16(dtype.F32FromE4M3(byte(a>>8))))<<16 | uint64(f16(dtype.F32FromE4M3(byte(a))))
	}},
	{"cvt.rn.f16x2.e5m2x2 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(f16(dtype.F32FromE5M2(byte(a>>8))))<<16 | uint64(f16(dtype.F32FromE5M2(byte(a))))
	}},
	{"cvt.rn.f16x2.e2m1x2 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(f16(dtype.F32FromE2M1(byte(a>>4&15))))<<16 | uint64(f16(dtype.F32FromE2M1(byte(a&15))))
	}},
	{"cvt.rn.bf16x2.ue8m0x2 %r0, %h1;", 'r', manyInts, func(a, _, _ uint64) uint64 {
		return uint64(bf16(dtype.F32FromE8M0(byte(a>>8))))<<16 | uint64(bf16(dtype.F32FromE8M0(byte(a))))
	}},
	{"cvt.rp.satfinite.ue8m0x2.f32 %h0, %r1, %r2;", 'h', manyFloats, pairFrom(exponentUp, 8)},
	{"cvt.rna.tf32.f32 %r0, %r1;", 'r', manyFloats, func(a, _, _ uint64) uint64 {
		if f(a) != f(a) {
			return 0x7fffffff
		}
		return (a + 0x1000) &^ 0x1fff
	}},
}

// fourRandomly rounds a, b, c and a by the random bits c.
func fourRandomly(a, b, c uint64) (word uint64) {
	for i, x := range []uint64{a, c, b, a} {
		word |= uint64(block.Round(f(x), i, uint32(c))) << (4 * i)
	}
	return word
}

// exponentUp is the smallest power of two that is not below |x|, as ue8m0.
func exponentUp(x float32) byte {
	x = float32(math.Abs(float64(x)))
	if x != x {
		return 255
	}
	for e := range 254 {
		if math.Ldexp(1, e-127) >= float64(x) {
			return byte(e)
		}
	}
	return 254
}

func TestConversions(t *testing.T) { testOps(t, convertOps) }
