package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
)

// updateTemp is the temp of the optimizer's program if the model reads gathered copies of sharded
// parameters; else parameters are updated in place.
func (p *Predictor) updateTemp(w *way, s *sizes, list []resident) int64 {
	switch {
	case p.cpu || p.arch == "sm_120":
		return p.updateMeans(w, list)
	case w.gather != "step" || !w.sharded:
		return 0
	}
	return once(p.updates, w.updateKey(s, list), func() int64 {
		return p.updateBuffers(w, s, list)
	})
}

// reduceTemp is the temp of the program that reduces the gradients of a pipeline rank.
func (p *Predictor) reduceTemp(w *way, s *sizes, list []resident) int64 {
	if p.cpu {
		var scattered, summed int64
		for i := range list {
			switch h := &list[i]; {
			case h.cut && w.zero < 2: // one in flight, one prepared, and one received
				scattered = max(scattered, 3*h.whole()*w.sum)
			case w.spread && !h.vector:
				summed += h.stored() * 4
			}
		}
		if w.spread && w.grad < 4 {
			summed = p.widened(list)
		}
		if w.zero < 2 && w.sum < w.grad {
			scattered = p.promoted(w, list)
		}
		return max(scattered, summed)
	}
	key := w.updateKey(s, list)
	key.reduce = true
	return once(p.updates, key, func() int64 { return p.reduceBuffers(w, list) })
}

// promoted is the temp of XLA:CPU for reduce-scatters of gradients in a smaller type than they are
// stored in. It promotes the sum to f32: all terms are rounded first, at full width, then all are
// sent, and then all results are rounded into the outputs, which can hold other buffers until
// then.
func (p *Predictor) promoted(w *way, list []resident) int64 {
	m, n := p.space.cleared(), len(list)
	for i := range list {
		if h := &list[i]; h.cut {
			m.add(h.whole()*4, i, n+i)
			m.add(h.stored()*4, n+i, 2*n+i)
			m.host(h.stored()*w.grad, -1, 2*n+i)
		}
	}
	return m.peak()
}

// widened is the temp of XLA:CPU for all-reduces of gradients below f32: all terms and all sums in
// f32, placed where terms were and where rounded sums will be.
func (p *Predictor) widened(list []resident) int64 {
	m := p.space.cleared()
	for i := range list {
		h := &list[i]
		m.add(h.stored()*4, i, len(list))
		m.add(h.stored()*4, len(list), len(list)+1+i)
		m.host(h.stored()*2, i, len(list)+1+i)
	}
	return m.peak()
}

// updateBound is an upper bound on the temp of the update and of the reduction: all their buffers
// at once.
func (w *way) updateBound(list []resident) (n int64) {
	for i := range list {
		h := &list[i]
		_, _, host := w.state(h)
		n += h.stored()*(20+w.elem+w.sum+w.grad) + h.whole()*(w.elem+w.sum) + w.copies(h) + 2*host
	}
	return n
}

// An updateKey is all that the buffers of an update depend on. The stages of a rank are identified
// by their number and the sum of their layers, since they have equally many each, or one more.
type updateKey struct {
	tp, fsdp, stages, layers int64
	ep, sparse               int64 // sparse are layers with experts behind others without
	quantized                int64 // layers with quantized copies
	flags                    uint64
	reduce                   bool
}

// updateKey returns the cache key of the update of some parameters.
func (w *way) updateKey(s *sizes, list []resident) updateKey {
	k := updateKey{tp: s.TP, fsdp: w.fsdp, ep: s.EP}
	var table, end bool
	stack, sparse := "", ""
	for i := range list {
		switch h := &list[i]; {
		case h.stack && h.loop > 0:
			if sparse == "" || sparse == h.name {
				sparse = h.name
				k.sparse += h.layers
				if h.quant != nil {
					k.quantized += h.layers
				}
			}
		case h.stack && (stack == "" || stack == h.name):
			stack = h.name
			k.stages++
			k.layers += h.layers
			if h.quant != nil {
				k.quantized += h.layers
			}
		case h.stack:
		case h.name == "embed":
			table = true
		default:
			end = true
		}
	}
	k.flags = bitsOf(table, end, w.unrolled, w.spread, w.gather == "step", w.link.counted,
		w.link.bytes == inHost) | small(w.elem, w.sum, w.grad, int64(w.zero))
	return k
}

