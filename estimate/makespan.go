package estimate

import (
	"slices"
	"sync"

	"github.com/deepwell/deepwell/schedule"
)

// orders caches the action orders of schedules by shape. One pass over an order yields the
// makespan, so that uneven stages of schedules without a closed form cost microseconds. Estimators
// derived from each other share them.
type orders struct {
	sync.Mutex
	made  map[shape]*schedule.Order
	walks schedule.Walks
}

// rounds is the number of microbatches per rank that are simulated; the rest repeats periodically.
const rounds = 4

// walked returns the makespan of a schedule by simulating it.
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
	// In steady state the busiest rank sets the pace, even if the simulated prefix does not show it
	// yet.
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

// A timing is the cache key of a simulation. Plans that differ only in how state is sharded often
// have the same one. The stages of a pipeline are runs of a few kinds: the two ends, quantized
// layers, bf16 layers, and a mixture. Pipelines with more kinds are not cached.
type timing struct {
	shape
	send  float64
	kinds [6]pass
}

// A pass is the times shared by a run of stages, and where it ends.
type pass struct {
	to                     int
	forward, input, weight float64
}

// timingOf returns the cache key of a simulation, if it has one.
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

// walk returns the makespan of a shape, from the cache if possible.
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

// pace simulates the order of a shape.
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

// find returns the order of a shape, and caches it.
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
