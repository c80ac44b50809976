package deepwell

import (
	"cmp"
	"context"
	"fmt"
	"io"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/table"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A KernelsJob asks what runs for a layer of a model.
type KernelsJob struct {
	Source    string // a plan without a pipeline, a model's name, or a file of [capture.Open]
	Cluster   string // NxGPU; "" is the plan's
	Precision string // of linear layers; "" is the plan's, or bf16
	Seq       int64  // tokens of a sequence, for a model; 0 is 2,048, or its context
}

// Kernels compiles the step of a model for a cluster, with and without kernels of our own, and
// lists the kernels of a layer. No GPU is used, and nothing runs.
func (e *Env) Kernels(ctx context.Context, job KernelsJob) (*table.Table, error) {
	v := e.begin(ctx, "kernels")
	var spec step.Spec
	var m *capture.Model // open while programs are written: a captured one reads its file then
	defer func() {
		if m != nil {
			_ = m.Close()
		}
	}()
	cluster := get(v, "read the cluster", func() (machine.Cluster, error) {
		c, err := clusterOf(CompileJob{Source: job.Source, Cluster: job.Cluster})
		if err == nil && c.CPU() {
			err = diag.New(diag.NotSupported, "a table of kernels is of a GPU").
				Because("XLA:CPU compiles a layer as a few functions, which have no names to count by").
				Try("--cluster 8xb200; what the CPU is given is in docs/kernels.md")
		}
		return c, err
	})
	v.pass("read the model", func() (err error) {
		spec, m, err = layerSpec(job, cluster)
		return err
	})
	var both [2]*step.Programs // with kernels of our own, and without
	v.pass("write the programs", func() (err error) {
		for i := range both {
			spec.Kernels = kernels.Options{Named: true, Without: i == 1}
			if both[i], err = step.Build(spec); err != nil {
				return at(err, job.Source)
			}
		}
		for _, p := range both[0].Passes {
			e.Events.Emit(event.Phase{Verb: v.name, Name: fmt.Sprintf("rewrite %s: %d operations become %d",
				p.Name, p.Before, p.After)})
		}
		return nil
	})
	reports := get(v, "compile them for the GPU", func() ([]*overlap.Report, error) {
		return e.layerReports(ctx, both[:], cluster)
	})
	return get(v, "list the kernels of a layer", func() (*table.Table, error) {
		t := &table.Table{Model: job.Source, Cluster: cluster.String(),
			Precision: cmp.Or(spec.Recipe.GEMMs, "bf16"), Seq: int64(spec.Recipe.Seq),
			Batch: int64(spec.Recipe.Batch), Passes: both[0].Passes}
		if cluster.Note != "" {
			t.Notes = append(t.Notes, cluster.Note)
		}
		var err error
		t.Layers, err = table.Of(reports[0], reports[1], both[0].Choices, cluster.GPU)
		return t, err
	}), v.err
}

// layerSpec says which programs have the layer: a plan's, or of a model with FSDP over all devices,
// without recomputation.
func layerSpec(job KernelsJob, c machine.Cluster) (spec step.Spec, m *capture.Model,
	err error) {
	var p *plan.Plan
	name := job.Source
	if isPlan(job.Source) {
		if p, err = readPlan(job.Source); err != nil {
			return spec, nil, err
		}
		if p.PP.Size > 1 || p.Devices() != int64(c.Count) || job.Seq != 0 {
			return spec, nil, diag.New(diag.BadUsage,
				"kernels takes a plan as it is, and without a pipeline").At("%s", job.Source).
				Try("leave --cluster and --seq out; or give the model's name")
		}
		name = p.Model
	}
	if m, err = capture.Open(name, capture.Options{}); err != nil {
		return spec, nil, err
	}
	trained := m.Trained()
	if p == nil {
		p = usualPlan(name, trained, c, CompileJob{Seq: job.Seq})
	}
	r, err := recipeOf(trained, p, cmp.Or(job.Precision, p.Precision))
	if err != nil {
		return spec, m, err
	}
	spec = step.Spec{Model: trained, Recipe: r, Arch: c.Arch()}
	if c.Count > 1 {
		spec.Plan = p
	}
	return spec, m, nil
}

// layerReports compiles the gradient programs, at the same time, and reads their schedules.
func (e *Env) layerReports(ctx context.Context, list []*step.Programs, c machine.Cluster) (
	[]*overlap.Report, error) {
	rates, err := overlap.RatesOf(c.GPU)
	if err != nil {
		return nil, err
	}
	reports := make([]*overlap.Report, len(list))
	read := func(i int) error {
		runner := replay.NewRunner(replay.RunOptions{Child: e.Child, Environ: e.Environ,
			Engines: e.Engines, Cache: e.Cache, Log: io.Discard})
		defer runner.Close()
		_, format, code, err := runner.Optimized(ctx, list[i].Find(step.Gradient, 0).Module, c)
		if err != nil {
			return err
		}
		m, err := hlo.Read(format, code)
		if err == nil {
			reports[i], err = overlap.Read(m, c, rates)
		}
		return err
	}
	return reports, parallel.Each(2, len(list), func() func(int) error { return read })
}
