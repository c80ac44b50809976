package main

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// shared works out what a step of a plan asks of a host whose devices share its cores, as the
// programs of our CPU engine do it in f32: all devices together. The numbers of this file were
// counted in compiled programs: of a small model with one size doubled at a time, so that what
// comes on top is due to that size.
func shared(c *model.Config, p *plan.Plan) price.Usage {
	s := newSharing(c, p)
	s.layers()
	s.ends()
	s.gradients()
	s.update()
	s.stages()
	return s.u
}

// A sharing adds up what devices do.
type sharing struct {
	c *model.Config
	p *plan.Plan
	u price.Usage
	passes

	tp, cp, fsdp, dp, pp float64
	micros, devices      float64
	tokens               float64 // of a microbatch on one device
	rows                 float64 // likewise
	between              float64 // what a device of tp does of all between products
	block, vocab         float64 // parameters of a layer, and of the embedding
	looped               bool    // layers are a loop's body (step.Build)
	turns                float64 // virtual stages of a rank
	split                bool    // the way back is two programs
}

// passes is how often the programs of a layer go over what flows through it: reads and writes of
// what lies between its halves, heads, scores, the inside of the MLP, and its parameters.
type passes struct{ flow, heads, scores, inside, params, operations float64 }

// The counts by how a layer is written. In a loop weights are copied out of stacks and gradients
// into them, and what is kept for the way back lies in stacks, too; with stages it leaves one
// program and enters another. Operations are kernels, copies and calls, which the runtime starts
// one after the other.
var (
	unrolled    = passes{flow: 50, heads: 20, scores: 10, inside: 16, operations: 73}
	recomputed  = passes{flow: 75, heads: 29, scores: 14, inside: 18, params: 8.5, operations: 129}
	staged      = passes{flow: 81, heads: 45, scores: 10, inside: 37, params: 12, operations: 133}
	stagedAgain = passes{flow: 70, heads: 28, scores: 14, inside: 18, params: 12, operations: 129}
	// XLA unrolls a loop of one iteration.
	stagedOne = passes{flow: 56, heads: 30, scores: 11, inside: 21, params: 3, operations: 95}

	// What comes on top where the way back is two programs, and for each round of a ring after the
	// first.
	splitting    = passes{flow: 32, heads: 21, inside: 14, operations: 23}
	splittingOne = passes{flow: 10, heads: 6, inside: 8, operations: 13}
	ringing      = passes{heads: 23, operations: 30}
)

const (
	ringMasks = 9.0 // over scores, once
	// wholeFlow is the share of passes between attention and MLP that sequence parallelism does not
	// shard: sums before they are scattered, and gathered values.
	wholeFlow = 0.5
	// scattered and gatheredAgain are passes over stacks in a loop's program that bring them into the
	// order in which they are sent.
	scattered, gatheredAgain = 2.5, 2.0
)

func newSharing(c *model.Config, p *plan.Plan) *sharing {
	size := func(axis string) float64 { return float64(p.Size(axis)) }
	s := &sharing{c: c, p: p, tp: size(plan.TensorAxis), cp: size(plan.ContextAxis),
		fsdp: size(plan.FSDPAxis), dp: size(plan.DataAxis), pp: size(plan.PipelineAxis),
		micros: float64(max(p.Microbatches, 1)), devices: float64(p.Devices()), turns: 1}
	s.rows = float64(p.MicrobatchSequences()) / (s.dp * s.fsdp)
	s.tokens = s.rows * float64(p.Seq) / s.cp
	s.between = 1
	if p.TP.Sequence {
		s.between = wholeFlow + (1-wholeFlow)/s.tp
	}
	q, kv := float64(c.Heads*c.HeadDim), float64(c.KVHeads*c.HeadDim)
	s.block = s.hidden()*(2*q+2*kv) + s.ups()*s.hidden()*float64(c.MLP) + s.hidden()*float64(c.MLP)
	s.vocab = s.hidden() * float64(c.Vocab)
	if s.pp > 1 {
		s.turns = float64(max(p.PP.Virtual, 1))
		if p.PP.Virtual == 0 && (p.PP.Schedule == "interleaved" || p.PP.Schedule == "zb-v") {
			s.turns = 2
		}
		s.split = p.PP.Schedule == "zb-h1" || p.PP.Schedule == "zb-v"
	}
	s.written(len(p.Recompute) > 0)
	return s
}

