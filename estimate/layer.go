package estimate

import (
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/price"
)

// A priced is the cost of all blocks of a model under one sharding.
type priced struct {
	layers      []block // by kind of layer
	embed, head block
	logits      float64 // bytes of the head's output
	attention   string  // kernel of our own programs
}

// blockCost returns the cost of the blocks under a sharding, cached at two levels: with FSDP
// collectives, and without, which shardings that differ only in FSDP share.
func (e *Estimator) blockCost(c *sharding) (*priced, error) {
	if p := e.blockCosts[*c]; p != nil {
		return p, nil
	}
	alone := *c
	alone.fsdp, alone.fsdpAt, alone.gather, alone.reduce = 0, 0, false, false
	base := e.bare[alone]
	if base == nil {
		base = &priced{layers: make([]block, len(e.kinds))}
		if err := e.build(&alone, base); err != nil {
			return nil, err
		}
		e.bare[alone] = base
	}
	p := &priced{slices.Clone(base.layers), base.embed, base.head, base.logits, base.attention}
	for k := range p.layers {
		e.gathered(c, &p.layers[k])
		e.offloaded(c, &p.layers[k])
	}
	e.gathered(c, &p.embed)
	e.gathered(c, &p.head)
	e.blockCosts[*c] = p
	return p, nil
}

// A leanSharding is the cache key of leanest: a sharding, a list of tag sets by its address, and
// the selected sets.
type leanSharding struct {
	sharding
	list  *[]ir.Tag
	which uint32
}

// leanest returns blocks whose memory is a lower bound over the selected sets of recompute tags.
func (e *Estimator) leanest(c *sharding, tags [][]ir.Tag, which uint32) (*priced, error) {
	if which == 0 {
		return e.blockCost(c)
	}
	key := leanSharding{*c, &tags[0], which}
	key.again = 0
	if p := e.leans[key]; p != nil {
		return p, nil
	}
	var least *priced
	for i, set := range tags {
		if which&(1<<i) == 0 {
			continue
		}
		with := *c
		with.again = cost.TagsOf(set)
		p, err := e.blockCost(&with)
		if err != nil {
			return nil, err
		}
		if least == nil {
			least = &priced{slices.Clone(p.layers), p.embed, p.head, p.logits, p.attention}
		}
		for k := range p.layers {
			least.layers[k].lower(&p.layers[k])
		}
		least.embed.lower(&p.embed)
		least.head.lower(&p.head)
	}
	e.leans[key] = least
	return least, nil
}

// lower reduces a block's memory to the minimum of both.
func (b *block) lower(o *block) {
	b.residual, b.dropped = min(b.residual, o.residual), min(b.dropped, o.dropped)
}

// build prices the blocks of a sharding without FSDP.
func (e *Estimator) build(c *sharding, p *priced) error {
	for k := range e.kinds {
		if p.attention != kernels.Plain {
			p.attention = e.kernel(c, e.kinds[k].windowed)
		}
	}
	if e.billed() {
		return e.bill(c, p)
	}
	for k := range e.kinds {
		p.layers[k] = e.layer(c, &e.kinds[k])
	}
	e.ends(c, p)
	return nil
}

// builder returns an empty builder for a sharding.
func (e *Estimator) builder(c *sharding) *builder {
	return &builder{e: e, c: c, p: e.prices, seen: map[[2]float64]bool{}}
}

// layer assembles a layer from attention, MLP and norms, and applies recomputation.
func (e *Estimator) layer(c *sharding, k *kind) block {
	norms, attn, mlp := e.builder(c), e.builder(c), e.builder(c)
	norms.in, attn.in, mlp.in = k.in, k.in, k.in
	mlp.seen = attn.seen // equal shapes share a buffer
	attn.attention(k.windowed)
	second := ir.MLP
	if k.sparse {
		norms.norms("router")
		mlp.experts()
		second = ir.Experts
	} else {
		norms.norms(norms.ups("")...)
		mlp.mlp(float64(e.config.MLP))
	}
	input := c.seqShard() * e.hidden() * 2 // bytes of the layer's input, which is also the MLP half's
	whole := block{residual: input, shapes: attn.shapes + mlp.shapes}
	all := cost.TagsOf([]ir.Tag{ir.Norm, ir.Attn, second})
	modules := e.prices.Profile().Modules && c.again&all != all
	if c.again.Has(ir.Attn) && !modules {
		whole.dropped += input
	} else {
		whole.residual += input
	}
	for _, part := range []struct {
		b   *builder
		tag ir.Tag
	}{{norms, ir.Norm}, {attn, ir.Attn}, {mlp, second}} {
		module := part.tag == ir.Attn || part.tag == ir.Experts
		if modules && module && c.again.Has(part.tag) {
			part.b.halve()
			whole.take(&part.b.block, false)
			continue
		}
		whole.take(&part.b.block, c.again.Has(part.tag))
	}
	return whole
}

// offloaded moves a layer's saved activations to the host, if the plan says so.
func (e *Estimator) offloaded(c *sharding, b *block) {
	if !c.offload {
		return
	}
	t := e.prices.Offload(b.residual)
	b.forward.offload += max(0, t-b.forward.sum())
	b.input.offload += max(0, t-b.input.sum()-b.weight.sum())
	b.dropped += 2 * b.residual // one layer in flight, one in use
	b.residual = 0
}

