package schedule

import (
	"math"

	"github.com/deepwell/deepwell/diag"
)

// Costs are the prices of actions in ticks: any unit of time, as long as it is one. Each list has
// one entry for every virtual stage, or a single one that holds for all. Whole numbers keep every
// result exact.
type Costs struct {
	Forward []int64 `json:"forward"`
	Input   []int64 `json:"input"`
	Weight  []int64 `json:"weight"`
	// Send is the time from the end of an action to the moment when the next stage's rank has its
	// result. It keeps neither rank from working.
	Send int64 `json:"send,omitempty"`
}

// Even gives costs that are the same for every stage, with free sending.
func Even(forward, input, weight int64) Costs {
	return Costs{Forward: []int64{forward}, Input: []int64{input}, Weight: []int64{weight}}
}

// prices are Costs spread out: the time of every kind for every stage.
type prices [len(letters)][]int64

func (c Costs) prices(shape Shape) (prices, error) {
	stages := shape.Stages()
	var p prices
	var err error
	if p[Forward], err = spread("the cost of forward", c.Forward, stages); err != nil {
		return p, err
	}
	if p[Input], err = spread("the cost of input", c.Input, stages); err != nil {
		return p, err
	}
	if p[Weight], err = spread("the cost of weight", c.Weight, stages); err != nil {
		return p, err
	}
	if c.Send < 0 {
		return p, diag.New(diag.ScheduleCosts, "sending costs %d", c.Send).
			Try("give a time of 0 or more")
	}
	p[Backward] = make([]int64, stages)
	var total float64
	for i := range stages {
		p[Backward][i] = p[Input][i] + p[Weight][i]
		total += float64(p[Forward][i]) + float64(p[Input][i]) + float64(p[Weight][i])
	}
	// A step in which nothing overlaps, on every rank, must be a number that int64 holds, and
	// Steps counts in quarters of a tick.
	total = (total + 2*float64(c.Send)*float64(stages)) * float64(shape.Micros)
	if total*float64(shape.Ranks) > math.MaxInt64/8 {
		return p, diag.New(diag.ScheduleCosts, "these costs are too large to add up").
			Try("count in a larger unit, such as nanoseconds")
	}
	return p, nil
}

// spread gives a list with an entry for each stage, from one or from as many as there are stages.
func spread(name string, list []int64, stages int) ([]int64, error) {
	if len(list) != 1 && len(list) != stages {
		return nil, diag.New(diag.ScheduleCosts, "%s has %d entries for %d stages",
			name, len(list), stages).Try("give one for all stages, or %d", stages)
	}
	full := make([]int64, stages)
	for i := range full {
		if full[i] = list[i%len(list)]; full[i] < 0 {
			return nil, diag.New(diag.ScheduleCosts, "%s is %d for stage %d", name, full[i], i).
				Try("give 0 or more")
		}
	}
	return full, nil
}

// A Span is the time of one action.
type Span struct {
	Start int64 `json:"start"`
	End   int64 `json:"end"`
}

// A Timeline is a schedule with times: every action starts as soon as its rank is free and what it
// needs has arrived.
type Timeline struct {
	Schedule *Schedule `json:"-"`
	Spans    [][]Span  `json:"spans"`    // as Schedule.Lists
	Busy     []int64   `json:"busy"`     // by rank: the time spent in actions
	Makespan int64     `json:"makespan"` // from the first start to the last end on any rank
}

// Simulate works out when every action runs. The schedule must be valid.
func (s *Schedule) Simulate(c Costs) (*Timeline, error) {
	o, err := s.Order()
	if err != nil {
		return nil, err
	}
	p, err := c.prices(s.Shape)
	if err != nil {
		return nil, err
	}
	t := &Timeline{Schedule: s, Spans: make([][]Span, s.Ranks), Busy: make([]int64, s.Ranks)}
	spans := make([]Span, len(o.Visits)) // one allocation for all ranks
	for rank, list := range s.Lists {
		t.Spans[rank], spans = spans[:len(list):len(list)], spans[len(list):]
	}
	var player Player[int64]
	t.Makespan = player.Play(o, func(v *Visit) int64 { return p[v.Kind][v.Stage] },
		func(_ *Visit, end int64) int64 { return end + c.Send },
		func(v *Visit, at Times[int64]) {
			t.Busy[v.Rank] += at.End - at.Start
			t.Spans[v.Rank][v.Place] = Span{at.Start, at.End}
		})
	return t, nil
}
