package train

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
)

// Programs are what a run computes: graphs, and the stages that they become on one kind of device.
type Programs struct {
	Step   *spmd.Step
	Params []model.Param // as the graphs take them, stacked or layer by layer
	Shape  model.Shape

	Gradient, Accumulate, Update, Evaluate *program.Stage // Accumulate is nil without parts
	Notes                                  []string       // what was chosen, and why

	// Sharding is how the model lies on the devices of a plan; nil on one device, and with stages.
	Sharding *spmd.Sharding
	// Pipe has the programs of a plan with pipeline stages, in the place of all of these; else nil.
	Pipe *Pipe

	optimizer optim.Optimizer
}

// Write writes the programs of a recipe for devices of an architecture, spread as the plan says;
// nil is one device.
func Write(c *model.Config, r *recipe.Recipe, arch string, how *plan.Plan) (*Programs, error) {
	return write(c, r, arch, how, optimizerOf)
}

func write(c *model.Config, r *recipe.Recipe, arch string, how *plan.Plan,
	optimizer func(*recipe.Recipe, dtype.DType) optim.Optimizer) (*Programs, error) {
	if how != nil {
		if err := agree(c, r, how); err != nil {
			return nil, err
		}
	}
	if r.Precision != dtype.F32 && r.Precision != dtype.BF16 {
		return nil, diag.New(diag.NotSupported, "a model cannot be trained in %s", r.Precision).
			Try("f32 or bf16")
	}
	set := kernels.For(arch)
	p := &Programs{Params: c.Params()}
	p.Shape = model.Shape{Batch: int64(r.Micro), Seq: int64(r.Seq)}
	apart, why := set.Documents()
	p.Shape.Documents, p.Notes = apart, append(p.Notes, why)
	p.Shape.Elem, p.Shape.Products = set.Types(r.Precision)
	p.optimizer = optimizer(r, p.Shape.Elem)
	g, err := c.Graph(p.Shape)
	if err != nil {
		return nil, err
	}
	unrolled, why := set.Unroll(c.Layers)
	switch {
	case how != nil && (how.PP.Size > 1 || how.TP.Overlap):
		unrolled, why = false, "stages and halves of a batch are made of a loop's body"
	case unrolled && how.Offloads(plan.Activations):
		unrolled, why = false, "what a loop stacks up goes to the host"
	case len(r.Recompute) > 0:
		unrolled, why = false, "outside a loop XLA finds what is computed again, and keeps it"
	}
	if unrolled {
		if g, err = ir.Unroll(g); err != nil {
			return nil, err
		}
		var layers []model.Param
		for _, one := range p.Params {
			layers = append(layers, one.Layers()...)
		}
		p.Params = layers
		p.Notes = append(p.Notes, "layers: unrolled, "+why)
	} else {
		p.Notes = append(p.Notes, "layers: a loop, "+why)
	}
	if how != nil && how.Size(plan.PipelineAxis) > 1 {
		if err := p.pipe(g, how, r.Recompute, set); err != nil {
			return nil, err
		}
		p.note(set)
		return p, nil
	}
	if how != nil && how.Devices() > 1 {
		if p.Sharding, err = spmd.Shard(g, how); err != nil {
			return nil, err
		}
		g = p.Sharding.Graph
	}
	o := spmd.Options{Optimizer: p.optimizer, Recompute: r.Recompute, Parts: r.Batch / r.Micro,
		Params: map[string]optim.Param{}, Sharding: p.Sharding,
		Activations: how.Offloads(plan.Activations), State: how.Offloads(plan.OptimizerState)}
	for _, one := range p.Params {
		o.Params[one.Name] = optim.Param{Tag: one.Tag, Decay: len(one.Shape) > 1}
	}
	if p.Step, err = spmd.Train(g, o); err != nil {
		return nil, err
	}
	if err := p.lower(set, how); err != nil {
		return nil, err
	}
	p.note(set)
	return p, nil
}

// note keeps what the kernels chose.
func (p *Programs) note(set *kernels.Set) {
	for _, choice := range set.Choices() {
		p.Notes = append(p.Notes, choice.Kind+": "+choice.Kernel+", "+choice.Why)
	}
}

// agree holds a plan to the recipe that it is to serve. Sizes and types stand in both, since each
// can be read alone.
func agree(c *model.Config, r *recipe.Recipe, p *plan.Plan) error {
	if err := p.Check(c); err != nil {
		return err
	}
	bad := func(what string, have, want any) error {
		return diag.New(diag.PlanMisfit, "the plan has %s %v, the recipe %v", what, have, want).
			Try("change either: --set on the command line, or the plan")
	}
	switch {
	case p.Batch != int64(r.Batch):
		return bad("a batch of", p.Batch, r.Batch)
	case p.Rows() != int64(r.Micro):
		return bad("microbatches of", p.Rows(), r.Micro)
	case p.Types.Params != r.Precision:
		return bad("parameters of", p.Types.Params, r.Precision)
	case p.Seq != int64(r.Seq):
		return bad("rows of", p.Seq, r.Seq)
	case len(p.Recompute) > 0 && !slices.Equal(p.Recompute, r.Recompute):
		return bad("recompute", p.Recompute, r.Recompute)
	}
	return nil
}

