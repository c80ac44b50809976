package train

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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
	"github.com/deepwell/deepwell/precision"
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
	Quantize                               *program.Stage // nil if no product has few bits
	Notes                                  []string       // what was chosen, and why
	Warnings                               []string       // what the numbers of a run depend on

	// Sharding is how the model lies on the devices of a plan; nil on one device, and with stages.
	Sharding *spmd.Sharding
	// Pipe has the programs of a plan with pipeline stages, in the place of all of these; else nil.
	Pipe *Pipe

	// Policy says what the products of linear layers are computed in.
	Policy *precision.Policy

	plan      *plan.Plan // nil is one device
	optimizer optim.Optimizer
	// inspect measures the errors of the copies of weights; only programs that inspect have it, which
	// beside it are those that give gradients, and measure the errors of what these round.
	inspect *program.Stage
	// again gives programs under another policy, or those that inspect.
	again func(p *precision.Policy, inspect bool) (*Programs, error)
}

// RecipeOf gives the recipe that a plan by itself asks for: its sizes and types, and defaults.
func RecipeOf(p *plan.Plan) *recipe.Recipe {
	r := recipe.Default()
	r.Batch, r.Micro, r.Seq = int(p.Batch), int(p.Rows()), int(p.Seq)
	r.Precision, r.Recompute = p.Types.Params, p.Recompute
	if p.Precision != "bf16" {
		r.Narrow = p.Precision
	}
	return r
}

// Write writes the programs of a recipe for devices of an architecture, spread as the plan says;
// nil is one device.
func Write(c *model.Config, r *recipe.Recipe, arch string, how *plan.Plan) (*Programs, error) {
	policy, err := precision.Load(c, cmp.Or(r.Narrow, string(precision.BF16)))
	if err != nil {
		return nil, err
	}
	if how != nil && precision.IsFile(r.Narrow) {
		if err := suits(c, how, policy); err != nil {
			return nil, err.At("%s", r.Narrow)
		}
	}
	return WriteIn(c, r, arch, how, policy)
}

// suits tells whether a plan has the word for a policy, and pieces of whole blocks of all formats
// that it has.
func suits(c *model.Config, how *plan.Plan, policy *precision.Policy) *diag.Error {
	has := string(policy.Narrowest())
	if p := cmp.Or(how.Precision, string(precision.BF16)); p != has {
		return diag.New(diag.PlanMisfit, "the plan has products in %s, the policy in %s at most", p,
			has).Try(`"precision": "%s" in the plan`, has)
	}
	for _, f := range []precision.Format{precision.MXFP8, precision.NVFP4} {
		p := *how
		if p.Precision = string(f); policy.Has(f) {
			if err := p.Check(c); err != nil {
				return diag.From(err)
			}
		}
	}
	return nil
}

// WriteIn is Write with products as a policy says.
func WriteIn(c *model.Config, r *recipe.Recipe, arch string, how *plan.Plan,
	policy *precision.Policy) (*Programs, error) {
	return write(c, r, arch, how, policy, optimizerOf, nil)
}

// write writes the programs; a test may edit the graph of the loss, which is nil in any other case.
func write(c *model.Config, r *recipe.Recipe, arch string, how *plan.Plan,
	policy *precision.Policy, optimizer func(*recipe.Recipe, dtype.DType) optim.Optimizer,
	edit func(*ir.Graph) (*ir.Graph, error)) (*Programs, error) {
	o := &order{c, r, arch, how, optimizer, edit}
	return o.write(policy, false)
}

// An order is what programs are written for, but for the policy.
type order struct {
	config    *model.Config
	recipe    *recipe.Recipe
	arch      string
	plan      *plan.Plan
	optimizer func(*recipe.Recipe, dtype.DType) optim.Optimizer
	edit      func(*ir.Graph) (*ir.Graph, error)
}

func (w *order) write(policy *precision.Policy, inspect bool) (*Programs, error) {
	c, r, how := w.config, w.recipe, w.plan
	if how != nil {
		if err := agree(c, r, how); err != nil {
			return nil, err
		}
	}
	if r.Precision != dtype.F32 && r.Precision != dtype.BF16 {
		return nil, diag.New(diag.NotSupported, "a model cannot be trained in %s", r.Precision).
			Try("f32 or bf16")
	}
	set := kernels.For(w.arch)
	p := &Programs{Params: c.Params(), Policy: policy, plan: how, again: w.write}
	p.Shape = model.Shape{Batch: int64(r.Micro), Seq: int64(r.Seq)}
	apart, why := set.Documents()
	if p.Shape.Documents = apart; apart {
		p.Notes = append(p.Notes, why)
	} else {
		p.Warnings = append(p.Warnings, why)
	}
	p.Shape.Elem, p.Shape.Products = set.Types(r.Precision)
	p.optimizer = w.optimizer(r, p.Shape.Elem)
	g, err := c.Graph(p.Shape)
	if err != nil {
		return nil, err
	}
	unrolled, why := set.Unrolled(c.Layers, how, len(r.Recompute) > 0)
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
	if policy.Quantizes() {
		if g, err = p.mark(g, c); err != nil {
			return nil, err
		}
	}
	if w.edit != nil {
		if g, err = w.edit(g); err != nil {
			return nil, err
		}
	}
	if how != nil && how.Size(plan.PipelineAxis) > 1 {
		if r.Repair > 0 && policy.Quantizes() {
			return nil, diag.New(diag.NotSupported, "a run over pipeline stages is not repaired").
				Try("precision without a last part, or a plan without stages")
		}
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
		Watch: r.Narrow != "" || policy.Quantizes(), Inspect: inspect,
		Activations: how.Offloads(plan.Activations), State: how.Offloads(plan.OptimizerState)}
	for _, one := range p.Params {
		o.Params[one.Name] = optim.Param{Tag: one.Tag, Decay: len(one.Shape) > 1}
	}
	if p.Step, err = spmd.Train(g, o); err != nil {
		return nil, err
	}
	if err := p.lower(set, how, inspect); err != nil {
		return nil, err
	}
	p.note(set)
	return p, nil
}

