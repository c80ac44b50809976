package main

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/ir"
)

func numbers(n int) []float32 {
	random := rand.New(rand.NewPCG(1, 2))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(random.NormFloat64() * math.Exp2(float64(random.IntN(20)-10)))
	}
	return x
}

// Without a part switched off, MXFP8 is what dtype/block says.
func TestEight(t *testing.T) {
	src := numbers(64 * 32)
	q, scales := make([]byte, len(src)), make([]byte, len(src)/block.MXFP8Size)
	want := make([]float32, len(src))
	if err := block.MXFP8(q, scales, src); err != nil {
		t.Fatal(err)
	}
	if err := block.FromMXFP8(want, q, scales); err != nil {
		t.Fatal(err)
	}
	got, s := variants[0].rounded(operand{m: src, rows: 64, cols: 32})
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("%g becomes %g, want %g", src[i], got[i], want[i])
		}
	}
	if s.saturated != 0 || s.snr() < 29 {
		t.Errorf("saturated %g, %.1f dB", s.saturated, s.snr())
	}
	if _, s := variants[1].rounded(operand{m: src, rows: 64, cols: 32}); s.saturated == 0 {
		t.Error("a scale that is rounded down saturates nothing")
	}
}

// A transform of both operands does not change a GEMM, and GEMMs are matrix products.
func TestGEMMs(t *testing.T) {
	x, y := numbers(3*32), numbers(5*32)
	exact := product(x, y, 32)
	if rel, proj := errors(exact, exact); rel != 0 || proj != 0 {
		t.Errorf("errors of nothing are %g and %g", rel, proj)
	}
	// Both arguments are rounded to bf16, before and after.
	if rel, _ := errors(product(spread(x), spread(y), 32), exact); rel > 0.01 {
		t.Errorf("transformed arguments are %g off", rel)
	}
	half := make([]float64, len(exact))
	for i := range half {
		half[i] = exact[i] / 2
	}
	if rel, proj := errors(half, exact); rel != 0.5 || proj != -0.5 {
		t.Errorf("half is %g off and shrinks by %g", rel, proj)
	}
}

func TestTurn(t *testing.T) {
	dims := []ir.Dim{{Name: "in", Size: 2}, {Name: "heads", Size: 2}, {Name: "dim", Size: 2}}
	got := turn([]float32{0, 1, 2, 3, 4, 5, 6, 7}, dims, []string{"heads", "dim"})
	for i, want := range []float32{0, 4, 1, 5, 2, 6, 3, 7} {
		if got[i] != want {
			t.Fatalf("%v", got)
		}
	}
}
