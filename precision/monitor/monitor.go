package monitor

import (
	"cmp"
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/stat"
)

// Options are the intervals of a monitor, in steps or samples.
type Options struct {
	// Settle is the first step whose samples count. Before it a model moves so fast that nothing is
	// usual, and only what is wrong at any time is acted on. It should not be less than the warmup of
	// the learning rate.
	Settle int
	// Learn is how many samples of a signal are needed before one can be unusual.
	Learn int
	// Hold is how many steps a GEMM stays fallen at least, and Healthy how many samples in a row its
	// signal must be within bounds before it returns.
	Hold, Healthy int
	// Inspect is the number of steps between two inspections, which measure rounding errors, from the
	// one after Settle on; 0 never inspects. Other statistics are cheap, and every step has them.
	Inspect int
}

// Defaults are the options of a run from scratch. Bounds were set on drifts from step 50 on
// of clean runs. Medians of 8 samples differ from medians of 12 by less
// than the bounds leave room for, and 100 steps are some ten times what a fault of a few batches
// lasts. An inspection costs 62 % of a step on a CPU (bench/monitor), so one in 100 costs 0.6 %.
func Defaults() Options {
	return Options{Settle: 50, Learn: 8, Hold: 100, Healthy: 8, Inspect: 100}
}

// A Monitor follows one run. It is not safe for concurrent use.
type Monitor struct {
	options Options
	losses  []float64 // of steps that counted
	norms   []float64 // the logarithms
	shared  bool      // most linear layers were strange together in the last sample
	suspect bool      // errors of rounding were strange in the last sample that has them
	sites   []*site   // sorted by layer and name
}

// New returns a monitor without history.
func New(o Options) *Monitor { return &Monitor{options: o} }

// An observation is the evaluation of one sample.
type observation struct {
	*Monitor
	s *Sample
	// refused says that the step does not count, spiked that its batch is to blame. Nothing is learned
	// from either, and from a spiked step no conclusions about tensors are drawn.
	refused, spiked bool
	lost            bool // nothing in the sample means anything
	suspects        bool // an error of rounding is strange for the first time
	strange         []strange
	decisions       []Decision
}

// Observe takes a sample in and returns what follows from it: refusals first, then falls and
// warnings in the order of the linear layers, then returns. A fall or a return holds from the next
// step on.
func (t *Monitor) Observe(s *Sample) []Decision {
	o := &observation{Monitor: t, s: s}
	for _, site := range t.sites {
		for i := range site.series {
			site.series[i].fresh = false
		}
	}
	o.wholeStep()
	o.nonFinite()
	o.checksums()
	if !o.refused && s.Step >= t.options.Settle {
		t.losses = push(t.losses, s.Loss, remembered)
		t.norms = push(t.norms, logNorm(s.GradNorm), remembered)
	}
	if !o.lost {
		for i := range s.Linears {
			o.linear(&s.Linears[i])
		}
		o.act()
	}
	o.returns()
	t.suspect = o.suspects
	return o.decisions
}

// Inspects reports whether a step is to measure rounding errors: at the interval of Options, and
// right after a sample in which one was out of bounds, since two in a row are needed to act.
func (t *Monitor) Inspects(step int) bool {
	o := t.options
	since := step - o.Settle - 1
	return o.Inspect > 0 && since >= 0 && (t.suspect || since%o.Inspect == 0)
}

// NextInspection returns the first regular inspection from a step on; -1 if there will not be one.
func (t *Monitor) NextInspection(step int) int {
	o := t.options
	if o.Inspect <= 0 {
		return -1
	}
	first := o.Settle + 1
	if step <= first {
		return first
	}
	return first + (step-first+o.Inspect-1)/o.Inspect*o.Inspect
}

// site finds or adds the history of a linear layer.
func (t *Monitor) site(layer int, name string) *site {
	i, ok := slices.BinarySearchFunc(t.sites, 0, func(s *site, _ int) int {
		return cmp.Or(cmp.Compare(s.layer, layer), cmp.Compare(s.name, name))
	})
	if !ok {
		t.sites = slices.Insert(t.sites, i, &site{layer: layer, name: name})
	}
	return t.sites[i]
}

// remembered is how many losses and norms are stored, and least how many of them are enough to
// judge.
const remembered, least = 64, 16

// Limits returns the largest loss and gradient norm that are not spikes, so that an update which
// takes them as bounds refuses a poisoned step by itself. They are +Inf without enough history.
//
// A loss is a spike if it is ten robust standard deviations above the recent median. The deviation
// counts as at least 1 % of the loss, so that large batches, whose losses vary less, are not
// refused for a harder page. The norm is judged likewise by its logarithm, with at least 0.2: 7.4
// times the median.
func (t *Monitor) Limits() (loss, norm float64) {
	if len(t.losses) < least {
		return math.Inf(1), math.Inf(1)
	}
	const sigmas = 10
	m, d := robust(t.losses)
	loss = m + sigmas*max(d, 0.01*math.Abs(m))
	m, d = robust(t.norms)
	return loss, math.Exp(m + sigmas*max(d, 0.2))
}

