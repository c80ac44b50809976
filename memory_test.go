package deepwell

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/step"
)

// accounted are plans of every schedule and none, every recomputation, precision and offload, with
// meshes that change from one to the next.
func accounted() (list []*plan.Plan) {
	meshes := []func(*plan.Plan){
		func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 4, Zero: 3, Gather: "layer"} },
		func(p *plan.Plan) {
			p.FSDP, p.TP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}, plan.TP{Size: 2, Sequence: true}
		},
		func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 4, Zero: 1, Gather: "step"} },
		func(p *plan.Plan) { p.DP, p.TP = 2, plan.TP{Size: 2, Sequence: true} },
		func(p *plan.Plan) { p.FSDP, p.DP = plan.FSDP{Size: 2, Zero: 2, Gather: "step"}, 2 },
		func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 4, Zero: 3, Gather: "microbatch"} },
		func(p *plan.Plan) {
			p.FSDP, p.TP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}, plan.TP{Size: 2}
		},
	}
	for _, order := range append([]string{""}, schedule.Names()...) {
		for _, again := range [][]ir.Tag{nil, {ir.Norm, ir.Attn}, {ir.MLP}, {ir.Norm, ir.Attn, ir.MLP}} {
			for _, word := range []string{"", "mxfp8", "nvfp4"} {
				for _, off := range [][]string{nil, {plan.Activations}, {plan.OptimizerState},
					{plan.Activations, plan.OptimizerState}} {
					p := plan.Default()
					p.Model, p.Seq, p.Microbatches = "llama3.1-8b", 8192, 8
					if order != "" {
						p.PP = plan.PP{Size: 4, Schedule: order}
					}
					meshes[len(list)%len(meshes)](p)
					p.Batch = 8 * p.Size(plan.DataAxis) * p.Size(plan.FSDPAxis)
					p.Recompute, p.Precision, p.Offload = again, word, off
					p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
					p.Cluster = fmt.Sprintf("%dxb200", p.Devices())
					list = append(list, p)
				}
			}
		}
	}
	return list
}

// Text, JSON and page of a dry run, and the search that found the plan, tell one account of memory.
func TestDryRunHoldsWhatThePlanSays(t *testing.T) {
	env := &Env{Events: event.Discard}
	dir := t.TempDir()
	const large, cluster = "llama3.1-70b", "64xb200"
	for i, one := range []PlanJob{
		{Source: large, Cluster: cluster, Fixed: autoplan.Fixed{"pp": "4", "schedule": "zb-h1", "tp": "4", "recompute": "norm+attn+mlp"}},
		{Source: large, Cluster: cluster, Fixed: autoplan.Fixed{"pp": "4", "schedule": "zb-v", "tp": "4", "recompute": "norm+attn"}},
		{Source: large, Cluster: cluster, Fixed: autoplan.Fixed{"pp": "1", "tp": "4", "recompute": "none", "offload": "optimizer"}},
		{Source: "llama3.1-8b", Cluster: "8xb200", Precisions: []string{"nvfp4"}},
		{Source: "deepseek-v3", Cluster: "1024xgb200", Batch: Batch{Sequences: 16384}, Fixed: autoplan.Fixed{"pp": "8", "tp": "1"}},
	} {
		one.Batch = cmp.Or(one.Batch, Batch{Sequences: 128})
		one.Top, one.Output = 1, filepath.Join(dir, fmt.Sprintf("%d.json", i))
		found, err := env.Plan(t.Context(), one)
		if err != nil {
			t.Fatalf("%+v: %v", one, err)
		}
		want := found.Choices[0]
		page := filepath.Join(dir, "page.html")
		d, err := env.DryRun(t.Context(), DryRunJob{Plan: one.Output, WhatIf: dryrun.WhatIf{Links: 1}, Report: page})
		if err != nil {
			t.Fatalf("%+v: %v", one, err)
		}
		peak, rank := d.Timeline.Peak()
		if d.Peak != want.Peak || d.Memory != want.Memory || peak != d.Memory || peak.Sum() != d.Peak ||
			d.Ranks[rank].Peak != peak {
			t.Errorf("%+v: planned %+v, dry run %+v, on the page %+v", one, want.Memory, d.Memory, peak)
		}
		html, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if tile := "<b>" + human.GiB(d.Peak) + "</b>"; !bytes.Contains(html, []byte(tile)) {
			t.Errorf("the page has no tile %s", tile)
		}
	}
}

// given is what a program gives that takes the place of nothing, in bytes of one device.
func given(t *testing.T, s *program.Module) (n int64) {
	t.Helper()
	count := func(list []program.Array, sign int64, some func(a program.Array) bool) {
		for _, a := range list {
			local, err := s.Local(a)
			if err != nil {
				t.Fatal(err)
			}
			if a.Memory == "" && some(a) {
				n += sign * local.Bytes()
			}
		}
	}
	count(s.Results, 1, func(program.Array) bool { return true })
	count(s.Args, -1, func(a program.Array) bool { return a.Into != "" })
	return n
}

// What plan, dryrun and compile say of a plan's memory is one account, cause by cause. What XLA
// needs for itself is a model, which bench/memory holds to the compiler; here compile takes the
// model's word for it, and all else from the arguments of the programs.
func TestMemoryIsOneAccount(t *testing.T) {
	var preset *model.Preset
	var err error
	if preset, err = model.Find("llama3.1-8b"); err != nil {
		t.Fatal(err)
	}
	config := *preset.Config
	config.Layers = 16
	all := accounted()
	for i, p := range all {
		if !slowtest.Enabled && i%17 != 0 {
			continue
		}
		t.Run(strings.Join(strings.Fields(p.String()), ""), func(t *testing.T) {
			if err := p.Check(&config); err != nil {
				t.Skip(err)
			}
			accountsAgree(t, &config, p)
		})
	}
}

// scalars is more than all scalars of a device: counters, losses, and the scales of tensors.
const scalars = 1 << 20

// near compares accounts cause by cause, but for scalars.
func near(a, b program.Memory) bool {
	return slices.EqualFunc(a.Causes(), b.Causes(), func(x, y program.Cause) bool {
		return x.Name == y.Name && max(x.Bytes-y.Bytes, y.Bytes-x.Bytes) <= scalars
	})
}

func accountsAgree(t *testing.T, config *model.Config, p *plan.Plan) {
	f, err := footprint.New(config, "sm_100")
	if err != nil {
		t.Fatal(err)
	}
	if p.Precision != "" {
		policy, err := precision.Load(config, p.Precision)
		if err != nil {
			t.Fatal(err)
		}
		f.In(policy)
	}
	foreseen, err := f.Needs(p)
	if err != nil {
		t.Fatal(err)
	}
	programs, err := step.Build(step.Spec{Model: config, Recipe: step.RecipeOf(p), Arch: "sm_100",
		Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	ranks, err := programs.Footprints(func(s *program.Module) step.Needs {
		return step.Needs{Temp: foreseen[s.Name][0], Output: given(t, s)}
	})
	if err != nil {
		t.Fatal(err)
	}
	want, err := f.Predict(p)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range ranks {
		got, want := r.Memory, want.Ranks[i].Memory
		got.Host, want.Host = 0, 0 // of the compiler's account at its worst moment
		off := float64(want.Sum())/float64(got.Sum()) - 1
		if !near(got, want) {
			t.Errorf("rank %d: programs hold %v in %s, predicted %v, %+.2f %%", i, got.Causes(), r.Largest,
				want.Causes(), 100*off)
		}
	}
}
