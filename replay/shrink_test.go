package replay

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// planOf is a plan of 8 microbatches in bf16, on as many B200 as its axes make.
func planOf(apply func(*plan.Plan)) *plan.Plan {
	p := plan.Default()
	p.Seq, p.Microbatches = 8192, 8
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	apply(p)
	p.Batch = 4 * p.Microbatches * p.DataParallelSize()
	p.Cluster = fmt.Sprintf("%dx%s", p.Devices(), gpu)
	return p
}

func preset(t *testing.T, name string) *model.Config {
	t.Helper()
	p, err := model.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Config
}

// shrinkRows are models and plans, and what becomes of them.
var shrinkRows = []struct {
	name, model string
	plan        func(*plan.Plan)
	axes        string // as [plan.Plan.Label] writes them
	layers      int64
	heads, kv   int64
}{
	{"one device", "llama3.1-8b", func(*plan.Plan) {}, "", 3, 8, 2},
	{"405b: three axes, one KV head on a device", "llama3.1-405b", func(p *plan.Plan) {
		p.DP, p.FSDP.Size, p.TP = 16, 128, plan.TP{Size: 8, Sequence: true, Overlap: true}
		p.Microbatches = 1
	}, "dp 2, fsdp 2 zero 3, tp 2", 4, 32, 2},
	{"copied KV heads", "llama3.1-8b", func(p *plan.Plan) {
		p.TP = plan.TP{Size: 16, Sequence: true}
	}, "tp 2", 3, 4, 1},
	{"ring", "llama3.1-8b", func(p *plan.Plan) { p.CP = plan.CP{Size: 8, Kind: "ring"} },
		"cp 4", 3, 8, 2},
	{"zigzag of two", "llama3.1-8b", func(p *plan.Plan) {
		p.CP = plan.CP{Size: 2, Kind: "gather", Balance: true}
	}, "cp 2", 3, 8, 2},
	{"gather", "llama3.1-8b", func(p *plan.Plan) { p.CP = plan.CP{Size: 8, Kind: "gather"} },
		"cp 2", 3, 8, 2},
	{"heads exchanged", "llama3.1-8b", func(p *plan.Plan) { p.CP = plan.CP{Size: 8, Kind: "a2a"} },
		"cp 2", 3, 8, 2},
	{"KV heads copied for an all-to-all", "llama3.1-8b", func(p *plan.Plan) {
		p.TP, p.CP = plan.TP{Size: 2}, plan.CP{Size: 8, Kind: "a2a"}
	}, "tp 2, cp 2", 3, 8, 2},
	{"groups in a ring", "llama3.1-8b", func(p *plan.Plan) {
		p.CP = plan.CP{Size: 32, Kind: "a2a+ring", Inner: 4, Balance: true}
	}, "cp 8", 3, 8, 2},
	{"stages between the first and the last", "llama3.1-70b", func(p *plan.Plan) {
		p.FSDP.Size, p.PP = 16, plan.PP{Size: 4, Schedule: "1f1b"}
	}, "fsdp 2 zero 3, pp 4", 16, 16, 2},
	{"virtual stages", "llama3.1-70b", func(p *plan.Plan) {
		p.FSDP = plan.FSDP{Size: 4, Zero: 2, Gather: plan.GatherStep}
		p.PP = plan.PP{Size: 8, Virtual: 5, Schedule: "interleaved"}
	}, "fsdp 2 zero 2, pp 2", 8, 16, 2},
	{"sixteen devices at most", "llama3.1-70b", func(p *plan.Plan) {
		p.DP, p.FSDP.Size, p.TP = 2, 4, plan.TP{Size: 4, Sequence: true}
		p.CP, p.PP = plan.CP{Size: 4, Kind: "ring"}, plan.PP{Size: 4, Schedule: "zb-h1"}
	}, "fsdp 2 zero 3, tp 2, cp 2, pp 2", 8, 32, 4},
	{"the last layers are in bf16", "llama3.1-8b", func(p *plan.Plan) {
		p.Precision = "nvfp4"
	}, "", 7, 8, 2},
	{"five windows and one without", "gemma3-1b", func(p *plan.Plan) {
		p.Seq, p.FSDP.Size = 4096, 8
	}, "fsdp 2 zero 3", 6, 4, 1},
	{"windows in a pipeline", "gemma3-1b", func(p *plan.Plan) {
		p.Seq, p.PP = 4096, plan.PP{Size: 4, Schedule: "1f1b"}
	}, "pp 4", 20, 4, 1},
	{"chunks of 160 tokens and blocks of 32", "llama3.1-70b", func(p *plan.Plan) {
		p.Seq, p.Precision = 2560, "mxfp8"
		p.TP = plan.TP{Size: 8, Sequence: true, Overlap: true}
		p.CP = plan.CP{Size: 8, Kind: "gather", Balance: true}
	}, "tp 2, cp 4", 3, 16, 2},
	{"all layers are alike", "llama3.1-8b", func(p *plan.Plan) { p.Precision = "mxfp8" }, "", 3, 8, 2},
}

