package estimate

import (
	"testing"

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
	for _, prec := range []price.Precision{price.BF16, price.FP8, price.MXFP8, price.NVFP4} {
		o := Options{Precision: prec}
		want := mustPrice(t, made.With(o), p).Step
		if got := mustPrice(t, old.With(o).Under(prof), p).Step; got != want {
			t.Errorf("%s: %v under the profile, %v with it from the start", prec, got, want)
		}
		run := price.Run{Card: "gb200", Precision: prec, Head: 128}
		if got := mustPrice(t, old.With(o).Under(prof.For(run)), p).Step; got != want {
			t.Errorf("%s: %v under the run's own profile, want %v", prec, got, want)
		}
	}
	if a, b := mustPrice(t, made.With(Options{Precision: price.FP8}), p).Step,
		mustPrice(t, made.With(Options{Precision: price.NVFP4}), p).Step; b >= a {
		t.Errorf("nvfp4 takes %v s, fp8 %v s", b, a)
	}
}
