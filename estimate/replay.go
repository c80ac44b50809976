package estimate

import (
	"cmp"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/schedule"
)

// A replay is the list of a schedule in an order in which everything that an action waits for
// stands before it. It is made once for a shape; with the times of stages, one walk over it gives
// the makespan, so that uneven stages of schedules with turns, of which no closed form is known,
// cost microseconds.
type replay []action

// replays are those that were made. Estimators that come from each other share them.
type replays struct {
	sync.Mutex
	made map[shape]replay
}

type action struct {
	rank, stage int32
	needs       int32 // the action that it waits for; -1 if none
	kind        schedule.Kind
	far         bool // on another rank
}

// rounds is how many microbatches for each rank are walked over; what comes after repeats.
const rounds = 4

// walked is the makespan of a schedule by replay.
func (e *Estimator) walked(name string, l *layout, stages []Stage, send float64) (float64, error) {
	if l.micros <= rounds*l.pipe {
		return e.walk(shape{name, l.pipe, l.virtual, l.micros}, stages, send)
	}
	few, err := e.walk(shape{name, l.pipe, l.virtual, (rounds - 1) * l.pipe}, stages, send)
	if err != nil {
		return 0, err
	}
	more, err := e.walk(shape{name, l.pipe, l.virtual, rounds * l.pipe}, stages, send)
	if err != nil {
		return 0, err
	}
	// In the end the rank that has most to do sets the pace, if it does not yet.
	busiest := 0.0
	for r := range int(l.pipe) {
		busy := 0.0
		for i := range stages {
			if l.rank(i) == r {
				busy += stages[i].both()
			}
		}
		busiest = max(busiest, busy)
	}
	pace := max(busiest, (more-few)/float64(l.pipe))
	return more + float64(l.micros-rounds*l.pipe)*pace, nil
}

func (e *Estimator) walk(s shape, stages []Stage, send float64) (float64, error) {
	r, err := e.replays.find(s)
	if err != nil {
		return 0, err
	}
	if need := len(r) + int(s.pipe); len(e.room) < need {
		e.room = make([]float64, need)
	}
	ends, free := e.room[:len(r)], e.room[len(r):len(r)+int(s.pipe)]
	clear(free)
	longest := 0.0
	for i := range r {
		a := &r[i]
		start := free[a.rank]
		if a.needs >= 0 {
			came := ends[a.needs]
			if a.far {
				came += send
			}
			start = max(start, came)
		}
		st := &stages[a.stage]
		switch a.kind {
		case schedule.Forward:
			start += st.Forward
		case schedule.Backward:
			start += st.Input + st.Weight
		case schedule.Input:
			start += st.Input
		case schedule.Weight:
			start += st.Weight
		}
		ends[i], free[a.rank] = start, start
		longest = max(longest, start)
	}
	return longest, nil
}

// find gives the replay of a shape, and makes it if it is not there.
func (l *replays) find(s shape) (replay, error) {
	l.Lock()
	defer l.Unlock()
	if r := l.made[s]; r != nil {
		return r, nil
	}
	r, err := newReplay(s)
	if err != nil {
		return nil, err
	}
	l.made[s] = r
	return r, nil
}

// newReplay puts the actions in the order in which they begin when each takes one tick.
func newReplay(s shape) (replay, error) {
	made, err := schedule.New(s.name, schedule.Shape{Ranks: int(s.pipe), Virtual: int(s.virtual),
		Micros: int(s.micros)})
	if err != nil {
		return nil, err
	}
	line, err := made.Simulate(schedule.Even(1, 1, 1))
	if err != nil {
		return nil, err
	}
	type begun struct {
		at   int64
		rank int
		schedule.Action
	}
	var order []begun
	for rank, list := range made.Lists {
		for i, a := range list {
			order = append(order, begun{line.Spans[rank][i].Start, rank, a})
		}
	}
	slices.SortStableFunc(order, func(a, b begun) int { return cmp.Compare(a.at, b.at) })
	r := make(replay, 0, len(order))
	// Where the forward pass and the input's gradient of each stage and microbatch stand.
	stages := made.Stages()
	at := make([]int32, 2*stages*made.Micros)
	place := func(gradient bool, stage, micro int) *int32 {
		i := stage*made.Micros + micro
		if gradient {
			i += stages * made.Micros
		}
		return &at[i]
	}
	for i, b := range order {
		a := action{rank: int32(b.rank), stage: int32(b.Stage), needs: -1, kind: b.Kind}
		from := -1
		switch {
		case b.Kind == schedule.Forward && b.Stage > 0:
			from = b.Stage - 1
			a.needs = *place(false, from, b.Micro)
		case b.Kind == schedule.Backward || b.Kind == schedule.Input:
			if from = b.Stage + 1; from == stages {
				from = b.Stage
				a.needs = *place(false, from, b.Micro)
			} else {
				a.needs = *place(true, from, b.Micro)
			}
		}
		a.far = from >= 0 && made.Rank(from) != b.rank
		if b.Kind != schedule.Weight {
			*place(b.Kind != schedule.Forward, b.Stage, b.Micro) = int32(i)
		}
		r = append(r, a)
	}
	return r, nil
}