// lower writes the graphs as stages.
func (p *Programs) lower(set *kernels.Set, how *plan.Plan) error {
	for _, one := range []struct {
		graph *ir.Graph
		stage **program.Stage
	}{
		{p.Step.Gradient, &p.Gradient}, {p.Step.Accumulate, &p.Accumulate},
		{p.Step.Update, &p.Update}, {p.Step.Evaluate, &p.Evaluate},
	} {
		if one.graph == nil {
			continue
		}
		s, err := lower.Stage(one.graph.Name, one.graph,
			lower.Options{Donate: p.Step.Donations(one.graph), Kernels: set})
		if err != nil {
			return err
		}
		*one.stage = s
	}
	p.Gradient.Flags = flags(set, p.Sharding, how)
	if p.Accumulate != nil {
		p.Accumulate.Flags = p.Gradient.Flags
	}
	return nil
}

// flags are the compile options of what takes gradients.
func flags(set *kernels.Set, s *spmd.Sharding, how *plan.Plan) (list map[string]any) {
	if s != nil {
		list = set.Joined(s.LayerBytes(), s.HandedBytes())
		fsdp := s.Plan.Size(plan.FSDPAxis)
		list = set.Gathered(list, s.LayerBytes()*fsdp, fsdp)
	}
	if how.Offloads(plan.Activations) {
		list = set.Offloading(list)
	}
	return list
}

// optimizerOf reads the section [optimizer] for a model that keeps its values in elem.
func optimizerOf(r *recipe.Recipe, elem dtype.DType) optim.Optimizer {
	o := r.Optimizer
	adam := optim.AdamW{Beta1: o.Beta1, Beta2: o.Beta2, Eps: AdamEps, Decay: o.Decay,
		ClipNorm: o.Clip, Moments: o.Moments, Compute: elem}
	if o.Name == "muon" {
		return optim.Muon{AdamW: adam, Momentum: muonMomentum}
	}
	return adam
}

// muonMomentum is Jordan's (2024), whatever the betas of the parameters that AdamW updates.
const muonMomentum = 0.95

// AdamEps is what is added to the root of the second moment: PyTorch's and Megatron's.
const AdamEps = 1e-8

// Rate is the learning rate of a step, counted from 0.
func Rate(r *recipe.Recipe, step int) float64 { return scheduleOf(r).Rate(step) }

// scheduleOf gives the rate by step.
func scheduleOf(r *recipe.Recipe) optim.Schedule {
	o := r.Optimizer
	switch o.Schedule {
	case "wsd":
		return optim.WSD{Peak: o.Rate, Floor: o.Floor, Warmup: o.Warmup, Decay: r.Steps / 5,
			Steps: r.Steps}
	case "constant":
		return optim.WSD{Peak: o.Rate, Floor: o.Rate, Warmup: o.Warmup, Steps: r.Steps}
	}
	return optim.WarmupCosine{Peak: o.Rate, Floor: o.Floor, Warmup: o.Warmup, Steps: r.Steps}
}

// Fingerprints name the texts of the programs, for checkpoints.
func (p *Programs) Fingerprints() map[string]string {
	list := map[string]string{}
	for _, s := range p.stages() {
		sum := sha256.Sum256([]byte(s.Text))
		list[s.Name] = hex.EncodeToString(sum[:])
	}
	return list
}

// Graphs gives what each program computes, by the name of its stage.
func (p *Programs) Graphs() map[string]*ir.Graph {
	all := map[string]*ir.Graph{}
	add := func(s *program.Stage, g *ir.Graph) {
		if s != nil {
			all[s.Name] = g
		}
	}
	if p.Pipe == nil {
		add(p.Gradient, p.Step.Gradient)
		add(p.Accumulate, p.Step.Accumulate)
		add(p.Update, p.Step.Update)
		add(p.Evaluate, p.Step.Evaluate)
		return all
	}
	for _, s := range p.Pipe.Stages {
		add(s.Programs.Forward, s.Graphs.Forward)
		add(s.Programs.Backward, s.Graphs.Backward)
		add(s.Programs.Input, s.Graphs.Input)
		add(s.Programs.Weight, s.Graphs.Weight)
	}
	for _, r := range p.Pipe.Ranks {
		add(r.Zero, r.Part.Zero)
		add(r.Reduce, r.Part.Reduce)
		add(r.Square, r.Part.Square)
		add(r.Update, r.Part.Update)
	}
	return all
}

func (p *Programs) stages() (list []*program.Stage) {
	if p.Pipe != nil {
		for rank := range p.Pipe.Ranks {
			list = append(list, p.Pipe.Programs(rank)...)
		}
		return list
	}
	list = []*program.Stage{p.Gradient, p.Update, p.Evaluate}
	if p.Accumulate != nil {
		list = append(list, p.Accumulate)
	}
	return list
}

// executables are the programs on an engine.
type executables struct {
	gradient, accumulate, update, evaluate *engine.Executable
}

func (p *Programs) compile(ctx context.Context, e *engine.Engine) (*executables, error) {
	x := &executables{}
	for _, one := range []struct {
		stage *program.Stage
		into  **engine.Executable
	}{
		{p.Gradient, &x.gradient}, {p.Accumulate, &x.accumulate}, {p.Update, &x.update},
		{p.Evaluate, &x.evaluate},
	} {
		if one.stage == nil {
			continue
		}
		var err error
		if *one.into, err = e.Compile(ctx, one.stage); err != nil {
			x.free()
			return nil, err
		}
	}
	return x, nil
}

func (x *executables) free() {
	for _, one := range []*engine.Executable{x.gradient, x.accumulate, x.update, x.evaluate} {
		if one != nil {
			one.Free()
		}
	}
}
