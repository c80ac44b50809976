package estimate

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
)

// A load is the sum of the blocks of one virtual stage.
type load struct {
	block
	layers       int64
	first, last  bool
	device, host float64 // seconds of a microbatch
	total        float64 // seconds, both combined (see join)
	state        state   // bytes of parameters, gradients and optimizer state
}

// loads are the virtual stages of a pipeline. Most are equal, so each kind is computed once.
type loads struct {
	kinds []load
	of    []int // the kind of each stage
}

// at returns the load of a virtual stage.
func (l *loads) at(stage int) *load { return &l.kinds[l.of[stage]] }

// stages adds up the blocks of every virtual stage. The result belongs to the estimator and is
// overwritten by the next call.
func (e *Estimator) stages(l *layout, p *priced) *loads {
	list, d := &e.loads, e.split(int(l.pipe*l.virtual))
	list.kinds, list.of = slices.Grow(list.kinds[:0], len(d.parts))[:len(d.parts)], d.of
	for i, t := range d.parts {
		list.kinds[i] = load{layers: t.layers, first: i == 0, last: i == len(d.parts)-1}
		e.fill(&list.kinds[i], p, t.at, t.layers)
	}
	return list
}

// A layerSplit is the assignment of a model's layers to stages.
type layerSplit struct {
	parts []struct{ at, layers int64 } // stages that differ: first layer and number of layers
	of    []int                        // index into parts, by stage
}

// split assigns layers to n stages, and caches the result.
func (e *Estimator) split(n int) *layerSplit {
	if d := e.splits[n]; d != nil {
		return d
	}
	d, at, last := &layerSplit{}, int64(0), int64(0)
	for i := range n {
		count := e.dealt(i, n)
		if i < 2 || i == n-1 || !e.alike(last, at, count) {
			d.parts = append(d.parts, struct{ at, layers int64 }{at, count})
		}
		d.of = append(d.of, len(d.parts)-1)
		at, last = at+count, count
	}
	e.splits[n] = d
	return d
}

// dealt is the number of layers of a stage. The first stages get one more if layers do not divide
// evenly. With Profile.Ends, embedding and head count as a layer each.
func (e *Estimator) dealt(stage, stages int) int64 {
	if stage < len(e.options.Layers) {
		return e.options.Layers[stage]
	}
	all, ends := e.config.Layers, int64(0)
	if stages > 1 && e.prices.Profile().Ends {
		all += 2
		if stage == 0 || stage == stages-1 {
			ends = 1
		}
	}
	return plan.LayersOf(all, int64(stage), int64(stages)) - ends
}

// alike reports whether count layers from at have the same kinds as the count layers before.
func (e *Estimator) alike(before, at, count int64) bool {
	if before != count {
		return false
	}
	end := min(at+count, e.config.Layers)
	for kind := range e.below {
		b := e.below[kind]
		if b[end]-b[at] != b[at]-b[at-before] {
			return false
		}
	}
	return true
}

// fill adds up count layers from at, and the ends of the model.
func (e *Estimator) fill(s *load, p *priced, at, count int64) {
	end := min(at+count, e.config.Layers)
	for kind := range p.layers {
		if n := e.below[kind][end] - e.below[kind][at]; n > 0 {
			s.add(&p.layers[kind], float64(n))
			s.shapes = max(s.shapes, p.layers[kind].shapes)
		}
	}
	if s.first {
		s.add(&p.embed, 1)
	}
	if s.last {
		s.add(&p.head, 1)
		s.shapes += p.head.shapes
		if k := float64(e.options.Predict); k > 0 { // each has a layer, a projection and the head
			s.add(&p.layers[e.lastKind], k)
			s.add(&p.head, k)
			s.dense -= k * p.head.dense
		}
	}
	prof := e.prices.Profile()
	s.device = s.forward.sum() + s.input.sum() + s.weight.sum() + s.again.sum()
	s.host = e.prices.Operations(s.operations)
	s.total = join(s.device, s.host, prof.Hosted)
}

// join combines device and host seconds, a power mean: the longer one hides most of the shorter.
func join(device, host, power float64) float64 {
	a, b := max(device, host), min(device, host)
	if b <= 0 {
		return a
	}
	r := b / a
	if power == 4 { // the common case, without a logarithm
		r *= r
		return a * math.Sqrt(math.Sqrt(1+r*r))
	}
	return a * math.Pow(1+math.Pow(r, power), 1/power)
}

