package estimate

import (
	"slices"
	"sync"

	"github.com/deepwell/deepwell/schedule"
)

// orders are the orders of schedules that were made, once for a shape: one pass over an order then
// gives the makespan, so that uneven stages of schedules with turns, of which no closed form is
// known, cost microseconds. Estimators that come from each other share them.
type orders struct {
	sync.Mutex
	made  map[shape]*schedule.Order
	walks schedule.Walks
}

// rounds is how many microbatches for each rank are walked over; what comes after repeats.
const rounds = 4

// walked is the makespan of a schedule by playing it.
func (e *Estimator) walked(name string, l *layout, stages []Stage, send float64) (float64, error) {
	if l.micros <= rounds*l.pipe {
		return e.walk(shape{name, l.pipe, l.virtual, l.micros}, stages, send)
	}
	quantized, err := e.walk(shape{name, l.pipe, l.virtual, (rounds - 1) * l.pipe}, stages, send)
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
			busy += stages[l.stage(r, turn)].Both()
		}
		busiest = max(busiest, busy)
	}
	pace := max(busiest, (more-quantized)/float64(l.pipe))
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

// pace plays the order of a shape.
func (e *Estimator) pace(s shape, stages []Stage, send float64) (float64, error) {
	o, err := e.orders.find(s)
	if err != nil {
		return 0, err
	}
	for kind := range e.costs {
		e.costs[kind] = slices.Grow(e.costs[kind][:0], len(stages))[:len(stages)]
	}
	for i := range stages {
		st := &stages[i]
		e.costs[schedule.Forward][i] = st.Forward
		e.costs[schedule.Input][i], e.costs[schedule.Weight][i] = st.Input, st.Weight
		e.costs[schedule.Backward][i] = st.Input + st.Weight
	}
	return e.player.Makespan(o, &e.costs, send), nil
}

// find gives the order of a shape, and makes it if it is not there.
func (l *orders) find(s shape) (*schedule.Order, error) {
	l.Lock()
	defer l.Unlock()
	if o := l.made[s]; o != nil {
		return o, nil
	}
	made, err := schedule.New(s.name, schedule.Shape{Ranks: int(s.pipe), Virtual: int(s.virtual),
		Micros: int(s.micros)})
	if err != nil {
		return nil, err
	}
	o, err := made.Order()
	if err == nil {
		l.made[s] = o
	}
	return o, err
}
