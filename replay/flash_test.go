package replay

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/step"
)

// flashProgram is the gradient of a small Gemma 2, whose scores have a soft cap.
func flashProgram(t *testing.T, format, plan string) Pair {
	t.Helper()
	list, err := cases("gemma2", format, lists.Find(planRows(),
		func(p planRow) bool { return p.name == plan }))
	if err != nil {
		t.Fatal(err)
	}
	return lists.Find(list, func(c testCase) bool { return c.pair.Kind == step.Gradient }).pair
}

// A model with a soft cap has flash attention of our own, forward and backward, with and without a
// window, and computes what its reference does.
func TestReplayFlash(t *testing.T) {
	plans := []string{"one"}
	if slowtest.Enabled {
		plans = append(plans, "fsdp8")
	}
	r := runner(t)
	for _, plan := range plans {
		p := flashProgram(t, "bf16", plan)
		parts := map[flash.Part]int{}
		for _, spec := range fused.SpecsIn(p.GPU.Text) {
			if a, err := flash.Parse(spec); err == nil && a.SoftCap > 0 {
				parts[a.Part]++
			}
		}
		if parts[flash.Forward] != 2 || parts[flash.DQ] != 2 || parts[flash.DKV] != 2 {
			t.Errorf("%s: kernels are %v", plan, parts)
		}
		one, _, err := r.Replay(t.Context(), p, Options{Wide: true, Fill: NaNs})
		if err != nil {
			t.Errorf("%s: %v", plan, err)
			continue
		}
		worst := one.Worst()
		t.Logf("%s: %.1e (%s) of %.1e", plan, worst.Relative, worst.Name, p.Bound(true).Limit)
		if !(worst.Relative <= p.Bound(true).Limit) {
			t.Errorf("%s: %s", plan, one.Summary())
		}
	}
}

// flashOf reads the attention of a call, and whether it is a part.
func flashOf(s *site, part flash.Part) bool {
	found := fused.SpecsIn(string(s.config))
	if len(found) != 1 {
		return false
	}
	a, err := flash.Parse(found[0])
	return err == nil && a.Part == part
}

// flashFaults are what a kernel, or its arguments, could have wrong.
var flashFaults = []fault{
	{"no cap", tritonTarget, func(_ *writer, s *site) (bool, *value) {
		if !flashOf(s, flash.Forward) {
			return false, nil
		}
		s.config = []byte(strings.Replace(string(s.config), "softcap=50 ", "softcap=0 ", 1))
		return true, nil
	}},
	{"keys of another token", tritonTarget, func(w *writer, s *site) (bool, *value) {
		if !flashOf(s, flash.DQ) {
			return false, nil
		}
		s.values[1] = rotated(w, s.values[1], 1, 1)
		return true, nil
	}},
	{"no delta", tritonTarget, func(w *writer, s *site) (bool, *value) {
		if !flashOf(s, flash.DKV) {
			return false, nil
		}
		s.values[4] = w.full(typeF32, s.values[4].shape.dims, 0)
		return true, nil
	}},
}

// Faults of flash attention are found.
func TestFaultsOfFlash(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	p := flashProgram(t, "bf16", "one")
	planted := map[string]bool{}
	names, programs := plantAll(t, r, p, flashFaults, planted)
	if len(planted) != len(flashFaults) {
		t.Errorf("only %v fit", names)
	}
	findAll(t, r, p, names, programs)
}
