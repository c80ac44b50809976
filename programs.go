package deepwell

import (
	"cmp"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// A source is a program to compile, and what is known about it.
type source struct {
	program *program.Program
	notes   []string
	// warnings are for people: what a run on this cluster computes differently.
	warnings []string
	planned  *step.Programs // of a plan; else nil
	// roomiest are the programs with the plan's largest slots of experts, by which memory is planned;
	// nil if there is but one size. Their modules' names end in roomy.
	roomiest *step.Programs
	sums     dtype.DType // element type of gradient reductions
	// twins maps a compiled module to the modules with the same text, which are not compiled again.
	twins map[string][]string
}

// programOf builds the programs of a plan for its own cluster, or for another one of the same size.
func programOf(job CompileJob, c machine.Cluster) (*source, error) {
	path := job.Source
	p, err := readPlan(path)
	if err != nil {
		return nil, err
	}
	if n := p.Devices(); n != int64(c.Count) {
		return nil, diag.New(diag.PlanMisfit, "the plan is for %d devices; the cluster %s has %d", n, c,
			c.Count).At("%s", path).Try("leave --cluster out, or name a cluster of %d devices", n)
	}
	m, err := capture.Open(p.Model, capture.Options{})
	if err != nil {
		return nil, at(err, path)
	}
	defer func() { _ = m.Close() }()
	x, err := writePlan(m.Trained(), p, c, cmp.Or(job.Precision, p.Precision), stageNameOf(path))
	if err != nil {
		return nil, at(err, path)
	}
	return x, nil
}

// recipeOf returns the recipe of a plan with its GEMMs in the given precision: a format, or a
// policy file. It sets the plan's precision to the format, or to the policy's narrowest one.
func recipeOf(config model.Model, p *plan.Plan, format string) (*recipe.Recipe, error) {
	if p.Precision = format; !precision.IsFile(format) {
		return step.RecipeOf(p), nil
	}
	policy, err := precision.Load(config, format)
	if err != nil {
		return nil, err
	}
	p.Precision = string(policy.Narrowest())
	r := step.RecipeOf(p)
	r.GEMMs = format
	return r, nil
}

// writePlan builds the programs of a plan, each distinct text once.
func writePlan(config model.Model, p *plan.Plan, c machine.Cluster, format, name string) (*source,
	error) {
	r, err := recipeOf(config, p, format)
	if err != nil {
		return nil, err
	}
	w, err := step.Build(step.Spec{Model: config, Recipe: r, Arch: c.Arch(), Plan: p})
	if err != nil {
		return nil, err
	}
	notes := append(w.Notes, p.SplitAcrossNVLink(c.Domain())...)
	out := &source{program: &program.Program{Name: name}, notes: notes,
		warnings: w.Warnings, planned: w,
		sums:  p.Types.Collectives,
		twins: map[string][]string{}}
	list, err := modulesOf(w, c)
	if err != nil {
		return nil, err
	}
	if n := w.Rungs(); n > 1 {
		if out.roomiest, err = w.Rung(n - 1); err != nil {
			return nil, err
		}
		more, err := modulesOf(out.roomiest, c)
		if err != nil {
			return nil, err
		}
		for _, s := range more {
			s.Name += roomy
		}
		list = append(list, more...)
	}
	first := map[string]string{} // by text
	for _, s := range list {
		switch {
		case first[s.Text] != "":
			out.twins[first[s.Text]] = append(out.twins[first[s.Text]], s.Name)
		default:
			first[s.Text] = s.Name
			out.program.Modules = append(out.program.Modules, *s)
		}
	}
	return out, out.program.Validate()
}

// roomy ends the names of modules with the plan's largest slots of experts.
const roomy = ".slots"

// modulesOf lists the modules of a step on all ranks, with devices counted from 0: ranks with the
// same text share one compiled program. On GPUs it adds the transfers between pipeline stages.
func modulesOf(p *step.Programs, c machine.Cluster) (list []*program.Module, err error) {
	for _, row := range p.List {
		if p.Joint() && (row.Kind == step.Evaluate || row.Kind == step.Quantize) && !p.Plan.Ahead() {
			continue // not part of a step
		}
		one := *row.Module
		one.Devices = p.Ranks[0].Devices
		list = append(list, &one)
	}
	if p.Joint() || c.CPU() {
		return list, nil // stages copy arrays from device to device
	}
	hidden := p.OfStage(step.Forward, 0).Module
	for _, a := range hidden.Results {
		if a.Role != program.Activation {
			continue
		}
		local, err := hidden.Local(a)
		if err != nil {
			return nil, err
		}
		s, err := engine.PermuteModule(local, p.Ranks[0].Devices, p.Ranks[1].Devices)
		if err != nil {
			return nil, err
		}
		s.Name = "stage_transfer"
		list = append(list, s)
	}
	return list, nil
}

// usualSeq is the sequence length of a model's step if none is given.
const usualSeq = 2048

// stepOf builds the step of a model that is named. For one device it is loss and gradients alone,
// with every layer recomputed in the backward pass. For several devices it is all programs of a
// plan with FSDP (ZeRO-3) over all of them, without recomputation.
func stepOf(called string, m model.Model, c machine.Cluster, job CompileJob) (*source, error) {
	p := usualPlan(called, m, c, job)
	name := stageNameOf(called + ".step")
	if c.Count > 1 {
		return writePlan(m, p, c, job.Precision, name)
	}
	p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	r, err := recipeOf(m, p, job.Precision)
	if err != nil {
		return nil, err
	}
	w, err := step.Build(step.Spec{Model: m, Recipe: r, Arch: c.Arch()})
	if err != nil {
		return nil, err
	}
	s := *w.Find(step.Gradient, 0).Module
	s.Name = name
	return &source{program: &program.Program{Name: name, Modules: []program.Module{s}}, notes: w.Notes,
		warnings: w.Warnings}, nil
}

// usualPlan is the plan of a model's step: FSDP over all devices, a sequence for each.
func usualPlan(called string, m model.Model, c machine.Cluster, job CompileJob) *plan.Plan {
	p := plan.Default()
	p.Model, p.Cluster = called, c.String()
	p.Seq, p.Batch = cmp.Or(job.Seq, seqOf(m)), max(1, job.Batch, int64(c.Count))
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	if c.Count > 1 {
		p.FSDP = plan.FSDP{Size: int64(c.Count), Zero: 3, Gather: "layer"}
	}
	return p
}

// footprints adds up the memory of a device of each rank, by cause, from the compiler's reports.
func (x *source) footprints(reports []*engine.Report) ([]*step.Footprint, error) {
	byName := map[string]*engine.Report{}
	for _, r := range reports {
		byName[r.Module] = r
		for _, twin := range x.twins[r.Module] {
			byName[twin] = r
		}
	}
	planned, end := x.planned, ""
	if x.roomiest != nil {
		planned, end = x.roomiest, roomy
	}
	list, err := planned.Footprints(func(s *program.Module) step.Needs {
		m := byName[s.Name+end].Memory
		return step.Needs{Temp: m.Temp, Output: m.Output, Alias: m.Alias, Host: m.Host}
	})
	for _, f := range list {
		f.Largest += end
		f.Capacity = reports[0].CapacityBytes
	}
	return list, err
}

// keepsToPlan compares compiled programs with the plan's graphs: XLA must neither change the
// collectives nor rematerialize on its own.
func (x *source) keepsToPlan(reports []*engine.Report, cpu bool) error {
	graphs := x.planned.Graphs()
	if x.roomiest != nil {
		for name, g := range x.roomiest.Graphs() {
			graphs[name+roomy] = g
		}
	}
	for _, r := range reports {
		if r.Recomputed > 0 {
			return diag.New(diag.PlanRemat, "the compiler recomputes %d instructions of %s to save memory",
				r.Recomputed, r.Module).Try("recompute more, smaller microbatches, or more devices")
		}
		g := graphs[r.Module]
		if g == nil {
			continue // a stage transfer
		}
		if err := spmd.CensusOf(g).Diff(r.Collectives, cpu, x.sums); err != nil {
			return diag.New(diag.PlanCensus, "%s", err).At("%s", r.Module)
		}
	}
	return nil
}
