package step

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
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

// A Spec is what programs are built for. Programs keep a copy of it, and are rebuilt from it when a
// run changes precision ([Programs.Again]).
type Spec struct {
	Model  model.Model
	Recipe *recipe.Recipe
	// Arch is the target: "cpu", or a GPU architecture such as "sm_100".
	Arch   string
	Plan   *plan.Plan        // nil is one device
	Policy *precision.Policy // nil is the recipe's
	// Documents is how many documents a sequence of the data has at most; 0 is not known, and -1 asks
	// for no mask between documents, whatever the data has.
	Documents int64

	Kernels kernels.Options

	// Optimizer replaces the recipe's. Edit rewrites the graph of the loss before it is sharded, as
	// tests do to inject faults. Both may be nil.
	Optimizer optim.Optimizer
	Edit      func(*ir.Graph) (*ir.Graph, error)

	inspect bool // programs also measure rounding errors
	rung    int  // of the plan's slots of experts
}

// A builder is a Spec on its way through the passes: each adds to Programs.
type builder struct {
	Spec
	*Programs
	kernels *kernels.Selector
	loss    *ir.Graph // until it is split into stages
}

// passes are the compiler's pipeline, in order. Every plan goes through all of them.
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

// Build builds the programs of a step. The same Spec gives the same bytes.
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

// build runs the passes, for a Spec whose policy is set.
func (s Spec) build() (*Programs, error) {
	b := &builder{Spec: s, kernels: kernels.For(s.Arch).With(s.Kernels),
		Programs: &Programs{Policy: s.Policy, Plan: s.Plan, Params: s.Model.Params(), spec: s}}
	for _, pass := range passes {
		if err := pass.run(b); err != nil {
			return nil, err
		}
	}
	b.Choices, b.Passes = b.kernels.Choices(), b.kernels.Passes()
	for _, choice := range b.Choices {
		b.Notes = append(b.Notes, choice.Kind+": "+choice.Kernel+", "+choice.Why)
	}
	return b.Programs, nil
}

// check compares the plan with the recipe and takes over sizes and types: the shape [B, S] of a
// microbatch, the compute type, the optimizer.
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
	b.Shape = model.Shape{Batch: int64(r.Microbatch), Seq: int64(r.Seq),
		PlainAttention: b.Spec.Plan.PlainAttention()}
	if b.Model.Facts().MoE != nil {
		b.experts()
	}
	// Whether attention stays within the documents of a packed sequence depends on the kernel.
	most, err := b.documents()
	if err != nil {
		return err
	}
	facts := b.Model.Facts()
	apart, why := b.kernels.Documents(most, kernels.Planned(facts, facts.Window > 0, r.Precision,
		b.Spec.Plan.Context(), int64(r.Seq), b.Shape.PlainAttention))
	if b.Shape.Documents = apart; apart > 0 || most == 1 {
		b.Notes = append(b.Notes, why)
	} else {
		b.Warnings = append(b.Warnings, why)
	}
	b.Shape.Elem, b.Shape.MatmulType = b.kernels.Types(r.Precision)
	if b.Programs.Optimizer = rounding(b.Spec.Optimizer, b.Shape.Elem); b.Spec.Optimizer == nil {
		b.Programs.Optimizer = optimizerOf(r, b.Shape.Elem)
	}
	return nil
}

// experts takes over the recipe's and the plan's word on experts.
func (b *builder) experts() {
	e := b.Recipe.Experts
	b.Shape.Experts = model.ExpertShape{Slots: b.Spec.Plan.ExpertSlots()[b.rung], Capacity: e.Capacity,
		ZLoss: e.ZLoss, Blocks: b.Programs.Policy.Quantizes()}
	if e.AuxLoss >= 0 {
		b.Shape.Experts.AuxLoss = &e.AuxLoss
	}
}

// optimized describes a parameter to the optimizer.
func (b *builder) optimized(one model.Param) optim.Param {
	p := optim.Param{Tag: one.Tag, Decay: !one.Vector()}
	if one.Tag == ir.Router { // which computes in f32
		p.Compute = dtype.F32
	}
	if one.Buffer {
		p.Balance = cmp.Or(b.Recipe.Experts.BiasRate, -1)
	}
	return p
}

// documents is how many documents a sequence may have: the plan's number, or else the data's.
func (b *builder) documents() (int64, error) {
	most := b.Documents
	if b.Spec.Plan == nil || b.Spec.Plan.Documents == 0 {
		return most, nil
	}
	if planned := b.Spec.Plan.Documents; most > planned {
		return 0, diag.New(diag.PlanMisfit, "a sequence of the data has %d documents; the plan has room "+
			"for %d", most, planned).At("plan documents").
			Try(`"documents": %d, or leave documents out of the plan`, most)
	}
	return b.Spec.Plan.Documents, nil
}

