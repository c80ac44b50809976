package autoplan

import (
	"context"
	"maps"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/plan"
)

// The search takes the way to experts that has the lowest price, and says so; both what gathers
// tokens and what overlaps half batches is chosen somewhere.
func TestExchangesAreChosenByPrice(t *testing.T) {
	seen := map[string]bool{}
	for _, ep := range []string{"4", "8"} {
		free := Fixed{"ep": ep, "tp": "1", "cp": "1", "pp": "4", "microbatch": "2", "zero": "2",
			"schedule": "interleaved", "recompute": "norm+experts"}
		job := jobFor(t, "qwen3-235b-a22b", "128xb200", 4096, 4<<20)
		job.Top, job.Fixed = 1, free
		r, err := Search(context.Background(), job)
		if err != nil {
			t.Fatal(err)
		}
		best := r.Choices[0]
		for _, fixed := range []string{"ep_kind=a2a,ep_overlap=false", "ep_kind=a2a,ep_overlap=true",
			"ep_kind=gather,ep_overlap=false", "ep_kind=gather,ep_overlap=true"} {
			more, err := ParseFixed(fixed)
			if err != nil {
				t.Fatal(err)
			}
			job.Fixed = maps.Clone(free)
			maps.Copy(job.Fixed, more)
			r, err := Search(context.Background(), job)
			if err != nil {
				t.Fatalf("%s: %v", fixed, err)
			}
			p := r.Choices[0].Plan
			if p.GathersTokens() != strings.Contains(fixed, "gather") ||
				p.EPOverlap != strings.Contains(fixed, "true") {
				t.Errorf("fixed %s gives %s, overlap %v", fixed, p.EPKind, p.EPOverlap)
			}
			if r.Choices[0].Step*Margin < best.Step {
				t.Errorf("ep %s: %s takes %.3f s, the plan chosen %.3f s: %s", ep, fixed,
					r.Choices[0].Step, best.Step, best.Why)
			}
		}
		seen["gather"] = seen["gather"] || best.Plan.GathersTokens()
		seen["overlap"] = seen["overlap"] || best.Plan.EPOverlap
		if !strings.Contains(best.Why, "ep_kind") || !strings.Contains(best.Why, "ep_overlap") {
			t.Errorf("no reason for the way to experts: %s", best.Why)
		}
		t.Logf("ep %s: %s", ep, best.Why)
	}
	if !seen["gather"] || !seen["overlap"] {
		t.Errorf("chosen were %v", seen)
	}
}

// Ways that programs cannot have are not searched: one sequence has no halves, NVFP4 scales by
// whole tensors, a dense model has no experts, and other stacks have their own way.
func TestExchangesThatCannotBe(t *testing.T) {
	job, err := jobFor(t, "qwen3-235b-a22b", "128xb200", 4096, 4<<20).filled()
	if err != nil {
		t.Fatal(err)
	}
	job.Precisions = []dtype.Format{dtype.FormatBF16, dtype.NVFP4}
	two := meshOption{mesh: mesh{tp: 1, cp: 1, ep: 8, pp: 1, data: 16}, microbatch: 2}
	one, nvfp4, none := two, two, two
	one.microbatch, nvfp4.precision, none.ep = 1, 1, 1
	for _, row := range []struct {
		n    meshOption
		ways int
	}{{two, 4}, {one, 2}, {nvfp4, 2}, {none, 1}} {
		ways := job.exchanges(row.n, 8)
		if len(ways) != row.ways {
			t.Errorf("%+v has %v", row.n, ways)
		}
		for _, x := range ways {
			p := job.blank("128xb200")
			row.n.exchange, row.n.rows, row.n.micros = x, 256, 1
			job.fill(p, row.n, layoutOption{shardOption{1, 16, 3, plan.GatherLayer},
				scheduleOption{"1f1b", 0}}, recomputeOption{})
			if row.n.ep == 1 {
				continue
			}
			p.Precision = precisionName(job.Precisions[row.n.precision])
			p.Batch = 128 * row.n.microbatch
			if err := p.Check(job.Config); err != nil {
				t.Errorf("%+v: %v", x, err)
			}
		}
	}
	dense := jobFor(t, "llama3.1-8b", "8xb200", 4096, 1<<20)
	dense.Fixed = Fixed{"ep_kind": "gather"}
	if _, err := Search(context.Background(), dense); err == nil ||
		!strings.Contains(err.Error(), "has none") {
		t.Errorf("a dense model with ep_kind: %v", err)
	}
	if _, err := ParseFixed("ep_kind=ring"); err == nil {
		t.Error("ep_kind=ring is taken")
	}
}
