package monitor

import (
	"math"
	"slices"
)

// linear judges everything that was measured of a linear layer: six signals for each quantized
// operand, then the signals of the layer itself.
func (o *observation) linear(l *Linear) {
	s := o.site(l.Layer, l.Name)
	formats := l.formats()
	for i := range l.Operands {
		op := &l.Operands[i]
		k := slices.Index(operands, op.Name)
		if k < 0 {
			continue
		}
		for j, v := range op.values() {
			o.judge(s, l, k*perOperand+j, measured{value: v, operand: k, format: formats[reader(k)]})
		}
	}
	for j, v := range l.values() {
		format := formats[wgrad]
		if j >= dwErrors {
			format = formats[j-dwErrors]
		}
		o.judge(s, l, ofLinear+j, measured{value: v, operand: -1, format: format})
	}
}

// judge compares a value with its history. A healthy value is added to the history; one out of
// bounds is collected in strange, for [observation.act].
func (o *observation) judge(s *site, l *Linear, place int, m measured) {
	sig, se := signalAt(place), &s.series[place]
	if math.IsNaN(m.value) || !sig.tensor && m.format == bf16 {
		return
	}
	// What the weight's gradient reads of a tensor is of that format as well: for NVFP4 elements are
	// spread over their neighbours first, which makes the largest smaller.
	if (!sig.tensor || m.operand >= tensors) && se.Format != m.format {
		se.forget()
		se.Format = m.format
	}
	m.usual = se.usual()
	m.learned = len(se.Values) >= max(o.options.Learn, 1)
	v := sig.judge(&m)
	// A poisoned batch says nothing about activations and gradients, and a model that still finds
	// its feet nothing at all, unless one sample is proof. But what was strange before the loss or
	// the norm leapt is rather why they did.
	early := o.s.Step < o.options.Settle
	batch := o.spiked && m.operand%tensors != opW && se.Bad == 0
	if proof := v.out && v.now; (early || batch) && !proof {
		return
	}
	se.fresh, se.now, se.bound = true, m, v.bound
	switch {
	case v.out && !v.warn:
		se.Bad++
		o.suspects = o.suspects || se.Bad == 1 && ofErrors(place)
		o.strange = append(o.strange, strange{s, l, place, v.now})
		return
	case v.warn && v.out:
		if se.Low++; se.Low == 2 {
			o.warn(s, place, "")
		}
	default:
		se.Low = 0
	}
	se.Bad = 0
	if !o.refused {
		se.learn(m.value)
	}
}

// A strange is a signal that is out of bounds. now says that one sample is proof.
type strange struct {
	*site
	linear *Linear
	place  int
	now    bool
}

// warn decides nothing but to report a signal.
func (o *observation) warn(s *site, place int, note string) {
	se := &s.series[place]
	o.decide(Decision{Kind: Warn, Layer: s.layer, Linear: s.name, Signal: placeName(place),
		Value: se.now.value, Usual: se.now.usual, Bound: se.bound, Note: note})
}

// act lets GEMMs fall back for signals that are out of bounds in the second sample in a row, or at
// once where one sample is proof.
func (o *observation) act() {
	if len(o.s.Linears) == 0 {
		return
	}
	shared := o.everywhere()
	for i, g := range o.strange {
		se := &g.series[g.place]
		switch {
		case shared && ofTensor(g.place):
			if i == 0 && !o.shared {
				o.warn(g.site, g.place, "and most linear layers with it, so that no GEMM is to blame")
			}
			if se.Bad = 0; !o.refused {
				se.learn(se.now.value)
			}
		case se.Bad >= 2 || g.now:
			o.drop(g)
		}
	}
	o.shared = shared
}

// ofTensor reports whether a signal belongs to the tensor and not to its format.
func ofTensor(place int) bool { return signalAt(place).tensor }

// everywhere reports whether tensors of more than half of the linear layers are out of bounds at
// once. That is another kind of batch, or a change of the learning rate or the batch size: what is
// usual changes, but no format is to blame.
func (o *observation) everywhere() bool {
	const enough = 4 // half of fewer says nothing
	n, last := 0, (*site)(nil)
	for _, g := range o.strange {
		if ofTensor(g.place) && g.site != last {
			n, last = n+1, g.site
		}
	}
	return len(o.s.Linears) >= enough && 2*n > len(o.s.Linears)
}

// drop lets the GEMMs fall back that a signal concerns. If all of them are in BF16 by policy,
// nothing can be done but to warn.
func (o *observation) drop(g strange) {
	s, place := g.site, g.place
	sig, se := signalAt(place), &s.series[place]
	formats, idle := g.linear.formats(), true
	for _, p := range concerned(s, g.linear, place) {
		idle = idle && formats[p] == bf16 && len(s.gemms[p].Fallen) == 0
		bound := se.bound
		if n := len(s.gemms[p].Fallen); sig.tensor && n > 0 {
			m := se.now
			m.rung = n
			v := sig.judge(&m)
			if !v.out {
				continue
			}
			bound = v.bound
		}
		o.fall(s, g.linear, p, moreBits(formats[p]), placeName(place), Decision{Signal: placeName(place),
			Value: se.now.value, Usual: se.now.usual, Bound: bound})
	}
	if idle && (se.Bad == 2 || g.now && se.Bad == 1) {
		o.warn(s, place, "")
	}
}

