package schedule

import "github.com/deepwell/deepwell/diag"

// interleaved is 1F1B with several virtual stages on a rank (Narayanan et al., Megatron-LM, 2021,
// arXiv 2104.04473, section 2.2): a microbatch comes by several times, each time for less work, and
// the bubble shrinks with the number of virtual stages. Microbatches go in groups of as many as
// there are ranks, a group through all virtual stages before the next.
func interleaved() kind {
	return kind{
		name: "interleaved", layout: Loop, least: 2,
		check: func(shape Shape) error {
			over := shape.Micros % shape.Ranks
			if over == 0 {
				return nil
			}
			e := diag.New(diag.ScheduleShape,
				"interleaved needs microbatches in groups of %d, one for each rank, not %d",
				shape.Ranks, shape.Micros)
			if less := shape.Micros - over; less > 0 {
				return e.Try("set %d or %d microbatches", less, less+shape.Ranks)
			}
			return e.Try("set %d microbatches", shape.Ranks)
		},
		list: interleavedList,
		inFlight: func(shape Shape, rank int) int {
			return min(shape.Micros*shape.Virtual, interleavedWarmup(shape, rank)+1)
		},
	}
}

// interleavedWarmup is the number of forwards before the first pair of a forward and a gradient.
// Each rank further from the end waits for two more actions, and the first group must have come to
// the last virtual stage.
func interleavedWarmup(shape Shape, rank int) int {
	return 2*(shape.Ranks-rank-1) + (shape.Virtual-1)*shape.Ranks
}

func interleavedList(s *Schedule, rank int) []Action {
	all := s.Micros * s.Virtual
	actions := make([]Action, 0, 2*all)
	// visit gives the k-th turn and microbatch in the order of groups.
	visit := func(k int) (turn, microbatch int) {
		group, in := k/(s.Ranks*s.Virtual), k%(s.Ranks*s.Virtual)
		return in / s.Ranks, group*s.Ranks + in%s.Ranks
	}
	warmup := min(all, interleavedWarmup(s.Shape, rank))
	for k := range all + warmup {
		if k < all {
			turn, microbatch := visit(k)
			actions = append(actions, Action{Forward, s.Stage(rank, turn), microbatch})
		}
		if k >= warmup {
			turn, microbatch := visit(k - warmup)
			actions = append(actions, Action{Backward, s.Stage(rank, s.Virtual-1-turn), microbatch})
		}
	}
	return actions
}
