package dryrun

import (
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Timeline is a step with times.
type Timeline struct {
	Schedule *schedule.Schedule `json:"-"`
	Step     float64            `json:"step"`   // seconds, from the first start to the last end
	Bubble   float64            `json:"bubble"` // share of the ranks' time that they wait for ranks
	Ranks    []Rank             `json:"ranks"`
	Policy   string             `json:"policy,omitempty"` // the step's
	Spans    [][]schedule.Span  `json:"-"`                // as Schedule.Lists, in nanoseconds

	step  *Step
	ticks int64
	send  []int64 // by stage
	waits []wait
	tails []tail
	loads []schedule.Load // of stages
}

// A tail is what a rank does after its list: reductions, optimizer, host, one after the other.
type tail struct {
	computed             int64 // the end of its last action
	reduce, update, host int64
}

func (x tail) end() int64 { return x.computed + x.reduce + x.update + x.host }

// spans are the parts of a tail that take time.
func (x tail) spans() []schedule.Span {
	var list []schedule.Span
	at := x.computed
	for _, p := range x.parts() {
		if p.ticks > 0 {
			list = append(list, schedule.Span{Start: at, End: at + p.ticks})
		}
		at += p.ticks
	}
	return list
}

// A Rank is where the time of one rank goes, in seconds that sum up to the step, and the most that
// it holds.
type Rank struct {
	Busy    float64        `json:"busy"`   // actions
	Update  float64        `json:"update"` // optimizer
	Links   float64        `json:"links"`  // waiting for results that are on their way
	Reduce  float64        `json:"reduce"` // reductions that nothing hides
	Host    float64        `json:"host"`
	Waiting float64        `json:"waiting"` // waiting for other ranks: the bubble
	Peak    program.Memory `json:"peak"`
}

// summary fills in what people read of its times.
func (t *Timeline) summary() {
	t.Step = seconds(t.ticks)
	waiting := int64(0)
	for rank := range t.Ranks {
		r, w, x := &t.Ranks[rank], t.waits[rank], t.tails[rank]
		r.Busy, r.Links = seconds(w.busy), seconds(w.links)
		r.Reduce, r.Update, r.Host = seconds(x.reduce), seconds(x.update), seconds(x.host)
		// The rest is idle: for ranks before and between actions, and for those that end later.
		idle := t.ticks - w.busy - w.links - (x.end() - x.computed)
		r.Waiting = seconds(idle)
		waiting += idle
	}
	if t.ticks > 0 {
		t.Bubble = float64(waiting) / float64(t.ticks) / float64(len(t.Ranks))
	}
}

// Peak is the most that any rank holds, and which.
func (t *Timeline) Peak() (program.Memory, int) {
	at := lists.Most(t.Ranks, func(r Rank) int64 { return r.Peak.Sum() })
	return t.Ranks[at].Peak, at
}

// A Sample is what a rank holds from a moment on.
type Sample struct {
	At int64 `json:"at"` // nanoseconds
	program.Memory
}

// peak goes through a rank's list without keeping samples.
func (t *Timeline) peak(rank int) program.Memory {
	var most program.Memory
	t.hold(rank, func(_ int64, m program.Memory) {
		if m.Sum() > most.Sum() {
			most = m
		}
	})
	return most
}

// Memory is what a rank holds over the step.
func (t *Timeline) Memory(rank int) []Sample {
	list := make([]Sample, 0, 2*len(t.Spans[rank])+1)
	t.hold(rank, func(at int64, m program.Memory) {
		if n := len(list); n > 0 && list[n-1].At == at {
			list[n-1].Memory = m // only the last state of a moment lasts
			return
		}
		list = append(list, Sample{at, m})
	})
	return list
}

// hold tells what a rank holds as it changes: what stays, what its microbatches hold
// ([schedule.Schedule.InFlight]), and at the end what its last programs need.
func (t *Timeline) hold(rank int, tell func(at int64, m program.Memory)) {
	var end program.Memory
	if len(t.step.Ranks) > 0 {
		end = t.step.Ranks[rank]
	}
	m := end
	m.Temp = 0
	tell(0, m)
	list, stages := t.Schedule.Lists[rank], t.Schedule.Of(rank)
	for place, held := range t.Schedule.InFlight(rank) {
		m.Activations = held.Bytes(stages, nil, t.loads)
		if place > 0 {
			m.Temp = 0
			tell(t.Spans[rank][place-1].End, m)
		}
		load := &t.loads[list[place].Stage]
		m.Activations += load.Passing[list[place].Kind]
		m.Temp = load.Temp[list[place].Kind]
		tell(t.Spans[rank][place].Start, m)
	}
	x := t.tails[rank]
	tell(x.computed, end)
	m.Activations, m.Temp = 0, 0
	tell(x.computed+x.reduce+x.update, m)
}
