package footprint

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/plan"
)

// A gradient is a program that computes a loss, or a pipeline stage of one: forward, backward or
// both.
type gradient struct {
	p      *Predictor
	s      *sizes
	w      *way
	plan   *plan.Plan
	part   part
	params []resident

	forward, backward bool
	half              half
	onto              bool // gradients are accumulated into an argument
}

// A half is one of the two programs that zero-bubble schedules split backward into: dgrad or
// wgrad.
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

// splitBit marks keys of stages with a split backward.
const splitBit = 10

// key packs the program's booleans and small numbers into bits.
func (g *gradient) key() programKey {
	w := g.w
	return programKey{s: g.s, fsdp: w.fsdp, part: g.part, flags: bitsOf(g.forward, g.backward, g.onto,
		g.p.rounded(g.plan), w.alone, w.unrolled, w.gather == "microbatch",
		w.gather == "layer", w.offload,
		w.hosted) | small(w.elem, w.grad, w.sum, int64(w.zero), int64(g.half))}
}

// bitsOf packs fewer than 20 booleans; small appends numbers below 16.
func bitsOf(list ...bool) (bits uint64) {
	for i, yes := range list {
		if yes {
			bits |= 1 << i
		}
	}
	return bits
}

// small packs numbers below 16 into 4 bits each, above the 20 bits of bitsOf.
func small(list ...int64) (bits uint64) {
	for i, n := range list {
		bits |= uint64(n) << (20 + 4*i)
	}
	return bits
}

// temp is what XLA allocates for the program besides arguments and results. It is cached: the
// plans of a search differ more often in what it does not depend on.
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

// lastTaken is the last use of weights that are gathered for all layers at once.
func (g *gradient) lastTaken(h *resident) int {
	switch {
	case !g.backward:
		return atLogits
	case h.class > g.first():
		return atSegment
	}
	return atBackward
}

// gathered reports whether the program gathers a parameter.
func (g *gradient) gathered(q *param) bool { return q.cut && g.w.gather != "step" }

