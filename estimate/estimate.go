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

// An Estimate is what a step of a plan takes.
//
// Step is the makespan of the pipeline, whose virtual stages are Stages, and Tail after it:
// gradients and parameters on their way as far as no computation hides them, and the optimizer.
type Estimate struct {
	Step      float64        // seconds
	Tail      float64        // seconds
	Waits     float64        // the share of Step that ranks wait for each other, in the mean
	Low, High float64        // seconds; nine in ten steps lie between them
	Stages    []Stage        // by virtual stage
	Parts     Parts          // of Step
	Peak      int64          // bytes of the worst rank
	Memory    program.Memory // of Peak
	// Ranks is what each rank of the pipeline holds at the end of a step, when no microbatch is
	// there, and Loads what microbatches hold before, by virtual stage. Both make Peak.
	Ranks  []program.Memory
	Loads  []schedule.Load
	Policy string // a line on what products are computed in; empty if all are in one type
	// Attention is the kernel of our own programs that was priced, as package kernels picks it, of
	// the layer that has the slowest; empty for other stacks.
	Attention string
}

// A Stage is one virtual stage of the pipeline, on one of its devices.
type Stage struct {
	Layers int64
	// Forward, Input and Weight are the seconds of one microbatch, collectives that nothing hides
	// included. Recomputation is part of Input.
	Forward, Input, Weight float64
	// Send is the seconds until the next stage has the result of this one.
	Send float64
}

// Parts is the seconds of a step by cause, of the rank that works longest. They sum to the step.
type Parts struct {
	Compute   float64 // products of linear layers
	Attention float64 // products of attention
	Memory    float64 // norms, activations and all else that waits for memory
	Recompute float64 // what the backward pass computes again
	Quantize  float64 // to narrow types
	Launch    float64 // what each kernel costs beyond its work
	Tensor    float64 // exposed collectives of tp
	Context   float64 // of cp
	Expert    float64 // of ep
	Pipeline  float64 // sends between stages that are waited for
	Bubble    float64 // waiting for other stages
	Data      float64 // exposed collectives of dp and fsdp
	Offload   float64 // copies to and from the host that nothing hides
	Optimizer float64
	Host      float64 // what a step costs the host beyond all that
}

// Sum is the whole step.
func (p Parts) Sum() float64 {
	return p.Compute + p.Attention + p.Memory + p.Recompute + p.Quantize + p.Launch + p.Tensor +
		p.Context + p.Expert + p.Pipeline + p.Bubble + p.Data + p.Offload + p.Optimizer + p.Host
}

// QuantizedLine says in a line what products are computed in and what it costs to write numbers in
// blocks; it is empty if none are.
func (e *Estimate) QuantizedLine() string {
	if e.Policy == "" {
		return ""
	}
	return fmt.Sprintf("%s; quantization takes %.1f %% of the step", e.Policy,
		100*e.Parts.Quantize/max(e.Parts.Sum(), 1e-12))
}

// Options are what a plan cannot say yet.
type Options struct {
	// Precision is that of linear layers; empty means the type of the plan's parameters. For our own
	// stack mxfp8 and nvfp4 stand for the policies of package precision.
	Precision dtype.Format
	// Policy says what each product is computed in, in the place of Precision. Only programs of our
	// own stack have one.
	Policy *precision.Policy
	// ExpertRanks is the number of devices that the experts are dealt to. 0 means the plan's axis
	// ep. Megatron folds it over dp, cp and tp: then ep is 1 in the plan and more here.
	ExpertRanks int64
	// ExpertTensor is how many devices share one expert; 0 means 1.
	ExpertTensor int64
	// Capacity is how many times its even share an expert takes before it drops tokens, with each
	// one padded to it; 0 means that nothing is dropped.
	Capacity float64
	// Imbalance is how many times its even share the busiest device's experts get; 0 means 1.
	Imbalance float64
	// Predict is the number of layers that predict further tokens.
	Predict int64
	// Layers says how many layers each virtual stage has, where a person laid them out.
	Layers []int64
	// Ulysses turns tokens into heads by all-to-all along cp (Jacobs et al., 2023), where a plan
	// knows gather and ring.
	Ulysses bool
	// Links makes every transfer between devices take so many times as long; 0 means 1.
	Links float64
	// Plain is attention whose scores are written to memory, as before FlashAttention.
	Plain bool
	// Core recomputes the scores of plain attention only (Korthikanti et al., 2022).
	Core bool
}

