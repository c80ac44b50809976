package estimate

import (
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/schedule"
)

// A sharding is how a block is sharded over the devices of a stage. Plans with equal shardings
// share the costs of their blocks, so it is the key of the estimator's cache.
type sharding struct {
	rows, seq                     int64 // sequences of a microbatch on a device, and their tokens
	tensor, context, expert, etp  int64
	slots                         float64 // of experts in our own programs (plan slots), the first
	tensorAt, contextAt, expertAt int64   // device strides
	fsdp, fsdpAt                  int64   // for parameters and gradients sent in every microbatch
	sequence, overlap             bool
	kind                          string // of context parallelism (plan cp.kind); "" without
	exchange                      string // of expert parallelism (plan ep_kind); "" without
	inner                         int64  // devices that exchange heads within a ring (cp.inner)
	balance                       bool
	plain                         bool // attention
	offload                       bool
	again                         cost.Tags
	saveRows                      bool // of experts (plan ep_save)
	joint                         bool // there is no pipeline
	params                        dtype.DType
	grads                         dtype.DType
	wire                          dtype.DType
	gather, reduce                bool  // FSDP gathers parameters, reduces gradients, per microbatch
	ranks                         int64 // ranks that share a tensor's NVFP4 amax; 0 without NVFP4
}

// A layout is a plan in numbers: the size of each axis and the stride between its devices.
type layout struct {
	sharding
	pipe, virtual, micros int64
	data                  int64 // dp
	shard                 int64 // fsdp
	zero                  int
	whole                 string // lifetime of gathered parameters: layer, microbatch or step
	dataAt, shardAt       int64
	pipeAt                int64
	fold                  int64 // size of the plan's ep axis
	vee                   bool  // stages run down the ranks and back up (zb-v)
	hosted                bool  // optimizer state is offloaded to the host
}

// read converts a plan to a layout. It checks only what pricing needs: [plan.Plan.Check] checks
// the rest.
func (e *Estimator) read(p *plan.Plan) (l layout, err error) {
	one := func(n int64) int64 { return max(n, 1) }
	l.pipe, l.virtual, l.micros = one(p.PP.Size), one(p.PP.Virtual), one(p.Microbatches)
	if l.joint = l.pipe == 1; l.joint {
		l.virtual = 1
	} else if p.PP.Virtual == 0 {
		l.virtual = int64(schedule.MinVirtual(p.PP.Schedule))
	}
	if err := p.FitsLayers(e.mostStages()); err != nil {
		return l, err // before anything is as long as there are stages
	}
	l.data, l.shard, l.zero, l.whole = one(p.DP), one(p.FSDP.Size), p.FSDP.Zero, p.FSDP.Gather
	l.fold = one(p.EP)
	l.tensor, l.context = one(p.TP.Size), one(p.CP.Size)
	l.expert, l.etp = l.fold, one(e.options.ExpertTensor)
	if e.options.ExpertRanks > 0 {
		l.expert = e.options.ExpertRanks
	}
	if e.config.MoE == nil {
		l.expert, l.etp = 1, 1
	} else if e.profile.Name == price.Own {
		l.slots, l.saveRows = p.ExpertSlots()[0], p.EPSave
	}
	ranks := p.DataParallelSize()
	if p.Microbatches > 0 && p.Batch%p.Microbatches != 0 {
		return l, diag.New(diag.PlanMisfit, "a batch of %d sequences does not divide into %d "+
			"microbatches", p.Batch, p.Microbatches).
			Try(`"batch": %d`, (p.Batch/p.Microbatches+1)*p.Microbatches)
	}
	sequences := p.MicrobatchSequences()
	if sequences%ranks != 0 || sequences == 0 ||
		p.Seq%(l.context*l.tensor) != 0 && p.TP.Sequence || p.Seq%l.context != 0 {
		return l, diag.New(diag.PlanMisfit,
			"%d sequences of %d tokens do not divide over %d ranks, cp %d", sequences, p.Seq, ranks,
			l.context).Try("choose sizes that divide them")
	}
	l.rows, l.seq = sequences/ranks, p.Seq
	l.sequence, l.overlap = p.TP.Sequence, p.TP.Overlap
	if e.profile.Name == price.Own {
		l.overlap = p.Halved()
		if err := p.HasHalves(l.rows); err != nil {
			return l, err
		}
		if l.expert > 1 {
			l.exchange = p.EPKind
		}
	}
	if l.context > 1 {
		l.kind, l.inner, l.balance = p.CP.Kind, p.CP.Inner, p.CP.Balance
	}
	if !p.CP.Fits(e.config.Heads, l.tensor) {
		return l, diag.New(diag.PlanMisfit, "%d heads do not divide over tp %d × cp %d",
			e.config.Heads, l.tensor, l.context).Try("cp.kind ring")
	}
	l.plain = p.PlainAttention()
	l.again = cost.TagsOf(p.Recompute)
	l.params, l.grads, l.wire = p.Types.Params, p.Types.Grads, p.Types.Collectives
	if !e.cluster.CPU() { // a CPU device has no other memory to offload to
		l.offload, l.hosted = p.Offloads(plan.Activations), p.Offloads(plan.OptimizerState)
	}
	if e.agrees {
		l.ranks = ranks * l.context * l.tensor
	}
	l.vee = l.pipe > 1 && schedule.LayoutOf(p.PP.Schedule) == schedule.Vee
	l.strides(p)
	if (l.shard > 1 || e.shardsOverExperts(&l.sharding)) && l.zero >= 2 {
		l.fsdp, l.fsdpAt, l.reduce = l.shard, l.shardAt, true
		l.gather = l.zero >= 3 && l.whole != "step"
	}
	return l, nil
}

