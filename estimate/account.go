package estimate

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// stage is the virtual stage that a rank runs as its turn-th. A vee layout (zb-v) runs down the
// ranks and back up; the others start again at rank 0.
func (l *layout) stage(rank, turn int) int {
	n := int(l.pipe)
	if l.vee && turn%2 == 1 {
		return turn*n + n - 1 - rank
	}
	return turn*n + rank
}

// account splits the step by cause, as seen by the rank with the most work. Idle time of that rank
// is bubble, apart from the sends it waits for.
func (e *Estimator) account(est *Estimate, l *layout, loads *loads, pipe float64, longest tail) {
	n := int(l.pipe)
	worst := lists.Most(e.busy, func(seconds float64) float64 { return seconds })
	m := float64(l.micros)
	parts := &est.Parts
	for turn := range int(l.virtual) {
		parts.charge(loads.at(l.stage(worst, turn)), m)
	}
	parts.Bubble = pipe - m*e.busy[worst]
	if n > 1 {
		sends := min(parts.Bubble, 2*est.Stages[0].Send*float64(n-1))
		parts.Bubble -= sends
		parts.Pipeline = sends
	}
	parts.Data += longest.data
	parts.Optimizer, parts.Host = longest.optimizer, longest.host
	est.Step = pipe + est.Tail
	if n > 1 {
		busy := lists.Sum(est.Stages, Stage.Both)
		est.Waits = (est.Step - est.Tail - parts.Pipeline - m*busy/float64(n)) / est.Step
	}
}

// longestTail returns the tail (gradient reduction, optimizer, parameter gathers) of the rank that
// ends the step. Rank r finishes its last backward pass earlier than rank 0, by the passes of the
// stages before it; that much of its tail overlaps with them.
func (e *Estimator) longestTail(l *layout, loads *loads) (longest tail) {
	slack, most := 0.0, math.Inf(-1)
	var was share
	for r := 0; r < int(l.pipe); slack, r = slack+loads.at(r).total, r+1 {
		if r > 0 && l.follows(r, loads) {
			continue
		}
		var is share
		window := 0.0
		for turn := range int(l.virtual) {
			s := loads.at(l.stage(r, turn))
			is.add(&s.block)
			window += s.total
		}
		if r > 0 && is == was { // same work as the rank before, and more slack
			continue
		}
		was = is
		t := e.tail(l, &is, window)
		if after := t.data + t.optimizer - slack; after > most {
			most, longest = after, t
			hidden := min(slack, t.data)
			longest.data -= hidden
			longest.optimizer = max(0, longest.optimizer-(slack-hidden))
		}
	}
	return longest
}

// follows reports whether a rank has the same kinds of stages as the rank before it.
func (l *layout) follows(r int, loads *loads) bool {
	for turn := range int(l.virtual) {
		if loads.of[l.stage(r, turn)] != loads.of[l.stage(r-1, turn)] {
			return false
		}
	}
	return true
}

// charge adds the seconds of m microbatches of a stage.
func (p *Parts) charge(s *load, m float64) {
	for _, f := range []*phase{&s.forward, &s.input, &s.weight} {
		p.Compute += m * f.gemm
		p.Attention += m * f.attention
		p.Memory += m * f.stream
		p.Quantize += m * f.quantize
		p.Tensor += m * f.tensor
		p.Context += m * f.context
		p.Expert += m * f.expert
		p.Data += m * f.data
		p.Offload += m * f.offload
	}
	p.Recompute += m * s.again.sum()
	p.Launch += m * (s.total - s.device)
}

// A shape identifies a schedule: its name and sizes.
type shape struct {
	name                  string
	pipe, virtual, micros int64
}

// remember computes the memory of every rank in closed form, for stacks and models without our own
// programs, and records the worst. With brief, only ranks that differ are computed; most stops at
// the first rank above that many bytes.
func (e *Estimator) remember(name string, est *Estimate, l *layout, loads *loads, logits float64,
	brief bool, most int64) error {
	if l.pipe == 1 {
		name = "1f1b" // a plan with one stage may omit the schedule
	}
	walk, err := e.orders.walks.Of(name, schedule.Shape{Ranks: int(l.pipe),
		Virtual: int(l.virtual), Micros: int(l.micros)})
	if err != nil {
		return err
	}
	prof := e.prices.Profile()
	transient := prof.Transient * l.tokens() * e.hidden() * 2
	logits *= prof.Logits
	e.kindLoads = slices.Grow(e.kindLoads[:0], len(loads.kinds))[:len(loads.kinds)]
	kinds := e.kindLoads
	for i := range loads.kinds {
		s := &loads.kinds[i]
		now := transient + s.dropped
		if s.last {
			now += logits
		}
		s.state = e.state(l, s)
		kinds[i] = schedule.Steady(int64(s.residual*prof.Saved), int64(now))
	}
	est.Ranks = e.ranks[:0]
	for _, kind := range loads.of {
		if !brief {
			est.Loads = append(est.Loads, kinds[kind])
		}
	}
	for r := range int(l.pipe) {
		if brief && walk.Follows(r, loads.of) {
			continue
		}
		var st state
		for turn := range int(l.virtual) {
			own := &loads.at(l.stage(r, turn)).state
			st.params += own.params
			st.copies += own.copies
			st.grads += own.grads
			st.optimizer += own.optimizer
		}
		m := program.Memory{Params: int64(st.params), Copies: int64(st.copies), Grads: int64(st.grads),
			Optimizer: int64(st.optimizer), Runtime: int64(prof.Reserve)}
		if l.hosted {
			m.Optimizer, m.Host = 0, m.Optimizer
		}
		est.Ranks = append(est.Ranks, m)
		_, m.Activations, m.Temp = walk.Peak(r, loads.of, kinds)
		if est.worst(m); most > 0 && est.Peak > most {
			break
		}
	}
	e.ranks = est.Ranks
	return nil
}

// interval sets the 90 % interval: ±1.645 standard deviations of the log step time.
func (e *Estimator) interval(est *Estimate) {
	f := math.Exp(1.645 * e.sigma)
	est.Low, est.High = est.Step/f, est.Step*f
}

// logSigma is the standard deviation of the log step time: the fit's residual error, plus terms
// for a model, a format or a GPU that the profile was not fitted on.
func (e *Estimator) logSigma() float64 {
	err := &e.prices.Profile().Error
	sigma := err.Dense
	if e.config.MoE != nil {
		sigma = err.Expert
	}
	if !e.fitted(err.Models) {
		sigma = math.Hypot(sigma, err.Model)
	}
	known := err.Precisions == nil || slices.Contains(err.Precisions, e.options.Precision)
	if !known || !slices.Contains(err.GPUs, e.cluster.GPU.Name) {
		sigma = math.Hypot(sigma, err.Beyond)
	}
	return sigma
}

// fitted reports whether the profile was fitted on runs of a model of these sizes.
func (e *Estimator) fitted(models []price.Known) bool {
	own := price.Known{Hidden: e.config.Hidden, MLP: e.config.MLP}
	if m := e.config.MoE; m != nil {
		own.MLP, own.Experts = m.MLP, m.Experts
	}
	return slices.ContainsFunc(models, func(m price.Known) bool {
		m.Name = ""
		return m == own
	})
}
