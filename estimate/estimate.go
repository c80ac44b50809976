package estimate

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// An Estimate is the predicted time and memory of one training step.
//
// Step is the pipeline's makespan plus Tail: exposed gradient reductions and parameter gathers,
// and the optimizer.
type Estimate struct {
	Step      float64        // seconds
	Tail      float64        // seconds
	Waits     float64        // mean share of Step that ranks wait for each other
	Low, High float64        // seconds; 90 % of steps fall between them
	Stages    []Stage        // by virtual stage
	Parts     Parts          // Step by cause
	Peak      int64          // bytes on the worst rank
	Memory    program.Memory // the worst rank's bytes by cause, at its peak
	// Ranks is the memory of each pipeline rank at the end of a step, without activations. Loads is
	// the activation memory of one microbatch, by virtual stage. Peak follows from both.
	Ranks  []program.Memory
	Loads  []schedule.Load
	Policy string // which GEMMs are quantized, in a line; empty if none are
	// Attention names the priced attention kernel of our own programs ([kernels.Selector]), of the
	// slowest layer; empty for other stacks.
	Attention string
}

// A Stage is one virtual pipeline stage, on one of its devices.
type Stage struct {
	Layers int64
	// Forward, Input (dgrad) and Weight (wgrad) are the seconds of one microbatch, with exposed
	// collectives. Recomputation is part of Input.
	Forward, Input, Weight float64
	// Send is the seconds to transfer activations to the next stage.
	Send float64
}

// Parts splits the seconds of a step by cause, on the rank with the most work. They sum to Step.
type Parts struct {
	Compute   float64 // GEMMs of linear layers
	Attention float64 // QKᵀ, softmax, PV
	Memory    float64 // norms, activation functions, other memory-bound kernels
	Recompute float64 // activation checkpointing
	Quantize  float64 // casts to quantized formats
	Launch    float64 // kernel launches that the device waits for
	Tensor    float64 // exposed tensor-parallel communication
	Context   float64 // exposed context-parallel communication
	Expert    float64 // exposed expert-parallel communication
	Pipeline  float64 // exposed sends between stages
	Bubble    float64 // idle time of the pipeline
	Data      float64 // exposed FSDP and data-parallel communication
	Offload   float64 // exposed copies to and from the host
	Optimizer float64
	Host      float64 // host time of a step, once
}

// Sum is the whole step.
func (p Parts) Sum() float64 {
	return p.Compute + p.Attention + p.Memory + p.Recompute + p.Quantize + p.Launch + p.Tensor +
		p.Context + p.Expert + p.Pipeline + p.Bubble + p.Data + p.Offload + p.Optimizer + p.Host
}

// QuantizedLine describes which GEMMs are quantized and what quantization costs; empty if none
// are.
func (e *Estimate) QuantizedLine() string {
	if e.Policy == "" {
		return ""
	}
	return fmt.Sprintf("%s; quantization takes %.1f %% of the step", e.Policy,
		100*e.Parts.Quantize/max(e.Parts.Sum(), 1e-12))
}

// Options are settings that a plan cannot express yet.
type Options struct {
	// Precision is the format of linear layers; empty means the parameters' type. For our own stack
	// mxfp8 and nvfp4 stand for the default policies of package precision.
	Precision dtype.Format
	// Policy sets the format of each GEMM and overrides Precision. Only our own stack has policies.
	Policy *precision.Policy
	// ExpertRanks is the number of devices that the experts are distributed over; 0 means the plan's
	// ep axis. Megatron folds expert parallelism over dp, cp and tp: then the plan's ep is 1.
	ExpertRanks int64
	// ExpertTensor is the tensor-parallel size of one expert; 0 means 1.
	ExpertTensor int64
	// Capacity is the capacity factor: an expert takes this many times its even share of tokens,
	// padded to it, and drops the rest; 0 drops nothing.
	Capacity float64
	// Imbalance is the load of the busiest device's experts relative to the mean; 0 means 1.
	Imbalance float64
	// Predict is the number of multi-token prediction layers.
	Predict int64
	// Layers is the number of layers of each virtual stage, for a hand-made split.
	Layers []int64
	// Links multiplies the time of every transfer between devices; 0 means 1.
	Links float64
	// Plain is attention that writes its scores to memory, as before FlashAttention.
	Plain bool
	// Core recomputes only the scores of plain attention: "selective recomputation" (Korthikanti et
	// al., 2022).
	Core bool
}