// graph builds the loss over one microbatch, unsharded, with one loop over layers.
func (b *builder) graph() (err error) {
	b.loss, err = b.Model.Graph(b.Shape)
	if b.Documents == 1 && b.Shape.Documents > 1 && errors.Is(err, diag.NotSupported) {
		// A captured program whose attention is written out cannot keep documents apart, and need not.
		b.Shape.Documents = 0
		b.loss, err = b.Model.Graph(b.Shape)
	}
	return err
}

// layers unrolls the loop over layers where the target runs them faster so. Stacked parameters
// become parameters of single layers.
func (b *builder) layers() error {
	unrolled, why := b.kernels.Unrolled(b.Model.Facts().Layers, b.Spec.Plan,
		len(b.Recipe.Recompute) > 0)
	if !unrolled {
		b.Notes = append(b.Notes, "layers: a loop, because "+why)
		return nil
	}
	b.Notes = append(b.Notes, "layers: unrolled, "+why)
	// Checkpoints have one tensor per layer in either form.
	var layers []model.Param
	for _, one := range b.Params {
		layers = append(layers, one.Layers()...)
	}
	b.Params = layers
	var err error
	b.loss, err = ir.Unroll(b.loss)
	return err
}

// mark sets the formats of linear layers. A loop over layers whose formats differ is split.
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

// edit applies [Spec.Edit].
func (b *builder) edit() (err error) {
	if b.Edit != nil {
		b.loss, err = b.Edit(b.loss)
	}
	return err
}

// stages splits the loss into the pipeline's virtual stages.
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
	// Stage 0 has the embedding and the last one the loss; layers are spread over all.
	cuts, err := spmd.Stages(b.loss, how.Stages(spmd.LoopIterations(b.loss)))
	if err != nil {
		return err
	}
	for k, cut := range cuts {
		cut.Number(k)
		b.Stages = append(b.Stages, &Stage{Rank: b.Schedule.Rank(k), stage: cut})
	}
	return nil
}

// shard rewrites each stage for one of its devices, with explicit collectives, and assigns devices
// to ranks: contiguous, so that a rank's mesh is inside a host where possible.
func (b *builder) shard() (err error) {
	// Rank r has the devices [r·size, (r+1)·size): neighbours in a mesh are neighbours in the cluster.
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

// options say how forward and backward pass are built.
func (b *builder) options() spmd.Options {
	how := b.Spec.Plan
	return spmd.Options{Optimizer: b.Programs.Optimizer, Recompute: b.Recipe.Recompute,
		Microbatches: b.Recipe.Batch / b.Recipe.Microbatch, Params: map[string]optim.Param{},
		Monitor: b.Recipe.GEMMs != "" || b.Programs.Policy.Quantizes(), Inspect: b.inspect,
		OffloadActivations: how.Offloads(plan.Activations),
		OffloadState:       how.Offloads(plan.OptimizerState), Requantize: b.kernels.Requantizes()}
}

// differentiate builds the backward pass of each stage and expands its quantized GEMMs.
func (b *builder) differentiate() (err error) {
	o := b.options()
	for k, s := range b.Stages {
		w := &b.Ranks[s.Rank].copies
		w.Monitor = o.Monitor
		if !b.Joint() { // a program for each pass of each stage
			if err := s.differentiate(k == 0, k == len(b.Stages)-1, b.Spec.Plan, o.Recompute); err != nil {
				return err
			}
			if err := s.expand(w, o.Report()); err != nil {
				return err
			}
			continue
		}
		// One graph for loss and gradients: XLA schedules both, and saved activations are its temporary
		// memory.
		if o.Sharding = s.Sharding; s.Sharding != nil {
			s.stage.Graph = s.Sharding.Graph
		}
		for _, one := range b.Params {
			o.Params[one.Name] = b.optimized(one)
		}
		if s.Joint, err = spmd.NewStep(s.stage.Graph, o, w); err != nil {
			return err
		}
	}
	return nil
}

// differentiate builds the backward pass of a pipeline stage: activations come from the stage
// before and go to the one after, their gradients the other way. Parameter gathers are recomputed
// in the backward pass and not saved.
func (s *Stage) differentiate(first, last bool, how *plan.Plan, recompute []ir.Tag) (err error) {
	g := s.Sharding.Graph
	// Gathered parameters are never saved between the passes: they would undo FSDP's sharding.
	b := pipeline.Boundary{Recompute: append(slices.Clone(recompute), ir.Gather),
		Grads: how.Types.Grads, Terms: true, ReduceGrad: s.Sharding.Scatter,
		Offload: how.Offloads(plan.Activations), SaveRows: how.EPSave}
	if !first {
		b.Inputs = []string{spmd.Hidden}
	}
	if !last {
		b.Outputs = []string{g.Results[0].Name}
	}
	s.Graphs, err = pipeline.Differentiate(g, b)
	return err
}

// expand writes quantized GEMMs out as quantize and block_dot operations, and renames parameters to
// the copies that are read instead.
func (s *Stage) expand(w *spmd.QuantizedCopies, report ir.Report) (err error) {
	s.stats = map[*ir.Graph][]ir.Stat{}
	for _, one := range []*ir.Graph{s.Graphs.Forward, s.Graphs.Backward, s.Graphs.Dgrad,
		s.Graphs.Wgrad} {
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

// update builds what each rank does around the microbatches: clearing, reducing and squaring
// gradients, and the optimizer.
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
		// Gradients of several microbatches are accumulated in arrays that begin as zeros. Around a
		// pipeline the norm needs the squares of all ranks before any of them may update.
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

// hold returns the parameters of a rank. A parameter that two of its stages use is listed once,
// since both add to one gradient; one that another rank uses too counts towards the norm in the
// first of them.
func (b *builder) hold(rank int, watch bool) (held []spmd.RankParam) {
	// Stages number their parameters (s1.block.q); a stack that is split between stages is one
	// parameter of the model.
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
			// The gradient has the accumulator's type, which the plan's types.grads sets.
			users := b.Users(l.Name)
			sum := s.Graphs.Backward.Find(s.Graphs.Accumulators[i])
			p := b.optimized(one)
			p.Name, p.Type = l.Name, sum.Type
			p.Stats = watch && len(sum.Type.Dims) > 1 && p.Balance == 0
			held = append(held, spmd.RankParam{Param: p, Layout: l, Shared: len(users) > 1,
				Counts: users[0] == rank})
		}
	}
	return held
}

// lower prints every graph as StableHLO, into the table. Programs that inspect have only the rows
// that measure.
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
			// Evaluation is short and compiles as it is.
			list := flags(b.kernels, s.Sharding, b.Spec.Plan)
			list = b.kernels.Doubled(list, b.gathersAhead(), lists.Filter(dtype.Formats(),
				b.Programs.Policy.Has))
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
	// Quantized programs prescribe every rounding; the compiler must not fuse or reorder them into
	// others, on any device.
	if b.Programs.Policy.Quantizes() {
		for _, one := range b.List {
			one.Module.Flags = b.kernels.Exact(one.Module.Flags)
		}
	}
	return nil
}

