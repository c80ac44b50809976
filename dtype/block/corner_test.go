package block

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

var (
	inf = float32(math.Inf(1))
	nan = float32(math.NaN())
)

// The cases in which implementations of these formats are known to differ, and what holds here.
func TestCorners(t *testing.T) {
	for _, c := range []struct {
		name string
		test func(*testing.T)
	}{
		{"01 E4M3 saturates", cornerSaturation},
		{"02 E4M3 subnormals and signed zero", cornerSubnormals},
		{"03 E8M0 ends", cornerScaleEnds},
		{"04 E8M0 of what is not finite, and of next to nothing", cornerScaleEncode},
		{"05 E8M0 decodes exactly", cornerScaleDecode},
		{"06 amax at 1.75", cornerRoundUp},
		{"07 E2M1 ties", cornerTies},
		{"08 signed zero in FP4", cornerFourBitZero},
		{"09 FP4 rounds from float32", cornerOneRounding},
		{"10 NVFP4 scales at the ends", cornerGlobal},
		{"11 NaN inside a block", cornerNaN},
		{"12 chance and signs are fixed", cornerChance},
		{"13 padding of scales is zero", cornerPadding},
		{"14 what is no whole block is refused", cornerRefusal},
	} {
		t.Run(c.name, c.test)
	}
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, not %v", what, got, want)
	}
}

// filled gives a block whose first numbers are these.
func filled(size int, list ...float32) []float32 {
	return append(slices.Clone(list), make([]float32, size-len(list))...)
}

// eight quantizes a block at every level, which must agree, and gives the bytes.
func eight(t *testing.T, list ...float32) (q []byte, scale byte) {
	t.Helper()
	src := filled(MXFP8Size, list...)
	compare(t, src)
	q, s := make([]byte, MXFP8Size), make([]byte, 1)
	must(t, MXFP8(q, s, src))
	return q, s[0]
}

// four gives the codes of a block, one to a byte.
func four(t *testing.T, amax float32, list ...float32) (codes []byte, scale byte) {
	t.Helper()
	src := filled(NVFP4Size, list...)
	q, s := make([]byte, NVFP4Size/2), make([]byte, 1)
	for on := best; on >= plain; on-- {
		nvfp4(on, q, s, src, newGrid(amax))
		now := make([]byte, 0, NVFP4Size)
		for _, b := range q {
			now = append(now, b&15, b>>4)
		}
		if codes != nil && (!slices.Equal(now, codes) || s[0] != scale) {
			t.Errorf("level %d: %x %x, not %x %x", on, now, s[0], codes, scale)
		}
		codes, scale = now, s[0]
	}
	return codes, scale
}

func cornerSaturation(t *testing.T) {
	for f, want := range map[float32]byte{ // as GPUs do
		448: 0x7e, 448.1: 0x7e, 464: 0x7e, 464.1: 0x7e, inf: 0x7e, -1e9: 0xfe,
	} {
		equal(t, "saturating", dtype.E4M3FromF32(f), want)
	}
}

func cornerSubnormals(t *testing.T) {
	for k := range 8 {
		equal(t, "subnormal", dtype.E4M3FromF32(float32(k)*0x1p-9), byte(k))
	}
	equal(t, "half of the smallest", dtype.E4M3FromF32(0x1p-10), 0)
	equal(t, "a little more", dtype.E4M3FromF32(0x1.000002p-10), 1)
	// The greatest is 448, so the scale is 1 and the elements are as above.
	q, scale := eight(t, 448, 0x1p-10, 0x1.000002p-10, -0x1p-10, float32(math.Copysign(0, -1)))
	equal(t, "scale", scale, 127)
	equal(t, "block", [5]byte(q), [5]byte{0x7e, 0, 1, 0x80, 0x80})
}

func cornerScaleEnds(t *testing.T) {
	equal(t, "0x00", dtype.F32FromE8M0(0), 0x1p-127)
	equal(t, "0xfe", dtype.F32FromE8M0(0xfe), 0x1p127)
	if f := dtype.F32FromE8M0(0xff); f == f {
		t.Errorf("0xff: %v", f)
	}
	_, factor := powerScale(infinity, 448)
	equal(t, "reciprocal of 0xfe", math.Float32bits(factor), 0x00400000)
	_, factor = powerScale(0, 448)
	equal(t, "reciprocal of 0x00", factor, 0x1p127)
}

