package estimate

import (
	"sync"

	"github.com/deepwell/deepwell/estimate/footprint"
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
	made  map[shape]replay
	walks footprint.Walks
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
		for turn := range int(l.virtual) {
			busy += stages[l.stage(r, turn)].both()
		}
		busiest = max(busiest, busy)
	}
	pace := max(busiest, (more-few)/float64(l.pipe))
	return more + float64(l.micros-rounds*l.pipe)*pace, nil
}

// A timing is all that a walk depends on. Plans that differ in how data axes share parameters often
// have the same. The stages of a pipeline are of few kinds, each a run of stages side by side: the
// two ends, blocks, bf16, and what has some of both. What has more is not kept.
type timing struct {
	shape
	send  float64
	kinds [6]pass
}

// A pass is the times of stages up to one.
type pass struct {
	to                     int
	forward, input, weight float64
}

// timingOf gives the key of a walk, if it has one.
func timingOf(s shape, stages []Stage, send float64) (t timing, ok bool) {
	t.shape, t.send = s, send
	n := 0
	for i := range stages {
		st := &stages[i]
		now := pass{i, st.Forward, st.Input, st.Weight}
		if n > 0 {
			last := &t.kinds[n-1]
			if last.forward == now.forward && last.input == now.input && last.weight == now.weight {
				last.to = i
				continue
			}
		}
		if n == len(t.kinds) {
			return t, false
		}
		t.kinds[n] = now
		n++
	}
	return t, true
}

// walk gives the makespan of a shape, from what is kept if it is there.
func (e *Estimator) walk(s shape, stages []Stage, send float64) (float64, error) {
	key, ok := timingOf(s, stages, send)
	if !ok {
		return e.pace(s, stages, send)
	}
	if t, known := e.spans[key]; known {
		return t, nil
	}
	t, err := e.pace(s, stages, send)
	if err == nil {
		e.spans[key] = t
	}
	return t, err
}

// pace walks over a replay.
func (e *Estimator) pace(s shape, stages []Stage, send float64) (float64, error) {
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

// A begun is an action and its rank.
type begun struct {
	rank int
	schedule.Action
}

// byStart sorts actions by the tick at which they begin, and those of one tick by rank.
func byStart(made *schedule.Schedule, line *schedule.Timeline) []begun {
	var ends []int // for each tick, the actions that began no later
	for _, spans := range line.Spans {
		for _, s := range spans {
			for int(s.Start)+1 >= len(ends) {
				ends = append(ends, 0)
			}
			ends[s.Start+1]++
		}
	}
	for t := 1; t < len(ends); t++ {
		ends[t] += ends[t-1]
	}
	order := make([]begun, ends[len(ends)-1])
	for rank, list := range made.Lists {
		for i, a := range list {
			at := &ends[line.Spans[rank][i].Start]
			order[*at] = begun{rank, a}
			*at++
		}
	}
	return order
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
	order := byStart(made, line)
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
