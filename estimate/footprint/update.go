package footprint

// updateTemp is what the optimizer's program has beside its results. Where gradients are whole, they
// are added up first, in the type that is sent; where copies are whole, they are gathered.
func (p *Predictor) updateTemp(w *way, list []holding, sums bool) int64 {
	var all, stacks, largest, whole, second int64 // bytes of pieces in f32, of copies
	for i := range list {
		h := &list[i]
		if !w.copied(h.param) {
			continue
		}
		piece := h.stored() * 4
		all += piece
		switch {
		case !h.stack:
		case piece > largest:
			second = whole
			largest, whole, stacks = piece, h.whole()*w.elem, piece
		case piece == largest:
			stacks += piece
		default:
			second = max(second, h.whole()*w.elem)
		}
	}
	switch {
	case all == 0:
		return 0
	case p.cpu:
		return whole + largest
	case p.arch == "sm_120":
		return min(stacks*4/3, 4*largest) + whole + second/2
	}
	n := 2*stacks + 5*(all-stacks)/2
	if whole > largest {
		n += whole + largest/2
	}
	return n
}
