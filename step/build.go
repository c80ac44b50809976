package step

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/spmd"
)

// A Spec is what programs are built for.
type Spec struct {
	Model  model.Model
	Recipe *recipe.Recipe
	Arch   string            // of the devices
	Plan   *plan.Plan        // nil is one device
	Policy *precision.Policy // nil is that of the recipe

	// Optimizer is another than a recipe can name, and Edit changes the graph of the loss before it
	// is cut: both are for tests, and nil elsewhere.
	Optimizer optim.Optimizer
	Edit      func(*ir.Graph) (*ir.Graph, error)

	inspect bool
}

// A builder is a Spec on its way through the passes.
type builder struct {
	Spec
	*Programs
	kernels *kernels.Selector
	loss    *ir.Graph // until it is cut into stages
}

// passes are what makes programs, in order. All plans go through all of them.
var passes = []struct {
	name string
	run  func(*builder) error
}{
	{"check", (*builder).check},
	{"model", (*builder).graph},
	{"layers", (*builder).layers},
	{"precision", (*builder).mark},
	{"edit", (*builder).edit},
	{"stages", (*builder).stages},
	{"shard", (*builder).shard},
	{"differentiate", (*builder).differentiate},
	{"update", (*builder).update},
	{"lower", (*builder).lower},
}

// Build builds the programs of a step.
func Build(s Spec) (*Programs, error) {
	if s.Policy == nil {
		var err error
		s.Policy, err = precision.Load(s.Model, cmp.Or(s.Recipe.GEMMs, string(dtype.FormatBF16)))
		if err != nil {
			return nil, err
		}
		if s.Plan != nil && precision.IsFile(s.Recipe.GEMMs) {
			if err := suits(s.Model, s.Plan, s.Policy); err != nil {
				return nil, err.At("%s", s.Recipe.GEMMs)
			}
		}
	}
	return s.build()
}

func (s Spec) build() (*Programs, error) {
	b := &builder{Spec: s, kernels: kernels.For(s.Arch), Programs: &Programs{Policy: s.Policy,
		Plan: s.Plan, Params: s.Model.Params(), spec: s}}
	for _, pass := range passes {
		if err := pass.run(b); err != nil {
			return nil, err
		}
	}
	for _, choice := range b.kernels.Choices() {
		b.Notes = append(b.Notes, choice.Kind+": "+choice.Kernel+", "+choice.Why)
	}
	return b.Programs, nil
}

// check holds the plan to the recipe, and finds what they say of sizes and types.
func (b *builder) check() error {
	r := b.Recipe
	if b.Spec.Plan != nil {
		if err := agree(b.Model, r, b.Spec.Plan); err != nil {
			return err
		}
	}
	if r.Precision != dtype.F32 && r.Precision != dtype.BF16 {
		return diag.New(diag.NotSupported, "a model cannot be trained in %s", r.Precision).
			Try("f32 or bf16")
	}
	b.Shape = model.Shape{Batch: int64(r.Microbatch), Seq: int64(r.Seq)}
	apart, why := b.kernels.Documents()
	if b.Shape.Documents = apart; apart {
		b.Notes = append(b.Notes, why)
	} else {
		b.Warnings = append(b.Warnings, why)
	}
	b.Shape.Elem, b.Shape.MatmulType = b.kernels.Types(r.Precision)
	if b.Programs.Optimizer = b.Spec.Optimizer; b.Programs.Optimizer == nil {
		b.Programs.Optimizer = optimizerOf(r, b.Shape.Elem)
	}
	return nil
}

func (b *builder) graph() (err error) {
	b.loss, err = b.Model.Graph(b.Shape)
	return err
}

// layers writes the layers one after another where the target runs them faster so.
func (b *builder) layers() error {
	unrolled, why := b.kernels.Unrolled(b.Model.Facts().Layers, b.Spec.Plan,
		len(b.Recipe.Recompute) > 0)
	if !unrolled {
		b.Notes = append(b.Notes, "layers: a loop, "+why)
		return nil
	}
	b.Notes = append(b.Notes, "layers: unrolled, "+why)
	var layers []model.Param
	for _, one := range b.Params {
		layers = append(layers, one.Layers()...)
	}
	b.Params = layers
	var err error
	b.loss, err = ir.Unroll(b.loss)
	return err
}

// mark tells linear layers what the policy says of them. Loops over layers that differ are cut.
func (b *builder) mark() error {
	policy := b.Programs.Policy
	if !policy.Quantizes() {
		return nil
	}
	if err := policy.Check(b.Model); err != nil {
		return err
	}
	for _, f := range dtype.Formats() {
		if n := f.Block(); policy.Has(f) && b.Shape.Seq%n != 0 {
			return diag.New(diag.PolicyMisfit, "rows of %d tokens are not made of blocks of %d",
				b.Shape.Seq, n).Try("seq a multiple of %d", n)
		}
	}
	var err error
	b.loss, b.Params, err = policy.Apply(b.loss, b.Params)
	return err
}