// written chooses how layers are written.
func (s *sharing) written(again bool) {
	one, more := float64(s.c.Layers) <= s.pp*s.turns, splitting
	s.looped = (s.pp > 1 || again) && !one
	switch {
	case s.pp > 1 && one:
		s.passes, more = stagedOne, splittingOne
	case s.pp > 1 && again:
		s.passes = stagedAgain
	case s.pp > 1:
		s.passes = staged
	case s.looped:
		s.passes = recomputed
	default:
		s.passes = unrolled
	}
	if s.split { // but for the first stage, which gives no gradient of an input
		s.add(more, 1-1/(s.pp*s.turns))
	}
}

func (p *passes) add(q passes, n float64) {
	p.flow += n * q.flow
	p.heads += n * q.heads
	p.scores += n * q.scores
	p.inside += n * q.inside
	p.params += n * q.params
	p.operations += n * q.operations
}

func (s *sharing) hidden() float64 { return float64(s.c.Hidden) }

// ups is the number of matrices into the MLP.
func (s *sharing) ups() float64 {
	if s.c.Gated {
		return 2
	}
	return 1
}

// product adds products [m,k]·[k,n] and their gradients, which are two more of the same work.
func (s *sharing) product(times, m, k, n float64) {
	s.u.Work += times * 2 * m * k * n
	s.u.Sides += times * 4 * (m*k + k*n + m*n)
}

// again is how often a part is computed forward.
func (s *sharing) again(tag ir.Tag) float64 {
	if slices.Contains(s.p.Recompute, tag) {
		return 2
	}
	return 1
}

func (s *sharing) layers() {
	c := s.c
	each := s.devices / s.pp * s.micros * float64(c.Layers) // layers that are computed
	attn, mlp := s.again(ir.Attn), s.again(ir.MLP)
	q, kv := float64(c.Heads*c.HeadDim)/s.tp, float64(c.KVHeads*c.HeadDim)/s.tp
	t, h, wide := s.tokens, s.hidden(), float64(c.MLP)/s.tp
	for _, n := range []float64{q, kv, kv} {
		s.product(each*(2+attn), t, h, n)
	}
	// Backward does not need the outputs of the last GEMMs of attention and MLP.
	s.product(each*3, t, q, h)
	s.product(each*(2+mlp)*s.ups(), t, h, wide)
	s.product(each*3, t, wide, h)
	s.tensor(each, attn, mlp)
	s.context(each, attn, kv)
	heads := float64(c.Heads) / s.tp
	s.attention(each, attn, heads)
	s.u.Streams += each * 4 * (s.flow*t*h*s.between + s.heads*t*q +
		s.scores*t*float64(s.p.Seq)*heads + s.inside*t*wide + s.params*s.block/s.tp)
	s.u.Operations += each * s.operations
}

// attention adds the matmuls of each head of each sequence: two forward, four backward, and the
// scores once more if backward is another program. A ring has one of each per chunk.
func (s *sharing) attention(each, attn, heads float64) {
	times, rounds := 4+2*attn, 1.0
	if s.pp > 1 && attn == 1 {
		times++
	}
	if s.p.CP.Ring() {
		rounds = s.cp
	}
	queries, keys := float64(s.p.Seq)/s.cp, float64(s.p.Seq)/rounds
	n := each * times * s.rows * heads * rounds
	s.u.Matrices += n
	s.product(n, queries, float64(s.c.HeadDim), keys)
}

// tensor adds tensor-parallel communication: all-reduces after attention and MLP, or
// reduce-scatters and gathers with sequence parallelism, and the same for gradients.
func (s *sharing) tensor(each, attn, mlp float64) {
	if s.tp == 1 {
		return
	}
	bytes := 4 * s.tokens * s.hidden()
	if !s.p.TP.Sequence {
		s.meet(each*4, bytes)
		return
	}
	s.meet(each*(6+attn+mlp), bytes) // recomputation gathers again
}

// context is keys and values on their way, forward and as gradients.
func (s *sharing) context(each, attn, kv float64) {
	if s.cp == 1 {
		return
	}
	if s.p.CP.Ring() {
		s.meet(each*(2*(s.cp-1)*attn+2*s.cp), 4*s.tokens*kv)
		s.add(ringing, s.cp-1)
		s.scores += ringMasks
		return
	}
	gathers := 2 * attn
	if s.pp > 1 {
		gathers = 4
	}
	s.meet(each*(gathers+2), 4*s.tokens*kv*s.cp)
}