// reduceBuffers lists the buffers of a program that reduces gradients: each is rounded while the
// one before is in flight, and then sent; all results are converted to the stored form at the end,
// in the same order. Until then outputs can hold other buffers. With a second sum, along dp or cp,
// XLA hides that one and waits for the first. Gradients that are only summed along dp and cp are
// sent all at once, in place.
func (p *Predictor) reduceBuffers(w *way, list []resident) int64 {
	m := p.space.cleared()
	all := sentOf(w, list)
	for i := range all {
		h := &all[i]
		if w.zero < 2 && !w.spread { // XLA's scheduler visits sends in reverse
			h = &all[len(all)-1-i]
		}
		scattered := h.cut && w.zero < 2
		made := 3 * h.turn
		if !scattered {
			if w.spread || !h.cut && w.sharded {
				m.add(h.sum, 0, 4*len(all))
			}
			continue
		}
		if w.spread {
			m.add(h.terms, made, made+2)
		} else {
			m.add(h.terms, made, made+4)
		}
		h.given = made + 2
		if h.transposed || w.sum != w.grad {
			h.given = 3*len(all) + h.turn
			m.add(h.sum, made+2, h.given)
		}
	}
	for i := range all {
		if h := &all[i]; h.given > 0 {
			m.host(h.result, -1, h.given)
		}
	}
	return m.peak()
}

// updateBuffers lists the buffers of the update. New moments and weights are computed in the order
// in which weights are sent, so none can be written in place. A weight is rounded and gathered,
// and transposed back into the old one's buffer; moments are copied back; and gathered copies are
// transposed to the order that the model reads. In between, the old buffers can hold others. A
// single layer needs no transposes: it is updated in place and gathered into its destination.
func (p *Predictor) updateBuffers(w *way, s *sizes, list []resident) int64 {
	m := p.space.cleared()
	all := slices.DeleteFunc(sentOf(w, list), func(h sent) bool { return !h.cut || h.quantized })
	o := scheduler{link: w.link, devices: w.fsdp, all: all}
	for i := range list {
		if list[i].vector {
			o.vectors++
		}
	}
	o.arrange()
	o.schedule()
	lists.Sort(all, func(a, b sent) int { return a.param - b.param })
	for i := range all { // new weights and moments
		if h := &all[i]; h.transposed {
			h.state(m)
		}
	}
	for i := range all { // and what is sent; XLA's scheduler visits sends in reverse
		h := &all[len(all)-1-i]
		if w.elem != 4 {
			m.add(h.rounded, h.round, h.arrive)
		}
		if h.transposed {
			m.add(h.whole, h.send, h.given)
		}
	}
	for i := range all {
		if h := &all[i]; h.transposed {
			m.host(h.whole, -1, h.given)
		} else {
			m.host(h.whole, -1, h.send)
		}
	}
	return m.peak()
}

// state adds a new weight and its moments, and the buffers of the old ones.
func (h *sent) state(m *space) {
	if h.table { // its gradient is transposed first, its moments only before they are copied
		m.add(h.shard, h.update, h.update)
		m.add(h.shard, h.unturn, h.copies)
		m.add(h.shard, h.unturn, h.copies)
	}
	m.add(h.shard, h.update, h.unturn)
	m.add(h.shard, h.update, max(h.back, h.round))
	m.add(h.shard, h.update, h.unturn)
	m.host(h.shard, h.update, h.back)
	if !h.table {
		m.host(h.shard, h.update, h.copies)
		m.host(h.shard, h.update, h.copies)
	}
}

// updateMeans is the temp of the update on the CPU and on sm_120: means over the plans of
// bench/memory, which are within a fifth of them.
func (p *Predictor) updateMeans(w *way, list []resident) int64 {
	var all, stacks, largest, whole, second int64 // bytes of shards in f32, of copies
	var table, transposed int64
	for i := range list {
		h := &list[i]
		if !w.copied(h.param) || h.quant != nil { // quantized copies are small when sent
			continue
		}
		shard := h.stored() * 4
		if !h.stack && h.first > 0 {
			table, transposed = h.whole()*w.elem, shard
		}
		if h.stack || h.first > 0 || p.cpu {
			all += shard
		}
		switch {
		case !h.stack || w.unrolled:
		case shard > largest:
			second = whole
			largest, whole, stacks = shard, h.whole()*w.elem, shard
		case shard == largest:
			stacks += shard
		default:
			second = max(second, h.whole()*w.elem)
		}
	}
	switch {
	case all == 0:
		return 0
	case p.cpu:
		return whole + max(largest, transposed) + table
	}
	n := min(stacks*4/3, 4*largest) + whole + second/2
	return n
}
