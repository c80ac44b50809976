package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// onCPU returns the temp of XLA:CPU from the list of its large buffers.
func (g *gradient) onCPU() int64 {
	m := &space{}
	joint := g.forward && g.backward
	flow, logits := g.s.flow, g.s.logits
	if joint {
		kept := g.s.residuals(g.part)
		layer := &g.s.bill.Layers[0]
		switch {
		case g.w.unrolled && !g.sharded(): // cheap functions are recomputed, as nothing is stacked
			for _, n := range layer.Cheap {
				at := slices.Index(kept, n*g.part.rounds)
				kept = slices.Delete(kept, at, at+1)
			}
		case g.w.unrolled && g.s.CP == 1: // CSE finds the recomputed scores, and keeps them
			n := g.chunks()
			each := g.s.scores*2*(n+1)/n + 2*g.s.mlp // SiLU, and what it gates, as well
			kept = append(kept, each*g.part.rounds*g.p.slots)
		}
		for _, n := range kept {
			g.layered(m, n, false)
		}
	}
	if g.part.last {
		to := atLoss
		if g.backward {
			to = atTable
		}
		if joint || g.backward && g.half == both {
			m.add(logits, atLogits, to) // its gradient reuses the buffer
		}
		m.add(logits/8, atLoss, atLoss) // kernels.Chunks
		if g.s.TP > 1 {                 // a label may belong to another device's shard
			m.add(logits, atLoss, atLoss)
			if g.p.config.Vocab%g.s.TP != 0 { // or to the padding
				m.add(logits, atLoss, atLoss)
			}
			if g.plan.TP.Overlap && g.sharded() { // halves are joined
				m.add(logits, atLoss, atLoss)
			}
		}
		m.add(2*flow, atLogits, to)
	}
	g.tables(m)
	w, _ := g.layer()
	if g.part.rounds == 1 || g.w.unrolled && !g.sharded() {
		w = 0 // nothing is sliced out of a stack
	}
	if g.p.rounded(g.plan) {
		g.rounded(m)
	}
	if g.forward {
		m.add(g.cpuSet(w, false), atForward, atForward)
	}
	if g.backward && g.half != ofWeights {
		m.add(g.cpuSet(w, true), atBackward, atBackward)
	}
	if g.backward && g.half != ofInput {
		g.gradients(m)
	}
	if g.w.unrolled {
		g.results(m)
	}
	return m.peak()
}

// layered adds what a stack of saved activations occupies from forward to backward; per layer if
// the layers are unrolled.
func (g *gradient) layered(m *space, bytes int64, alone bool) {
	n := int64(1)
	if g.w.unrolled {
		n = g.part.rounds * g.p.slots
	}
	for range n {
		m.list = append(m.list, buffer{bytes / n, atForward, atBackward, alone})
	}
}

// results adds the output buffers of gradients of unrolled layers. Each can hold other buffers
// until its layer's gradient is scattered into it. If nothing is gathered by layer, all are
// written at once.
func (g *gradient) results(m *space) {
	m.hosts = nil
	if g.w.gather != "layer" || !g.sharded() || g.onto {
		return
	}
	for i := range g.params {
		if h := &g.params[i]; h.stack {
			for range h.layers {
				m.host(g.w.grads(h)/h.layers, -1, atSettle)
			}
		}
	}
}

// tables adds the parameters that are gathered outside of the loop. A parameter that is not
// sharded along its first dimension is gathered in another order and transposed.
func (g *gradient) tables(m *space) {
	var largest, rest int64
	for i := range g.params {
		h := &g.params[i]
		if !g.gathered(h.param) {
			continue
		}
		bytes := g.taken(h)
		transposed := int64(0)
		if h.first > 0 || h.stack {
			transposed = bytes
		}
		switch {
		case g.w.gather == "microbatch" && !g.forward: // live since forward
		case h.stack && g.w.gather == "microbatch":
			m.add(bytes, atGather, g.lastTaken(h))
			m.list[len(m.list)-1].alone = g.s.TP > 1 // gradients of tables are settled before the loop
			largest, rest = max(largest, bytes), rest+bytes
		case h.stack && g.w.unrolled: // CSE finds the second gather, and keeps the first
			if g.p.rounded(g.plan) { // as sent: GEMMs read that type
				bytes = h.whole() * g.w.sum
			}
			g.layered(m, bytes, g.p.rounded(g.plan))
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			m.add(bytes+transposed, atEmbed, atEmbed)
		case g.forward && transposed > 0 && h.name != "embed":
			m.add(bytes, atForward, atHead)
			m.add(transposed, atForward, atForward)
		case g.forward && g.part.first: // what is gathered is gathered early
			m.add(bytes, atEmbed, atHead)
			m.add(transposed, atEmbed, atEmbed)
		default:
			m.add(bytes, atLogits, atHead)
			m.add(transposed, atLogits, atLogits)
		}
	}
	// Stacks are transposed one after another, the largest first.
	if same := rest / max(largest, 1) * largest; same > 0 {
		m.add(max(0, largest-(rest-same)), atGather, atGather)
	}
}

// chunks is the number of query chunks that attention computes one after another.
func (g *gradient) chunks() int64 {
	_, matmuls := g.p.set.Types(g.s.Params)
	queries := g.s.attention.In[0].Type.Size(ir.Seq)
	keys := g.s.attention.In[1].Type.Size(ir.Keys)
	return int64(len(g.p.set.QueryBlocks(g.s.attention, matmuls, queries, keys)))
}

// cpuSet is the working set of one layer, in bytes.
func (g *gradient) cpuSet(weights int64, back bool) int64 {
	mlp, flow, scores := g.s.mlp, g.s.whole, 4*g.s.scores/g.chunks()
	if !back {
		return 2*mlp + 3*flow + scores + weights/2
	}
	n := 2 * mlp
	if g.s.again(ir.MLP) {
		n = 5 * mlp
	}
	switch {
	case g.w.gather != "layer" || !g.sharded() || !g.s.again(ir.MLP):
		weights /= 2
	case g.p.rounded(g.plan):
		weights /= 4 // half of them, in bf16 as they are sent and as GEMMs read them
	}
	return n + 4*flow + 2*scores + weights
}

// rounded adds the head's table, which GEMMs read in bf16: transposed if possible, and in the
// buffer of the gathered table if there is one.
func (g *gradient) rounded(m *space) {
	joint := g.forward && g.backward
	if g.part.last && g.half != ofWeights && kernels.Split(g.s.vocab) > 0 &&
		(!g.sharded() || g.w.gather != "layer" || !joint) {
		m.add(g.s.vocab*g.p.config.Hidden*2, atLogits, atHead)
	}
}