// meet adds rendezvous, counted by device, in which each sends or receives that many bytes.
func (s *sharing) meet(times, bytes float64) {
	s.u.Meetings += times
	s.u.Sent += times * bytes
}

// ends is the embedding and the head with its loss: 6 passes over scores, the flow 12 times.
func (s *sharing) ends() {
	each := s.devices / s.pp * s.micros
	t, v := s.tokens, float64(s.c.Vocab)/s.tp
	s.product(each*3, t, s.hidden(), v)
	s.u.Streams += each * 4 * (6*t*v + 12*t*s.hidden())
	s.u.Operations += each * 50
	if s.tp > 1 {
		s.meet(each*5, 4*t*s.hidden())
	}
}

// share is the parameters of a device, before fsdp shards them.
func (s *sharing) share() float64 {
	all := s.block*float64(s.c.Layers) + 2*s.vocab
	if s.c.Tied {
		all -= s.vocab
	}
	return all / s.tp / s.pp
}

// arrays is the number of arrays of a device that fsdp shards, each with its own collectives: the
// matrices of all layers, or stacks of them, and the ends.
func (s *sharing) arrays() float64 {
	matrices := 5 + s.ups()
	if !s.looped {
		matrices *= float64(s.c.Layers) / s.pp
	}
	return matrices + 2/s.pp
}

// gradients is what each microbatch does to gradients, and what it gathers of parameters.
func (s *sharing) gradients() {
	own, each := s.share(), s.devices*s.micros
	kept := own
	if s.fsdp > 1 && s.p.FSDP.Zero >= 2 {
		s.meet(each*s.arrays(), 4*own/s.arrays())
		kept /= s.fsdp
		if s.looped && s.pp == 1 {
			s.u.Streams += each * 4 * scattered * own
		}
	}
	if s.micros > 1 || s.pp > 1 {
		s.u.Streams += each * 12 * kept
	}
	if s.fsdp == 1 || s.p.FSDP.Zero < 3 {
		return
	}
	arrays := s.arrays()
	times := map[string]float64{"layer": 2 * each, "microbatch": each,
		"step": s.devices}[s.p.FSDP.Gather]
	if s.pp > 1 && s.p.FSDP.Gather == "microbatch" { // each program gathers for itself
		times = 2 * each
	}
	switch {
	case s.looped && s.p.FSDP.Gather == "layer": // in each round
		arrays *= float64(s.c.Layers) / s.pp
	case s.looped && s.p.FSDP.Gather == "microbatch":
		s.u.Streams += each * 4 * gatheredAgain * own
	}
	s.meet(times*arrays, 4*own/arrays)
}

// update is the end of the step: sums over copies, the optimizer, whole parameters.
func (s *sharing) update() {
	own := s.share()
	cut := own
	if s.fsdp > 1 {
		cut /= s.fsdp
	}
	if s.fsdp > 1 && s.p.FSDP.Zero == 1 {
		s.meet(s.devices*s.arrays(), 4*own/s.arrays())
	}
	if s.dp*s.cp > 1 { // XLA joins these sums
		s.meet(s.devices*2, 4*cut/2)
	}
	if s.fsdp > 1 && s.p.FSDP.Zero < 3 {
		s.meet(s.devices*s.arrays(), 4*own/s.arrays())
	}
	// Gradient twice, for its norm and for the update; parameter and two moments read and written.
	s.u.Streams += s.devices * 4 * 11 * cut
	s.u.Operations += s.devices * s.arrays() * 6
	s.u.Arrays += s.devices * s.arrays() * 7
}

// stages is programs with what they take and give, and what they hand to each other.
func (s *sharing) stages() {
	each := s.devices * s.micros
	s.u.Programs = s.devices * (s.micros + 1)
	s.u.Arrays += each * 3 * s.arrays()
	if s.pp == 1 {
		return
	}
	runs := 2.0 // programs of a stage for a microbatch
	if s.split {
		runs = 3
	}
	s.u.Programs = each*runs*s.turns + 4*s.devices
	s.u.Arrays += each * s.turns * 30 // kept from one program to the next
	between := s.pp*s.turns - 1
	s.u.Streams += each / s.pp * between * 2 * 2 * 4 * s.tokens * s.hidden()
}
