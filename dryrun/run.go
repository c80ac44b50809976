package dryrun

import (
	"math"
	"math/rand/v2"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/schedule"
)

// Run works out when every action runs. With jitter and several replicas it draws each of them, 64
// at most, and gives the timeline of the slowest, for which all others wait.
func (s *Step) Run(w WhatIf) (*Timeline, error) {
	if err := s.check(w); err != nil {
		return nil, err
	}
	if w.Links != 0 && w.Links != 1 {
		slower, err := s.Slower(w.Links)
		if err != nil {
			return nil, err
		}
		w.Links = 0
		return slower.Run(w)
	}
	p := s.prices(w)
	slowest, err := s.once(p, w)
	for range min(s.Replicas, maxReplicas) - 1 {
		if err != nil || w.Jitter == 0 {
			break
		}
		var t *Timeline
		if t, err = s.once(p, w); err == nil && t.ticks > slowest.ticks {
			slowest = t
		}
	}
	if err != nil {
		return nil, err
	}
	slowest.summary()
	return slowest, nil
}

// once simulates one pipeline.
func (s *Step) once(p prices, w WhatIf) (*Timeline, error) {
	r := newRun(s, p)
	if w.Jitter > 0 {
		r.vary = jitter(w.Jitter, w.Random)
	}
	if !r.all() {
		// Lists that were made by hand may contradict themselves; the validator says how.
		if err := s.Schedule.Validate(); err != nil {
			return nil, err
		}
		return nil, diag.New(diag.ScheduleInvalid, "the schedule cannot be run")
	}
	r.tail()
	return r.line, nil
}

// jitter gives factors with a mean of 1.
func jitter(deviation float64, random *rand.Rand) func(int64) int64 {
	variance := math.Log1p(deviation * deviation)
	sigma := math.Sqrt(variance)
	return func(t int64) int64 {
		return int64(math.Round(float64(t) * math.Exp(sigma*random.NormFloat64()-variance/2)))
	}
}

// A run is one simulation on its way. An action is looked at once, and once more if its rank had
// to wait, so that the work grows with the number of actions alone.
type run struct {
	step   *Step
	lists  [][]schedule.Action
	prices prices
	vary   func(int64) int64 // nil leaves times as they are
	line   *Timeline
	micros int
	// forward and gradient are when a stage's result of a microbatch is there for its reader, and
	// sent is when it was done; -1 is not yet.
	forward, gradient         []int64
	forwardDone, gradientDone []int64
	place                     []int
	free                      []int64    // by rank: when it can work again
	link                      [][2]int64 // by rank: when its link down and up the pipeline is free
	weights                   int        // gradients of weights that are done
	waits                     []bool
	ready                     []int
}

func newRun(s *Step, p prices) *run {
	list := s.Schedule
	n := len(s.Stages) * list.Micros
	times := make([]int64, 4*n)
	for i := range times {
		times[i] = -1
	}
	r := &run{step: s, lists: list.Lists, prices: p, micros: list.Micros,
		forward: times[:n], gradient: times[n : 2*n],
		forwardDone: times[2*n : 3*n], gradientDone: times[3*n:],
		place: make([]int, list.Ranks), free: make([]int64, list.Ranks),
		link:  make([][2]int64, list.Ranks),
		waits: make([]bool, list.Ranks)}
	total := 0
	for _, l := range r.lists {
		total += len(l)
	}
	r.line = &Timeline{Schedule: list, step: s, Policy: s.Policy, send: p.send,
		Ranks: make([]Rank, list.Ranks), Spans: make([][]schedule.Span, list.Ranks),
		waits: make([]wait, list.Ranks)}
	spans := make([]schedule.Span, total)
	for rank, l := range r.lists {
		r.line.Spans[rank], spans = spans[:len(l):len(l)], spans[len(l):]
	}
	return r
}

// A wait is what a rank's idle time in the pipeline was for.
type wait struct {
	busy  int64
	links int64 // for a result that was done and on its way
	ranks int64 // for a rank that was not done
}