func cornerScaleEncode(t *testing.T) {
	equal(t, "NaN", dtype.E8M0FromF32(nan), 0xff)
	equal(t, "infinity", dtype.E8M0FromF32(inf), 0xfe)
	equal(t, "zero", dtype.E8M0FromF32(0), 0)
	equal(t, "2^-127", dtype.E8M0FromF32(0x1p-127), 0)
	equal(t, "more than 2^-127", dtype.E8M0FromF32(0x1.000004p-127), 1)
	q, scale := eight(t, inf, math.MaxFloat32, 1, -inf)
	equal(t, "scale with an infinity", scale, 0xfe)
	equal(t, "block with an infinity", [4]byte(q), [4]byte{0x7e, 0x40, 0, 0xfe})
	q, scale = eight(t)
	equal(t, "scale of zeros", scale, 0)
	equal(t, "block of zeros", [32]byte(q), [32]byte{})
	// 448·2⁻¹²⁷ is the largest that the smallest scale serves.
	q, scale = eight(t, 0x1.cp-119, math.SmallestNonzeroFloat32)
	equal(t, "smallest scale", scale, 0)
	equal(t, "its elements", [2]byte(q), [2]byte{0x7e, 0})
	_, scale = eight(t, 0x1.c00002p-119)
	equal(t, "next scale", scale, 1)
	// A block of subnormal numbers is not lost: 2⁻¹³³ times 2¹²⁷ is 2⁻⁶.
	q, scale = eight(t, 0x1p-133, -0x1p-136)
	equal(t, "subnormal block", [3]byte{scale, q[0], q[1]}, [3]byte{0, 0x08, 0x81})
}

func cornerScaleDecode(t *testing.T) {
	for b := range 255 {
		equal(t, "scale", float64(dtype.F32FromE8M0(byte(b))), math.Ldexp(1, b-127))
	}
}

func cornerRoundUp(t *testing.T) {
	for _, c := range []struct {
		amax        float32
		scale, code byte
	}{
		{1.75, 119, 0x7e},                                                              // 448
		{math.Nextafter32(1.75, 0), 119, 0x7e}, {math.Nextafter32(1.75, 2), 120, 0x76}, // 224
		{math.Nextafter32(2, 0), 120, 0x78}, {2, 120, 0x78}, {1, 119, 0x78}, // 256
		{1.7421875, 119, 0x7e}, {1.7578125, 120, 0x76}, {1.9921875, 120, 0x78}, // bfloat16 neighbours
	} {
		q, scale := eight(t, 0, c.amax)
		equal(t, "scale", scale, c.scale)
		equal(t, "element", q[1], c.code)
	}
}

func cornerTies(t *testing.T) {
	list := []float32{.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, inf}
	want := []float32{0, 1, 1, 2, 2, 4, 4, 6, 6, 6}
	for i, f := range list {
		equal(t, "tie", dtype.F32FromE2M1(dtype.E2M1FromF32(f)), want[i])
		equal(t, "negative tie", dtype.F32FromE2M1(dtype.E2M1FromF32(-f)), -want[i])
	}
	// With an amax of 2688 for the tensor and 6 for the block every factor is 1.
	codes, scale := four(t, 2688, 6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -.25, -.75, -5)
	equal(t, "scale", scale, 0x38)
	equal(t, "codes", [11]byte(codes), [11]byte{7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14})
}

func cornerFourBitZero(t *testing.T) {
	// The sign bit stays, as the conversion of GPUs and torchao keep it.
	codes, _ := four(t, 2688, 6, float32(math.Copysign(0, -1)), -.1, 0)
	equal(t, "codes", [4]byte(codes), [4]byte{7, 8, 8, 0})
}

func cornerOneRounding(t *testing.T) {
	// The upper neighbour of a tie would be the tie itself in bfloat16.
	codes, _ := four(t, 2688, 6, 1.25, math.Nextafter32(1.25, 2), math.Nextafter32(2.5, 3))
	equal(t, "codes", [4]byte(codes), [4]byte{7, 2, 3, 5})
}