// concerned returns the GEMMs that a signal concerns.
//
// A property of a tensor concerns both GEMMs that read it. A property of one quantized copy
// concerns its reader alone, if the other copy was measured too and so speaks for itself. A weight
// gradient that is too small or too large comes from dy if that is as far from its median, and then
// dgrad has the same trouble.
func concerned(s *site, l *Linear, place int) []int {
	if place >= ofLinear {
		switch j := place - ofLinear; {
		case j >= dwErrors:
			return []int{j - dwErrors}
		case j == dwNoise || !strangeGradient(s):
			return []int{wgrad}
		}
		return []int{dgrad, wgrad}
	}
	operand, sig := place/perOperand, place%perOperand
	both := readers(operand)
	if operandSignals[sig].tensor {
		return both[:]
	}
	other := operands[(operand+tensors)%len(operands)]
	for i := range l.Operands {
		if l.Operands[i].Name == other && !math.IsNaN(l.Operands[i].values()[sig]) {
			return []int{reader(operand)}
		}
	}
	return both[:]
}

// strangeGradient reports whether amax of dy is a factor of 16 above or below its median.
func strangeGradient(s *site) bool {
	for _, operand := range []int{opDY, opDY + tensors} {
		se := &s.series[operand*perOperand]
		m := se.now
		if se.fresh && m.learned && (m.value > 16*m.usual || m.value < m.usual/16) {
			return true
		}
	}
	return false
}

// fall moves a GEMM to a wider format, unless it is there or the run has not switched yet. After a
// relapse it stays twice as long as the time before.
func (o *observation) fall(s *site, l *Linear, index int, to, cause string, d Decision) {
	p, format := &s.gemms[index], l.formats()[index]
	if n := len(p.Fallen); n > 0 && p.Fallen[n-1].To != format {
		if o.s.Step-p.Since <= o.options.Hold {
			return // the run has not switched yet
		}
		p.Fallen = nil // somebody else decides
	}
	if format == bf16 {
		return
	}
	d.Kind, d.Layer, d.Linear, d.GEMM = Fall, s.layer, s.name, gemms[index]
	d.From, d.To = format, to
	o.decide(d)
	switch {
	case p.Wait == 0:
		p.Wait = max(o.options.Hold, 1)
	case p.Returned:
		p.Wait = min(2*p.Wait, 1<<30)
	}
	p.Fallen = append(p.Fallen, o.decisions[len(o.decisions)-1])
	p.Since, p.Cause, p.Healthy, p.Measured, p.Returned = o.s.Step, cause, 0, false, false
}

// returns moves GEMMs back by one format that have waited long enough and whose signal is healthy,
// or cannot be measured in their present format.
func (o *observation) returns() {
	for _, s := range o.sites {
		for i := range s.gemms {
			p := &s.gemms[i]
			if len(p.Fallen) == 0 || p.Since == o.s.Step || o.refused {
				if o.refused {
					p.Healthy = 0
				}
				continue
			}
			o.back(s, p)
		}
	}
}

// back decides about the return of one GEMM.
func (o *observation) back(s *site, p *gemmState) {
	waited := o.s.Step - p.Since
	d := Decision{Signal: "steps since the fall", Value: float64(waited), Usual: float64(p.Wait),
		Bound: float64(p.Wait)}
	ready := true
	if place := placeOf(p.Cause); place >= 0 {
		se := &s.series[place]
		switch {
		case se.fresh && se.Bad > 0:
			p.Measured, p.Healthy, ready = true, 0, false
			if waited >= 2*p.Wait {
				se.forget() // so it is to stay, and becomes what is usual
			}
		case se.fresh:
			p.Measured = true
			p.Healthy++
			ready = p.Healthy >= o.options.Healthy
			d = Decision{Signal: p.Cause, Value: se.now.value, Usual: se.now.usual, Bound: se.bound}
		default:
			ready = !p.Measured
		}
	}
	if !ready || waited < p.Wait {
		return
	}
	top := p.Fallen[len(p.Fallen)-1]
	d.Kind, d.Layer, d.Linear, d.GEMM = Return, s.layer, s.name, top.GEMM
	d.From, d.To = top.To, top.From
	o.decide(d)
	p.Fallen = p.Fallen[:len(p.Fallen)-1]
	p.Since, p.Healthy, p.Measured, p.Returned = o.s.Step, 0, false, true
}
