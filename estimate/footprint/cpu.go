package footprint

// onCPU lists the buffers that XLA:CPU has.
func (g *gradient) onCPU() int64 {
	m := &space{}
	joint := g.forward && g.backward
	flow := g.s.values(g.s.piece, g.s.embed)
	logits := g.s.values(g.s.tokens, g.s.vocab)
	if joint {
		for _, k := range g.s.kept(g.again) {
			for range k.count {
				m.add(k.bytes*g.part.rounds*g.s.layers, atForward, atBackward)
			}
		}
	}
	if g.part.last {
		to := atLoss
		if g.backward {
			to = atHead
		}
		if joint || g.backward {
			m.add(logits, atLogits, to) // its gradient takes its place
		}
		m.add(logits/8, atLoss, atLoss) // kernels.Chunks
		m.add(2*flow, atLogits, to)
	}
	g.tables(m)
	w, _ := g.layer()
	if g.forward {
		m.add(g.cpuSet(w, false), atForward, atForward)
	}
	if g.backward {
		m.add(g.cpuSet(w, true), atBackward, atBackward)
		g.gradients(m)
	}
	return m.peak()
}

// tables adds the parameters that are gathered outside of the loop. One that is not cut along its
// first dimension is gathered in another order and turned.
func (g *gradient) tables(m *space) {
	for i := range g.params {
		h := &g.params[i]
		if !g.gathered(h.param) {
			continue
		}
		bytes := h.whole() * g.w.elem
		turned := int64(0)
		if h.first > 0 || h.stack {
			turned = bytes
		}
		switch {
		case h.stack && g.w.gather == "micro":
			from, to := atEmbed, atBackward
			if !g.forward {
				from = atHead
			}
			if !g.backward {
				to = atLogits
			}
			m.add(bytes, from, to)
		case h.stack:
		case h.name == "embed" && !g.p.config.Tied:
			m.add(bytes+turned, atEmbed, atEmbed)
		default:
			m.add(bytes, atLogits, atHead)
			m.add(turned, atLogits, atLogits)
			if g.part.first {
				m.add(bytes+turned, atEmbed, atEmbed)
			}
		}
	}
}

// cpuSet is what one layer has while it computes.
func (g *gradient) cpuSet(weights int64, back bool) int64 {
	s := g.s
	mlp, flow := s.values(s.tokens, s.mlp), s.values(s.tokens, s.embed)
	pieces := max(1, min(s.seq/64, 4))
	scores := s.rows * s.count * s.seq / pieces * s.seq * 4
	if !back {
		return 2*mlp + 3*flow + scores + weights
	}
	n := 2 * mlp
	if g.again.mlp {
		n = 4 * mlp
	}
	return n + 4*flow + 2*scores + 3*weights/2
}
