package schedule

// zeroBubbleH1 is 1F1B with the gradient in two parts (Qi et al., Zero Bubble Pipeline Parallelism,
// 2024, arXiv 2401.10241, section 2.1). The stage before waits for the input gradient only, so the
// last microbatch runs back faster; the weight gradients that were put off fill the time that
// 1F1B leaves empty. They are put off only so far that no rank holds more than the first one does
// under 1F1B.
func zeroBubbleH1() kind {
	return kind{
		name: "zb-h1", layout: Loop, least: 1, most: 1,
		list: func(s *Schedule, rank int) []Action {
			l := s.lister(rank, 3)
			l.repeat(s.Ranks-rank, forward(0))
			// Up to here the rank holds fewer than the first one; it may catch up.
			l.repeatWhile(rank, forward(0), input(0), forward(0))
			l.repeatWhile(s.Micros, forward(0), input(0), weight(0), forward(0))
			l.repeat(s.Micros, input(0), weight(0))
			return l.actions
		},
		inFlight: func(shape Shape, _ int) int { return min(shape.Micros, shape.Ranks) },
	}
}
