package train

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// The gradients of a layer go as one, the two halves of a batch do not: at 64 GPUs the limit is
// between 99.6 and 134 MB; at 1,024 a layer's gradients are within what XLA joins by itself.
func TestGradientsOfALayerAreJoined(t *testing.T) {
	for _, row := range []struct {
		plan     string
		from, to int64
	}{
		{"llama3.1-405b-64xb200.json", 99_600_000, 134_217_728}, {"llama3.1-405b-1024xb200.json", 0, 0},
	} {
		path := filepath.Join("..", "examples", "plans", row.plan)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.Parse(text, path)
		if err != nil {
			t.Fatal(err)
		}
		preset, err := model.Find(p.Model)
		if err != nil {
			t.Fatal(err)
		}
		w, err := step.Build(step.Spec{Model: preset.Config, Recipe: step.RecipeOf(p), Arch: "sm_100",
			Plan: p})
		if err != nil {
			t.Fatal(err)
		}
		flags := w.Find(step.Gradient, 0).Module.Flags
		limit, _ := flags["xla_gpu_reduce_scatter_combine_threshold_bytes"].(int64)
		if limit < row.from || limit > row.to {
			t.Errorf("%s: joined up to %d bytes, not from %d to %d", row.plan, limit, row.from, row.to)
		}
	}
}

// Weights are rounded once for a step, by the update, whenever their shards are gathered: programs of
// a stage that join them for a microbatch take the same copies as those that do for a layer. (What
// a forward pass had joined in bf16 was once kept for the backward pass, which rounded it each
// time.)
func TestStagesTakeCopiesHoweverTheyGather(t *testing.T) {
	preset, err := model.Find("llama3.2-1b")
	if err != nil {
		t.Fatal(err)
	}
	made := func(gather, format string) (list []string) {
		p := plan.Default()
		p.Model, p.Cluster, p.Precision = preset.Name, "4xb200", format
		p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
		p.Seq, p.Batch, p.Microbatches = 1024, 8, 4
		p.PP = plan.PP{Size: 2, Schedule: "1f1b"}
		p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: gather}
		w, err := step.Build(step.Spec{Model: preset.Config, Recipe: step.RecipeOf(p), Arch: "sm_100",
			Plan: p})
		if err != nil {
			t.Fatal(err)
		}
		for name, g := range w.Graphs() {
			if !strings.HasSuffix(name, ".copies") {
				continue
			}
			for _, v := range g.Results {
				list = append(list, name+" "+v.Name)
			}
		}
		slices.Sort(list)
		return list
	}
	for _, format := range []string{"mxfp8", "nvfp4"} {
		want, got := made("layer", format), made("microbatch", format)
		if len(want) == 0 || !slices.Equal(want, got) {
			t.Errorf("%s: copies for a microbatch\n%s\nfor a layer\n%s", format, strings.Join(got, "\n"),
				strings.Join(want, "\n"))
		}
	}
}

// Where a plan and a recipe contradict each other, the key to change is named, in both.
func TestPlansNameTheKey(t *testing.T) {
	c, err := model.Parse([]byte(config))
	if err != nil {
		t.Fatal(err)
	}
	p := plan.Default()
	p.Seq, p.Batch, p.Microbatches = 16, 4, 1
	p.DP, p.Cluster = 2, "2xcpu"
	r := step.RecipeOf(p)
	r.Precision = dtype.BF16
	_, err = step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu", Plan: p})
	if e := diag.From(err); e == nil || e.Fix !=
		`--set precision=f32, or in the plan "types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}` {
		t.Errorf("%v", err)
	}
	r = step.RecipeOf(p)
	r.Seq = 32
	_, err = step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu", Plan: p})
	if e := diag.From(err); e == nil || e.Fix != `--set seq=16, or in the plan "seq": 32` {
		t.Errorf("%v", err)
	}
}