// mark tells linear layers what the policy says of them. Loops over layers that differ are cut.
func (p *Programs) mark(g *ir.Graph, c *model.Config) (*ir.Graph, error) {
	if err := p.Policy.Check(c); err != nil {
		return nil, err
	}
	for _, f := range []precision.Format{precision.MXFP8, precision.NVFP4} {
		if n := f.Block(); p.Policy.Has(f) && p.Shape.Seq%n != 0 {
			return nil, diag.New(diag.PolicyMisfit, "rows of %d tokens are not made of blocks of %d",
				p.Shape.Seq, n).Try("seq a multiple of %d", n)
		}
	}
	var err error
	g, p.Params, err = p.Policy.Apply(g, p.Params)
	return g, err
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
	bad := func(what string, have, want any, fix string) error {
		return diag.New(diag.PlanMisfit, "the plan has %s %v, the recipe %v", what, have, want).
			Try("%s", fix)
	}
	either := func(key string, have any, inPlan string) string {
		return fmt.Sprintf("--set %s=%v, or in the plan %s", key, have, inPlan)
	}
	inPlan, inRecipe := cmp.Or(p.Precision, p.Types.Params.String()),
		cmp.Or(r.Narrow, r.Precision.String())
	switch {
	case p.Batch != int64(r.Batch):
		return bad("a batch of", p.Batch, r.Batch,
			either("batch", p.Batch, fmt.Sprintf(`"batch": %d`, r.Batch)))
	case p.Rows() != int64(r.Micro):
		return bad("microbatches of", p.Rows(), r.Micro, either("micro", p.Rows(),
			fmt.Sprintf(`"microbatches": %d`, max(1, r.Batch/max(1, r.Micro)))))
	case !precision.IsFile(r.Narrow) && inPlan != inRecipe:
		return bad("GEMMs in", inPlan, inRecipe, either("precision", inPlan, inThePlan(r)))
	case p.Types.Params != r.Precision:
		return bad("parameters of", p.Types.Params, r.Precision,
			either("precision", p.Types.Params, inThePlan(r)))
	case p.Seq != int64(r.Seq):
		return bad("sequences of", p.Seq, r.Seq,
			either("seq", p.Seq, fmt.Sprintf(`"seq": %d`, r.Seq)))
	case len(p.Recompute) > 0 && !slices.Equal(p.Recompute, r.Recompute):
		return bad("recompute", p.Recompute, r.Recompute,
			"leave recompute out of the recipe, where the plan has it")
	}
	return nil
}

// inThePlan spells a recipe's precision as a plan does: the type of the parameters that GEMMs read,
// and the format of quantized ones.
func inThePlan(r *recipe.Recipe) string {
	types := `"types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}`
	switch {
	case r.Narrow != "":
		return fmt.Sprintf(`"precision": %q, %s`, r.Narrow, types)
	case r.Precision == dtype.BF16:
		return types
	}
	return "no types"
}

// lower writes the graphs as stages.
func (p *Programs) lower(set *kernels.Set, how *plan.Plan, inspect bool) error {
	type written struct {
		graph *ir.Graph
		stage **program.Stage
	}
	list := []written{{p.Step.Gradient, &p.Gradient}, {p.Step.Accumulate, &p.Accumulate}}
	if inspect {
		list = append(list, written{p.Step.Inspect, &p.inspect})
	} else {
		list = append(list, written{p.Step.Update, &p.Update}, written{p.Step.Evaluate, &p.Evaluate},
			written{p.Step.Quantize, &p.Quantize})
	}
	for _, one := range list {
		if one.graph == nil {
			continue
		}
		s, err := lower.Stage(one.graph.Name, one.graph,
			lower.Options{Kernels: set})
		if err != nil {
			return err
		}
		*one.stage = s
	}
	p.Gradient.Flags = flags(set, p.Sharding, how)
	if p.Accumulate != nil {
		p.Accumulate.Flags = p.Gradient.Flags
	}
	p.exact(set, p.stages())
	return nil
}

// exact keeps the compiler from rounding otherwise than programs with products in few bits say.
func (p *Programs) exact(set *kernels.Set, stages []*program.Stage) {
	if !p.Policy.Quantizes() {
		return
	}
	for _, s := range stages {
		s.Flags = set.Exact(s.Flags)
	}
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
		add(p.Quantize, p.Step.Quantize)
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
		add(r.Quantize, r.Part.Quantize)
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
	list = []*program.Stage{p.Gradient}
	for _, s := range []*program.Stage{p.Update, p.Evaluate, p.Accumulate, p.Quantize, p.inspect} {
		if s != nil {
			list = append(list, s)
		}
	}
	return list
}

// executables are the programs on an engine.
type executables struct {
	gradient, accumulate, update, evaluate, quantize, inspect *engine.Executable
}

func (p *Programs) compile(ctx context.Context, e *engine.Engine) (*executables, error) {
	x := &executables{}
	for _, one := range []struct {
		stage *program.Stage
		into  **engine.Executable
	}{
		{p.Gradient, &x.gradient}, {p.Accumulate, &x.accumulate}, {p.Update, &x.update},
		{p.Evaluate, &x.evaluate}, {p.Quantize, &x.quantize}, {p.inspect, &x.inspect},
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
	for _, one := range []*engine.Executable{x.gradient, x.accumulate, x.update, x.evaluate,
		x.quantize, x.inspect} {
		if one != nil {
			one.Free()
		}
	}
}