// all runs every list to its end, and reports whether that was possible.
func (r *run) all() bool {
	if len(r.lists) != len(r.place) {
		return false
	}
	for rank := range r.lists {
		r.ready = append(r.ready, len(r.lists)-1-rank) // a stack, so that the first goes first
	}
	for len(r.ready) > 0 {
		rank := r.ready[len(r.ready)-1]
		r.ready = r.ready[:len(r.ready)-1]
		if !r.advance(rank) {
			return false
		}
	}
	for rank, at := range r.place {
		if at < len(r.lists[rank]) {
			return false
		}
	}
	return r.weights == len(r.forward)
}

// advance runs a rank until it must wait; false means that its list has no meaning.
func (r *run) advance(rank int) bool {
	list, spans := r.lists[rank], r.line.Spans[rank]
	last := len(r.prices.rank) - 1
	for ; r.place[rank] < len(list); r.place[rank]++ {
		a := list[r.place[rank]]
		if a.Stage < 0 || a.Stage > last || uint(a.Micro) >= uint(r.micros) || a.Kind > schedule.Weight {
			return false
		}
		at := a.Stage*r.micros + a.Micro
		if !r.next(a.Kind, at) {
			return false
		}
		arrived, done := int64(0), int64(0)
		switch {
		case a.Kind == schedule.Forward && a.Stage > 0:
			arrived, done = r.forward[at-r.micros], r.forwardDone[at-r.micros]
		case (a.Kind == schedule.Backward || a.Kind == schedule.Input) && a.Stage < last:
			arrived, done = r.gradient[at+r.micros], r.gradientDone[at+r.micros]
		}
		if arrived < 0 {
			r.waits[rank] = true
			return true
		}
		start := r.begin(rank, arrived, done)
		length := r.prices.action[a.Kind][a.Stage]
		if r.vary != nil {
			length = r.vary(length)
		}
		end := start + length
		spans[r.place[rank]] = schedule.Span{Start: start, End: end}
		r.free[rank] = end
		r.line.waits[rank].busy += length
		r.give(a, at, rank, end)
	}
	return true
}

// next reports whether a kind is what a microbatch's stage comes to now: the forward first, then
// the gradients, each once.
func (r *run) next(k schedule.Kind, at int) bool {
	switch k {
	case schedule.Forward:
		return r.forwardDone[at] < 0
	case schedule.Weight:
		return r.gradientDone[at] >= 0
	default:
		return r.forwardDone[at] >= 0 && r.gradientDone[at] < 0
	}
}

// begin is when a rank can start, and notes what it waited for.
func (r *run) begin(rank int, arrived, done int64) int64 {
	free := r.free[rank]
	if arrived <= free {
		return free
	}
	w := &r.line.waits[rank]
	w.links += arrived - max(free, done)
	w.ranks += max(0, done-free)
	return arrived
}

// give notes an action's result, sends it on, and wakes the rank that waits for it.
func (r *run) give(a schedule.Action, at, rank int, end int64) {
	to := -1
	switch a.Kind {
	case schedule.Forward:
		if a.Stage+1 < len(r.prices.rank) {
			to = a.Stage + 1
		}
		r.forward[at], r.forwardDone[at] = r.sent(a.Stage, to, rank, 0, end), end
	case schedule.Weight:
		r.weights++
		return
	default:
		if a.Kind == schedule.Backward {
			r.weights++
		}
		to = a.Stage - 1
		r.gradient[at], r.gradientDone[at] = r.sent(a.Stage, to, rank, 1, end), end
	}
	if to >= 0 && r.waits[r.prices.rank[to]] {
		r.waits[r.prices.rank[to]] = false
		r.ready = append(r.ready, r.prices.rank[to])
	}
}

// sent is when a result is at the rank of the stage that it is for: at once if that is the same
// rank, and else when the link is free and has carried it.
func (r *run) sent(stage, to, rank, direction int, end int64) int64 {
	if to < 0 || r.prices.rank[to] == rank {
		return end
	}
	link := &r.link[rank][direction]
	*link = max(*link, end) + r.prices.send[stage]
	return *link
}

// tail adds what follows the pipeline. The step ends when all ranks are through.
func (r *run) tail() {
	t := r.line
	t.tails = make([]tail, len(r.lists))
	for rank := range t.tails {
		x := tail{computed: r.free[rank], reduce: r.prices.reduce, update: r.prices.update[rank],
			host: r.prices.host}
		t.tails[rank] = x
		t.ticks = max(t.ticks, x.end())
	}
}
