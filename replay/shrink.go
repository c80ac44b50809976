package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
)

// A Small is a model and a plan that are small enough to be replayed, and have the same parts as
// the ones that they were made of.
type Small struct {
	Model   *model.Config
	Plan    *plan.Plan
	Changes []Change
}

// A Change is one size that [Shrink] changed.
type Change struct {
	Name string `json:"name"`
	From int64  `json:"from"`
	To   int64  `json:"to"`
}

// String writes a change as "layers 126 → 2".
func (c Change) String() string { return fmt.Sprintf("%s %d → %d", c.Name, c.From, c.To) }

// Sizes of a small model on one device. No two of them are equal, so that a transposed or swapped
// operand does not fit. All are multiples of aligned, and get the remainder that the full size has:
// compilers choose by alignment.
const (
	smallHidden  = 384
	smallMLP     = 640 // of a device along tp
	smallVocab   = 896 // of a device along tp
	smallSeq     = 256 // tokens of a device along cp
	aligned      = 128
	smallHeads   = 32 // in all
	smallRows    = 2  // sequences of a microbatch on a device
	smallDevices = 16
	smallAxis    = 2 // devices along an axis
	// Of a ring of 2 both directions are the same, a sequence in 2 × 2 chunks has no inner ones, and a
	// pipeline of 2 stages has none that is neither first nor last.
	longAxis = 4
	// Layers of a stage. In a loop over 2, a wrong step from one iteration to the next may go unseen,
	// and XLA takes up to 2 iterations out of loops that gather parameters a layer ahead: of 4 layers,
	// the forward pass's loop keeps 3 and the backward pass's 2.
	leastLayers    = 3
	gatheredLayers = 4 // with parameters that are gathered for each layer
	mostLayers     = 12
)

// Shrink makes a model and its plan small: axes of 2 devices, or 4 of rings, zigzag orders and
// stages, 16 devices at most; 3 layers for a stage, or 4 if layers are gathered, or as many as show
// the formats and windows that the stage has; few heads of the same size, with the same number of
// heads for each KV head if that is possible. Everything that is no size stays: schedule, ZeRO
// stage, recomputation, offload, types, precision and the order of axes.
func Shrink(c *model.Config, p *plan.Plan) (*Small, error) {
	if err := p.Check(c); err != nil {
		return nil, err
	}
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return nil, err
	}
	if cluster.CPU() {
		return nil, diag.New(diag.PlanMisfit, "the plan is for CPU devices, whose programs run as they "+
			"are").Try("--cluster %dxb200, or another GPU", cluster.Count)
	}
	s := shrinker{c: c, p: p, model: *c, plan: *p}
	s.axes()
	s.batch()
	s.heads()
	s.widths()
	if err := s.layers(); err != nil {
		return nil, err
	}
	s.plan.Cluster = fmt.Sprintf("%dx%s", s.plan.Devices(), cluster.GPU.Name)
	small := &Small{Model: &s.model, Plan: &s.plan, Changes: s.changes()}
	if err := small.Check(); err != nil {
		return nil, err
	}
	return small, nil
}

// Check finds sizes that do not fit. The error is about the small plan, whose sizes nobody wrote,
// and has no advice.
func (s *Small) Check() error {
	err := s.Model.Check()
	if err == nil {
		err = s.Plan.Check(s.Model)
	}
	if err == nil {
		return nil
	}
	e := diag.From(err)
	return diag.New(e.Code, "made small, the plan cannot be replayed: %s", e.What).
		Because("sizes became %s", strings.Join(lists.Map(s.Changes, Change.String), ", "))
}

// A shrinker has a model and a plan, and copies that become small.
type shrinker struct {
	c     *model.Config
	p     *plan.Plan
	model model.Config
	plan  plan.Plan
}

// axes sets the devices along each axis. If there are too many, rings and pipelines become shorter,
// and then replicas are left out.
func (s *shrinker) axes() {
	q := &s.plan
	q.DP, q.EP = min(s.p.Size(plan.DataAxis), smallAxis), min(s.p.Size(plan.ExpertAxis), smallAxis)
	q.FSDP.Size = min(s.p.Size(plan.FSDPAxis), smallAxis)
	q.TP.Size = min(s.p.Size(plan.TensorAxis), smallAxis)
	s.context(smallAxis)
	q.PP.Size = s.p.Size(plan.PipelineAxis)
	if s.p.CP.Ring() || q.CP.Balance {
		s.context(longAxis)
	}
	if q.PP.Virtual > 2 {
		q.PP.Virtual = 2
	}
	if q.PP.Size = min(q.PP.Size, longAxis); len(q.Stages(1<<20)) > int(q.PP.Size) {
		q.PP.Size = min(q.PP.Size, smallAxis) // virtual stages have inner ones
	}
	for _, shorter := range []func(){
		func() { s.context(smallAxis) },
		func() { q.PP.Size = min(q.PP.Size, smallAxis) },
		func() { q.DP = 1 },
	} {
		if q.Devices() > smallDevices {
			shorter()
		}
	}
}