// robust returns the median of the newest values and a standard deviation that neither outliers nor
// a trend move much: it is estimated from the differences of neighbours, whose deviation is √2
// times the values', and is 1.4826 times the median of their magnitudes if they are normal.
func robust(list []float64) (m, deviation float64) {
	var steps []float64
	for i := 1; i < len(list); i++ {
		steps = append(steps, math.Abs(list[i]-list[i-1]))
	}
	return stat.Median(recent(list)), 1.4826 / math.Sqrt2 * stat.Median(steps)
}

// recent returns the values that medians are taken over.
func recent(list []float64) []float64 { return list[max(0, len(list)-least):] }

// logNorm is the logarithm of a norm; a norm of zero counts as the smallest positive f32.
func logNorm(v float64) float64 { return math.Log(max(v, math.SmallestNonzeroFloat32)) }

// wholeStep judges the loss and the global gradient norm.
func (o *observation) wholeStep() {
	s := o.s
	maxLoss, maxNorm := o.Limits()
	switch {
	case isFinite(s.Loss) && s.Loss > maxLoss:
		o.spiked = true
		o.refuse(Decision{Layer: -1, Signal: "loss", Value: s.Loss, Usual: stat.Median(recent(o.losses)),
			Bound: maxLoss, Note: "the batch is skipped"})
	case isFinite(s.GradNorm) && s.GradNorm > maxNorm:
		o.spiked = true
		o.refuse(Decision{Layer: -1, Signal: "gradient norm", Value: s.GradNorm,
			Usual: math.Exp(stat.Median(recent(o.norms))), Bound: maxNorm, Note: "the batch is skipped"})
	}
}

func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// refuse decides that the update is not applied.
func (o *observation) refuse(d Decision) {
	o.refused = true
	d.Kind = Refuse
	o.decide(d)
}

// decide adds a decision of this step.
func (o *observation) decide(d Decision) {
	d.Step = o.s.Step
	d.Value, d.Usual, d.Bound = finite(d.Value), finite(d.Usual), finite(d.Bound)
	o.decisions = append(o.decisions, d)
}

// nonFinite refuses a step with a NaN or an infinity, and looks for its source. A NaN of the
// forward pass reaches everything after it and, through the loss, every gradient: its source is the
// first linear layer whose operands have one. A NaN of the backward pass leaves the loss alone and
// reaches every layer before it: its source is the last one.
func (o *observation) nonFinite() {
	s := o.s
	if s.Finite && isFinite(s.Loss) && isFinite(s.GradNorm) {
		return
	}
	o.lost = true
	l, op, n := o.source()
	d := Decision{Layer: -1, Signal: "not finite", Value: float64(max(n, 1)),
		Note: "where it came from was not measured"}
	if l != nil {
		d.Layer, d.Linear, d.Note = l.Layer, l.Name, ""
	}
	o.refuse(d)
	if l == nil {
		return
	}
	site := o.site(l.Layer, l.Name)
	if op == "" {
		o.straight(site, l, wgrad, "dw not finite", float64(n))
		return
	}
	for _, p := range readers(slices.Index(operands, op)) {
		o.straight(site, l, p, op+" not finite", float64(n))
	}
}

// source returns the linear layer, the operand ("" for the weight gradient) and how many elements
// are not finite.
func (o *observation) source() (l *Linear, operand string, n int64) {
	forward := !isFinite(o.s.Loss)
	for i := range o.s.Linears {
		at := &o.s.Linears[i]
		if !forward {
			at = &o.s.Linears[len(o.s.Linears)-1-i]
		}
		for _, op := range at.Operands {
			k := slices.Index(operands, op.Name)
			if op.NonFinite > 0 && k >= 0 && (k%tensors == opDY) != forward {
				return at, op.Name, op.NonFinite
			}
		}
		if !forward && (at.NonFinite > 0 || math.IsInf(at.Norm, 0)) {
			return at, "", max(at.NonFinite, 1)
		}
	}
	return nil, "", 0
}

// checksums compares the scales that GEMMs read with those that were written.
func (o *observation) checksums() {
	for i := range o.s.Linears {
		l := &o.s.Linears[i]
		for _, op := range l.Operands {
			k := slices.Index(operands, op.Name)
			if op.Made == op.Used || k < 0 {
				continue
			}
			o.refuse(Decision{Layer: l.Layer, Linear: l.Name, Signal: op.Name + " scales",
				Value: 1, Retry: true, Note: "they are not the bytes that were made"})
			o.straight(o.site(l.Layer, l.Name), l, reader(k), op.Name+" scales", 1)
		}
	}
}

// straight moves a GEMM to BF16, for faults that no format with scales helps against.
func (o *observation) straight(s *site, l *Linear, product int, signal string, count float64) {
	o.fall(s, l, product, bf16, "", Decision{Signal: signal, Value: count})
}
