package schedule

// zeroBubbleV gives each rank two virtual stages in the layout [Vee] and splits the gradient (Qi et
// al., arXiv 2401.10241, section 6). The loss is on the first rank, so its gradient starts there
// while the forwards still come down, and in the time of three equal actions every rank finds work
// without a gap. A rank holds twice as many virtual stages as there are ranks, each of half the
// size: as much as the first rank under 1F1B.
func zeroBubbleV() kind {
	return kind{
		name: "zb-v", layout: Vee, least: 2, most: 2,
		list:     zeroBubbleVList,
		inFlight: func(shape Shape, _ int) int { return min(2*shape.Micros, 2*shape.Ranks) },
	}
}

// zeroBubbleVList follows the first microbatch with equal actions: how many forwards of the way
// down fit before it comes back up, how many of both before its gradient comes down, and how many
// of the way up before its gradient comes back. Then the pattern repeats, six actions a microbatch.
func zeroBubbleVList(s *Schedule, rank int) []Action {
	const down, up = 0, 1
	below := s.Ranks - rank // ranks from here to the turn of the V, this one included
	l := s.lister(rank, 3)
	l.repeat(2*below-1, forward(down))
	l.repeat(rank, forward(up), forward(down))
	l.repeat(below, forward(up), input(up), weight(up))
	l.repeatWhile(s.Micros, forward(up),
		forward(down), input(down), weight(down), forward(up), input(up), weight(up))
	// The end mirrors the start: what others wait for goes first.
	l.repeat(rank, input(down), input(up))
	l.repeat(below, input(down), weight(down))
	l.repeat(s.Micros, weight(up))
	l.repeat(s.Micros, weight(down))
	return l.actions
}
