package autoplan

import (
	"context"
	"fmt"
)

// A plan whose ranks idle for 5 % of the step or more is not listed first if another one with less
// bubble costs at most 3 % more. Stragglers and jitter, which no cost model contains, add to the
// step where ranks wait; 3 % is half the accuracy of an estimate.
const (
	muchBubble     = 0.05
	worthLowBubble = 1.03
)

// nearBubble is the factor by which the closed form's bubble may exceed the simulator's. Simulated
// plans that turn out to have too much bubble are dropped, so the search for low-bubble plans
// keeps more meshes.
const (
	nearBubble      = 1.1
	lowBubbleMeshes = 20
)

// lowBubble lists a plan with little bubble first, if one costs little more than the best. least
// is the best metric in closed form. A simulated plan that is listed may be [same] times worse
// than another, and differs from its closed form by Margin at most; this bounds the metric of
// plans worth pricing. The bound does not hold for money, whose metric counts other devices than
// the bill, nor with corrections, which differ by format.
func (s *searcher) lowBubble(ctx context.Context, best []Choice, least float64) ([]Choice, error) {
	if best[0].Bubble < muchBubble || s.job.Goal == Memory {
		return best, nil
	}
	top := s.job.Top
	s.lowBubbleOnly, s.job.Top = true, max(top, lowBubbleMeshes)
	if s.job.Goal != Money && s.job.Correction.Runs == 0 {
		s.cap = least * worthLowBubble * same * same * Margin * Margin * Margin
	}
	defer func() { s.job.Top = top }()
	found, err := s.run(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.simulate(ctx, found)
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		if s.worse(c, best[0]) > worthLowBubble {
			continue
		}
		list := []Choice{c}
		for _, other := range best {
			if other.Plan.String() != c.Plan.String() && len(list) < top {
				list = append(list, other)
			}
		}
		return list, nil
	}
	return best, nil
}

// worse is the ratio of two plans' values of the goal.
func (s *searcher) worse(c, than Choice) float64 {
	if s.job.Goal == Money {
		return than.Rate / c.Rate
	}
	return c.slower(&than)
}

// explainBubble adds to the first plan's sentence what its low bubble costs, or that no plan with
// a low bubble is near.
func explainBubble(list []Choice, best Choice, searched bool) {
	switch first := &list[0]; {
	case !searched:
	case first.Bubble < muchBubble:
		slow := first.slower(&best) - 1
		first.Why += fmt.Sprintf("; chosen over a plan with %.1f %% bubble, for %.1f %% of time",
			100*best.Bubble, 100*slow)
	default:
		first.Why += fmt.Sprintf("; no plan under %.0f %% bubble is within %.0f %%",
			100*muchBubble, 100*(worthLowBubble-1))
	}
}