// mostStages is the number of stages that layers can be dealt to. With Profile.Ends, embedding and
// head count as a layer each; Options.Layers may have stages without layers.
func (e *Estimator) mostStages() int64 {
	n := e.config.Layers
	if e.prices.Profile().Ends {
		n += 2
	}
	return max(n, int64(len(e.options.Layers)))
}

// strides assigns device strides, from the innermost axis outwards.
func (l *layout) strides(p *plan.Plan) {
	at := int64(1)
	order := p.Order
	if len(order) == 0 {
		order = defaultOrder
	}
	for _, axis := range slices.Backward(order) {
		size, stride := l.axis(axis)
		*stride = at
		at *= size
	}
	if l.fold == 1 { // ep is folded over dp, cp and tp
		l.expertAt = 1
	}
}

// axis returns the size of an axis and where its stride is stored.
func (l *layout) axis(name string) (size int64, stride *int64) {
	switch name {
	case plan.TensorAxis:
		return l.tensor, &l.tensorAt
	case plan.ExpertAxis:
		return l.fold, &l.expertAt
	case plan.ContextAxis:
		return l.context, &l.contextAt
	case plan.FSDPAxis:
		return l.shard, &l.shardAt
	case plan.DataAxis:
		return l.data, &l.dataAt
	}
	return l.pipe, &l.pipeAt
}

// defaultOrder is the device order of a plan without one: pipeline stages farthest apart,
// tensor-parallel ranks adjacent.
var defaultOrder = []string{plan.PipelineAxis, plan.DataAxis, plan.FSDPAxis, plan.ContextAxis,
	plan.ExpertAxis, plan.TensorAxis}

// tokens is the tokens of a microbatch on a device; seqShard divides them by tp under sequence
// parallelism.
func (c *sharding) tokens() float64 { return float64(c.rows*c.seq) / float64(c.context) }

func (c *sharding) seqShard() float64 {
	if c.sequence {
		return c.tokens() / float64(c.tensor)
	}
	return c.tokens()
}

// The groups of devices that a collective along an axis spans, as size and stride. Their cost
// depends on how many NVLink domains such a group touches.
func (c *sharding) tensorGroup() price.Group {
	return price.Group{Size: c.tensor, Stride: c.tensorAt}
}

// Along cp, devices that exchange heads follow each other, and sequences are shared between them.
func (c *sharding) headsGroup() price.Group {
	return price.Group{Size: c.cp().AllToAll(), Stride: c.contextAt}
}
func (c *sharding) contextGroup() price.Group {
	cp := c.cp()
	return price.Group{Size: cp.Shards(), Stride: c.contextAt * cp.AllToAll()}
}
func (c *sharding) everyone() price.Group { return price.Group{Size: c.ranks, Stride: 1} }
func (c *sharding) expertGroup() price.Group {
	return price.Group{Size: c.expert, Stride: c.expertAt}
}
func (c *sharding) fsdpGroup() price.Group { return price.Group{Size: c.fsdp, Stride: c.fsdpAt} }

// cp is the plan's context parallelism.
func (c *sharding) cp() plan.CP {
	return plan.CP{Size: c.context, Kind: c.kind, Inner: c.inner, Balance: c.balance}
}

// sorted is the memory traffic of an all-to-all in bytes for each byte sent: slices for each peer
// are put together, read and written, and slices from each peer again if there are several
// sequences.
func (c *sharding) sorted() float64 {
	if c.rows > 1 {
		return 4
	}
	return 2
}

// A joining is the memory traffic of joining the parts of attention, in bytes forward and backward
// for each element of a device's results, and of its keys and values.
type joining struct{ results, keys [2]float64 }

// joins is what our own programs move beside cuDNN's calls (package lower/stablehlo). halo is the
// share of a chunk that is its halo, 0 without one.
//
// A ring adds to results, and to gradients of Q, K and V, with each move. Sums are f32, what comes
// is bf16: 4 + 2 read, 4 written. A zigzag ring selects the half of the results that the move was
// for, 4 + 4 read and 4 written once more, and the halves of Q, K and V that it reads.
//
// Gathered keys join each chunk with the keys before it once: 2 + 2 read, 2 written. Balanced
// chunks are copied, 2 + 2 for each tensor that goes with queries, and three quarters of the
// gathered keys are put into order twice. Gradients of gathered keys are added up in f32 and
// rounded.
//
// With a halo, tensors of as many queries and keys are sliced and reversed, and the rest of the
// chunk is copied once.
func (c *sharding) joins(halo float64) joining {
	cp := c.cp()
	n := float64(cp.Shards())
	switch {
	case halo > 0:
		return joining{[2]float64{4 + 14*halo, 4 + 22*halo}, [2]float64{8 * halo, 4 + 18*halo}}
	case cp.Ring() && c.balance:
		return joining{[2]float64{22 * (n - 1), 16 * (n - 1)}, [2]float64{0, 16 * (n - 1)}}
	case cp.Ring():
		return joining{[2]float64{10 * (n - 1), 10 * (n - 1)}, [2]float64{0, 10 * (n - 1)}}
	case c.balance:
		return joining{[2]float64{6 + 4, 6 + 3*4}, [2]float64{6 * n, (6 + 13) * n}}
	}
	return joining{[2]float64{6, 6}, [2]float64{0, 12 * n}}
}
