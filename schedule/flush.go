package schedule

// gpipe runs every forward, then every gradient (Huang et al., GPipe, 2019, arXiv 1811.06965). It
// is the simplest schedule and holds the whole batch. The paper draws the gradients in the reverse
// order of the forwards; here, as in all other schedules, a stage takes microbatches in order both
// ways, which takes the same time.
func gpipe() kind {
	return kind{
		name: "gpipe", layout: Loop, least: 1, most: 1,
		list: func(s *Schedule, rank int) []Action {
			l := s.lister(rank, 2)
			l.repeat(s.Micros, forward(0))
			l.repeat(s.Micros, backward(0))
			return l.actions
		},
		inFlight: func(shape Shape, _ int) int { return shape.Micros },
	}
}

// oneFOneB runs a gradient as soon as one arrives, so that a rank has no more microbatches in
// flight than there are ranks below it (PipeDream-flush: Narayanan et al., 2021, arXiv 2006.09503;
// in Megatron-LM, arXiv 2104.04473, section 2.2). It has GPipe's bubble.
func oneFOneB() kind {
	return kind{
		name: "1f1b", layout: Loop, least: 1, most: 1,
		list: func(s *Schedule, rank int) []Action {
			l := s.lister(rank, 2)
			l.repeat(s.Ranks-rank-1, forward(0))
			l.repeat(s.Micros, forward(0), backward(0))
			return l.actions
		},
		inFlight: func(shape Shape, rank int) int { return min(shape.Micros, shape.Ranks-rank) },
	}
}
