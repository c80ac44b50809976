package footprint

// updateTemp is what the optimizer's program has beside its results. Where gradients are whole, they
// are added up first, in the type that is sent; where copies are whole, they are gathered.
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
	} else if w.sum != 4 {
		terms *= 2
	}
	switch {
	case all == 0:
		return terms
	case p.cpu:
		return whole + max(largest, turned) + table + terms
	case p.arch == "sm_120":
		n := min(stacks*4/3, 4*largest) + whole + second/2
		if w.zero < 2 {
			n = max(n, 8*all/5)
		}
		return n
	}
	n := 2*stacks + 5*(all-stacks)/2 + whole + largest/2
	switch {
	case turned == 0:
		return n * 22 / 25
	case turned > other:
		return n * 4 / 5
	}
	return n * 53 / 50
}