// times returns the passes of a stage, stretched to include host time.
func (s *load) times() (forward, input, weight float64) {
	if s.device <= 0 {
		return s.total / 3, s.total / 3, s.total / 3
	}
	f := s.total / s.device
	return f * s.forward.sum(), f * (s.input.sum() + s.again.sum()), f * s.weight.sum()
}

// state is the bytes a device keeps for a stage's parameters over the whole step.
type state struct{ params, copies, grads, optimizer float64 }

// state computes the bytes of parameters, gathered copies, gradients and optimizer state by ZeRO
// stage.
func (e *Estimator) state(l *layout, s *load) (m state) {
	prof := e.prices.Profile()
	wide, grad := float64(l.params.Bits())/8, float64(l.grads.Bits())/8
	moments := 12.0 // f32 master and two moments
	if wide == 4 {
		moments = 8 // the parameter is its own master
	}
	if prof.Weight > 0 {
		wide = prof.Weight
	}
	if prof.Gradient > 0 {
		grad = prof.Gradient
	}
	params := s.dense + s.experts
	if params > 0 { // quantized copies replace bf16 ones
		wide += (s.quantWeights.own + s.quantExperts.own) / params
	}
	shard, expertShard := e.shards(l)
	shardedDense := s.dense/shard + s.experts/expertShard
	switch {
	case l.zero >= 3 && l.shard > 1:
		m.params = wide * shardedDense
		m.grads = grad * shardedDense
		// Two layers gathered at a time, one in use and one prefetched; or the whole stage.
		if l.whole == "layer" {
			m.copies = 2 * wide * (params / float64(max(s.layers, 1)))
			if s.first || s.last {
				m.copies = max(m.copies, wide*e.padded(l.tensor)/float64(l.tensor)*e.hidden())
			}
		} else {
			m.copies = wide * params
		}
	case l.zero == 2 && l.shard > 1:
		m.params, m.grads = wide*params, grad*shardedDense
	default:
		m.params, m.grads = wide*params, grad*params
	}
	m.optimizer = moments * shardedDense
	if prof.Dummy {
		m.copies += s.shapes
	}
	return m
}

// shards is the number of devices that share optimizer state, of dense parameters and of experts.
func (e *Estimator) shards(l *layout) (dense, experts float64) {
	dense = float64(l.shard)
	if e.prices.Profile().Sharded {
		dense *= float64(l.context * l.fold)
	}
	experts = dense
	if e.shardsOverExperts(&l.sharding) {
		dense *= float64(l.fold)
	} else if e.config.MoE != nil && e.profile.Name != price.Own {
		all := float64(l.shard * l.context * l.tensor * l.fold)
		experts = max(1, all/float64(l.expert*l.etp))
	}
	return dense, experts
}

// tail is the seconds of a step after its pipeline: exposed gradient reduction and parameter
// gathers (data), optimizer, and host.
type tail struct{ data, optimizer, host float64 }

// A share is the parameters of a rank, before fsdp shards them, with their quantized copies.
type share struct {
	dense, experts             float64
	quantWeights, quantExperts quantBytes
}

// add counts the parameters of a stage.
func (s *share) add(b *block) {
	s.dense += b.dense
	s.experts += b.experts
	s.quantWeights.add(&b.quantWeights, 1)
	s.quantExperts.add(&b.quantExperts, 1)
}