// A small plan has every axis of the full one and the same words, fits its small model, and is the
// smallest of its kind: shrunk again, it stays.
func TestShrink(t *testing.T) {
	for _, row := range shrinkRows {
		t.Run(row.name, func(t *testing.T) {
			c, full := preset(t, row.model), planOf(row.plan)
			s, err := Shrink(c, full)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.Plan.Label(); got != row.axes || s.Plan.Devices() > smallDevices {
				t.Errorf("axes %q, not %q", got, row.axes)
			}
			if s.Model.Layers != row.layers || s.Model.Heads != row.heads || s.Model.KVHeads != row.kv {
				t.Errorf("%d layers, %d heads, %d KV heads", s.Model.Layers, s.Model.Heads, s.Model.KVHeads)
			}
			same := *s.Plan
			same.Model, same.Cluster, same.Seq, same.Batch = full.Model, full.Cluster, full.Seq, full.Batch
			same.Microbatches, same.DP, same.EP = full.Microbatches, full.DP, full.EP
			same.FSDP.Size, same.TP.Size, same.CP.Size = full.FSDP.Size, full.TP.Size, full.CP.Size
			same.CP.Inner = full.CP.Inner
			same.PP.Size, same.PP.Virtual = full.PP.Size, full.PP.Virtual
			if same.String() != full.String() || s.Model.HeadDim != c.HeadDim {
				t.Errorf("more than sizes differ:\n%s\n%s", full, s.Plan)
			}
			if !sameKinds(c, s.Model) || s.Plan.Seq/s.Plan.CP.Chunks()%max(1, s.Plan.Block()) != 0 {
				t.Errorf("windows %v of %v, seq %d", s.Model.Windowed, c.Windowed, s.Plan.Seq)
			}
			again, err := Shrink(s.Model, s.Plan)
			if err != nil || len(again.Changes) > 0 {
				t.Errorf("shrunk again: %v, %v", again, err)
			}
			if _, err := step.Build(step.Spec{Model: s.Model, Recipe: step.RecipeOf(s.Plan),
				Plan: s.Plan, Arch: "sm_100"}); err != nil {
				t.Error(err)
			}
		})
	}
}

// sameKinds says that both models have layers with a window, and without, if one of them has.
func sameKinds(a, b *model.Config) bool {
	return slices.Contains(a.Windowed, true) == slices.Contains(b.Windowed, true) &&
		slices.Contains(a.Windowed, false) == slices.Contains(b.Windowed, false)
}

// An error about the small plan says so: its sizes are nobody's.
func TestSmallPlanErrors(t *testing.T) {
	s, err := Shrink(preset(t, "llama3.1-70b"), planOf(func(p *plan.Plan) { p.CP.Size = 2 }))
	if err != nil {
		t.Fatal(err)
	}
	s.Plan.Seq++
	if err := s.Check(); err == nil || !strings.Contains(err.Error(), "made small") {
		t.Errorf("error %v", err)
	}
}

// Every change of a size is reported, sizes keep their alignment, and a model that is small already
// stays as it is.
func TestShrinkReportsChanges(t *testing.T) {
	c := preset(t, "llama3.1-405b")
	s, err := Shrink(c, planOf(func(p *plan.Plan) { p.TP, p.Microbatches = plan.TP{Size: 8}, 1 }))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"tp 8 → 2", "layers 126 → 3", "heads 128 → 32", "KV heads 8 → 2",
		"hidden 16384 → 384", "seq 8192 → 256"} {
		if !slices.ContainsFunc(s.Changes, func(c Change) bool { return c.String() == want }) {
			t.Errorf("%q is not among %v", want, s.Changes)
		}
	}
	if full, small := c.Vocab/8%aligned, s.Model.Vocab/2%aligned; full != small {
		t.Errorf("a device's vocabulary is aligned to %d, not %d", small, full)
	}
	tiny, err := model.Parse(fmt.Appendf(nil, models[0].config, 2))
	if err != nil {
		t.Fatal(err)
	}
	p := planOf(func(p *plan.Plan) { p.Seq, p.Microbatches = 128, 1 })
	p.Batch = 2
	if s, err := Shrink(tiny, p); err != nil || len(s.Changes) > 0 {
		t.Errorf("%v, %v", s, err)
	}
}

// A plan that cannot be compiled is not shrunk into one that can.
func TestShrinkRefuses(t *testing.T) {
	c := preset(t, "llama3.1-8b")
	for name, p := range map[string]*plan.Plan{
		"heads":   planOf(func(p *plan.Plan) { p.TP.Size = 3 }),
		"experts": planOf(func(p *plan.Plan) { p.EP = 2 }),
	} {
		if _, err := Shrink(c, p); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	cpu := planOf(func(*plan.Plan) {})
	cpu.Cluster = "1xcpu"
	if _, err := Shrink(c, cpu); diag.From(err).Code != diag.PlanMisfit {
		t.Errorf("CPU devices: %v", err)
	}
}
