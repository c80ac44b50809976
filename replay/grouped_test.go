package replay

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// groupedMixtral is a small Mixtral whose experts are grouped GEMMs: sizes are whole tiles, and an
// expert has two of each device, of which tokens fill about half of one.
var groupedMixtral = modelRow{name: "mixtral grouped", grouped: true,
	config: modelNamed("mixtral").config}

// groupedIn lists the grouped GEMMs of a program, in their order.
func groupedIn(t *testing.T, text string) (list []fused.Group) {
	t.Helper()
	for _, m := range regexp.MustCompile(`spec = "(grouped [^"]*)"`).FindAllStringSubmatch(text, -1) {
		g, err := fused.ParseGroup(m[1])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, g)
	}
	return list
}

// apartPlan is a plan whose shards have whole steps of NVFP4's sums, in a wider model.
const apartPlan = "ep4 fsdp2"

func groupedProgram(t *testing.T, format, name string) Pair {
	t.Helper()
	m, row := groupedMixtral, lists.Find(planRows(), func(p planRow) bool { return p.name == name })
	if name == apartPlan {
		m.config = strings.Replace(m.config, `"hidden_size": 256`, `"hidden_size": 512`, 1)
		row = planRow{name, 2, func(p *plan.Plan) {
			p.EP, p.FSDP = 4, plan.FSDP{Size: 2, Zero: 3, Gather: plan.GatherLayer}
		}}
	}
	list, err := m.cases(format, row)
	if err != nil {
		t.Fatal(err)
	}
	return lists.Find(list, func(c testCase) bool { return c.pair.Kind == step.Gradient }).pair
}

// groupedPrograms are gradients, with the orders of the weights of their grouped GEMMs: as they
// are, or with the dimension first that FSDP gathers and reduces along; with an s in front, shards
// are apart.
var groupedPrograms = []struct {
	format, plan   string
	forward, grads []string
}{
	{"bf16", "one", []string{"eko", "eok"}, []string{"eok"}},
	{"bf16", expertPlan, []string{"keo", "oek"}, []string{"oek"}},
	{"mxfp8", "one", []string{"eok"}, []string{"eok"}},
	{"mxfp8", "fsdp8", []string{"keo", "oek"}, []string{"oek"}},
	{"mxfp8", expertPlan, []string{"keo", "oek"}, []string{"oek"}},
	{"nvfp4", "one", []string{"eok"}, []string{"eok"}},
	{"nvfp4", "fsdp8", []string{"eok", "oek"}, []string{"oek"}},
	{"nvfp4", expertPlan, []string{"eok", "oek"}, []string{"oek"}},
	{"nvfp4", apartPlan, []string{"seok", "oek"}, []string{"oek"}},
}

// All GEMMs of experts are grouped: three forward, six backward, and two that a plan recomputes.
func TestExpertsAreGrouped(t *testing.T) {
	for _, row := range groupedPrograms {
		list := groupedIn(t, groupedProgram(t, row.format, row.plan).GPU.Text)
		list = slices.DeleteFunc(list, func(g fused.Group) bool { // the last layer is in bf16
			return row.format == "nvfp4" && g.Format == ""
		})
		var forward, grads []string
		for _, g := range list {
			if g.Grad {
				grads = append(grads, g.Weights)
			} else {
				forward = append(forward, strings.Repeat("s", min(g.Shards, 1))+g.Weights)
			}
		}
		n := len(list)
		slices.Sort(forward)
		slices.Sort(grads)
		forward, grads = slices.Compact(forward), slices.Compact(grads)
		slices.Sort(row.forward)
		t.Log(row.format, row.plan, n, list[0])
		if n < 9 || !slices.Equal(forward, row.forward) || !slices.Equal(grads, row.grads) {
			t.Errorf("%s, %s: %d grouped GEMMs with weights in %v, and gradients in %v", row.format,
				row.plan, n, forward, grads)
		}
	}
}

