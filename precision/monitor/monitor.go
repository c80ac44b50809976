package monitor

import (
	"cmp"
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/stat"
)

// Options are the times of a watch.
type Options struct {
	// Settle is the step from which on samples count. Before it a model moves so fast that nothing is
	// usual, and only what is wrong at any time is acted on. It should be no less than the steps over
	// which the learning rate rises.
	Settle int
	// Learn is how many samples of a signal are wanted before one is called unusual.
	Learn int
	// Hold is how many steps a product stays fallen at least, and Healthy how many samples in a row
	// its signal must have been within bounds when it returns.
	Hold, Healthy int
	// Inspect is how many steps lie between two whose errors of rounding are measured, from the one
	// after Settle on; 0 measures none. These cost more than the rest, which every step tells.
	Inspect int
}

// Defaults are the options of a run from scratch: bounds were set on drifts from step 50 on
// (reference/parity_notes.md 4), medians of 8 samples differ from those of 12 by less than the
// bounds leave room for, and 100 steps are some ten times what a fault of a few batches lasts.
// An inspection costs 62 % of a step on a CPU (bench/watch), so that one in 100 costs 0.6 %.
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

// New gives a watch that has seen nothing.
func New(o Options) *Monitor { return &Monitor{options: o} }

// An observation is the look at one sample.
type observation struct {
	*Monitor
	s *Sample
	// refused says that the step does not count, spiked that its batch is to blame: nothing is
	// learned from either, and from the latter no conclusions about tensors are drawn.
	refused, spiked bool
	lost            bool // nothing in the sample means anything
	suspects        bool // an error of rounding is strange for the first time
	strange         []strange
	decisions       []Decision
}

// Observe takes in a sample and says what follows from it: refusals first, then falls and warnings
// in the order of the linear layers, then returns. A fall or a return holds from the next step on.
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

// Inspects tells whether the errors of rounding are to be measured in a step: every so often, and
// right after a sample in which one was strange, since two in a row are wanted to act.
func (t *Monitor) Inspects(step int) bool {
	o := t.options
	since := step - o.Settle - 1
	return o.Inspect > 0 && since >= 0 && (t.suspect || since%o.Inspect == 0)
}

// NextInspection is the first step from one on that is measured in any case; -1 if none is.
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

// Fallen lists the falls that are in effect, so that a run that goes on from a checkpoint can put
// them on its policy again: for each product in the order in which they were made.
func (t *Monitor) Fallen() []Decision {
	var list []Decision
	for _, s := range t.sites {
		for i := range s.gemms {
			list = append(list, s.gemms[i].Fallen...)
		}
	}
	return list
}

// site finds or makes one.
func (t *Monitor) site(layer int, name string) *site {
	i, ok := slices.BinarySearchFunc(t.sites, 0, func(s *site, _ int) int {
		return cmp.Or(cmp.Compare(s.layer, layer), cmp.Compare(s.name, name))
	})
	if !ok {
		t.sites = slices.Insert(t.sites, i, &site{layer: layer, name: name})
	}
	return t.sites[i]
}

// remembered is how many losses and norms are kept, and least how many of them make a judgement.
const remembered, least = 64, 16

// Limits gives the largest loss and gradient norm that are no spikes, so that an update that takes
// them as bounds refuses a poisoned step by itself. They are infinite until there is a history.
//
// A loss is one if it is ten robust standard deviations above the recent median. The deviation
// counts as 1 % of the loss at least, so that large batches, whose losses differ less, are not
// refused for a harder page. The norm is judged the same way by its logarithm, with 0.2 at least:
// 7.4 times the median.
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

// robust gives the median of the newest values and a standard deviation that neither a few strange
// values nor a trend move much: that of the differences of neighbours, which is √2 times that of
// the values, and 1.4826 times the median of their magnitudes if they are normal.
func robust(list []float64) (m, deviation float64) {
	var steps []float64
	for i := 1; i < len(list); i++ {
		steps = append(steps, math.Abs(list[i]-list[i-1]))
	}
	return stat.Median(recent(list)), 1.4826 / math.Sqrt2 * stat.Median(steps)
}

func recent(list []float64) []float64 { return list[max(0, len(list)-least):] }

// logNorm is the logarithm of a norm; a norm of zero counts as the smallest there is.
func logNorm(v float64) float64 { return math.Log(max(v, math.SmallestNonzeroFloat32)) }

// wholeStep judges the loss and the norm of all gradients.
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

func (o *observation) refuse(d Decision) {
	o.refused = true
	d.Kind = Refuse
	o.decide(d)
}

func (o *observation) decide(d Decision) {
	d.Step = o.s.Step
	d.Value, d.Usual, d.Bound = finite(d.Value), finite(d.Usual), finite(d.Bound)
	o.decisions = append(o.decisions, d)
}

// nonFinite refuses a step with a number that is not finite, and looks for its source. A NaN of the
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

// source finds the linear layer, the operand or "" for the gradient of the weight, and how many
// elements are not finite.
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

// checksums compares the scales that products read with those that were made.
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

// straight takes a product to BF16 for something that no format with scales would help against.
func (o *observation) straight(s *site, l *Linear, product int, signal string, count float64) {
	o.fall(s, l, product, bf16, "", Decision{Signal: signal, Value: count})
}