func cornerGlobal(t *testing.T) {
	in, out := Global(0)
	equal(t, "zero tensor", [2]float32{in, out}, [2]float32{1, 1})
	in, _ = Global(inf)
	equal(t, "infinite tensor", in, 1)
	in, out = Global(1e-40)
	equal(t, "tiny tensor", in, math.MaxFloat32)
	equal(t, "its way out", out, float32(1)/math.MaxFloat32)
	codes, scale := four(t, 0)
	equal(t, "zero tensor's scale", scale, 0)
	equal(t, "zero tensor's codes", [16]byte(codes), [16]byte{})
	codes, scale = four(t, 1)
	equal(t, "zero block's scale", scale, 0)
	equal(t, "zero block's codes", [16]byte(codes), [16]byte{})
	// 2⁻¹⁰ rounds to the scale 0: the codes saturate, and stand for 0.
	codes, scale = four(t, 2688, 6*0x1p-11, -6*0x1p-12)
	equal(t, "underflowing scale", scale, 0)
	equal(t, "its codes", [3]byte(codes), [3]byte{7, 15, 0})
	// An outlier elsewhere in the tensor does the same to ordinary numbers.
	_, scale = four(t, 1e9, 1)
	equal(t, "beside an outlier", scale, 0)
	codes, scale = four(t, 1, 1, .5)
	equal(t, "the cap", scale, 0x7e)
	equal(t, "codes at the cap", [2]byte(codes), [2]byte{7, 5})
	_, scale = four(t, 1, 1000) // the amax that was given is too small
	equal(t, "above the cap", scale, 0x7e)
	codes, scale = four(t, inf, inf, -1e38, 1)
	equal(t, "infinity", scale, 0x7e)
	equal(t, "codes with infinity", [4]byte(codes), [4]byte{7, 15, 0, 0})
	codes, scale = four(t, 1e-40, 1e-40, 1e-41, -1e-40)
	equal(t, "tiny tensor's scale", scale, dtype.E4M3FromF32(float32(1e-40)*(math.MaxFloat32*float32(1.0/6))))
	equal(t, "tiny tensor's sign", codes[2], codes[0]|8)
}

func cornerNaN(t *testing.T) {
	for _, at := range []int{0, 13, 31} {
		x := filled(MXFP8Size, 1, 2)
		x[at] = nan
		q, scale := eight(t, x...)
		equal(t, "MXFP8 scale", scale, 0xff)
		for _, b := range q {
			equal(t, "MXFP8 element", b, 0x7f)
		}
		codes, scale := four(t, 2, x[at/16*16:][:16]...)
		equal(t, "NVFP4 scale", scale, 0x7f)
		for _, b := range codes {
			equal(t, "NVFP4 code", b, 7)
		}
	}
	if a := Amax(filled(64, 1, -nan)); a == a {
		t.Errorf("amax: %v", a)
	}
	// An amax that dropped the NaN still marks only the block that has it.
	src, q, s := filled(32, nan), make([]byte, 16), make([]byte, 2)
	src[16] = 1
	must(t, NVFP4(q, s, src, 1))
	equal(t, "the two scales", [2]byte(s), [2]byte{0x7f, 0x7e})
	// One that kept it marks all.
	must(t, NVFP4(q, s, src, nan))
	equal(t, "the two scales", [2]byte(s), [2]byte{0x7f, 0x7f})
	must(t, Stochastic(q, s, src, 1, Key{}, Window{Cols: 32}))
	equal(t, "stochastic", [3]byte{s[0], s[1], q[0]}, [3]byte{0x7f, 0x7e, 0x77})
}

func cornerChance(t *testing.T) {
	equal(t, "key", NewKey(1, 2, 3), NewKey(1, 2, 3))
	var row [16]uint16
	row[3] = 0x3f80 // the fourth sign is negative, so its row of the matrix changes sign
	must(t, Hadamard(row[:], row[:]))
	equal(t, "transform", row, [16]uint16{0xbe80, 0x3e80, 0x3e80, 0xbe80, 0xbe80, 0x3e80, 0x3e80, 0xbe80,
		0xbe80, 0x3e80, 0x3e80, 0xbe80, 0xbe80, 0x3e80, 0x3e80, 0xbe80})
	const n = 1 << 16
	for _, v := range []float32{.1, .25, .6, 1.9, 2.3, 3.25, 4.5, 5.9} {
		src := make([]float32, n)
		for i := range src {
			src[i] = v
			if i%NVFP4Size == 0 {
				src[i] = 6 // so that every factor is 1
			}
		}
		q, s, back := make([]byte, n/2), make([]byte, n/16), make([]float32, n)
		must(t, Stochastic(q, s, src, 2688, NewKey(1, 2, 3), Window{Cols: 256}))
		must(t, FromNVFP4(back, q, s, 1))
		var sum float64
		for i, f := range back {
			if i%NVFP4Size != 0 {
				sum += float64(f)
			}
		}
		mean := sum / (n * 15 / 16)
		// The spread of an element is at most half a step of 2, so the deviation of the mean is 1/248;
		// four times that is passed by once in 16,000 values, and the bits are fixed.
		if math.Abs(mean-float64(v)) > 4.0/248 {
			t.Errorf("the mean of %v is %v", v, mean)
		}
	}
}