// An Estimator prices plans of one model on one cluster with one software stack. It keeps what it
// worked out, so that it is not safe for concurrent use; [Estimator.With] makes another.
type Estimator struct {
	config  *model.Config
	cluster machine.Cluster
	profile *price.Profile // as it was given; prices are under what it is for this run
	prices  *price.Prices
	set     *kernels.Selector // what our own programs' attention becomes on the cluster
	options Options
	sigma   float64 // of the logarithm of a step

	blockCosts map[cut]*priced
	bare       map[cut]*priced // without fsdp
	leans      map[leanCut]*priced
	splits     map[int]*layerSplit // by number of stages
	orders     *orders
	player     schedule.Player[float64]
	costs      [4][]float64     // of the stages of a plan that is played, by kind of action
	loads      loads            // of the plan that is priced
	parts      []Stage          // likewise
	ranks      []program.Memory // likewise
	busy       []float64        // likewise, by rank
	kindLoads  []schedule.Load  // likewise, by kind of stage
	spans      map[timing]float64
	book       *cost.Book
	own        *own

	policy     *precision.Policy // what our own programs compute in; nil if nothing is in blocks
	word       dtype.Format      // of all linear layers where there is no policy
	policyLine string            // of the policy, in a line
	agrees     bool              // the policy has NVFP4, whose scales all devices agree on
	// kinds are those of layers, below how many of each stand before a place, and lastKind is that
	// of the last layer.
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

// With gives an estimator of the same things with options, which may run beside e.
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

// On gives an estimator of the same things on another number of the same devices, for whoever uses
// e: they share the bills of graphs, schedules, and what is known of the memory of programs.
func (e *Estimator) On(cl machine.Cluster) *Estimator {
	n := *e
	n.cluster = cl
	n.loadPrices()
	n.forget()
	n.own = e.own
	return &n
}

// Beside gives an estimator of the same things that may run beside e.
func (e *Estimator) Beside() *Estimator {
	n := *e
	n.forget()
	return &n
}

func (e *Estimator) forget() {
	e.splits = map[int]*layerSplit{}
	e.blockCosts, e.bare, e.leans = map[cut]*priced{}, map[cut]*priced{}, map[leanCut]*priced{}
	e.player, e.own, e.costs = schedule.Player[float64]{}, &own{}, [4][]float64{}
	e.loads, e.parts, e.ranks, e.busy, e.spans = loads{}, nil, nil, nil, map[timing]float64{}
	e.kindLoads = nil
}

// Price works out a plan. It does not ask whether the plan can run or fits: see
// [plan.Plan.Check] and Peak.
func (e *Estimator) Price(p *plan.Plan) (Estimate, error) {
	est, _, err := e.Within(p, Limits{})
	return est.Clone(), err
}

// Clone gives an estimate that stays as it is when the estimator prices again.
func (e Estimate) Clone() Estimate {
	e.Stages, e.Ranks, e.Loads = slices.Clone(e.Stages), slices.Clone(e.Ranks), slices.Clone(e.Loads)
	return e
}

// Limits are what a plan must not exceed to be of use; 0 is no limit.
type Limits struct {
	Peak int64   // bytes
	Step float64 // seconds
	// Waits is the share of the step of a pipeline that ranks may wait for each other. With it time
	// is worked out before memory.
	Waits float64
	Timed bool // no memory is asked for
	// Brief leaves out what is not needed to know that a plan exceeds a limit: the memory of one that
	// is too slow, and of one that does not fit all but a rank that does not.
	Brief bool
}

// Within prices a plan as Price does, but for two things: lists are the estimator's own until it
// prices again, and of a plan that exceeds a limit no more is worked out than it takes to know
// that. Then Within reports false, Step is what the plan takes at least, and what follows from the
// step may be missing; Peak and Memory are those of the plan, but for Brief. With limits there are
// no Loads, nor Ranks but the worst.
func (e *Estimator) Within(p *plan.Plan, most Limits) (est Estimate, whole bool, err error) {
	l, err := e.read(p)
	if err != nil {
		return est, false, err
	}
	est.Policy = e.policyLine
	blocks, err := e.blockCost(&l.cut)
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
	// A closed form takes less than memory, playing a schedule takes more.
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

// Exceeds tells whether a plan needs more than most bytes whichever of some sets of tags it
// recomputes: of the list those whose bits are set, or, if none is, its own. A plan of which it
// does not say so may still need more.
func (e *Estimator) Exceeds(p *plan.Plan, tags [][]ir.Tag, which uint32, most int64) (bool, error) {
	if e.compilable(p) {
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
	blocks, err := e.leanest(&l.cut, tags, which)
	if err != nil {
		return false, err
	}
	var est Estimate
	err = e.remember(p.PP.Schedule, &est, &l, e.stages(&l, blocks), blocks.logits, true, most)
	return est.Peak > most, err
}

// time works out the step, and divides it by cause.
func (e *Estimator) time(est *Estimate, name string, l *layout, loads *loads, t tail) error {
	pipe, err := e.makespan(name, l, est.Stages)
	if err == nil {
		e.account(est, l, loads, pipe, t)
	}
	return err
}

// memory works out what ranks hold, all of them if there are no limits.
func (e *Estimator) memory(p *plan.Plan, est *Estimate, l *layout, loads *loads, logits float64,
	most Limits) error {
	limited, peak := most != (Limits{}), int64(0)
	if most.Brief {
		peak = most.Peak
	}
	if e.compilable(p) {
		return e.compiled(p, est, limited, peak)
	}
	return e.remember(p.PP.Schedule, est, l, loads, logits, limited, peak)
}

// passes gives the times of the stages.
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

// work adds up what each rank has to do for a microbatch.
func (e *Estimator) work(l *layout, loads *loads) {
	e.busy = slices.Grow(e.busy[:0], int(l.pipe))[:l.pipe]
	clear(e.busy)
	for turn := range int(l.virtual) {
		for r := range e.busy {
			e.busy[r] += loads.at(l.stage(r, turn)).total
		}
	}
}

// least is a time that no schedule falls short of: a rank waits for the first microbatch to come
// down to it, and then has all of them to work on.
func (e *Estimator) least(l *layout, stages []Stage) float64 {
	longest, before := 0.0, 0.0
	for r, busy := range e.busy {
		longest = max(longest, before+float64(l.micros)*busy)
		before += stages[r].Forward
	}
	return longest * (1 - rounding)
}

// rounding is more than sums in another order can differ by.
const rounding = 1e-9

// Under gives an estimator of the same model on the same cluster, with the same options, under
// another profile. Lists of schedules, which have no prices in them, are shared.
func (e *Estimator) Under(prof *price.Profile) *Estimator {
	n := *e
	n.profile = prof
	n.loadPrices()
	n.classify()
	n.forget()
	return &n
}

// loadPrices takes the prices of the profile for what is estimated.
func (e *Estimator) loadPrices() {
	e.prices = price.New(e.cluster, e.profile.For(e.run()))
	if f := e.options.Links; f > 0 && f != 1 {
		e.prices = e.prices.Slower(f)
	}
	e.sigma = e.logSigma()
}

// run is what the constants of a stack may depend on.
func (e *Estimator) run() price.Run {
	r := price.Run{GPU: e.cluster.GPU.Name, Precision: e.options.Precision, Head: e.config.HeadDim}
	if m := e.config.MoE; m != nil {
		r.Experts, r.Bias = true, m.Bias
	}
	return r
}
