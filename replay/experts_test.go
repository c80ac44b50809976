package replay

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/step"
)

// expertFaults are what can go wrong between tokens and experts.
var expertFaults = []fault{
	{"wrong expert group", "all-to-all", func(_ *writer, s *site) (bool, *value) {
		// The members of two groups change places: rows go to devices with other tokens.
		n := len(s.groups.lists)
		if n < 2 {
			return false, nil
		}
		lists := slices.Clone(s.groups.lists)
		lists[0], lists[1] = slices.Clone(lists[0]), slices.Clone(lists[1])
		lists[0][1], lists[1][0] = lists[1][0], lists[0][1]
		s.groups.lists = lists
		return true, nil
	}},
	{"all-to-all dropped", "all-to-all", func(w *writer, s *site) (bool, *value) {
		if len(s.dims) == 0 {
			return true, w.together(s, s.values)
		}
		return true, s.values[0]
	}},
	{"experts swapped", "__cublas$lt$matmul", func(w *writer, s *site) (bool, *value) {
		var g struct {
			GEMM gemmConfig `json:"gemm_backend_config"`
		}
		if json.Unmarshal(s.config, &g) != nil {
			return false, nil
		}
		batch := g.GEMM.Dims.dims().batch[1]
		if len(batch) != 1 {
			return false, nil
		}
		s.values[1] = rotated(w, s.values[1], int(batch[0]), 1)
		return true, nil
	}},
}

// Faults between tokens and experts are found in the gradients of small siblings of Mixtral and
// DeepSeek-V3.
func TestFaultsOfExperts(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	for _, m := range []string{"mixtral", "deepseek experts"} {
		p := programOf(t, m, step.Gradient, "bf16", expertPlan)
		planted := map[string]bool{}
		names, programs := plantAll(t, r, p, expertFaults, planted)
		if len(planted) != len(expertFaults) {
			t.Errorf("%s: only %v fit", m, names)
		}
		findAll(t, r, p, names, programs)
	}
}
