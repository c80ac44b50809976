package plan

import (
	"fmt"
	"math"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/schedule"
)

// Check reports the first thing that keeps the plan from training a model on its cluster, and what
// would fit. Sizes that are only awkward are not in its way: KV heads fewer than tp are copied, a
// vocabulary that tp does not divide is padded, and stages may differ in their number of layers.
func (p *Plan) Check(m model.Model) error {
	c := m.Facts()
	for _, check := range []func(*model.Facts) *diag.Error{
		p.checkValues, p.checkOrder, p.checkDevices, p.checkLater, p.checkExperts, p.checkRows,
		p.checkTensor, p.checkContext, p.checkStages, p.checkScaleBlocks,
	} {
		if err := check(&c); err != nil {
			return err
		}
	}
	return nil
}

func misfit(format string, args ...any) *diag.Error {
	return diag.New(diag.PlanMisfit, format, args...)
}

func later(format string, args ...any) *diag.Error {
	return diag.New(diag.PlanLater, format, args...)
}

// checkValues refuses what a file cannot say, for plans made in code: sizes, words and types.
func (p *Plan) checkValues(*model.Facts) *diag.Error {
	// The form leaves out an axis of one device or less.
	for _, axis := range []struct {
		name string
		size int64
	}{{FSDPAxis, p.FSDP.Size}, {TensorAxis, p.TP.Size}, {ContextAxis, p.CP.Size},
		{PipelineAxis, p.PP.Size}, {"pp.virtual", p.PP.Virtual}} {
		if axis.size < 0 || axis.size > maxCount {
			return diag.New(diag.PlanValue, "%s is %d, not a whole number from 1 to %d", axis.name,
				axis.size, maxCount).At("plan %s", axis.name)
		}
	}
	for _, t := range []dtype.DType{p.Types.Params, p.Types.Grads, p.Types.Collectives} {
		if !t.Valid() {
			return diag.New(diag.PlanValue, "types are not set").At("plan types").
				Try("begin with plan.Default()")
		}
	}
	text, err := p.Marshal()
	if err == nil {
		_, err = Parse(text, "plan")
	}
	if err == nil {
		return nil
	}
	e := diag.From(err)
	if _, key, ok := strings.Cut(e.Where, " "); ok { // lines are of a text that nobody has seen
		e = e.At("plan %s", key)
	}
	return e
}

func (p *Plan) checkOrder(*model.Facts) *diag.Error {
	place := map[string]int{}
	for i, axis := range p.axes() {
		place[axis] = i
	}
	for _, axis := range order {
		if _, ok := place[axis]; !ok {
			return misfit("order does not name %s", axis)
		}
	}
	if p.Size(PipelineAxis) > 1 && place[PipelineAxis] != 0 {
		return misfit("order puts %s outside %s", p.axes()[0], PipelineAxis).
			Because("a stage's devices must follow each other").Try("put %q first", PipelineAxis)
	}
	return nil
}

func (p *Plan) checkDevices(*model.Facts) *diag.Error {
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return diag.From(err)
	}
	have, want := int64(cluster.Count), p.Devices()
	if have == want {
		return nil
	}
	var parts []string
	for _, axis := range p.axes() {
		if n := p.Size(axis); n > 1 {
			parts = append(parts, fmt.Sprintf("%s %d", axis, n))
		}
	}
	e := misfit("%s make %d devices; the cluster has %d", strings.Join(parts, " × "), want, have)
	if len(parts) == 0 {
		e = misfit("the plan is for one device; the cluster has %d", have)
	}
	if rest := want / p.Size(FSDPAxis); have%rest == 0 {
		return e.Try(`"fsdp": %d`, have/rest)
	}
	return e.Try("choose sizes whose product is %d", have)
}

func (p *Plan) checkRows(*model.Facts) *diag.Error {
	ranks := p.DataParallelSize()
	if p.Halved() {
		ranks *= 2 // halves of a batch
	}
	if p.Batch%p.Microbatches == 0 && p.MicrobatchSequences()%ranks == 0 {
		return nil
	}
	each := p.Microbatches * ranks
	halves := ""
	if p.Halved() {
		halves = " × 2 halves"
	}
	if n := p.Size(ExpertAxis); n > 1 {
		halves = fmt.Sprintf(" × ep %d", n) + halves
	}
	return misfit("a batch of %d sequences does not divide into %d microbatches × dp %d × fsdp %d%s",
		p.Batch, p.Microbatches, p.Size(DataAxis), p.Size(FSDPAxis), halves).
		Try(`"batch": %d`, (p.Batch+each-1)/each*each)
}

