package aten

import (
	"errors"
	"io"
	"math"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// sharded are models whose names of dimensions are hard to find: weights of queries, keys and values
// in one, attention written out.
var sharded = []struct {
	name  string
	slow  bool
	plans []string
}{
	{"nanogpt", false, []string{"dp", "tp", "sp"}},
	{"phi3", false, []string{"dp", "tp"}},
	{"mixtral", true, []string{"dp", "tp", "sp", "ep"}},
	{"deepseek_v3", true, []string{"dp", "tp", "cp", "ep"}},
	{"einsum", false, []string{"dp", "tp", "sp", "cp"}},
	{"alibi", false, []string{"dp", "tp", "cp"}},
}

// Plans of two devices give the loss of data parallelism after three steps.
func TestHardNamesAreSharded(t *testing.T) {
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 2, Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	for _, s := range sharded {
		t.Run(s.name, func(t *testing.T) {
			if s.slow {
				slowtest.Only(t)
			}
			want := math.NaN()
			ep := plantest.Row{Name: "ep", Apply: func(p *plan.Plan) { p.EP = 2 }}
			for _, row := range append(plantest.Meshes(), ep) {
				if !slices.Contains(s.plans, row.Name) {
					continue
				}
				last := stepped(t, e, s.name, row)
				t.Logf("%s %-6s %.6f", s.name, row.Name, last)
				if row.Name == "dp" {
					want = last
				}
				if !(math.Abs(last-want) < 1e-5*want) {
					t.Errorf("under %s the loss is %v, and %v under dp", row.Name, last, want)
				}
			}
		})
	}
}

// stepped trains three steps under a plan, and gives the last loss.
func stepped(t *testing.T, e *engine.Engine, name string, row plantest.Row) float64 {
	t.Helper()
	m, _ := load(t, name)
	r := recipe.Default()
	r.Out, r.Steps, r.Batch, r.Seq, r.Precision = t.TempDir(), 3, 4, 8, dtype.F32
	r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 1
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch = "2xcpu", 8, 4
	row.Apply(p)
	tr, err := train.New(t.Context(), train.Options{Engine: e, Model: m, Recipe: r, Data: chance{},
		Plan: p})
	if err != nil {
		t.Fatalf("%s: %v", row.Name, err)
	}
	defer tr.Close()
	last := math.NaN()
	for {
		s, err := tr.Step(t.Context())
		if errors.Is(err, io.EOF) {
			return last
		} else if err != nil {
			t.Fatalf("%s: %v", row.Name, err)
		}
		last = s.Loss
	}
}