// context leaves sequences at most a number of shards along cp, and an all-to-all few devices.
func (s *shrinker) context(shards int64) {
	heads := min(s.p.CP.AllToAll(), smallAxis)
	s.plan.CP.Size = heads * min(s.p.CP.Shards(), shards)
	if s.p.CP.Inner > 0 {
		s.plan.CP.Inner = heads
	}
}

// batch sets sequences and microbatches.
func (s *shrinker) batch() {
	q := &s.plan
	whole, small := s.p.CP.Chunks(), q.CP.Chunks()
	of := int64(1) // parts of a chunk
	if s.p.TP.Sequence {
		whole *= s.p.Size(plan.TensorAxis)
		of = q.Size(plan.TensorAxis)
	}
	part := shrunk(s.p.Seq/whole, smallSeq/of)
	for n := q.Block(); n > 0 && of*part%n != 0; {
		part++ // a chunk is whole blocks that share a scale
	}
	q.Seq = small * of * part

	stages := q.Size(plan.PipelineAxis)
	q.Microbatches = min(s.p.Microbatches, 2*stages)
	if q.Microbatches > stages {
		q.Microbatches -= q.Microbatches % stages // interleaved needs whole groups
	}
	rows := int64(smallRows)
	if s.p.TP.Overlap && s.p.Size(plan.TensorAxis) > 1 {
		rows *= 2 // halves of a batch
	}
	rows = min(rows, s.p.MicrobatchSequences()/s.p.DataParallelSize())
	q.Batch = rows * q.Microbatches * q.DataParallelSize()
}

// heads sets the number of heads: two KV heads on a device if it has several, and as many heads for
// each as before.
func (s *shrinker) heads() {
	tp, small := s.p.Size(plan.TensorAxis), s.plan.Size(plan.TensorAxis)
	each := s.c.Heads / s.c.KVHeads
	kv := small * min(s.c.KVHeads/tp, 2)
	if s.p.CP.Copies(max(s.c.KVHeads/tp, 1)) > 1 {
		kv = min(kv, small) // so that an all-to-all copies them here, too
	}
	if kv == 0 { // KV heads are copied
		kv = max(1, small*s.c.KVHeads/tp)
	}
	heads := kv * each
	if heads > smallHeads {
		heads = max(kv, smallHeads/kv*kv)
	}
	for heads%(small*s.plan.CP.AllToAll()) != 0 {
		heads += kv
	}
	s.model.KVHeads, s.model.Heads = kv, min(heads, s.c.Heads)
}

// widths sets the sizes that heads do not: a device's share of each is small.
func (s *shrinker) widths() {
	tp, small := s.p.Size(plan.TensorAxis), s.plan.Size(plan.TensorAxis)
	m := &s.model
	m.Hidden = shrunk(s.c.Hidden, smallHidden)
	m.MLP = small * shrunk(s.c.MLP/tp, smallMLP)
	if m.Vocab = small * shrunk(s.c.Vocab/tp, smallVocab); s.c.Vocab%tp != 0 {
		m.Vocab-- // the last device's share is padded here, too
	}
	m.BOS, m.EOS = -1, nil // tokens that the small vocabulary may not have
	if s.c.Learned {
		m.Context = min(s.c.Context, s.plan.Seq)
	}
	if s.c.Window > 0 {
		m.Window = max(1, s.c.Window*s.plan.Seq/s.p.Seq)
	}
}

// shrunk is a size between base and base + aligned with the same remainder, or n if it is smaller.
func shrunk(n, base int64) int64 {
	if n <= base {
		return n
	}
	return base + (n-base)%aligned
}

