package monitor

import (
	"math"
	"slices"
)

// linear looks at all that was measured of a linear layer.
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

// judge compares a value with its history, and adds it to that if it is none to act on.
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

// A strange is a signal that is out of bounds.
type strange struct {
	*site
	linear *Linear
	place  int
	now    bool
}

func (o *observation) warn(s *site, place int, note string) {
	se := &s.series[place]
	o.decide(Decision{Kind: Warn, Layer: s.layer, Linear: s.name, Signal: placeName(place),
		Value: se.now.value, Usual: se.now.usual, Bound: se.bound, Note: note})
}

// act lets products fall for what is strange in the second sample in a row, or proof at once.
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
				o.warn(g.site, g.place, "and most linear layers with it, so that no product is to blame")
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

func ofTensor(place int) bool { return signalAt(place).tensor }

// everywhere reports whether tensors of more than half of the linear layers are strange at once.
// That is a batch of another kind, or a change of the rate or of the batch's size: what is usual
// changes, but not because of a format.
func (o *observation) everywhere() bool {
	const few = 4 // of so few a half says nothing
	n, last := 0, (*site)(nil)
	for _, g := range o.strange {
		if ofTensor(g.place) && g.site != last {
			n, last = n+1, g.site
		}
	}
	return len(o.s.Linears) >= few && 2*n > len(o.s.Linears)
}

// drop lets the products fall that a signal is about. Where all of them are in BF16 of old there is
// nothing to be done but to say so.
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

// concerned lists the products that a signal speaks of.
//
// What is true of a tensor is true for both products that read it. What is true of one copy is true
// for its reader alone, if the other copy was measured and so speaks for itself. A gradient of a
// weight that is too small or too large comes from dy if that is as far from its median, and
// then dgrad has the same trouble.
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

// strangeGradient reports whether amax of dy is out of the bounds that judgeAmax has upwards, in
// either direction.
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

// fall takes a product to a wider format, unless it is there or on the way.
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

// returns takes products back up, one rung at a time, that have waited long enough and whose signal
// is healthy, or cannot be seen from where they are.
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
