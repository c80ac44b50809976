package footprint

import (
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/plan"
)

// A gradient is a program that computes a loss, or a stage of one, forward, backward or both.
type gradient struct {
	p      *Predictor
	s      *sizes
	w      *way
	plan   *plan.Plan
	part   part
	params []resident

	forward, backward bool
	half              half
	onto              bool // gradients are added to what is there
}

// A half is one of the two that a backward pass may be cut into.
type half int

const (
	both half = iota
	ofInput
	ofWeights
)

// A programKey is all that the buffers of a gradient depend on.
type programKey struct {
	s     *sizes
	fsdp  int64
	part  part
	flags uint64
}

// splitBit is of keys of stages.
const splitBit = 10

// key writes the yes and no of a program as bits, and its small numbers after them.
func (g *gradient) key() programKey {
	w := g.w
	return programKey{s: g.s, fsdp: w.fsdp, part: g.part, flags: bitsOf(g.forward, g.backward, g.onto,
		g.p.rounded(g.plan), w.alone, w.unrolled, w.gather == "micro", w.gather == "layer", w.offload,
		w.hosted) | small(w.elem, w.grad, w.sum, int64(w.zero), int64(g.half))}
}

// bitsOf writes yes and no as bits, fewer than 20; small writes numbers below 16 after them.
func bitsOf(list ...bool) (bits uint64) {
	for i, yes := range list {
		if yes {
			bits |= 1 << i
		}
	}
	return bits
}

func small(list ...int64) (bits uint64) {
	for i, n := range list {
		bits |= uint64(n) << (20 + 4*i)
	}
	return bits
}

// temp is what XLA allocates for the program beside arguments and results. It is worked out once:
// plans of a search differ in what it does not depend on more often than in what it does.
func (g *gradient) temp() int64 {
	return once(g.p.temps, g.key(), func() int64 {
		if g.p.cpu {
			return g.onCPU()
		}
		return g.onGPU()
	})
}

// first is the class of the part's first layers.
func (g *gradient) first() int {
	for i := range g.params {
		if g.params[i].stack {
			return g.params[i].class
		}
	}
	return 0
}

// lastTaken is when weights that were gathered for all layers are taken last.
func (g *gradient) lastTaken(h *resident) int {
	switch {
	case !g.backward:
		return atLogits
	case h.class > g.first():
		return atSegment
	}
	return atBackward
}

// gathered tells whether a parameter is gathered by the program.
func (g *gradient) gathered(q *param) bool { return q.cut && g.w.gather != "step" }

// onGPU lists the buffers that XLA:GPU has.
func (g *gradient) onGPU() int64 {
	m := g.p.space.cleared()
	joint := g.forward && g.backward
	flow, whole, logits := g.s.flow, g.s.whole, g.s.logits
	if joint && !g.w.offload {
		to := atBackward
		for i := range g.s.bill.Layers { // the last loop is the first one back
			for _, n := range g.s.residualsOf(nil, g.part, i) {
				m.add(n, atForward, to)
			}
			// Of plans that gather by layers the peaks are those of all that is kept.
			if g.s.rounds(g.part, i) > 0 && (g.w.gather != "layer" || !g.sharded()) {
				to = atSegment
			}
		}
	}
	if g.part.last {
		if g.forward && joint {
			m.add(logits, atLogits, atLoss)
		}
		if g.backward && g.half == both {
			m.add(logits, atLoss, g.headGrad())
			m.add(whole, atLogits, g.headGrad())
			m.add(flow*3/2, atLogits, atHead)
		}
	}
	g.weights(m)
	if g.part.mix > 0 {
		g.quantized(m)
	}
	forward, backward := g.layer()
	if g.w.offload {
		g.moved(m)
	}
	if g.forward {
		m.add(g.forwardSet(forward), atForward, atForward)
	}
	if g.backward && g.half != ofWeights {
		m.add(g.backwardSet(backward), atSegment, atBackward)
	}
	if g.half == ofWeights {
		m.add(g.wgradTemp(whole)+g.transposedFactors(), atBackward, atBackward)
	}
	if g.backward && g.half != ofInput {
		g.gradients(m)
	}
	return m.peak()
}