// Programs with grouped GEMMs compute what their references do.
func TestReplayGrouped(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	for _, row := range groupedPrograms {
		t.Run(row.format+", "+row.plan, func(t *testing.T) {
			p := groupedProgram(t, row.format, row.plan)
			one, _, err := r.Replay(t.Context(), p, Options{Wide: true, Fill: NaNs})
			if err != nil {
				t.Fatal(err)
			}
			worst := one.Worst()
			t.Logf("%.1e (%s) of %.1e", worst.Relative, worst.Name, p.Bound(true).Limit)
			if !(worst.Relative <= p.Bound(true).Limit) {
				t.Error(one.Summary())
			}
		})
	}
}

// groupedFaults are what a grouped kernel, or its arguments, could have wrong.
var groupedFaults = []fault{
	{"another expert's weights", tritonTarget, func(w *writer, s *site) (bool, *value) {
		g, ok := groupOf(s)
		if !ok || g.Grad {
			return false, nil
		}
		at := tilesOf(g) / 2
		rows, dims := s.values[at], s.values[at].shape.dims
		experts := int64(g.Experts)
		x := w.reshape(rows, experts, elements(dims)/experts)
		if g.Weights != "eok" {
			return false, nil
		}
		s.values[at] = w.reshape(rotated(w, x, 0, 1), dims...)
		return true, nil
	}},
	{"a tile skipped that has tokens", tritonTarget, func(w *writer, s *site) (bool, *value) {
		g, ok := groupOf(s)
		if !ok || g.Grad {
			return false, nil
		}
		last := tilesOf(g)
		s.values[last] = w.fullInt(typeS32, s.values[last].shape.dims, -1)
		return true, nil
	}},
	{"a gradient of no rows", tritonTarget, func(w *writer, s *site) (bool, *value) {
		g, ok := groupOf(s)
		if !ok || !g.Grad {
			return false, nil
		}
		last := tilesOf(g)
		s.values[last] = w.fullInt(typeS32, s.values[last].shape.dims, 0)
		return true, nil
	}},
}

// groupedFaultsOfNVFP4 are what it can have wrong beside.
var groupedFaultsOfNVFP4 = []fault{
	{"the scale of a tensor", tritonTarget, func(w *writer, s *site) (bool, *value) {
		g, ok := groupOf(s)
		if !ok || g.Format != dtype.NVFP4 {
			return false, nil
		}
		last := len(s.values) - 1
		s.values[last] = w.full(typeF32, s.values[last].shape.dims, 1)
		return true, nil
	}},
	{"numbers of a byte the other way round", tritonTarget, func(w *writer, s *site) (bool, *value) {
		g, ok := groupOf(s)
		if !ok || g.Format != dtype.NVFP4 {
			return false, nil
		}
		x := s.values[0]
		four := w.fullInt(typeU8, x.shape.dims, 4)
		s.values[0] = w.elementwise("or", w.elementwise("shift-left", x, four),
			w.elementwise("shift-right-logical", x, four))
		return true, nil
	}},
}

// tilesOf is which argument tells tiles with tokens.
func tilesOf(g fused.Group) int {
	if g.Format == "" {
		return 2
	}
	return 4
}

const tritonTarget = "__gpu$xla.gpu.triton"

// groupOf reads the grouped GEMM of a call.
func groupOf(s *site) (fused.Group, bool) {
	found := fused.SpecsIn(string(s.config))
	if len(found) != 1 {
		return fused.Group{}, false
	}
	g, err := fused.ParseGroup(found[0])
	return g, err == nil
}

// Faults of grouped kernels are found.
func TestFaultsOfGrouped(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	for _, row := range []struct {
		format string
		faults []fault
	}{
		{"mxfp8", groupedFaults},
		{"nvfp4", slices.Concat(groupedFaults, groupedFaultsOfNVFP4)},
	} {
		t.Run(row.format, func(t *testing.T) {
			p := groupedProgram(t, row.format, "one")
			planted := map[string]bool{}
			names, programs := plantAll(t, r, p, row.faults, planted)
			if len(planted) != len(row.faults) {
				t.Errorf("only %v fit", names)
			}
			findAll(t, r, p, names, programs)
		})
	}
}