func (b *builder) edit() (err error) {
	if b.Edit != nil {
		b.loss, err = b.Edit(b.loss)
	}
	return err
}

// stages cuts the loss into those of the pipeline.
func (b *builder) stages() error {
	how := b.Spec.Plan
	if how == nil || how.Size(plan.PipelineAxis) == 1 {
		b.Stages = []*Stage{{stage: &spmd.Stage{Graph: b.loss}}}
		return nil
	}
	var err error
	if b.Schedule, err = how.Schedule(); err != nil {
		return err
	}
	cuts, err := spmd.Stages(b.loss, how.Stages(spmd.Rounds(b.loss)))
	if err != nil {
		return err
	}
	for k, cut := range cuts {
		cut.Number(k)
		b.Stages = append(b.Stages, &Stage{Rank: b.Schedule.Rank(k), stage: cut})
	}
	return nil
}

// shard writes each stage for one of its devices, and deals the devices to ranks.
func (b *builder) shard() (err error) {
	how, ranks, size := b.Spec.Plan, 1, 1
	if b.Schedule != nil {
		ranks = b.Schedule.Ranks
	}
	if how != nil {
		size = int(how.Devices()) / ranks
	}
	for rank := range ranks {
		b.Ranks = append(b.Ranks, &Rank{Devices: program.Range(rank*size, size)})
	}
	if how == nil || how.Devices() == 1 {
		return nil
	}
	for _, s := range b.Stages {
		if s.Sharding, err = spmd.Shard(s.stage.Graph, how); err != nil {
			return err
		}
	}
	return nil
}

// options say how forward and backward pass are made.
func (b *builder) options() spmd.Options {
	how := b.Spec.Plan
	return spmd.Options{Optimizer: b.Programs.Optimizer, Recompute: b.Recipe.Recompute,
		Microbatches: b.Recipe.Batch / b.Recipe.Microbatch, Params: map[string]optim.Param{},
		Monitor: b.Recipe.GEMMs != "" || b.Programs.Policy.Quantizes(), Inspect: b.inspect,
		OffloadActivations: how.Offloads(plan.Activations),
		OffloadState:       how.Offloads(plan.OptimizerState)}
}

// differentiate takes the gradient of each stage and writes quantized GEMMs out.
func (b *builder) differentiate() (err error) {
	o := b.options()
	for k, s := range b.Stages {
		w := &b.Ranks[s.Rank].copies
		w.Monitor = o.Monitor
		if !b.Joint() {
			if err := s.differentiate(k == 0, k == len(b.Stages)-1, b.Spec.Plan, o.Recompute); err != nil {
				return err
			}
			if err := s.expand(w, o.Report()); err != nil {
				return err
			}
			continue
		}
		if o.Sharding = s.Sharding; s.Sharding != nil {
			s.stage.Graph = s.Sharding.Graph
		}
		for _, one := range b.Params {
			o.Params[one.Name] = optim.Param{Tag: one.Tag, Decay: len(one.Shape) > 1}
		}
		if s.Joint, err = spmd.NewStep(s.stage.Graph, o, w); err != nil {
			return err
		}
	}
	return nil
}

// differentiate takes the gradient of a stage between others.
func (s *Stage) differentiate(first, last bool, how *plan.Plan, recompute []ir.Tag) (err error) {
	g := s.Sharding.Graph
	b := pipeline.Boundary{Recompute: append(slices.Clone(recompute), ir.Gather),
		Grads: how.Types.Grads, Terms: true, ReduceGrad: s.Sharding.Scatter,
		Offload: how.Offloads(plan.Activations)}
	if !first {
		b.Inputs = []string{spmd.Hidden}
	}
	if !last {
		b.Outputs = []string{g.Results[0].Name}
	}
	s.Graphs, err = pipeline.Differentiate(g, b)
	return err
}

// expand writes quantized GEMMs out, and names what graphs take in the place of parameters.
func (s *Stage) expand(w *spmd.QuantizedCopies, report ir.Report) (err error) {
	s.stats = map[*ir.Graph][]ir.Stat{}
	for _, one := range []*ir.Graph{s.Graphs.Forward, s.Graphs.Backward, s.Graphs.Input,
		s.Graphs.Weight} {
		if one == nil {
			continue
		}
		if s.stats[one], err = w.Expand(one, report); err != nil {
			return err
		}
		s.Sharding.Copies(one)
	}
	return nil
}

// update builds what each rank does around the microbatches.
func (b *builder) update() (err error) {
	o := b.options()
	for rank, r := range b.Ranks {
		var held []spmd.RankParam
		if b.Joint() {
			o.Sharding = b.Stages[0].Sharding
			held, r.Params = b.Stages[0].Joint.RankParams(), b.Params
		} else {
			held = b.hold(rank, o.Monitor)
		}
		end := o.UpdateOptions(&r.copies)
		if !b.Joint() {
			end.Plan, end.Zero, end.Fused = b.Spec.Plan, true, false
		}
		if r.RankUpdate, err = spmd.NewRankUpdate(held, end); err != nil {
			return err
		}
	}
	return nil
}