// moved adds what is on its way where residuals are on the host: forward those of a layer and of
// the one before, backward some of the next; and gathered weights of a layer in the model's own
// type, since with copies to wait for XLA sends for them earlier.
func (g *gradient) moved(m *space) {
	var kept, late, weights int64
	for i := range g.s.bill.Layers {
		if g.s.rounds(g.part, i) > 0 {
			kept, late = max(kept, g.s.residualBytes[i]), max(late, sum(g.s.bill.Layers[i].Late))
		}
	}
	for i := range g.params {
		if h := &g.params[i]; h.stack && h.quant == nil && h.cut && g.w.gather == "layer" {
			weights += h.param.whole * g.w.elem
		}
	}
	if g.forward {
		m.add(kept*5/3, atForward, atForward)
	}
	if g.backward && g.half != ofWeights {
		m.add(kept/3+weights*3/2, atSegment, atBackward)
	}
	if g.half == ofWeights {
		m.add(2*late, atBackward, atBackward)
	}
}

// wgradTemp is what the half of weights has beside gradients, one factor at least: in a loop the
// product of queries, keys and values, which is one, before it is cut; without a loop products with
// the same factor, before they are added to what is there.
func (g *gradient) wgradTemp(factor int64) int64 {
	var ups, heads int64 // of weights that one factor goes into
	for i := range g.params {
		h := &g.params[i]
		if i > 0 && h.param == g.params[i-1].param { // layers that differ have as many weights
			continue
		}
		switch h.name[strings.LastIndexByte(h.name, '.')+1:] {
		case "gate", "up":
			ups += h.param.whole * g.w.elem
		case "q", "k", "v":
			heads += h.param.whole * g.w.elem
		}
	}
	if g.part.rounds == 1 {
		return ups + 2*factor
	}
	return heads + factor
}

// headGrad is the moment of the gradient of the head's weights: after the loop back, but where
// nothing is sent in the loop that it could be put beside, XLA's other scheduler has it before.
func (g *gradient) headGrad() int {
	if g.p.arch == "sm_120" && g.w.gather == "step" {
		return atTable
	}
	return atHeadGrad
}

// stays tells whether a stage keeps what it gathered for the pass forward until the one back. In
// few bits the two take different copies, and each gathers its own.
func (g *gradient) stays() bool {
	quantized := false
	if g.p.quant != nil {
		g.p.quant.each(g.part.mix, func(c class, _ int64) { quantized = quantized || len(c) > 0 })
	}
	return g.w.gather == "micro" && !quantized
}

// recomputes tells whether the pass back runs a linear layer forward again.
func (g *gradient) recomputes(param string) bool {
	switch param[strings.LastIndexByte(param, '.')+1:] {
	case "q", "k", "v", "o":
		return g.s.again(ir.Attn)
	}
	return g.s.again(ir.MLP)
}

// taken is the bytes of what the program takes of a parameter, whole.
func (g *gradient) taken(h *resident) int64 {
	switch {
	case h.quant == nil:
		return h.whole() * g.w.elem
	case g.forward && g.backward:
		return h.param.whole * h.quant.own / 32
	case g.forward:
		return h.param.whole * h.quant.forward / 32
	case g.recomputes(h.name):
		return h.param.whole * (h.quant.forward + h.quant.backward) / 32
	}
	return h.param.whole * h.quant.backward / 32
}

// weights adds the parameters that are gathered outside of the loop.
func (g *gradient) weights(m *space) {
	for i := range g.params {
		h := &g.params[i]
		if !g.gathered(h.param) {
			continue
		}
		bytes := g.taken(h)
		switch {
		case g.stays() && !g.forward || g.half == ofWeights:
		case h.stack && g.w.gather == "micro" && h.quant != nil && g.forward && g.backward &&
			!g.recomputes(h.name): // each pass has its own copy
			m.add(h.param.whole*h.quant.forward/32, atEmbed, atLogits)
			m.add(h.param.whole*h.quant.backward/32, atTable, g.lastTaken(h))
		case h.stack && g.w.gather == "micro":
			m.add(bytes, atEmbed, g.lastTaken(h))
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			m.add(bytes, atEmbed, atEmbed)
		default:
			m.add(bytes, atLogits, atHead)
		}
	}
}