// layers sets the depth: for each stage the least number of layers, or as many as it takes until
// the first stages, the last and those between have the runs of formats and windows that the full
// model's have. Where runs are too long or too many, a stage gets a few layers of every kind.
func (s *shrinker) layers() error {
	full, err := patterns(s.c, s.p)
	if err != nil {
		return err
	}
	stages := int64(len(s.plan.Stages(1 << 20)))
	most := max(1, s.c.Layers/int64(len(s.p.Stages(s.c.Layers))))
	least := int64(leastLayers)
	if s.p.Size(plan.FSDPAxis) > 1 && s.p.FSDP.Zero == 3 && s.p.FSDP.Gather != plan.GatherStep {
		least = gatheredLayers
	}
	least = min(least, most)
	for n := least; n <= max(least, min(mostLayers, most)); n++ {
		s.setLayers(n * stages)
		got, err := patterns(&s.model, &s.plan)
		if err != nil {
			return err
		}
		if slices.Equal(got, full) {
			return nil
		}
	}
	s.setLayers(least * stages)
	if s.c.Windowed != nil {
		n := min(least+2, most)
		s.setLayers(n * stages)
		s.model.Windowed = slices.Repeat(s.windows(n), int(stages))
	}
	return nil
}

func (s *shrinker) setLayers(n int64) {
	if s.model.Layers = min(n, s.c.Layers); s.c.Windowed != nil {
		s.model.Windowed = s.c.Windowed[:s.model.Layers]
	}
}

// windows says which layers of a small stage of n layers have a window: as in the full model's
// first n, but for the one before the last if all of them are of one kind and the model has both.
// So one run follows another in both orders.
func (s *shrinker) windows(n int64) []bool {
	list := slices.Clone(s.c.Windowed[:n])
	if other := !list[0]; n > 1 && !slices.Contains(list, other) &&
		slices.Contains(s.c.Windowed, other) {
		list[max(1, n-2)] = other
	}
	return list
}

// patterns describe the distinct stages, sorted: the runs of equal layers, each of one layer or of
// several.
func patterns(c *model.Config, p *plan.Plan) ([]string, error) {
	policy, err := precision.Default(c, formatOf(p))
	if err != nil {
		return nil, err
	}
	var list []string
	at := int64(0)
	for k, n := range p.Stages(c.Layers) {
		var b strings.Builder
		run, before := 0, ""
		for i := range n {
			windowed := c.Windowed != nil && c.Windowed[at+i]
			layer := fmt.Sprint(policy.Layer(int(at+i)), windowed)
			switch {
			case layer != before:
				b.WriteString("; " + layer)
				run, before = 1, layer
			case run == 1:
				b.WriteString(", several")
				run++
			}
		}
		at += n
		if last := at == c.Layers; last || k == 0 {
			fmt.Fprintf(&b, "; first %v, last %v", k == 0, last)
		}
		list = append(list, b.String())
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

// formatOf is the format of a plan's GEMMs, as a policy names it.
func formatOf(p *plan.Plan) string {
	if p.Block() > 0 {
		return p.Precision
	}
	return "bf16"
}

// changes lists the sizes that are not what they were.
func (s *shrinker) changes() (list []Change) {
	add := func(name string, from, to int64) {
		if from != to {
			list = append(list, Change{name, from, to})
		}
	}
	for _, axis := range []string{plan.DataAxis, plan.FSDPAxis, plan.TensorAxis, plan.ContextAxis,
		plan.ExpertAxis, plan.PipelineAxis} {
		add(axis, s.p.Size(axis), s.plan.Size(axis))
	}
	add("virtual", s.p.PP.Virtual, s.plan.PP.Virtual)
	add("layers", s.c.Layers, s.model.Layers)
	if s.c.Windowed != nil {
		add("layers with full attention", fullAttention(s.c), fullAttention(&s.model))
	}
	add("hidden", s.c.Hidden, s.model.Hidden)
	add("cp.inner", s.p.CP.Inner, s.plan.CP.Inner)
	add("heads", s.c.Heads, s.model.Heads)
	add("KV heads", s.c.KVHeads, s.model.KVHeads)
	add("heads per KV head", s.c.Heads/s.c.KVHeads, s.model.Heads/s.model.KVHeads)
	add("MLP", s.c.MLP, s.model.MLP)
	add("vocab", s.c.Vocab, s.model.Vocab)
	add("window", s.c.Window, s.model.Window)
	add("seq", s.p.Seq, s.plan.Seq)
	add("batch", s.p.Batch, s.plan.Batch)
	add("microbatches", s.p.Microbatches, s.plan.Microbatches)
	return list
}

// fullAttention is the number of layers without a window.
func fullAttention(c *model.Config) int64 {
	return int64(len(lists.Filter(c.Windowed, func(w bool) bool { return !w })))
}