// hold finds the parameters of a rank. One that two of its stages use is held once, since both add
// to one gradient; one that another rank uses as well counts in the first.
func (b *builder) hold(rank int, watch bool) (held []spmd.RankParam) {
	byName := map[string]model.Param{}
	for _, one := range b.Params {
		byName[one.Name] = one
	}
	r := b.Ranks[rank]
	for _, s := range b.Stages {
		if s.Rank != rank {
			continue
		}
		for i, l := range s.Sharding.Params {
			if slices.ContainsFunc(held, func(h spmd.RankParam) bool { return h.Name == l.Name }) {
				continue
			}
			one := byName[s.stage.Unnumbered(l.Name)]
			if rounds, ok := s.stage.Layers[l.Name]; ok {
				one = one.Slice(rounds[0], rounds[1])
			}
			r.Params = append(r.Params, one)
			users := b.Users(l.Name)
			sum := s.Graphs.Backward.Find(s.Graphs.Accumulators[i])
			held = append(held, spmd.RankParam{
				Param: optim.Param{Name: l.Name, Type: sum.Type, Tag: one.Tag, Decay: len(one.Shape) > 1,
					Stats: watch && len(sum.Type.Dims) > 1},
				Layout: l, Shared: len(users) > 1, Counts: users[0] == rank})
		}
	}
	return held
}

// lower writes the table. Programs that inspect have only what measures.
func (b *builder) lower() error {
	for rank, r := range b.Ranks {
		for k, s := range b.Stages {
			if s.Rank != rank {
				continue
			}
			from := len(b.List)
			if err := b.add(rank, k, b.ofStage(s)); err != nil {
				return err
			}
			list := flags(b.kernels, s.Sharding, b.Spec.Plan)
			for _, one := range b.List[from:] {
				if one.Kind != Evaluate {
					one.Module.Flags = list
				}
			}
		}
		rows := []*Program{{Kind: Zero, Graph: r.Zero}, {Kind: Reduce, Graph: r.Reduce},
			{Kind: Square, Graph: r.Square}, {Kind: Update, Graph: r.Update},
			{Kind: Quantize, Graph: r.Quantize}}
		if b.inspect {
			rows = []*Program{{Kind: Inspect, Graph: r.Inspect}}
		}
		if err := b.add(rank, -1, rows); err != nil {
			return err
		}
	}
	if b.Programs.Policy.Quantizes() { // the compiler must not round otherwise than programs say
		for _, one := range b.List {
			one.Module.Flags = b.kernels.Exact(one.Module.Flags)
		}
	}
	return nil
}

// ofStage are the programs of a stage: those that its schedule asks for.
func (b *builder) ofStage(s *Stage) []*Program {
	if j := s.Joint; j != nil {
		rows := []*Program{{Kind: Gradient, Graph: j.Gradient, Stats: j.Stats},
			{Kind: Accumulate, Graph: j.Accumulate, Stats: j.Stats},
			{Kind: Evaluate, Graph: j.Evaluate}}
		if b.inspect {
			return rows[:2]
		}
		return rows
	}
	g, of := s.Graphs, func(kind Kind, g *ir.Graph) *Program {
		return &Program{Kind: kind, Graph: g, Stats: s.stats[g]}
	}
	if b.Schedule.Has(schedule.Input) {
		return []*Program{of(Forward, g.Forward), of(Input, g.Input), of(Weight, g.Weight)}
	}
	return []*Program{of(Forward, g.Forward), of(Backward, g.Backward)}
}

// add lowers programs, as far as there are such graphs. Where there is one rank, they are called as
// their graphs are.
func (b *builder) add(rank, stage int, list []*Program) (err error) {
	for _, p := range list {
		if p.Graph == nil {
			continue
		}
		name := p.Graph.Name
		p.Rank, p.Stage = rank, stage
		switch {
		case b.Joint():
		case stage < 0:
			name = fmt.Sprintf("rank%d.%s", rank, name)
		default:
			name = fmt.Sprintf("stage%d.%s", stage, p.Kind)
		}
		p.Module, err = lower.Module(name, p.Graph, lower.Options{Kernels: b.kernels})
		if err != nil {
			return err
		}
		p.Module.Devices = b.Ranks[rank].Devices
		b.List = append(b.List, p)
	}
	return nil
}

// flags are the compile options of what takes gradients.
func flags(set *kernels.Selector, s *spmd.Sharding, how *plan.Plan) (list map[string]any) {
	if s != nil {
		list = set.Joined(s.LayerBytes(), s.BoundaryBytes())
		shards := plan.Times(s.Plan.Shards())
		list = set.Gathered(list, s.LayerBytes()*shards, shards)
	}
	if how.Offloads(plan.Activations) {
		list = set.Offloading(list)
	}
	return list
}
