package estimate

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// Shared works out what a step of a plan asks of a host whose devices share its cores, as the
// programs of our CPU engine do it in f32: all devices together.
func Shared(c *model.Config, p *plan.Plan) price.Usage {
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

	tp, cp, fsdp, dp, pp float64
	micros, devices      float64
	tokens               float64 // of a microbatch on one device
	between              float64 // how many devices of tp do the same between products
	block, vocab         float64 // parameters of a layer, and of the embedding
}

func newSharing(c *model.Config, p *plan.Plan) *sharing {
	size := func(axis string) float64 { return float64(p.Size(axis)) }
	s := &sharing{c: c, p: p, tp: size(plan.TensorAxis), cp: size(plan.ContextAxis),
		fsdp: size(plan.FSDPAxis), dp: size(plan.DataAxis), pp: size(plan.PipelineAxis),
		micros: float64(max(p.Microbatches, 1)), devices: float64(p.Devices())}
	s.tokens = float64(p.Rows()*p.Seq) / (s.dp * s.fsdp * s.cp)
	s.between = s.tp
	if p.TP.Sequence {
		s.between = 1
	}
	q, kv := float64(c.Heads*c.HeadDim), float64(c.KVHeads*c.HeadDim)
	s.block = s.hidden()*(2*q+2*kv) + s.ups()*s.hidden()*float64(c.MLP) + s.hidden()*float64(c.MLP)
	s.vocab = s.hidden() * float64(c.Vocab)
	return s
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

// Passes over a tensor by what is no product, as XLA's fusions leave them, forward; the backward
// pass has twice as many.
const (
	normPasses   = 4 // two norms and two sums, each read and written
	headPasses   = 6 // rotations and changes of layout of queries, keys and values
	scorePasses  = 4 // scale, mask, largest, exponentials, sum
	gatePasses   = 3
	logitsPasses = 4
)

// operations of a layer's programs, forward and backward: kernels, copies and calls that the
// runtime starts one after the other, counted in the programs of a small model.
const operations = 120

func (s *sharing) layers() {
	c := s.c
	each := s.devices / s.pp * s.micros * float64(c.Layers) // layers that are computed
	attn, mlp, norm := s.again(ir.Attn), s.again(ir.MLP), s.again(ir.Norm)
	q, kv := float64(c.Heads*c.HeadDim)/s.tp, float64(c.KVHeads*c.HeadDim)/s.tp
	t, h, wide := s.tokens, s.hidden(), float64(c.MLP)/s.tp
	for _, n := range []float64{q, kv, kv} {
		s.product(each*(2+attn), t, h, n)
	}
	s.product(each*(2+attn), t, q, h)
	s.product(each*(2+mlp)*s.ups(), t, h, wide)
	s.product(each*(2+mlp), t, wide, h)
	heads, keys := float64(c.Heads)/s.tp, float64(s.p.Seq)
	s.u.Work += each * (2 + attn) * 4 * t * keys * q
	s.u.Streams += each * 4 * ((2+norm)*normPasses*t*h*s.between/s.tp + (2+attn)*headPasses*t*q +
		(2+attn)*scorePasses*t*keys*heads + (2+mlp)*gatePasses*t*wide)
	s.u.Operations += each * operations * (2 + attn) / 3
	s.tensor(each, attn, mlp)
	s.context(each, attn, kv)
	if s.pp > 1 || len(s.p.Recompute) > 0 {
		// Then layers are a loop (train.Write): each round copies its weights out of stacks, for both
		// passes, and its gradients into them.
		s.u.Streams += each * 4 * loopPasses * s.block / s.tp
	}
}

// loopPasses is two copies of weights and one of gradients, each read and written.
const loopPasses = 6

// tensor is what devices of tp send each other: sums after attention and MLP, or their halves, with
// a cut sequence, and the same for gradients.
func (s *sharing) tensor(each, attn, mlp float64) {
	if s.tp == 1 {
		return
	}
	bytes := 4 * s.tokens * s.hidden() * (s.tp - 1) / s.tp
	s.meet(each*(2+attn+mlp), 2*bytes)
	if s.p.TP.Sequence { // two meetings for each sum
		s.u.Meetings += each * (2 + attn + mlp)
	}
}

// context is keys and values on their way, forward and as gradients.
func (s *sharing) context(each, attn, kv float64) {
	if s.cp == 1 {
		return
	}
	bytes := 2 * 4 * s.tokens * kv * (s.cp - 1)
	meetings := 2.0 // keys and values
	if s.p.CP.Kind == "ring" {
		meetings = 2 * (s.cp - 1)
	}
	s.meet(each*(1+attn)*meetings, bytes/meetings)
	if s.p.CP.Kind == "ring" { // rounds are computed apart and put together
		s.u.Streams += each * (2 + attn) * 4 * 2 * s.cp * s.tokens * kv
		s.u.Operations += each * operations / 3 * (s.cp - 1)
	}
}

// meet adds meetings, counted by device, in which each gets so many bytes.
func (s *sharing) meet(times, bytes float64) {
	s.u.Meetings += times
	s.u.Sent += times * bytes
}

// ends is the embedding and the head with its loss.
func (s *sharing) ends() {
	each := s.devices / s.pp * s.micros
	t, v := s.tokens, float64(s.c.Vocab)/s.tp
	s.product(each*(2+s.again(ir.Head)), t, s.hidden(), v)
	s.u.Streams += each * 4 * (3*logitsPasses*t*v + 6*t*s.hidden())
	if s.tp > 1 {
		s.meet(each*4, 2*4*t*s.hidden())
	}
}

// share is the parameters that a device has of all, before fsdp cuts them.
func (s *sharing) share() float64 {
	all := s.block*float64(s.c.Layers) + 2*s.vocab
	if s.c.Tied {
		all -= s.vocab
	}
	return all / s.tp / s.pp
}

// arrays is how many arrays a device's parameters are: a collective each.
func (s *sharing) arrays() float64 { return 9 * float64(s.c.Layers) / s.pp }

// gradients is what each microbatch does to gradients, and what it gathers of parameters.
func (s *sharing) gradients() {
	own, each := s.share(), s.devices*s.micros
	kept := own
	if s.fsdp > 1 && s.p.FSDP.Zero >= 2 {
		s.meet(each*s.arrays(), 4*own/s.arrays())
		kept /= s.fsdp
	}
	if s.micros > 1 || s.pp > 1 {
		s.u.Streams += each * 12 * kept
	}
	if s.fsdp == 1 || s.p.FSDP.Zero < 3 {
		return
	}
	times := map[string]float64{"layer": 2 * each, "micro": each, "step": s.devices}[s.p.FSDP.Gather]
	if s.pp > 1 && s.p.FSDP.Gather == "micro" { // each program gathers for itself
		times = 2 * each
	}
	s.meet(times*s.arrays(), 4*own/s.arrays())
}

// update is the end of the step: sums over copies, the optimizer, whole parameters.
func (s *sharing) update() {
	own := s.share()
	cut := own
	if s.fsdp > 1 {
		cut /= s.fsdp
	}
	copies := s.dp * s.cp
	if s.fsdp > 1 && s.p.FSDP.Zero == 1 {
		s.meet(s.devices*s.arrays(), 4*own/s.arrays())
	}
	if copies > 1 {
		s.meet(s.devices*s.arrays(), 2*4*cut/s.arrays())
	}
	if s.fsdp > 1 && s.p.FSDP.Zero < 3 {
		s.meet(s.devices*s.arrays(), 4*own/s.arrays())
	}
	// Gradient twice, for its norm and for the update; parameter and two moments read and written.
	s.u.Streams += s.devices * 4 * 8 * cut
	s.u.Operations += s.devices * s.arrays() * 4
}

// stages is programs, and what they hand to each other.
func (s *sharing) stages() {
	s.u.Programs = s.devices * (s.micros + 1)
	if s.pp == 1 {
		return
	}
	list, err := s.p.Schedule()
	if err != nil {
		return
	}
	runs := 2.0 // programs of a stage for a microbatch
	if list.Name == "zb-h1" || list.Name == "zb-v" {
		runs = 3
	}
	each := s.devices / s.pp * s.micros
	s.u.Programs = each*runs*float64(list.Stages()) + 4*s.devices
	between := float64(list.Stages() - 1)
	s.u.Streams += each * between * 2 * 2 * 4 * s.tokens * s.hidden()
	// What a layer keeps for its gradients leaves one program and enters another.
	s.u.Streams += each * float64(s.c.Layers) * (runs - 1) * 2 * 4 * s.tokens *
		(6*s.hidden() + 3*float64(s.c.MLP)/s.tp)
}