// FitsTP reports whether heads, MLP and experts of a model can be sharded over tp devices. KV
// heads fewer than tp are copied.
func FitsTP(c *model.Facts, tp int64) bool {
	experts := c.MoE == nil || c.MoE.MLP%tp == 0 && c.MoE.Shared%tp == 0
	return c.Heads%tp == 0 && c.MLP%tp == 0 && (c.KVHeads%tp == 0 || tp%c.KVHeads == 0) && experts
}

func (p *Plan) checkTensor(c *model.Facts) *diag.Error {
	tp := p.Size(TensorAxis)
	if tp == 1 {
		return nil
	}
	var good []string
	for n := int64(1); n <= c.Heads && len(good) < 12; n++ {
		if FitsTP(c, n) {
			good = append(good, fmt.Sprint(n))
		}
	}
	would := "tp can be " + strings.Join(good, ", ")
	switch {
	case c.Heads%tp != 0:
		return misfit("%d heads cannot be sharded over tp %d", c.Heads, tp).Try("%s", would)
	case c.MLP%tp != 0:
		return misfit("an MLP of %d cannot be sharded over tp %d", c.MLP, tp).Try("%s", would)
	case c.KVHeads%tp != 0 && tp%c.KVHeads != 0:
		return misfit("%d KV heads can be neither sharded over tp %d nor replicated evenly", c.KVHeads,
			tp).Try("%s", would)
	case !FitsTP(c, tp):
		return misfit("experts with an MLP of %d cannot be sharded over tp %d", c.MoE.MLP, tp).
			Try("%s", would)
	}
	return nil
}

