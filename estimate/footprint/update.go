package footprint

// updateTemp is what the optimizer's program has beside its results. Where the model takes whole
// copies of what is kept in pieces, the pieces of a stack are brought into the order that is sent,
// and what was gathered is brought back; XLA prepares most of them before the first is sent, so
// that both forms of a piece wait in f32. How many do, and what is on its way, the schedule
// decides: the factors are means over the plans of bench/memory, which lie within a fifth of them.
func (p *Predictor) updateTemp(w *way, list []holding, sums bool) int64 {
	var all, stacks, largest, whole, second int64 // bytes of pieces in f32, of copies
	var terms, table, turned, other int64
	for i := range list {
		h := &list[i]
		if !h.vector {
			terms += h.stored() * 4
		}
		if !w.copied(h.param) {
			continue
		}
		piece := h.stored() * 4
		if !h.stack && h.first > 0 {
			table, turned = h.whole()*w.elem, piece
		}
		if h.stack || h.first > 0 || p.cpu {
			all += piece
		}
		switch {
		case !h.stack || w.unrolled:
		case piece > largest:
			second, other = whole, largest
			largest, whole, stacks = piece, h.whole()*w.elem, piece
		case piece == largest:
			stacks += piece
		default:
			second, other = max(second, h.whole()*w.elem), max(other, piece)
		}
	}
	if !p.cpu || !sums || !w.spread {
		terms = 0
	} else if w.sum != 4 && all == 0 { // rounded, and sums; one of both in the place of copies
		terms *= 2
	}
	switch {
	case all == 0:
		return terms
	case p.cpu:
		return max(whole+max(largest, turned)+table, terms)
	case p.arch == "sm_120":
		n := min(stacks*4/3, 4*largest) + whole + second/2
		if w.zero < 2 {
			n = max(n, 8*all/5)
		}
		return n
	}
	n := 2*stacks + 5*(all-stacks)/2 + whole + largest/2
	switch {
	case w.zero < 2 && sums && whole > largest: // gradients were added up before
		return n * 17 / 20
	case turned == 0:
		return n * 22 / 25
	case turned*10 > other*9:
		return n * 4 / 5
	}
	return n * 53 / 50
}
