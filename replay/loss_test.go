package replay

import (
	"testing"

	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/step"
)

// lossOf reads the loss of a call.
func lossOf(s *site) bool {
	found := fused.SpecsIn(string(s.config))
	if len(found) != 1 {
		return false
	}
	_, err := fused.ParseLoss(found[0])
	return err == nil
}

// lossFaults are what the kernel of a loss, or its arguments, could have wrong.
var lossFaults = []fault{
	{"labels of other rows", tritonTarget, func(w *writer, s *site) (bool, *value) {
		if !lossOf(s) {
			return false, nil
		}
		s.values[1] = rotated(w, s.values[1], 0, 1)
		return true, nil
	}},
	{"a gradient with nothing to multiply by", tritonTarget, func(w *writer, s *site) (bool, *value) {
		if !lossOf(s) {
			return false, nil
		}
		s.values[2] = w.full(typeF32, s.values[2].shape.dims, 1)
		return true, nil
	}},
}

// Programs whose loss is computed in place compute what their references do; faults are found.
func TestReplayLoss(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	for _, plan := range []string{"one", "fsdp8"} {
		p := programOf(t, "llama", step.Gradient, "bf16", plan)
		n := 0
		for _, text := range fused.SpecsIn(p.GPU.Text) {
			if _, err := fused.ParseLoss(text); err == nil {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s: %d losses in place", plan, n)
		}
		one, _, err := r.Replay(t.Context(), p, Options{Wide: true, Fill: NaNs})
		if err != nil {
			t.Fatal(err)
		}
		worst := one.Worst()
		t.Logf("%s: %.1e (%s) of %.1e", plan, worst.Relative, worst.Name, p.Bound(true).Limit)
		if !(worst.Relative <= p.Bound(true).Limit) {
			t.Errorf("%s: %s", plan, one.Summary())
		}
	}
	p := programOf(t, "llama", step.Gradient, "bf16", "one")
	planted := map[string]bool{}
	names, programs := plantAll(t, r, p, lossFaults, planted)
	if len(planted) != len(lossFaults) {
		t.Errorf("only %v fit", names)
	}
	findAll(t, r, p, names, programs)
}