// onGPU returns the temp of XLA:GPU from the list of its large buffers.
func (g *gradient) onGPU() int64 {
	m := g.p.space.cleared()
	joint := g.forward && g.backward
	flow, whole, logits := g.s.flow, g.s.whole, g.s.logits
	if joint && !g.w.offload {
		to := atBackward
		for i := range g.s.bill.Layers { // the last forward loop is the first backward loop
			for _, n := range g.s.residualsOf(nil, g.part, i) {
				m.add(n, atForward, to)
			}
			// If parameters are gathered by layer, the peak has all saved activations live at once.
			if g.s.rounds(g.part, i) > 0 && (g.w.gather != "layer" || !g.sharded()) {
				to = atSegment
			}
		}
	}
	if g.part.last {
		if g.forward && joint && !g.inPlace() {
			m.add(logits, atLogits, atLoss)
		}
		if g.backward && g.half == both {
			from := atLoss
			if joint && g.inPlace() {
				from = atLogits
			}
			m.add(logits, from, g.headGrad())
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
		m.add(g.wgradTemp(whole), atBackward, atBackward)
	}
	if g.backward && g.half != ofInput {
		g.gradients(m)
	}
	return m.peak()
}

// inPlace reports whether a kernel of our own writes the gradient of logits over them. The gradient
// of capped logits reads them, too.
func (g *gradient) inPlace() bool {
	elem, _ := g.p.set.Types(g.s.Params)
	_, ok := g.p.set.Losses(kernels.Loss{Rows: g.s.logits / (g.s.elem * max(g.s.vocab, 1)),
		Cols: g.s.vocab, Elem: elem, Labels: dtype.S32, Sharded: g.s.TP > 1,
		Others: g.p.config.LogitCap > 0})
	return ok
}

// moved adds buffers in flight with offloaded activations: in forward a layer's and its
// predecessor's, in backward some of the next layer's; and one layer's gathered weights, because
// XLA starts gathers earlier while copies are pending.
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

// wgradTemp is the temp of the wgrad half besides gradients, at least one operand. In a loop it is
// the merged QKV gradient before it is split; without a loop, GEMMs with a common operand before
// they are accumulated.
func (g *gradient) wgradTemp(factor int64) int64 {
	var ups, heads int64 // bytes of weights that share an operand
	for i := range g.params {
		h := &g.params[i]
		if i > 0 && h.param == g.params[i-1].param { // layers that differ have equally many weights
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

// headGrad is the point at which the head's wgrad runs: after the backward loop, or before it if
// the loop has no collective that XLA's latency-hiding scheduler could overlap it with. A tied
// table's is accumulated with the embedding's, at the end.
func (g *gradient) headGrad() int {
	tied := g.onto && g.p.config.Tied
	if g.p.arch == "sm_120" && g.w.gather == "step" && !tied {
		return atTable
	}
	return atHeadGrad
}

// stays reports whether a stage keeps parameters gathered in forward until backward. Quantized
// passes read different copies, and each gathers its own.
func (g *gradient) stays() bool {
	quantized := false
	if g.p.quant != nil {
		g.p.quant.each(g.part.mix, func(c class, _ int64) { quantized = quantized || len(c) > 0 })
	}
	return g.w.gather == "microbatch" && !quantized
}

// recomputes reports whether backward reruns a linear layer's fprop.
func (g *gradient) recomputes(param string) bool {
	switch name := param[strings.LastIndexByte(param, '.')+1:]; {
	case slices.Contains([]string{"q", "k", "v", "o", "q_down", "q_up", "kv_down", "kv_up"}, name):
		return g.s.again(ir.Attn)
	case strings.HasPrefix(name, "expert_"):
		return g.s.again(ir.Experts)
	}
	return g.s.again(ir.MLP)
}

// taken is the gathered bytes that the program reads of a parameter.
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
		case h.stack && g.w.gather == "microbatch" && h.quant != nil && g.forward && g.backward &&
			!g.recomputes(h.name): // each pass has its own copy
			m.add(h.param.whole*h.quant.forward/32, atEmbed, atLogits)
			m.add(h.param.whole*h.quant.backward/32, atTable, g.lastTaken(h))
		case h.stack && g.w.gather == "microbatch":
			m.add(bytes, atEmbed, g.lastTaken(h))
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			m.add(bytes, atEmbed, atEmbed)
		default:
			m.add(bytes, atLogits, atHead)
		}
	}
}

// forwardSet is the working set of one layer in forward: MLP activations, and the weights of this
// layer and the next; or, if attention writes its scores, these and their exponentials in f32.
func (g *gradient) forwardSet(weights int64) int64 {
	n := 2*g.s.mlp + 3*g.s.whole + g.expertSet(weights)/2
	scores := int64(0)
	if g.plain() {
		scores = 8*g.s.scores + 2*g.s.whole
	}
	if g.w.gather == "layer" && g.sharded() {
		return max(n, scores) + 2*weights
	}
	return max(n+weights/2, scores) // attention uses its weights in place
}

// ExpertSet is the bytes of a layer's experts in backward: one activation of their MLPs, of mlp
// bytes, with others and gradients, and rows. The factors are a fit to compiled programs for GB200:
// mixtral-8x7b on 64 with ep 8 and 1, qwen3-235b-a22b on 128 with ep 16, deepseek-v3 on 256 with
// ep 16.
func ExpertSet(mlp, rows int64) int64 { return 5*mlp + 3*rows }

// expertSet is what a layer's experts add to the working set in backward. Beside all-to-alls, XLA
// starts gathers of weights earlier.
func (g *gradient) expertSet(weights int64) int64 {
	if g.s.expert == 0 || g.part.from+g.part.rounds <= g.p.dense {
		return 0
	}
	n := ExpertSet(g.s.expert, g.s.rows)
	if g.s.EP > 1 && g.w.gather == "layer" && g.sharded() {
		n += 2 * weights
	}
	return n
}

func (g *gradient) sharded() bool { return g.w.sharded }

// plain reports whether some layer's attention writes its scores.
func (g *gradient) plain() bool {
	p := g.p
	a := kernels.Planned(p.config.Facts(), p.windowed, g.plan.Types.Params, g.plan.CP, g.plan.Seq,
		g.plan.PlainAttention())
	kernel, _ := p.set.Attention(a)
	return !kernels.Flash(kernel)
}

// gatheredKeys is what cuDNN's attention to gathered keys (context parallelism) has beside queries
// in backward: the keys, their gradients and the sum of these in f32, and a workspace of 4 bytes
// per element of one chunk's queries, and of the keys before it for each head of queries. In a
// balanced plan there is a copy of three quarters of the keys in order for either chunk.
func (g *gradient) gatheredKeys() int64 {
	op := g.s.attention
	if op == nil || op.Attrs.Text("ring") != "" {
		return 0
	}
	if _, places := op.MaskArgs(); len(places) == 0 {
		return 0
	}
	q, k := op.In[0].Type.Shape().Bytes(), op.In[1].Type.Shape().Bytes()
	if g.s.Balance {
		return 2*q*g.s.CP + 12*k
	}
	return 2*q*(g.s.CP+1) + 8*k
}

// backwardSet is the working set of one layer in backward.
func (g *gradient) backwardSet(weights int64) int64 {
	mlp, flow := g.s.mlp, g.s.whole
	n := 2*mlp + g.expertSet(weights)
	gathers := g.w.gather != "step" && g.sharded()
	switch {
	case !gathers && g.plan.TP.Sequence && g.plan.Size(plan.TensorAxis) > 1:
		n += 8 * flow // the residual stream and its gradients are sharded
	case !gathers:
		n += 12 * flow
	case g.s.again(ir.MLP):
		n += 5*mlp/2 + 8*flow
	default:
		n += 8 * flow
	}
	var scores int64
	if g.plain() { // and exponentials in f32, with their gradients; both are rounded for GEMMs
		scores = 12*g.s.scores + 8*flow
	} else { // cuDNN's workspace, and operands and results of the device's heads
		scores = max(g.s.packed, g.gatheredKeys()) + 8*min(flow, g.s.elem*g.s.queries)
		if g.s.again(ir.Attn) {
			n, scores = n+g.s.parts, scores+g.s.parts
		}
	}
	if g.plan.TP.Overlap { // half batches for experts alone keep both: mixtral-8x7b, 68.3 GiB compiled
		n, scores = n*3/5, scores*3/5
	}
	switch {
	case g.w.gather != "layer" || !gathers:
		return max(n+weights/3, scores)
	case g.p.arch == "sm_120":
		return max(n, scores) + 3*weights
	}
	return max(n, scores) + 3*weights/2
}

// gradients adds the gradients of parameters: stacks that the backward loop fills, in the model's
// type, and the buffers in which they are rounded, sent and accumulated.
func (g *gradient) gradients(m *space) {
	at := atSettle
	for i := range g.params {
		h := &g.params[i]
		grown, elem := h.whole(), g.w.elem // as the loop writes it
		if h.stack && h.cut && g.w.gather == "layer" {
			grown, elem = h.stored(), g.w.sum
		}
		from := atBackward
		switch {
		case h.stack && g.p.cpu: // zero-initialized accumulators are allocated early
			from = atGather
		case h.stack && h.class > g.first():
			from = atSegment
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			from = atEmbedGrad
			if g.p.cpu {
				from = atEmbed
			}
		case g.p.cpu && (g.s.TP > 1 || g.p.config.Tied && g.w.gather == "microbatch"):
			from = atHead
		case g.p.cpu:
			from = atTable
		default:
			from = g.headGrad()
		}
		kept := grown == h.stored() || g.w.zero < 2 // in the type and layout of the accumulator
		if g.p.cpu && h.stack && h.layers == 1 && g.part.rounds == 1 && g.onto && kept {
			m.add(grown*elem, atSettle, at) // XLA:CPU computes all GEMMs before it accumulates the first
			at++
			continue
		}
		single := h.layers == 1 && (g.onto && kept || g.p.cpu && g.part.rounds > 1)
		if h.stack && (g.w.unrolled || single) {
			continue // XLA unrolls a loop of one iteration: results are accumulated, or sent, at once
		}
		if !h.stack && h.name != "embed" && g.half == ofWeights && g.onto && kept && !g.p.cpu {
			continue // the GEMM accumulates in place (beta = 1)
		}
		if !h.stack && g.onto && kept && g.p.cpu && !h.vector {
			if g.part.first && !g.part.last {
				continue // embedding rows are scattered in place
			}
			if g.half == ofWeights { // after all stacks
				last := atSettle + len(g.params)
				m.add(grown*elem, last, last)
				continue
			}
		}
		result := g.w.grads(h)
		same := elem == g.w.grad && !g.onto && kept
		if same { // written in place
			m.host(result, -1, from)
			continue
		}
		m.add(grown*elem, from, at)
		if !g.onto {
			m.host(result, -1, at)
		}
		if grown != h.stored() && g.w.zero >= 2 {
			// Transposed to the order in which it is sent, and rounded.
			if g.p.cpu && (h.stack || h.first > 0 || g.w.sum < g.w.elem && g.half != ofWeights) {
				m.add(grown*g.w.elem, at, at)
			}
			if g.onto || g.w.sum != g.w.grad { // the reduced shard
				m.add(h.stored()*g.w.sum, at, at)
			}
		}
		at++
	}
}