// An Estimator prices plans of one model on one cluster with one software stack. It caches
// results, so it is not safe for concurrent use; [Estimator.Beside] and [Estimator.With] return
// estimators for other goroutines.
type Estimator struct {
	config  *model.Config
	cluster machine.Cluster
	profile *price.Profile // as given; prices holds the one for this run
	prices  *price.Prices
	set     *kernels.Selector // attention kernels of our own programs
	options Options
	sigma   float64 // standard deviation of the log step time

	blockCosts map[sharding]*priced
	bare       map[sharding]*priced // without FSDP collectives
	leans      map[leanSharding]*priced
	splits     map[int]*layerSplit // by number of stages
	orders     *orders
	player     schedule.Player[float64]
	costs      [4][]float64     // scratch: stage times of a simulated plan, by kind of action
	loads      loads            // scratch of the plan being priced
	parts      []Stage          // scratch
	ranks      []program.Memory // scratch
	busy       []float64        // scratch: seconds per microbatch, by rank
	kindLoads  []schedule.Load  // scratch, by kind of stage
	spans      map[timing]float64
	book       *cost.Book
	own        *own

	policy     *precision.Policy // of our own programs; nil if nothing is quantized
	word       dtype.Format      // format of all linear layers without a policy
	policyLine string            // the policy in a line
	agrees     bool              // the policy has NVFP4, whose amax is all-reduced
	// kinds lists the kinds of layers; below[k][i] counts the layers of kind k before layer i;
	// lastKind is the kind of the last layer.
	kinds    []kind
	below    [][]int64
	lastKind int
}

// New makes an estimator.
func New(c *model.Config, cl machine.Cluster, prof *price.Profile) (*Estimator, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	e := &Estimator{config: c, cluster: cl, profile: prof, set: kernels.For(cl.Arch()),
		orders: &orders{made: map[shape]*schedule.Order{}}}
	e.loadPrices()
	e.classify()
	e.forget()
	return e, nil
}

// With returns an estimator with other options, which may run concurrently with e.
func (e *Estimator) With(o Options) *Estimator {
	n := *e
	n.options = o
	if n.profile.For(n.run()) != n.profile || o.Links != e.options.Links {
		n.loadPrices()
	}
	n.sigma = n.logSigma()
	n.classify()
	n.forget()
	return &n
}

// On returns an estimator for another number of the same GPUs. It shares caches of graph costs,
// schedules and program memory with e, so only one goroutine may use both.
func (e *Estimator) On(cl machine.Cluster) *Estimator {
	n := *e
	n.cluster = cl
	n.loadPrices()
	n.forget()
	n.own = e.own
	return &n
}

// Beside returns a copy with empty caches, which may run concurrently with e.
func (e *Estimator) Beside() *Estimator {
	n := *e
	n.forget()
	return &n
}

// forget drops all caches and scratch buffers. Two estimators must not share them unless one
// goroutine uses both.
func (e *Estimator) forget() {
	e.splits = map[int]*layerSplit{}
	e.blockCosts, e.bare = map[sharding]*priced{}, map[sharding]*priced{}
	e.leans = map[leanSharding]*priced{}
	e.player, e.own, e.costs = schedule.Player[float64]{}, &own{}, [4][]float64{}
	e.loads, e.parts, e.ranks, e.busy, e.spans = loads{}, nil, nil, nil, map[timing]float64{}
	e.kindLoads = nil
}

// Price estimates a plan. It does not check whether the plan can run or fits: see
// [plan.Plan.Check] and Estimate.Peak.
func (e *Estimator) Price(p *plan.Plan) (Estimate, error) {
	est, _, err := e.Within(p, Limits{})
	return est.Clone(), err
}

// Clone returns a copy that stays valid when the estimator prices again.
func (e Estimate) Clone() Estimate {
	e.Stages, e.Ranks, e.Loads = slices.Clone(e.Stages), slices.Clone(e.Ranks), slices.Clone(e.Loads)
	return e
}

// Limits bound the plans that are of use to a search; 0 means no limit.
type Limits struct {
	Peak int64   // bytes
	Step float64 // seconds
	// Waits is the largest idle share of a pipelined step. With it, time is computed before memory.
	Waits float64
	Timed bool // only time is needed
	// Brief stops as soon as a limit is exceeded: a plan that is too slow gets no memory, and a plan
	// that does not fit only the memory of one rank that does not.
	Brief bool
}

// Within prices a plan as Price does, with two differences. Slices in the result belong to the
// estimator and are overwritten by the next call. And a plan that exceeds a limit is computed only
// as far as needed: then whole is false, Step is a lower bound, and fields that depend on it may
// be unset; Peak and Memory are set, unless Brief is. With limits, Loads is empty and Ranks has
// only the worst.
func (e *Estimator) Within(p *plan.Plan, most Limits) (est Estimate, whole bool, err error) {
	l, err := e.read(p)
	if err != nil {
		return est, false, err
	}
	est.Policy = e.policyLine
	blocks, err := e.blockCost(&l.sharding)
	if err != nil {
		return est, false, err
	}
	est.Attention = blocks.attention
	loads := e.stages(&l, blocks)
	e.passes(&est, &l, loads)
	e.work(&l, loads)
	limited := most != (Limits{})
	slow := func() bool { return most.Step > 0 && est.Step > most.Step }
	if limited {
		if est.Step = e.least(&l, est.Stages); most.Brief && slow() {
			return est, false, nil
		}
	}
	tail := e.longestTail(&l, loads)
	est.Tail = tail.data + tail.optimizer + tail.host
	if est.Step += est.Tail; most.Brief && slow() {
		return est, false, nil
	}
	// A closed-form makespan is cheaper than the memory model, simulating a schedule is not.
	timed := most.Waits > 0 || most.Timed || closed(p.PP.Schedule, &l, est.Stages)
	if timed {
		if err := e.time(&est, p.PP.Schedule, &l, loads, tail); err != nil {
			return est, false, err
		}
		if most.Brief && slow() || most.Waits > 0 && est.Waits > most.Waits || most.Timed {
			return est, false, nil
		}
	}
	if err := e.memory(p, &est, &l, loads, blocks.logits, most); err != nil {
		return est, false, err
	}
	if most.Peak > 0 && est.Peak > most.Peak || slow() {
		return est, false, nil
	}
	if !timed {
		err = e.time(&est, p.PP.Schedule, &l, loads, tail)
	}
	e.interval(&est)
	return est, err == nil, err
}

