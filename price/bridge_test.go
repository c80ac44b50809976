package price

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// TestBridge holds the shipped constants to what is possible: near their priors, and ordered as
// hardware and software are.
func TestBridge(t *testing.T) {
	b := MegatronBridge()
	for _, e := range b.Effects() {
		if d := math.Abs(math.Log(*e.Value/e.Prior)) * e.Prior / e.Sigma; !(d < 3) {
			t.Errorf("%s is %.4g, %.1f deviations from %.4g", e.Name, *e.Value, d, e.Prior)
		}
	}
	run := Run{GPU: "gb200", Precision: dtype.MXFP8, Experts: true}
	base := b.Profile(run)
	fused, eager := run, run
	fused.Fused, eager.Eager = true, true
	if p := b.Profile(fused); p.Stream >= base.Stream || p.Operation >= base.Operation {
		t.Error("fused experts are no faster")
	}
	if p := b.Profile(eager); p.Operation <= base.Operation {
		t.Error("without graphs the host is no slower")
	}
}

// TestFor gives each run its own profile under one name.
func TestFor(t *testing.T) {
	old, err := Find("megatron-26.04")
	if err != nil {
		t.Fatal(err)
	}
	now, err := Find("megatron-26.08")
	if err != nil {
		t.Fatal(err)
	}
	experts := Run{GPU: "gb300", Precision: dtype.MXFP8, Experts: true}
	if a, b := old.For(experts), now.For(experts); b.Stream >= a.Stream {
		t.Error("26.08 has no fused experts")
	}
	dense := Run{GPU: "gb300", Precision: dtype.NVFP4, Head: 128}
	a, b := old.For(dense), now.For(dense)
	if a.GEMM != b.GEMM || a.Stream != b.Stream {
		t.Error("dense models differ between releases")
	}
	if a.GEMM == old.GEMM || a.Name != old.Name {
		t.Errorf("the profile of a run equals the default, or has lost its name: %+v", a)
	}
	if again := a.For(dense); again != a {
		t.Error("the profile of a run depends on the run")
	}
	plain, err := Find("megatron")
	if err != nil {
		t.Fatal(err)
	}
	if plain.For(dense) != plain {
		t.Error("other stacks depend on the run")
	}
}