// tail prices the end of the step on one rank. window is the seconds of its last microbatch,
// behind which collectives can hide.
func (e *Estimator) tail(l *layout, of *share, window float64) (t tail) {
	dense, experts := of.dense, of.experts
	prof := e.prices.Profile()
	shard, expertShard := e.shards(l)
	wide, wire := float64(l.params.Bits())/8, float64(l.wire.Bits())/8
	group := price.Group{Size: int64(shard), Stride: l.shardAt}
	if prof.Sharded && l.context > 1 {
		group.Stride = min(group.Stride, l.contextAt)
	}
	if prof.Sharded && l.fold > 1 {
		group.Stride = min(group.Stride, l.expertAt)
	}
	expertGroup := price.Group{Size: int64(expertShard), Stride: l.expertAt * l.expert * l.etp}
	if e.profile.Name == price.Own {
		group.Size, expertGroup = l.shard, price.Group{Size: l.shard, Stride: l.shardAt}
	}
	sum := 0.0
	scatter := func(params, quantized float64, g price.Group) {
		if l.zero < 2 {
			sum += e.prices.Collective(price.ReduceScatter, params*wire, g)
		}
		if l.zero < 3 || l.whole == "step" {
			sum += e.prices.Collective(price.AllGather, params*wide+quantized, g)
		}
	}
	over := e.shardsOverExperts(&l.sharding)
	if ep := l.expertGroup(); over {
		a, b := nested(group, ep)
		scatter(dense*a, of.quantWeights.own*a, group)
		scatter(dense*b, of.quantWeights.own*b, ep)
	} else {
		scatter(dense, of.quantWeights.own, group)
	}
	scatter(experts, of.quantExperts.own, expertGroup)
	// Replicas (dp, and axes that do not shard state) all-reduce their gradients.
	copies, stride := l.data, l.dataAt
	if !prof.Sharded && l.fold > 1 && !over {
		copies, stride = copies*l.fold, l.expertAt
	}
	if !prof.Sharded && l.context > 1 {
		copies, stride = copies*l.context, min(stride, l.contextAt)
	}
	if copies > 1 {
		bytes := dense / shard * wire
		sum += e.prices.Collective(price.AllReduce, bytes, price.Group{Size: copies, Stride: stride})
	}
	replicas := price.Group{Size: l.data, Stride: l.dataAt}
	if over {
		replicas = price.Group{Size: copies, Stride: stride}
	}
	if replicas.Size > 1 && experts > 0 {
		sum += e.prices.Collective(price.AllReduce, experts/expertShard*wire, replicas)
	}
	sum *= prof.Gradients
	t.data = max((1-prof.HideData)*sum, sum-window)
	own := dense/shard + experts/expertShard
	// Bytes per parameter: Adam reads gradient, master and moments and writes master, moments and
	// the model's copy (38); the gradient norm reads the shard once more (4); zeroing writes the
	// whole gradient (4).
	t.optimizer = e.prices.Optimizer(own*(38+4) + (dense+experts)*4)
	// Weights are quantized once a step, on the device that updates them.
	t.optimizer += of.quantWeights.made/shard + of.quantExperts.made/expertShard
	if l.hosted { // masters and moments cross the host link both ways, overlapped
		t.optimizer = max(t.optimizer, e.prices.Offload(own*12))
	}
	t.host = prof.Step
	return t
}

// own predicts the memory of our own programs; created on first use.
type own struct{ *footprint.Predictor }

// compilable reports whether our own stack has programs for the plan, so that package footprint
// predicts its memory.
func (e *Estimator) compilable() bool {
	o := e.options
	wide := e.policy == nil && (e.word == "" || e.word == dtype.FormatBF16)
	known := wide || e.policy != nil && !e.cluster.CPU()
	return e.profile.Name == price.Own && known && o.Layers == nil && !o.Plain && o.Predict == 0 &&
		o.ExpertRanks == 0
}

// predictor returns the memory predictor of our own programs.
func (e *Estimator) predictor() (_ *footprint.Predictor, err error) {
	if e.own.Predictor == nil {
		if e.own.Predictor, err = footprint.New(e.config, e.cluster.Arch()); err != nil {
			return nil, err
		}
		e.own.Share(&e.orders.walks, e.book)
		e.own.In(e.policy)
	}
	return e.own.Predictor, nil
}

// reserve is the bytes of a device that no program can use.
func (e *Estimator) reserve() int64 { return int64(e.prices.Profile().Reserve) }

// compiled predicts the memory that XLA will report for our own programs of a plan.
func (e *Estimator) compiled(p *plan.Plan, est *Estimate, brief bool, most int64) error {
	own, err := e.predictor()
	if err != nil {
		return err
	}
	var f footprint.Footprint
	if brief {
		f, err = own.Worst(p, max(0, most-e.reserve()))
	} else {
		f, err = own.Predict(p)
	}
	if err != nil {
		return err
	}
	est.Loads = f.Loads
	est.Ranks = e.ranks[:0]
	for i := range f.Ranks {
		r := &f.Ranks[i]
		r.Runtime = e.reserve()
		end := r.Memory
		end.Activations, end.Temp = 0, r.Update
		est.Ranks = append(est.Ranks, end)
		est.worst(r.Memory)
	}
	e.ranks = est.Ranks
	return nil
}

// worst records a rank's memory if it is the largest so far.
func (e *Estimate) worst(m program.Memory) {
	if sum := m.Sum(); sum > e.Peak {
		e.Peak, e.Memory = sum, m
	}
}
