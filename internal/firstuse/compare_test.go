package firstuse

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// On the software GPU, kernels as programs have them are their plain forms; with an error in the
// text they are not.
func TestCompare(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{GPUs: 1, Memory: 64 << 20}) {
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, text := range []string{
		"mxfp8 1x8192x4096 along across: bf16 -> 0",
		"mxfp8 2x96x160 along across: bf16 -> 0",
		"loss 8192x128256",
		"mxfp8 1x8192x14336 along across rounds=32 into=0,2 saved=0,1: " +
			"bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4",
		"mxfp8 1x8192x4000 along keep rounds=32 from=0: bf16, f32 rows, f32 cols; mul 0 1; mul 3 2 -> 4",
		"nvfp4 1x8192x4096 along: bf16 -> 0",
		"nvfp4 32x4096x14336 along across tile layers=32: bf16 -> 0",
		"nvfp4 1x8192x4096 along stochastic=0 tensors=6,7: bf16 -> 0",
		"nvfp4 1x8192x4096 along added stochastic=0 tensors=6,7: bf16 -> 0",
		"nvfp4 1x8192x14336 along amax keep rounds=32 into=0 saved=1: " +
			"bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4",
		"rms_norm 100x384 eps=1e-05 shift=0 added normed rounds=32 from=0 saved=1 kept=0,1",
		"rms_norm_grad 100x384 eps=1e-05 shift=0 grads=3 residual rounds=32 from=0",
	} {
		apart, err := Compare(t.Context(), e, text, 1)
		if err != nil || apart > Limit {
			t.Errorf("%s: %.3g, %v", text, apart, err)
		}
		t.Logf("%s: %.3g", text, apart)
	}
	for _, fault := range []struct{ name, spec, old, new string }{
		{"a sum is a difference", "mxfp8 1x64x128 along: bf16, bf16; add 0 1 -> 2", "arith.addf",
			"arith.subf"},
		{"another round's slot", "mxfp8 1x64x128 along rounds=3 into=0: bf16 -> 0",
			"arith.constant 8192 : i64", "arith.constant 4096 : i64"},
		{"another tensor's bits", "nvfp4 1x64x128 along stochastic=0 tensors=6,7: bf16 -> 0",
			"arith.constant 64 : i32", "arith.constant 65 : i32"},
		{"a scale that is one too high", "mxfp8 1x64x128 along: bf16 -> 0", "dense<31>", "dense<127>"},
	} {
		s, err := fused.ParseSpec(fault.spec)
		if err != nil {
			t.Fatal(err)
		}
		k, err := s.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		wrong := strings.Replace(k.Text, fault.old, fault.new, 1)
		if wrong == k.Text {
			t.Fatalf("%s: the text has no %s:\n%s", fault.name, fault.old, k.Text)
		}
		k.Text = wrong
		apart, err := compare(t.Context(), e, s, k, 1)
		if err == nil && apart <= Limit {
			t.Errorf("%s is not found: %.3g", fault.name, apart)
		}
		t.Logf("%s: %.3g, %v", fault.name, apart, err)
	}
}

// The plain forms of kernels with tensor cores are what the interpreter makes of their text.
func TestPlainForms(t *testing.T) {
	for _, text := range []string{
		"nvfp4 1x128x160 along across amax: bf16 -> 0",
		"nvfp4 2x96x256 across amax: bf16 -> 0",
		"nvfp4 1x128x160 along across: bf16 -> 0",
		"nvfp4 2x96x256 along across layers=2: bf16 -> 0",
		"nvfp4 2x96x256 along across stochastic=0,1 tensors=6,7: bf16 -> 0",
		"nvfp4 1x96x256 across added stochastic=1 tensors=6,7: bf16 -> 0",
		"nvfp4 1x96x160 along across keep stochastic=0,1 tensors=6,7,8,9: " +
			"bf16, bf16, bf16; mul 0 1; mul 0 2 -> 3 4",
	} {
		s, err := fused.ParseSpec(text)
		if err != nil {
			t.Fatal(err)
		}
		k, err := s.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		d := draw(s, k, rand.New(rand.NewPCG(1, 2)))
		all := slices.Clone(d.operands)
		for _, a := range k.Args[len(all):] {
			all = append(all, make([]byte, a.Elem.Bits()/8*elements(a.Shape)))
		}
		if err := interpret.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		want, err := plain(s, k, d.values)
		if err != nil || len(want) != len(all)-len(d.operands) {
			t.Fatalf("%s: %d results, %v", text, len(want), err)
		}
		if apart := judge(s, all[len(d.operands):], want); apart > Limit {
			t.Errorf("%s: %.3g", text, apart)
		}
	}
}

// Every step of expressions has a plain form.
func TestSteps(t *testing.T) {
	for op := range expr.Ops {
		if op == "fill" || op == "select" {
			continue
		}
		if v := one(expr.Step{Op: op, By: 2}, 0.5, 0.25); math.IsNaN(float64(v)) {
			t.Errorf("%s has none", op)
		}
	}
}
