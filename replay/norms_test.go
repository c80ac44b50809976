package replay

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/step"
)

// normPrograms are gradients, with how many different kernels of rows they must call: norms, of
// which some are of sums, and gradients.
var normPrograms = []struct {
	model, format, plan string
	norms, added, grads int
}{
	{"llama", "bf16", "one", 2, 1, 3},
	{"llama", "bf16", "fsdp8", 2, 1, 3},
	{"llama", "bf16", "tp2 fsdp4", 0, 0, 0}, // tp shards several sequences (kernels.Scattered)
	{"llama", "mxfp8", "one", 2, 1, 3},      // which write codes (pass norm-codes)
	{"llama", "mxfp8", "fsdp8", 2, 1, 3},
	{"llama", "nvfp4", "fsdp8", 2, 1, 3}, // the last layer's in bf16
	{"qwen3", "bf16", "fsdp8", 4, 1, 5},  // two are of heads
	{"gemma2", "bf16", "one", 3, 1, 4},
	{"deepseek", "bf16", "one", 4, 1, 4},        // two are of 192 and 160 columns, which are no power of two
	{"llama", "bf16", "fsdp8 offload", 1, 1, 3}, // nothing is saved in stacks
}

func normProgram(t *testing.T, model, format, plan string) Pair {
	t.Helper()
	row := lists.Find(planRows(), func(p planRow) bool { return p.name == plan })
	list, err := cases(model, format, row)
	if err != nil {
		t.Fatal(err)
	}
	return lists.Find(list, func(c testCase) bool { return c.pair.Kind == step.Gradient }).pair
}

// normsIn lists the kernels of rows of a program.
func normsIn(text string) (list []rownorm.Norm) {
	for _, spec := range fused.SpecsIn(text) {
		if n, err := rownorm.Parse(spec); err == nil {
			list = append(list, n)
		}
	}
	return list
}

// Programs of every precision have kernels of rows.
func TestNormsAreOfRows(t *testing.T) {
	for _, row := range normPrograms {
		var norms, added, grads int
		for _, n := range normsIn(normProgram(t, row.model, row.format, row.plan).GPU.Text) {
			t.Log(row.model, row.format, row.plan, n)
			switch {
			case n.Grads > 0:
				grads++
			case n.Added:
				added++
				norms++
			default:
				norms++
			}
		}
		if norms != row.norms || added != row.added || grads != row.grads {
			t.Errorf("%s %s, %s: %d norms, %d of sums, %d gradients", row.model, row.format, row.plan, norms,
				added, grads)
		}
	}
}

// Programs with kernels of rows compute what their references do.
func TestReplayNorms(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	for _, row := range normPrograms {
		t.Run(row.model+" "+row.format+" "+row.plan, func(t *testing.T) {
			p := normProgram(t, row.model, row.format, row.plan)
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

// normFault changes the specification of the first kernel that it fits.
func normFault(name string, change func(n *rownorm.Norm) bool) fault {
	return fault{name, tritonTarget, func(_ *writer, s *site) (bool, *value) {
		found := fused.SpecsIn(string(s.config))
		if len(found) != 1 {
			return false, nil
		}
		n, err := rownorm.Parse(found[0])
		if err != nil || !change(&n) {
			return false, nil
		}
		s.config = []byte(strings.ReplaceAll(string(s.config), found[0], n.String()))
		return true, nil
	}}
}

// normFaults are what a kernel of rows, or its arguments, could have wrong.
var normFaults = []fault{
	normFault("a shifted weight", func(n *rownorm.Norm) bool {
		n.Shift = 1
		return n.Grads == 0
	}),
	normFault("another ε", func(n *rownorm.Norm) bool {
		n.Eps = 1
		return n.Grads > 0
	}),
	{"another round's slot", tritonTarget, func(w *writer, s *site) (bool, *value) {
		n, ok := normOf(s)
		if !ok || len(n.From) == 0 {
			return false, nil
		}
		at := n.Operands()
		x := w.reshape(s.values[at])
		x = w.elementwise("subtract", w.fullInt(typeS32, nil, int64(n.Rounds)-1), x)
		s.values[at] = w.reshape(x, s.values[at].shape.dims...)
		return true, nil
	}},
	{"the residual's gradient as one of the norm's", tritonTarget,
		func(w *writer, s *site) (bool, *value) {
			n, ok := normOf(s)
			if !ok || !n.Residual {
				return false, nil
			}
			return swapped(2, 2+n.Grads)(w, s)
		}},
	{"no residual's gradient", tritonTarget, func(w *writer, s *site) (bool, *value) {
		n, ok := normOf(s)
		if !ok || !n.Residual {
			return false, nil
		}
		at := 2 + n.Grads
		s.values[at] = w.convertExactly(w.full(typeF32, s.values[at].shape.dims, 0),
			s.values[at].shape.typ)
		return true, nil
	}},
	{"rows shifted by one", tritonTarget, func(w *writer, s *site) (bool, *value) {
		n, ok := normOf(s)
		if !ok || n.Grads == 0 || len(s.values[2].shape.dims) != 2 {
			return false, nil
		}
		s.values[2] = rotated(w, s.values[2], 0, 1)
		return true, nil
	}},
}

// normOf reads the kernel of rows of a call.
func normOf(s *site) (rownorm.Norm, bool) {
	found := fused.SpecsIn(string(s.config))
	if len(found) != 1 {
		return rownorm.Norm{}, false
	}
	n, err := rownorm.Parse(found[0])
	return n, err == nil
}

// Faults of kernels of rows are found.
func TestFaultsOfNorms(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	p := normProgram(t, "llama", "bf16", "one")
	planted := map[string]bool{}
	names, programs := plantAll(t, r, p, normFaults, planted)
	if len(planted) != len(normFaults) {
		t.Errorf("only %v fit", names)
	}
	findAll(t, r, p, names, programs)
}
