package autoplan

import (
	"context"
	"fmt"
)

// A plan whose ranks wait for each other for a twentieth of the step or more is not put first if
// another one that waits less costs at most 3 % more. Waiting is where stragglers and jitter, which
// no price has in it, add to the step; the 3 % are half of what an estimate is good for.
const (
	muchBubble     = 0.05
	worthLowBubble = 1.03
)

// nearBubble is how far the closed form may be above the simulator's bubble. Candidates that turn
// out to be no better are dropped, so that a search for calm ones looks at more meshes.
const (
	nearBubble      = 1.1
	lowBubbleMeshes = 20
)

// lowBubble puts a plan with little bubble first, if one costs little more than the best. Least is
// the best metric in closed form. Of what is simulated a plan may be told that is up to [same]
// beyond another one, and it differs from its closed form by the margin at most, so that worse ones
// need not be looked at. This does not hold for money, of which the metric counts other devices
// than the bill does, nor for corrections, which are by precision.
func (s *searcher) lowBubble(ctx context.Context, best []Choice, least float64) ([]Choice, error) {
	if best[0].Bubble < muchBubble {
		return best, nil
	}
	top := s.job.Top
	s.calm, s.job.Top = true, max(top, lowBubbleMeshes)
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

// worse is how many times as much of the goal a plan has as another.
func (s *searcher) worse(c, than Choice) float64 {
	switch s.job.Goal {
	case Memory:
		return float64(c.Peak) / float64(than.Peak)
	case Money:
		return than.Rate / c.Rate
	}
	return c.slower(&than)
}

// explainBubble says in the first plan's sentence what its little bubble costs, or that much of it
// could not be had for little.
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
