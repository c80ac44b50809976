package estimate

import (
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/price"
)

// TestUnder prices a plan as an estimator would that was made with the profile, and gives a stack
// that depends on the precision the constants of the one that is asked for.
func TestUnder(t *testing.T) {
	prof, err := price.Find("megatron-26.08")
	if err != nil {
		t.Fatal(err)
	}
	p := base()
	old := estimator(t, "llama3-70b", "64xgb200", "megatron")
	made := estimator(t, "llama3-70b", "64xgb200", "megatron-26.08")
	for _, prec := range []dtype.Format{dtype.FormatBF16, dtype.FormatFP8, dtype.MXFP8, dtype.NVFP4} {
		o := Options{Precision: prec}
		want := mustPrice(t, made.With(o), p).Step
		if got := mustPrice(t, old.With(o).Under(prof), p).Step; got != want {
			t.Errorf("%s: %v under the profile, %v with it from the start", prec, got, want)
		}
		run := price.Run{GPU: "gb200", Precision: prec, Head: 128}
		if got := mustPrice(t, old.With(o).Under(prof.For(run)), p).Step; got != want {
			t.Errorf("%s: %v under the run's own profile, want %v", prec, got, want)
		}
	}
	if a, b := mustPrice(t, made.With(Options{Precision: dtype.FormatFP8}), p).Step,
		mustPrice(t, made.With(Options{Precision: dtype.NVFP4}), p).Step; b >= a {
		t.Errorf("nvfp4 takes %v s, fp8 %v s", b, a)
	}
}

// TestLogSigma has an interval grow with what the profile has not seen.
func TestLogSigma(t *testing.T) {
	wide := func(model, cluster, prof string, prec dtype.Format) float64 {
		est := mustPrice(t, estimator(t, model, cluster, prof).With(Options{Precision: prec}), base())
		return est.High / est.Low
	}
	seen := wide("llama3-70b", "64xb200", "megatron", dtype.FormatBF16)
	for name, other := range map[string]float64{
		"model":     wide("llama3.1-8b", "64xb200", "megatron", dtype.FormatBF16),
		"gpu":       wide("llama3-70b", "64xgb200", "megatron", dtype.FormatBF16),
		"precision": wide("llama3-70b", "64xb200", "megatron", dtype.FormatFP8),
	} {
		if other <= seen {
			t.Errorf("a new %s: %v, all seen: %v", name, other, seen)
		}
	}
}

// TestQuantizedMemory checks that Transformer Engine saves fewer bytes in quantized formats, and
// that recomputing a module saves some of the activations that full recomputation saves.
func TestQuantizedMemory(t *testing.T) {
	e := estimator(t, "deepseek-v3", "64xgb200", "megatron-26.08")
	kept := func(prec dtype.Format, tags ...ir.Tag) int64 {
		p := base()
		p.Recompute = tags
		return mustPrice(t, e.With(Options{Precision: prec, ExpertRanks: 64}), p).Memory.Activations
	}
	none, module := kept(dtype.MXFP8), kept(dtype.MXFP8, ir.Attn)
	all := kept(dtype.MXFP8, ir.Norm, ir.Attn, ir.MLP, ir.Experts)
	if wide := kept(dtype.FormatBF16); none >= wide {
		t.Errorf("mxfp8 keeps %d bytes, bf16 %d", none, wide)
	}
	if module >= none || all >= module {
		t.Errorf("nothing recomputed %d bytes, a module %d, all %d", none, module, all)
	}
}