// Exceeds reports whether a plan needs more than most bytes with every set of recompute tags whose
// bit in which is set; with which 0, with its own tags. It uses lower bounds, so false does not
// mean that the plan fits.
func (e *Estimator) Exceeds(p *plan.Plan, tags [][]ir.Tag, which uint32, most int64) (bool, error) {
	if e.compilable() {
		own, err := e.predictor()
		if err != nil {
			return false, err
		}
		return own.Exceeds(p, tags, which, max(0, most-e.reserve()))
	}
	l, err := e.read(p)
	if err != nil {
		return false, err
	}
	blocks, err := e.leanest(&l.sharding, tags, which)
	if err != nil {
		return false, err
	}
	var est Estimate
	err = e.remember(p.PP.Schedule, &est, &l, e.stages(&l, blocks), blocks.logits, true, most)
	return est.Peak > most, err
}

// time computes the step and splits it by cause.
func (e *Estimator) time(est *Estimate, name string, l *layout, loads *loads, t tail) error {
	pipe, err := e.makespan(name, l, est.Stages)
	if err == nil {
		e.account(est, l, loads, pipe, t)
	}
	return err
}

// memory computes the memory of the ranks: all of them without limits, else those that differ.
func (e *Estimator) memory(p *plan.Plan, est *Estimate, l *layout, loads *loads, logits float64,
	most Limits) error {
	limited, peak := most != (Limits{}), int64(0)
	if most.Brief {
		peak = most.Peak
	}
	if e.compilable() {
		return e.compiled(p, est, limited, peak)
	}
	return e.remember(p.PP.Schedule, est, l, loads, logits, limited, peak)
}

// passes sets the times of the stages.
func (e *Estimator) passes(est *Estimate, l *layout, loads *loads) {
	send := 0.0
	if l.pipe > 1 {
		bytes := l.seqShard() * e.hidden() * 2
		send = e.prices.Collective(price.Permute, bytes, price.Group{Size: 2, Stride: l.pipeAt})
	}
	e.parts = e.parts[:0]
	for i, kind := range loads.of {
		if i > 0 && kind == loads.of[i-1] {
			e.parts = append(e.parts, e.parts[i-1])
			continue
		}
		s := &loads.kinds[kind]
		st := Stage{Layers: s.layers, Send: send}
		st.Forward, st.Input, st.Weight = s.times()
		e.parts = append(e.parts, st)
	}
	est.Stages = e.parts
}

// work adds up each rank's seconds per microbatch.
func (e *Estimator) work(l *layout, loads *loads) {
	e.busy = slices.Grow(e.busy[:0], int(l.pipe))[:l.pipe]
	clear(e.busy)
	for turn := range int(l.virtual) {
		for r := range e.busy {
			e.busy[r] += loads.at(l.stage(r, turn)).total
		}
	}
}

// least is a lower bound for every schedule: a rank waits for the first microbatch to pass the
// stages before it, and then has all microbatches to compute.
func (e *Estimator) least(l *layout, stages []Stage) float64 {
	longest, before := 0.0, 0.0
	for r, busy := range e.busy {
		longest = max(longest, before+float64(l.micros)*busy)
		before += stages[r].Forward
	}
	return longest * (1 - rounding)
}

// rounding exceeds the relative difference of sums in another order.
const rounding = 1e-9

// Under returns an estimator with another cost model. Schedules, which contain no times, are
// shared.
func (e *Estimator) Under(prof *price.Profile) *Estimator {
	n := *e
	n.profile = prof
	n.loadPrices()
	n.classify()
	n.forget()
	return &n
}

// loadPrices instantiates the cost model for the cluster and the options.
func (e *Estimator) loadPrices() {
	e.prices = price.New(e.cluster, e.profile.For(e.run()))
	if f := e.options.Links; f > 0 && f != 1 {
		e.prices = e.prices.Slower(f)
	}
	e.sigma = e.logSigma()
}

// run lists what a stack's constants may depend on.
func (e *Estimator) run() price.Run {
	r := price.Run{GPU: e.cluster.GPU.Name, Precision: e.options.Precision, Head: e.config.HeadDim}
	if m := e.config.MoE; m != nil {
		r.Experts, r.Bias = true, m.Bias
	}
	return r
}
