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

// A source is what there is to compile.
type source struct {
	program *program.Program
	notes   []string
	// warnings are what the numbers of a run depend on.
	warnings []string
	planned  *step.Programs // of a plan; else nil
	sums     dtype.DType    // of what devices add up
	// twins names, for programs of a plan that stand for others of the same text, those others.
	twins map[string][]string
}

// programOf writes the programs of a plan for its cluster, or for another one of the same size.
func programOf(job CompileJob, c machine.Cluster) (*source, error) {
	path := job.Source
	p, err := readPlan(path)
	if err != nil {
		return nil, err
	}
	m, err := capture.Open(p.Model, capture.Options{})
	if err != nil {
		return nil, at(err, path)
	}
	defer func() { _ = m.Close() }()
	x, err := writePlan(m.Config, p, c, cmp.Or(job.Precision, p.Precision), stageNameOf(path))
	if err != nil {
		return nil, at(err, path)
	}
	return x, nil
}

// recipeOf gives the recipe of a plan whose products are computed as a word says, or a policy, for
// which the plan gets the word.
func recipeOf(config *model.Config, p *plan.Plan, narrow string) (*recipe.Recipe, error) {
	if p.Precision = narrow; !precision.IsFile(narrow) {
		return step.RecipeOf(p), nil
	}
	policy, err := precision.Load(config, narrow)
	if err != nil {
		return nil, err
	}
	p.Precision = string(policy.Narrowest())
	r := step.RecipeOf(p)
	r.GEMMs = narrow
	return r, nil
}

// writePlan writes the programs of a plan.
func writePlan(config *model.Config, p *plan.Plan, c machine.Cluster, narrow, name string) (*source,
	error) {
	r, err := recipeOf(config, p, narrow)
	if err != nil {
		return nil, err
	}
	w, err := step.Build(step.Spec{Model: config, Recipe: r, Arch: c.Arch(), Plan: p})
	if err != nil {
		return nil, err
	}
	notes := append(w.Notes, p.Straddles(c.Domain())...)
	out := &source{program: &program.Program{Name: name}, notes: notes,
		warnings: w.Warnings, planned: w,
		sums:  p.Types.Collectives,
		twins: map[string][]string{}}
	list, err := modulesOf(w, c)
	if err != nil {
		return nil, err
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

// modulesOf lists the programs of a step of all ranks, each on devices counted from 0, since what
// is compiled for one rank serves all that do the same; and what hands over between ranks on a
// cluster.
func modulesOf(p *step.Programs, c machine.Cluster) (list []*program.Module, err error) {
	for _, row := range p.List {
		if p.Joint() && (row.Kind == step.Evaluate || row.Kind == step.Quantize) {
			continue // no part of a step
		}
		one := *row.Module
		one.Devices = p.Ranks[0].Devices
		list = append(list, &one)
	}
	if p.Joint() || c.CPU() {
		return list, nil // devices copy
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
		s.Name = "handover"
		list = append(list, s)
	}
	return list, nil
}

// stepOf writes the step of a preset: for one device loss and gradients alone, with every block
// computed again in the backward pass, for several all programs of a plan that cuts parameters,
// gradients and the optimizer's state over them (FSDP) and keeps what the backward pass needs.
func stepOf(preset *model.Preset, c machine.Cluster, job CompileJob) (*source, error) {
	if preset.Config == nil {
		return nil, diag.New(diag.ModelUnknown, "the sizes of %s are not public", preset.Name).
			Try("deepwell models lists what is known; or give the folder of a config.json")
	}
	p := plan.Default()
	p.Model, p.Cluster = preset.Name, c.String()
	p.Seq, p.Batch = max(1, job.Seq), max(1, job.Batch, int64(c.Count))
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	name := stageNameOf(preset.Name + ".step")
	if c.Count > 1 {
		p.FSDP = plan.FSDP{Size: int64(c.Count), Zero: 3, Gather: "layer"}
		return writePlan(preset.Config, p, c, job.Precision, name)
	}
	p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	r, err := recipeOf(preset.Config, p, job.Precision)
	if err != nil {
		return nil, err
	}
	w, err := step.Build(step.Spec{Model: preset.Config, Recipe: r, Arch: c.Arch()})
	if err != nil {
		return nil, err
	}
	s := *w.Find(step.Gradient, 0).Module
	s.Name = name
	return &source{program: &program.Program{Name: name, Modules: []program.Module{s}}, notes: w.Notes,
		warnings: w.Warnings}, nil
}

// footprints adds up what the devices of a plan's ranks hold, by cause.
func (x *source) footprints(reports []*engine.Report) ([]*step.Footprint, error) {
	byName := map[string]*engine.Report{}
	for _, r := range reports {
		byName[r.Stage] = r
		for _, twin := range x.twins[r.Stage] {
			byName[twin] = r
		}
	}
	list, err := x.planned.Footprints(func(s *program.Module) step.Needs {
		m := byName[s.Name].Memory
		return step.Needs{Temp: m.Temp, Output: m.Output, Alias: m.Alias, Host: m.Host}
	})
	for _, f := range list {
		f.Capacity = reports[0].CapacityBytes
	}
	return list, err
}

// keepsToPlan holds what the compiler made of a plan's programs to the plan: they send what their
// graphs say, and nothing is computed again that the plan did not ask for.
func (x *source) keepsToPlan(reports []*engine.Report, cpu bool) error {
	graphs := x.planned.Graphs()
	for _, r := range reports {
		if r.Recomputed > 0 {
			return diag.New(diag.PlanRemat, "the compiler repeats %d instructions of %s to save memory",
				r.Recomputed, r.Stage).Try("recompute more, smaller microbatches, or more devices")
		}
		g := graphs[r.Stage]
		if g == nil {
			continue // what hands over between stages
		}
		if err := spmd.CensusOf(g).Diff(r.Collectives, cpu, x.sums); err != nil {
			return diag.New(diag.PlanCensus, "%s", err).At("%s", r.Stage)
		}
	}
	return nil
}