// CheckShards reports what does not divide over devices, of plans that are priced only and need
// not pass Check: sequences and heads over context parallelism, experts and their slots, and shards
// of linear layers into blocks of the formats that these have.
func (p *Plan) CheckShards(m model.Model, formats ...dtype.Format) error {
	c := m.Facts()
	if err := p.checkContext(&c); err != nil {
		return err
	}
	if err := p.checkExperts(&c); err != nil {
		return err
	}
	for _, f := range formats {
		if err := p.checkHalves(f); err != nil {
			return err
		}
		if n := f.Block(); n > 1 {
			if err := p.checkBlocks(&c, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkContext holds sequences, and heads that an all-to-all exchanges, to whole shards.
func (p *Plan) checkContext(c *model.Facts) *diag.Error {
	tp := p.Size(TensorAxis)
	switch heads := p.CP.AllToAll(); {
	case p.CP.Kind == hierarchical && p.Size(ContextAxis) > 1 &&
		(p.CP.Inner < 2 || p.CP.Inner >= p.CP.Size || p.CP.Size%p.CP.Inner != 0):
		return misfit("cp %d does not divide into several groups of %d", p.CP.Size, p.CP.Inner).
			At("plan cp.inner").Try("cp.inner a divisor of cp between 2 and %d", p.CP.Size/2)
	case p.CP.Kind != hierarchical && p.CP.Inner != 0:
		return misfit("cp.inner is for cp.kind %s", hierarchical).At("plan cp.inner").
			Try("leave cp.inner out")
	case heads > 1 && p.CP.Shards() == 1 && p.CP.Balance:
		return misfit("cp.balance orders a sequence that cp.kind a2a has whole").
			At("plan cp.balance").Try("leave cp.balance out, or cp.kind ring")
	case !p.CP.Fits(c.Heads, tp):
		size := map[string]string{ContextAxis: "cp", innerAxis: "cp.inner"}[p.CP.AllToAllAxis()]
		return misfit("the %d heads of a device cannot be divided among %d by an all-to-all",
			c.Heads/tp, heads).At("plan cp.kind").
			Try("tp × %s a divisor of %d heads, or cp.kind ring", size, c.Heads)
	}
	chunks := p.CP.Chunks()
	if p.TP.Sequence {
		chunks *= p.Size(TensorAxis)
	}
	if p.Seq%chunks == 0 {
		return nil
	}
	return misfit("a sequence of %d tokens cannot be split into %d", p.Seq, chunks).
		Try(`"seq": %d`, (p.Seq+chunks-1)/chunks*chunks)
}

func (p *Plan) checkStages(c *model.Facts) *diag.Error {
	if p.Size(PipelineAxis) == 1 {
		if p.PP.Virtual > 1 {
			return misfit("virtual stages need a pp of more than 1").At("plan pp.virtual").
				Try("leave pp.virtual out")
		}
		return nil
	}
	if _, err := p.Schedule(); err != nil {
		return diag.From(err)
	}
	return diag.From(p.FitsLayers(c.Layers))
}

// FitsLayers reports more stages than there are layers to deal to them.
func (p *Plan) FitsLayers(layers int64) error {
	stages := p.stages()
	if stages <= layers {
		return nil
	}
	return misfit("%d layers cannot be split into %d stages", layers, stages).
		Try("pp × virtual can be at most %d", layers)
}

// stages is pp × virtual, with the schedule's minimum for a virtual of 0.
func (p *Plan) stages() int64 {
	pp := p.Size(PipelineAxis)
	if pp > 1 && p.PP.Virtual < 1 {
		return pp * int64(schedule.MinVirtual(p.PP.Schedule))
	}
	return pp * max(p.PP.Virtual, 1)
}

// maxActions bounds microbatches times stages, which a schedule lists one by one: 32 times what
// 405b takes on 100,000 devices, and 0.3 GiB in the simulator.
const maxActions = 1 << 20

// Schedule is what the stages do in which order, for one stage and one microbatch at least.
func (p *Plan) Schedule() (*schedule.Schedule, error) {
	// A list holds every action of every stage. Divided, since a product may overflow.
	switch n := p.stages(); {
	case n > maxActions:
		return nil, diag.New(diag.PlanValue, "pp %d × virtual %d are more stages than a schedule holds",
			p.Size(PipelineAxis), p.PP.Virtual).At("plan pp").
			Try("pp × virtual can be at most the model's layers")
	case p.Microbatches > maxActions/n:
		return nil, diag.New(diag.PlanValue, "%d microbatches in %d stages are more than a schedule "+
			"holds", p.Microbatches, n).At("plan microbatches").
			Try(`"microbatches": at most %d`, maxActions/n)
	}
	return schedule.New(p.PP.Schedule, schedule.Shape{Ranks: int(p.Size(PipelineAxis)),
		Micros: int(p.Microbatches), Virtual: int(p.PP.Virtual)})
}

// Stages deals the layers of a model to the stages of the plan, in order: the first stages get one
// more where they do not come out even. A plan with more stages than layers, which [Plan.Check]
// refuses, gets a layer in each stage and no others.
func (p *Plan) Stages(layers int64) []int64 {
	n := min(p.stages(), max(layers, 1))
	list := make([]int64, n)
	for i := range list {
		list[i] = LayersOf(layers, int64(i), n)
	}
	return list
}

// LayersOf is the number of layers of one of n stages. If layers is no multiple of n, the first
// stages have one more.
func LayersOf(layers, stage, n int64) int64 {
	count := layers / n
	if stage < layers%n {
		count++
	}
	return count
}

// Block is the number of elements that share a scale in quantized GEMMs; 0 if GEMMs are not
// quantized.
func (p *Plan) Block() int64 {
	if n := dtype.Format(p.Precision).Block(); n > 1 {
		return n
	}
	return 0
}

// checkScaleBlocks holds what a device has to whole blocks along what products sum over: a block
// that two devices share would have another scale than on one.
func (p *Plan) checkScaleBlocks(c *model.Facts) *diag.Error {
	n := p.Block()
	if n == 0 {
		return nil
	}
	if err := p.checkHalves(dtype.Format(p.Precision)); err != nil {
		return err
	}
	return p.checkBlocks(c, n)
}

// checkHalves refuses half batches with a format that has a scale of the whole tensor.
func (p *Plan) checkHalves(f dtype.Format) *diag.Error {
	if !f.TensorScale() || !p.Halved() {
		return nil
	}
	return later("halves of a batch have other largest magnitudes than the batch").
		Because("%s scales by the amax of a tensor", f).Try("leave %s out", p.halvedBy())
}

// halvedBy names the keys by which layers work on half batches.
func (p *Plan) halvedBy() string {
	var keys []string
	if p.TP.Overlap {
		keys = append(keys, "tp.overlap")
	}
	if p.EPOverlap {
		keys = append(keys, "ep_overlap")
	}
	return strings.Join(keys, " and ")
}

// HasHalves holds the sequences of a microbatch on a device to two halves.
func (p *Plan) HasHalves(sequences int64) *diag.Error {
	if !p.Halved() || sequences%2 == 0 {
		return nil
	}
	return misfit("a microbatch of %d on a device has no halves", sequences).
		At("plan %s", p.halvedBy()).Try("fewer microbatches, or leave %s out", p.halvedBy())
}

// checkBlocks holds a device's shards to whole blocks of n elements.
func (p *Plan) checkBlocks(c *model.Facts, n int64) *diag.Error {
	switch chunks, tp := p.CP.Chunks(), p.Size(TensorAxis); {
	case WholeScaleBlocks(c, n, p.Seq, chunks, tp):
		return nil
	case p.Seq/chunks%n != 0:
		return misfit("a shard of %d tokens does not divide into blocks of %d", p.Seq/chunks, n).
			Try("seq a multiple of %d, or a smaller cp", n*chunks)
	default:
		size := c.MLP
		if size/tp%n == 0 {
			size = splitExperts(c, n, tp)
		}
		return misfit("%d of the MLP's %d elements do not divide into blocks of %d", size/tp, size, n).
			Try("a smaller tp")
	}
}

// WholeScaleBlocks reports whether a device's share of every contracted dimension is whole blocks
// of n elements: its chunk of a sequence (wgrad) and its shard of the MLP, and of experts' MLPs.
func WholeScaleBlocks(c *model.Facts, n, seq, chunks, tp int64) bool {
	return seq/chunks%n == 0 && c.MLP/tp%n == 0 && splitExperts(c, n, tp) == 0
}

// splitExperts is the size of an expert's MLP, or of the shared experts', whose blocks tp would
// split; 0 without one. What is not made of blocks is not quantized.
func splitExperts(c *model.Facts, n, tp int64) int64 {
	if c.MoE == nil {
		return 0
	}
	for _, size := range []int64{c.MoE.MLP, c.MoE.Shared} {
		if size%n == 0 && size/tp%n != 0 {
			return size
		}
	}
	return 0
}

// checkExperts holds experts to whole shards.
func (p *Plan) checkExperts(c *model.Facts) *diag.Error {
	switch ep := p.Size(ExpertAxis); {
	case ep > 1 && c.MoE == nil:
		return misfit("ep %d shards experts, and the model has none", ep).At("plan ep").
			Try("leave ep out, or make it dp or fsdp")
	case ep > 1 && c.MoE.Experts%ep != 0:
		return misfit("%d experts cannot be sharded over ep %d", c.MoE.Experts, ep).At("plan ep").
			Try("ep a divisor of %d", c.MoE.Experts)
	case len(p.Slots) > 0 && c.MoE == nil:
		return misfit("slots are for experts, and the model has none").At("plan slots").
			Try("leave slots out")
	}
	for i, x := range p.Slots {
		if !(x >= 1) || math.IsInf(x, 0) || i > 0 && x <= p.Slots[i-1] {
			return misfit("slots are %v, not growing numbers from 1 on", p.Slots).At("plan slots").
				Try(`"slots": [1.25, 2, 4]`)
		}
	}
	return nil
}

// checkLater refuses by name what a plan can say and no program can be made of yet.
func (p *Plan) checkLater(c *model.Facts) *diag.Error {
	switch {
	case p.Precision == "bf16" && p.Types.Params == dtype.F32:
		return misfit("GEMMs in bf16 need parameters in bf16").
			Try(`"types": {"params": "bf16"}, or leave precision out`)
	case p.Precision == "fp8":
		return later("training in fp8 with per-tensor scales is not supported").
			Try("use mxfp8; deepwell dryrun predicts the plan as it is")
	case p.Block() > 0 && p.Types.Params == dtype.F32:
		return misfit("GEMMs in %s need parameters in bf16", p.Precision).
			Try(`"types": {"params": "bf16"}, or leave precision out`)
	case p.Types.Params == dtype.F32 && p.Types != (Types{dtype.F32, dtype.F32, dtype.F32}):
		return misfit("gradients of f32 parameters are kept and summed in f32").
			Try(`"types": {"params": "bf16"}, or leave types out`)
	}
	return nil
}