func cornerPadding(t *testing.T) {
	scales := slices.Repeat([]byte{0xaa}, 5*3)
	tiled := slices.Repeat([]byte{0xbb}, SwizzledLen(5, 3))
	must(t, Swizzle(tiled, scales, 5, 3))
	equal(t, "bytes", len(tiled), 512)
	count := map[byte]int{}
	for _, b := range tiled {
		count[b]++
	}
	equal(t, "scales", count[0xaa], 15)
	equal(t, "zeros", count[0], 512-15)
}

func cornerRefusal(t *testing.T) {
	x, q, s := make([]float32, 512), make([]byte, 512), make([]byte, 32)
	for what, err := range map[string]error{
		"MXFP8 of 33":        MXFP8(q[:33], s[:1], x[:33]),
		"MXFP8 without room": MXFP8(q[:32], s[:1], x[:64]),
		"MXFP8 scales":       MXFP8(q[:64], s[:1], x[:64]),
		"columns of 16 rows": MXFP8Columns(q, s[:16], x, 16, 32),
		"columns, short":     MXFP8Columns(q, s[:16], x, 32, 32),
		"NVFP4 of 24":        NVFP4(q[:12], s[:1], x[:24], 1),
		"tiles of 8×32":      NVFP4Tiles(q[:128], s[:16], x[:256], 8, 32, 1),
		"tiles, long":        NVFP4Tiles(q[:256], s[:32], x, 16, 16, 1),
		"rows of 24":         Stochastic(q[:24], s[:3], x[:48], 1, Key{}, Window{Cols: 24}),
		"rows of none":       Stochastic(q[:24], s[:3], x[:48], 1, Key{}, Window{}),
		"parts of rows":      Stochastic(q[:24], s[:3], x[:48], 1, Key{}, Window{Cols: 32}),
		"hadamard of 8":      Hadamard(make([]uint16, 8), make([]uint16, 8)),
		"back from MXFP8":    FromMXFP8(x[:32], q[:31], s[:1]),
		"back from NVFP4":    FromNVFP4(x[:32], q[:16], s[:1], 1),
		"swizzle":            Swizzle(q, s[:4], 2, 1),
		"unswizzle":          Unswizzle(s[:2], q[:511], 2, 1),
		"transpose":          Transpose(x[:4], x[:6], 2, 3),
	} {
		if err == nil {
			t.Errorf("%s was taken", what)
		}
	}
}

// The generic path rounds as the kernel of MXFP8 does, and its scales keep the largest element of
// each element type in range.
func TestEncode(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	src := make([]float32, 32*64)
	for i := range src {
		src[i] = float32(math.Ldexp(r.NormFloat64(), r.IntN(60)-30))
	}
	src[40], src[100], src[200] = float32(math.NaN()), float32(math.Inf(-1)), 0
	q, scales := make([]byte, len(src)), make([]byte, len(src)/32)
	if err := MXFP8(q, scales, src); err != nil {
		t.Fatal(err)
	}
	for i := range scales {
		one := make([]byte, 32)
		s := encodeBlock(dtype.F8E4M3FN, one, src[32*i:][:32])
		if s != scales[i] || !bytes.Equal(one, q[32*i:][:32]) {
			t.Errorf("block %d: %d %v, MXFP8 has %d %v", i, s, one, scales[i], q[32*i:][:32])
		}
	}
	for _, elem := range []dtype.DType{dtype.F8E5M2, dtype.F4E2M1FN} {
		most := elem.FromCode(elem.MaxCode())
		for _, x := range []float32{most, most * 0.99, most * 1.01, 3, 1e-30} {
			one := make([]byte, 1)
			s := encodeBlock(elem, one, []float32{x})
			got := elem.FromCode(one[0]) * dtype.F32FromE8M0(s)
			if math.Abs(float64(got-x)) > 0.26*float64(x) {
				t.Errorf("%s: %g became %g", elem, x, got)
			}
		}
	}
}