// halve restricts recomputation to the module that the stack can recompute alone (Megatron's
// recompute_modules).
func (b *block) halve() {
	b.again.add(&b.part, 1)
	b.residual -= b.modules
	b.dropped += b.modules
	b.operations *= 1.1
}

// take adds a part of a layer. A recomputed part saves nothing, costs another forward pass, and
// needs its memory while it is recomputed.
func (b *block) take(part *block, again bool) {
	p := *part
	p.dropped = 0
	if again {
		p.again.add(&p.forward, 1)
		p.forward.quantize -= p.later
		p.operations *= 4.0 / 3
		b.dropped += p.residual
		p.residual = 0
	}
	dropped := b.dropped + part.dropped
	b.add(&p, 1)
	b.dropped = dropped
}

// gathered adds FSDP's collectives of every microbatch: parameters are gathered before each pass,
// and gradients reduced after. One layer's collectives overlap with another layer's computation.
func (e *Estimator) gathered(c *sharding, b *block) {
	if !c.gather && !c.reduce {
		return
	}
	hide := e.prices.Profile().HideData
	exposed := func(comm, compute float64) float64 { return max((1-hide)*comm, comm-compute) }
	wide, wire := float64(c.params.Bits())/8, float64(c.wire.Bits())/8
	if c.gather {
		gather := func(dense, experts float64) float64 {
			return e.sent(c, price.AllGather, b.dense*wide+dense, b.experts*wide+experts)
		}
		b.forward.data += exposed(gather(b.quantWeights.forward, b.quantExperts.forward), b.forward.sum())
		b.input.data += exposed(gather(b.quantWeights.backward, b.quantExperts.backward), b.input.sum()/2)
	}
	if c.reduce {
		reduce := e.sent(c, price.ReduceScatter, b.dense*wire, b.experts*wire)
		b.weight.data += exposed(reduce, b.input.sum()/2+b.weight.sum())
	}
}

// sent is the seconds of gathering parameters of that many bytes, or of reducing their gradients,
// over the devices that shard them. In our own programs ep shards all parameters but the experts',
// too, and the outer axis of the two gathers the smaller shards ([ir.Placement.Nested]).
func (e *Estimator) sent(c *sharding, kind price.Kind, dense, experts float64) float64 {
	if !e.shardsOverExperts(c) {
		return e.prices.Collective(kind, dense+experts, c.fsdpGroup())
	}
	fsdp, ep := c.fsdpGroup(), c.expertGroup()
	along, over := nested(fsdp, ep)
	return e.prices.Collective(kind, dense*along+experts, fsdp) +
		e.prices.Collective(kind, dense*over, ep)
}

// nested is the share of a parameter that each of two axes gathers if both shard it: the outer one
// a shard along the inner one, which then gathers all.
func nested(a, b price.Group) (along, over float64) {
	if a.Stride > b.Stride {
		return 1 / float64(max(b.Size, 1)), 1
	}
	return 1, 1 / float64(max(a.Size, 1))
}

// shardsOverExperts reports whether ep shards parameters besides the experts' own.
func (e *Estimator) shardsOverExperts(c *sharding) bool {
	return e.profile.Name == price.Own && c.expert > 1
}

// ends prices embedding and head. The vocabulary is padded so that tp divides it, to a multiple
// that the stack prefers.
func (e *Estimator) ends(c *sharding, p *priced) {
	tp := float64(c.tensor)
	vocab := e.padded(c.tensor) / tp
	embed, head := e.builder(c), e.builder(c)
	shard := c.seqShard() * e.hidden()
	embed.stream(shard*4, shard*8)
	embed.dense += vocab * e.hidden()
	if e.config.Learned {
		embed.dense += float64(e.config.Context) * e.hidden()
	}
	embed.operations += 5
	head.linear(dtype.FormatBF16, c.tokens(), e.hidden(), vocab)
	if e.config.Tied {
		head.dense = 0
	}
	head.dense += e.hidden()
	p.logits = c.tokens() * vocab * 2
	head.stream(p.logits+shard*4, 2*p.logits+shard*8)
	head.operations += 10
	if c.tensor > 1 && c.sequence {
		bytes, g := c.tokens()*e.hidden()*2, c.tensorGroup()
		gather := e.prices.Collective(price.AllGather, bytes, g)
		scatter := e.prices.Collective(price.ReduceScatter, bytes, g)
		embed.forward.tensor += scatter
		embed.input.tensor += gather
		head.forward.tensor += gather
		head.input.tensor += gather + scatter
	}
	p.embed, p.head = embed.block, head.block
}

func (e *Estimator) hidden() float64 { return float64(e.config.Hidden) }

// padded is the size of the vocabulary after padding for tp.
func (e *Estimator) padded(tensor int64) float64 {
	unit := tensor * max(int64(e.prices.Profile().Vocab), 1)
	return float64((e.config.Vocab + unit - 1) / unit * unit)
}
