package dryrun

import (
	"math"
	"math/rand/v2"
	"sync"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/schedule"
)

// Run works out when every action runs. With jitter and several replicas it draws each of them, 64
// at most, and gives the timeline of the slowest, for which all others wait.
func (s *Step) Run(w WhatIf) (*Timeline, error) {
	t, err := s.run(w, true)
	if err != nil {
		return nil, err
	}
	for rank := range t.Ranks {
		t.Ranks[rank].Peak = t.peak(rank)
	}
	return t, nil
}

// Time is Run on a day on which nothing goes wrong, without the memory of ranks and without spans.
func (s *Step) Time() (*Timeline, error) { return s.run(WhatIf{}, false) }

func (s *Step) run(w WhatIf, spans bool) (*Timeline, error) {
	if err := s.check(w); err != nil {
		return nil, err
	}
	if w.Links != 0 && w.Links != 1 {
		slower, err := s.Slower(w.Links)
		if err != nil {
			return nil, err
		}
		w.Links = 0
		return slower.run(w, spans)
	}
	o := s.Order
	if o == nil {
		var err error
		if o, err = s.Schedule.Order(); err != nil {
			return nil, err
		}
	}
	p := s.prices(w)
	slowest := s.once(o, p, w, spans)
	for range min(s.Replicas, maxReplicas) - 1 {
		if w.Jitter == 0 {
			break
		}
		if t := s.once(o, p, w, spans); t.ticks > slowest.ticks {
			slowest = t
		}
	}
	slowest.summary()
	return slowest, nil
}

// jitter gives factors with a mean of 1.
func jitter(deviation float64, random *rand.Rand) func(int64) int64 {
	variance := math.Log1p(deviation * deviation)
	sigma := math.Sqrt(variance)
	return func(t int64) int64 {
		return int64(math.Round(float64(t) * math.Exp(sigma*random.NormFloat64()-variance/2)))
	}
}

// A wait is what a rank's idle time in the pipeline was for.
type wait struct {
	busy  int64
	links int64 // for a result that was done and on its way
}

// players keep their memory from one step to the next.
var players = sync.Pool{New: func() any { return new(schedule.Player[int64]) }}

// once simulates one pipeline. Each rank has a link down and one up the pipeline, on which results
// travel one after the other.
func (s *Step) once(o *schedule.Order, p prices, w WhatIf, spans bool) *Timeline {
	list := s.Schedule
	t := &Timeline{Schedule: list, step: s, Policy: s.Policy, send: p.send,
		Ranks: make([]Rank, list.Ranks),
		waits: make([]wait, list.Ranks), tails: make([]tail, list.Ranks)}
	t.loads = lists.Map(s.Stages, func(x Stage) schedule.Load { return x.Load })
	if spans {
		all := make([]schedule.Span, len(o.Visits))
		for _, l := range list.Lists {
			t.Spans, all = append(t.Spans, all[:len(l):len(l)]), all[len(l):]
		}
	}
	player := players.Get().(*schedule.Player[int64])
	defer players.Put(player)
	vary := func(t int64) int64 { return t }
	if w.Jitter > 0 {
		vary = jitter(w.Jitter, w.Random)
	}
	cost := func(v *schedule.Visit) int64 { return vary(p.action[v.Kind][v.Stage]) }
	links := make([][2]int64, list.Ranks) // when they are free
	sent := func(v *schedule.Visit, end int64) int64 {
		link := &links[v.Rank][0]
		if v.Kind != schedule.Forward {
			link = &links[v.Rank][1]
		}
		*link = max(*link, end) + p.send[v.Stage]
		return *link
	}
	player.Play(o, cost, sent, func(v *schedule.Visit, at schedule.Times[int64]) {
		if spans {
			t.Spans[v.Rank][v.Place] = schedule.Span{Start: at.Start, End: at.End}
		}
		w := &t.waits[v.Rank]
		w.busy += at.End - at.Start
		if at.Arrived > at.Free {
			w.links += at.Arrived - max(at.Free, at.Done)
		}
		t.tails[v.Rank].computed = at.End
	})
	// The step ends when all ranks are through with what follows the pipeline.
	for rank := range t.tails {
		x := &t.tails[rank]
		x.reduce, x.update, x.host = p.reduce, p.update[rank], p.host
		t.ticks = max(t.ticks, x.end())
	}
	return t
}
