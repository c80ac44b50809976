package ir_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// byHand measures rows in a format with package block alone.
func byHand(t *testing.T, f ir.Format, x []float32, amax float32) [ir.ErrorSums]float64 {
	t.Helper()
	size := int(f.Block())
	codes, scales := make([]byte, len(x)), make([]byte, len(x)/size)
	back, steps := make([]float64, len(x)), make([]float64, len(x)/size)
	most := 448.0
	if f == ir.MXFP8 {
		if err := block.MXFP8(codes, scales, x); err != nil {
			t.Fatal(err)
		}
		for i, c := range codes {
			steps[i/size] = float64(dtype.F32FromE8M0(scales[i/size]))
			back[i] = float64(dtype.F32FromE4M3(c)) * steps[i/size]
		}
	} else {
		if err := block.NVFP4(codes[:len(x)/2], scales, x, amax); err != nil {
			t.Fatal(err)
		}
		_, out := block.Global(amax)
		most = 6
		for i := range x {
			steps[i/size] = float64(dtype.F32FromE4M3(scales[i/size])) * float64(out)
			back[i] = float64(dtype.F32FromE2M1(codes[i/2]>>(4*(i%2))&15)) * steps[i/size]
		}
	}
	var s [ir.ErrorSums]float64
	for from := 0; from < len(x); from += size {
		top, low := 0.0, math.Inf(1)
		for i := from; i < from+size; i++ {
			a, b := float64(x[i]), back[i]
			if a != 0 && b == 0 {
				s[0]++
			}
			if end := most * steps[i/size]; math.Abs(a) > end*(1+0x1p-20) && end > 0 {
				s[1]++
			}
			s[2], s[3] = s[2]+a*a, s[3]+(a-b)*(a-b)
			if a != 0 {
				top, low = max(top, math.Abs(a)), min(low, math.Abs(a))
			}
		}
		if top > 0 {
			s[4], s[5] = s[4]+math.Log2(top/low), s[5]+1
		}
	}
	return s
}

// What an inspection tells of rows is what comes of them by hand: of random rows, and of those at
// which something happens. A scale that is rounded up clamps nothing; FP4's does.
func TestErrorsAreThoseOfTheBlocks(t *testing.T) {
	const cols = 64
	rows := map[string]func(r *rand.Rand, i int) float32{
		"random":    func(r *rand.Rand, _ int) float32 { return float32(r.NormFloat64()) },
		"zeros":     func(*rand.Rand, int) float32 { return 0 },
		"one":       func(_ *rand.Rand, i int) float32 { return float32(i % 64 / 63) },
		"outlier":   func(r *rand.Rand, i int) float32 { return float32(r.NormFloat64()) + float32(i/63*9999) },
		"tiny":      func(r *rand.Rand, _ int) float32 { return float32(r.NormFloat64() * 1e-30) },
		"huge":      func(r *rand.Rand, _ int) float32 { return float32(r.NormFloat64() * 1e30) },
		"powers":    func(_ *rand.Rand, i int) float32 { return float32(math.Ldexp(1, -i)) },
		"just over": func(_ *rand.Rand, i int) float32 { return float32(i%2)*1.7500001 + 0.1 },
	}
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		for name, row := range rows {
			b := ir.NewBuilder("errors")
			x := b.Input("x", ir.Data, irtest.F32(irtest.D("rows", 4), irtest.D("embed", cols)), "")
			q := ir.Quantize{Format: f, Along: []string{"embed"}}
			g, err := b.Graph(b.QuantizeStats(x, q, b.QuantizeAll(x, q)...))
			if err != nil {
				t.Fatal(err)
			}
			r, a := rand.New(rand.NewPCG(3, 4)), eval.New(x.Type)
			src := make([]float32, len(a.Data))
			for i := range src {
				src[i] = row(r, i%cols)
				a.Data[i] = float64(src[i])
			}
			out, err := eval.Run(g, map[string][]*eval.Array{"x": {a}})
			if err != nil {
				t.Fatal(err)
			}
			want := byHand(t, f, src, block.Amax(src))
			for i, got := range out[0][0].Data {
				if !(math.Abs(got-want[i]) <= 1e-12*math.Abs(want[i])) { // in another order
					t.Errorf("%s, %s: number %d is %v, want %v", f, name, i, got, want[i])
				}
			}
			if f == ir.MXFP8 && want[1] != 0 {
				t.Errorf("%s: %v are clamped", name, want[1])
			}
			if f == ir.NVFP4 && name == "random" && want[1] == 0 {
				t.Error("nothing is clamped")
			}
		}
	}
}