// gathersAhead tells whether each round of a loop over layers gathers the next one's weights, in a
// program of forward and backward pass. Experts are left out: their loops take long to compile.
func (b *builder) gathersAhead() bool {
	how := b.Spec.Plan
	return b.Joint() && how != nil && how.FSDP.Size > 1 && how.FSDP.Zero == 3 &&
		how.FSDP.Gather == plan.GatherLayer && !how.Offloads(plan.Activations) &&
		b.Spec.Model.Facts().MoE == nil
}

// ofStage returns the rows of a stage. A zero-bubble schedule splits the backward pass in two.
func (b *builder) ofStage(s *Stage) []*Program {
	if j := s.Joint; j != nil {
		rows := []*Program{{Kind: Gradient, Graph: j.Gradient, Stats: j.Stats},
			{Kind: Evaluate, Graph: j.Evaluate}}
		if b.inspect {
			return rows[:1]
		}
		return rows
	}
	// Zero-bubble schedules run wgrad when the pipeline would wait, so dgrad is a program of its own.
	g, of := s.Graphs, func(kind Kind, g *ir.Graph) *Program {
		return &Program{Kind: kind, Graph: g, Stats: s.stats[g]}
	}
	if b.Schedule.Has(schedule.Input) {
		return []*Program{of(Forward, g.Forward), of(Input, g.Dgrad), of(Weight, g.Wgrad)}
	}
	return []*Program{of(Forward, g.Forward), of(Backward, g.Backward)}
}

// add lowers rows and appends them to the table; a row without a graph is skipped. Module names are
// part of checkpoints and caches: with one rank they are the graph's, else "rank0.update" or
// "stage1.forward".
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

// flags are the compile options of programs that compute gradients: how collectives are combined
// and overlapped.
func flags(set *kernels.Selector, s *spmd.Sharding, how *plan.Plan) (list map[string]any) {
	if s != nil { // how many bytes of gathers and reductions XLA may combine
		list = set.Joined(s.LayerBytes(), s.BoundaryBytes())
		shards := plan.DevicesAlong(s.Plan.Shards())
		list = set.Gathered(list, s.LayerBytes()*shards, shards)
	}
	if how.Offloads(plan.Activations) {
		list = set.Offloading(list)
	}
	return list
}
