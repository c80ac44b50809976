package dryrun

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/schedule"
)

// Helps works out what the step would take if one thing were better, the best first. What saves
// less than a thousandth is left out.
func (s *Step) Helps() ([]Suggestion, error) {
	now, err := s.Run(WhatIf{})
	if err != nil {
		return nil, err
	}
	var list []Suggestion
	// Only what a person can change is tried; autoplan.Improve tries other plans and precisions.
	for _, c := range []struct {
		change string
		step   *Step
	}{
		{"stages of equal work", s.balanced()},
		{"twice as many microbatches of half the size", s.finer()},
	} {
		if c.step == nil {
			continue
		}
		t, err := c.step.Run(WhatIf{})
		if err != nil {
			return nil, err
		}
		if float64(t.ticks) < 0.999*float64(now.ticks) {
			list = append(list, Suggestion{Change: c.change, Step: t.Step})
		}
	}
	lists.Sort(list, func(a, b Suggestion) int { return cmp.Compare(a.Step, b.Step) })
	return list, nil
}

// balanced is the step with the same work dealt evenly to its stages, or nil if there is one.
func (s *Step) balanced() *Step {
	n := float64(len(s.Stages))
	if n < 2 {
		return nil
	}
	var mean Stage
	for _, t := range s.Stages {
		mean.Forward += t.Forward / n
		mean.Input += t.Input / n
		mean.Weight += t.Weight / n
	}
	x := *s
	x.Stages = slices.Clone(s.Stages)
	for i := range x.Stages {
		t := &x.Stages[i]
		t.Forward, t.Input, t.Weight = mean.Forward, mean.Input, mean.Weight
	}
	return &x
}

// finer is the step with microbatches of half the size, or nil if they have none, or the schedule
// is one that nobody can make again.
func (s *Step) finer() *Step {
	shape := s.Schedule.Shape
	shape.Micros *= 2
	list, err := schedule.New(s.Schedule.Name, shape)
	if err != nil || s.Schedule.Ranks == 1 || s.Rows%2 == 1 {
		return nil
	}
	x := *s
	x.Schedule, x.Stages = list, slices.Clone(s.Stages)
	for i := range x.Stages {
		t := &x.Stages[i]
		t.Forward, t.Input, t.Weight, t.Send = t.Forward/2, t.Input/2, t.Weight/2, t.Send/2
	}
	return &x
}

// Scenarios works out what the step would take if one thing were worse. Random gives a new source
// of random numbers with the same seed each time.
func (s *Step) Scenarios(random func() *rand.Rand) ([]Suggestion, error) {
	now, err := s.Run(WhatIf{})
	if err != nil {
		return nil, err
	}
	slowest := lists.Most(now.Ranks, func(r Rank) float64 { return r.Busy })
	var list []Suggestion
	type scenario struct {
		change string
		what   WhatIf
	}
	all := []scenario{
		{fmt.Sprintf("pipeline rank %d is 10 %% slower", slowest),
			WhatIf{Slow: 1.1, Straggler: slowest}},
		{"times vary by 2 %", WhatIf{Jitter: 0.02, Random: random()}},
		{"times vary by 10 %", WhatIf{Jitter: 0.1, Random: random()}},
	}
	if s.Slower != nil {
		all = append(all, scenario{"links half as fast", WhatIf{Links: 2}})
	}
	for _, c := range all {
		t, err := s.Run(c.what)
		if err != nil {
			return nil, err
		}
		list = append(list, Suggestion{Change: c.change, Step: t.Step})
	}
	return list, nil
}