// forwardSet is what one layer has while it computes: the MLP's values, and the weights of the
// layer and of the next; or, if attention writes its scores, these and their exponentials in f32.
func (g *gradient) forwardSet(weights int64) int64 {
	n := 2*g.s.mlp + 3*g.s.whole
	scores := int64(0)
	if g.plain() {
		scores = 8*g.s.scores + 2*g.s.whole
	}
	if g.w.gather == "layer" && g.sharded() {
		return max(n, scores) + 2*weights
	}
	return max(n+weights/2, scores) // attention takes its weights as they are
}

func (g *gradient) sharded() bool { return g.w.sharded }

// plain tells whether some layer's attention is not cuDNN's.
func (g *gradient) plain() bool {
	p := g.p
	a := kernels.Planned(p.config.Facts(), p.windowed, g.plan.Types.Params, g.plan.CP)
	kernel, _ := p.set.Attention(a)
	return kernel != kernels.CuDNN
}

// backwardSet is what one layer has on its way back.
func (g *gradient) backwardSet(weights int64) int64 {
	mlp, flow := g.s.mlp, g.s.whole
	n := 2 * mlp
	gathers := g.w.gather != "step" && g.sharded()
	switch {
	case !gathers:
		n += 12 * flow
	case g.s.again(ir.MLP):
		n += 5*mlp/2 + 8*flow
	default:
		n += 8 * flow
	}
	scores := int64(0)
	if g.plain() { // and exponentials in f32, and their gradients; for products both are rounded
		scores = 12*g.s.scores + 8*flow
	}
	if g.plan.TP.Overlap {
		n, scores = n*3/5, scores*3/5
	}
	switch {
	case g.w.gather != "layer" || !gathers:
		return max(n+weights/3, scores)
	case g.p.arch == "sm_120":
		return max(n, scores) + 5*weights/2
	}
	return max(n, scores) + 3*weights/2
}

// gradients adds those of parameters: stacks that the loop back fills, in the type of the model,
// and what becomes of them.
func (g *gradient) gradients(m *space) {
	at := atSettle
	for i := range g.params {
		h := &g.params[i]
		grown, elem := h.whole(), g.w.elem // as the loop gives it
		if h.stack && h.cut && g.w.gather == "layer" {
			grown, elem = h.stored(), g.w.sum
		}
		from := atBackward
		switch {
		case h.stack && g.p.cpu: // zeros that gradients are added to are made early
			from = atGather
		case h.stack && h.class > g.first():
			from = atSegment
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			from = atEmbedGrad
			if g.p.cpu {
				from = atEmbed
			}
		case g.p.cpu && (g.s.TP > 1 || g.p.config.Tied && g.w.gather == "micro"):
			from = atHead
		case g.p.cpu:
			from = atTable
		default:
			from = g.headGrad()
		}
		kept := grown == h.stored() || g.w.zero < 2 // in the form that it comes in
		if g.p.cpu && h.stack && h.layers == 1 && g.part.rounds == 1 && g.onto && kept {
			m.add(grown*elem, atSettle, at) // XLA:CPU has all products before it adds the first
			at++
			continue
		}
		single := h.layers == 1 && (g.onto && kept || g.p.cpu && g.part.rounds > 1)
		if h.stack && (g.w.unrolled || single) {
			continue // a loop of one round is none: what it gives is added, or sent, at once
		}
		if !h.stack && h.name != "embed" && g.half == ofWeights && g.onto && kept && !g.p.cpu {
			continue // the product itself adds to what is there
		}
		if !h.stack && g.onto && kept && g.p.cpu && !h.vector {
			if g.part.first && !g.part.last {
				continue // rows are added where they stay
			}
			if g.half == ofWeights { // when all stacks are settled
				last := atSettle + len(g.params)
				m.add(grown*elem, last, last)
				continue
			}
		}
		result := g.w.grads(h)
		same := elem == g.w.grad && !g.onto && kept
		if same { // it is written where it stays
			m.host(result, -1, from)
			continue
		}
		m.add(grown*elem, from, at)
		if !g.onto {
			m.host(result, -1, at)
		}
		if grown != h.stored() && g.w.zero >= 2 {
			// Brought into the order that is sent, and rounded.
			if g.p.cpu && (h.stack || h.first > 0 || g.w.sum < g.w.elem && g.half != ofWeights) {
				m.add(grown*g.w.elem, at, at)
			}
			if g.onto || g.w.sum != g.w.grad { // what comes back
				m.add(h.stored()*g.w.sum, at, at)
			}
		}
		at++
	}
}
