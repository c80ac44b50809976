package replay

import (
	"errors"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// XLA miscompiles layers that are a loop, gather their parameters and offload their activations: its
// notes on the loop, by which copies to and from the host find their slices, contradict the program.
// A live run refuses such plans (DW3106); if this test fails, it need not any more.
func TestOffloadedLayersThatGatherAreMiscompiled(t *testing.T) {
	slowtest.Only(t)
	list, err := cases("llama", "bf16", planRow{"fsdp2 offload of 5 layers", 5, func(p *plan.Plan) {
		p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: plan.GatherLayer}
		p.Offload = []string{plan.Activations}
	}})
	if err != nil {
		t.Fatal(err)
	}
	r := runner(t)
	for _, one := range list {
		if one.pair.Kind != step.Gradient {
			continue
		}
		format, code, err := r.Compile(t.Context(), one.pair.GPU, one.pair.Cluster)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = Rewrite(format, code, Options{Fill: NaNs}); !errors.Is(err, diag.ReplayConfig) {
			t.Errorf("%s: %v", one, err)
		}
		t.Log(err)
		return
	}
	t.Fatal("there is no gradient")
}
