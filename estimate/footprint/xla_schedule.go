package footprint

import (
	"cmp"
	"slices"

	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A link is what XLA's scheduler takes gathers along fsdp to cost, in what it takes others to cost.
type link struct {
	// counted is where XLA has no figures for the card and its links: an operation is one, and what
	// is sent takes five, whatever their sizes.
	counted bool
	// bytes is how many of those that operations read and write take as long as one that is sent.
	bytes int64
}

// Where XLA knows the card it goes by rates: 8 TB/s of memory, and, by how much it fills gathers
// with in the plans of bench/memory, 570 GB/s of NVLink. Between hosts it is so much less that all
// there is fits beside one gather.
const (
	inHost  = 14
	outside = 140
)

// gatherTime is what a gather takes where operations are counted (XLA's kHighLatency over
// kMediumCost).
const gatherTime = 5

// link says what gathers of a plan cost. XLA has figures for hosts of NVLink with a network between
// them: not for PCI Express, nor for a domain of several hosts.
func (p *Predictor) link(pl *plan.Plan) link {
	if p.place.cluster != pl.Cluster || p.place.perHost == 0 {
		p.place.cluster, p.place.counted, p.place.perHost = pl.Cluster, p.arch == "sm_120", 8
		if c, err := machine.ParseCluster(pl.Cluster); err == nil && !c.CPU() {
			p.place.perHost = int64(c.DevicesPerHost)
			p.place.counted = p.place.counted || c.HostsPerDomain > 1
		}
	}
	l := link{p.place.counted, outside}
	within := max(pl.TP.Size, 1) * max(pl.CP.Size, 1) * max(pl.FSDP.Size, 1)
	if within <= p.place.perHost {
		l.bytes = inHost
	}
	return l
}

// A place is where the devices of the last plan lie.
type place struct {
	cluster string
	counted bool
	perHost int64
}

// A sent is a parameter of which gradients or copies are sent, in bytes, and, where they are, the
// moments of what an update does with it.
type sent struct {
	shard, rounded, whole int64 // what is kept, in f32 and as it is sent; what comes of it
	terms, sum, result    int64 // its gradient before and after it is added up, and as it is kept
	param, turn           int   // its place among all, and among those that are sent
	cut                   bool
	transposed            bool // it is sent in another order than it is kept in
	table                 bool // and its update is computed in that order
	quantized             bool // its copies are quantized

	update, round, send, arrive int // the new weight and moments; it is rounded; it is on its way
	back, unturn, copies, given int // to where the old was: weight, moments; what the model takes
}

// sentOf lists parameters, the smallest first, and tables before stacks of the largest matrices.
func sentOf(w *way, list []resident) []sent {
	all := make([]sent, 0, len(list))
	var widest, least int64 // matrix, and the smallest stack of such
	for i := range list {
		h := &list[i]
		if h.vector {
			continue
		}
		transposed := h.cut && (h.layers > 1 || !h.stack && h.first > 0)
		all = append(all, sent{param: i, shard: h.stored() * 4, rounded: h.stored() * w.elem,
			whole: h.whole() * w.elem, terms: h.whole() * w.sum, sum: h.stored() * w.sum,
			result: h.stored() * w.grad, cut: h.cut, transposed: transposed, table: transposed && !h.stack,
			quantized: h.quant != nil})
		switch {
		case !h.stack || h.param.stored < widest:
		case h.param.stored > widest:
			widest, least = h.param.stored, h.stored()*4
		default:
			least = min(least, h.stored()*4)
		}
	}
	rank := func(h *sent) int64 {
		if h.table {
			return min(h.shard, least-1)
		}
		return h.shard
	}
	slices.SortStableFunc(all, func(a, b sent) int { return cmp.Compare(rank(&a), rank(&b)) })
	for i := range all {
		all[i].turn = i
	}
	return all
}

// A scheduler orders the operations of an update as XLA's does: from the end to the beginning, one
// gather at a time, and each takes what is ready of the rest until its time is over.
type scheduler struct {
	link
	devices int64
	all     []sent // in the order in which they are sent
	order   []int  // in which they are put back
	now     int    // counted from the end
	vectors int    // updates of what is not sent

	gives, backs, copied int // how many are given, put back and copied, counted from the last

	waiting []int // sent, and not yet rounded
	ready   []int // rounded, and not yet updated
}

// arrange puts what is sent in its order. With a table that is turned the smallest go first, and
// what is put back goes in the same order. Without one, of equals the last goes first, or, if
// operations are counted, the largest; what is put back goes the other way round. So it is, too,
// where pieces have 2 GiB and more, which are fused otherwise.
func (o *scheduler) arrange() {
	n := len(o.all)
	for i := range n {
		o.order = append(o.order, i)
	}
	if slices.ContainsFunc(o.all, func(h sent) bool { return h.table }) && o.all[n-1].shard < 1<<31 {
		return
	}
	slices.Reverse(o.all)
	if !o.counted {
		slices.SortStableFunc(o.all, func(a, b sent) int { return cmp.Compare(a.shard, b.shard) })
	}
	slices.Reverse(o.order)
}

// schedule gives all operations their moments.
func (o *scheduler) schedule() {
	o.now = 1
	for i := len(o.all) - 1; i >= 0; i-- {
		h := &o.all[i]
		for h.transposed && h.given == 0 {
			o.give()
		}
		h.arrive = o.tick()
		left := int64(gatherTime)
		if !o.counted {
			left = h.whole / o.devices * (o.devices - 1) * o.bytes
		}
		for cost, more := int64(0), true; left > 0 && more; left -= cost {
			cost, more = o.fill()
		}
		for o.backs == len(o.all) && o.copied < len(o.all) {
			o.restore()
		}
		h.send = o.tick()
		o.waiting = append(o.waiting, i)
	}
	for more := true; more; {
		_, more = o.fill()
	}
	for i := range o.all {
		h := &o.all[i]
		for _, at := range []*int{&h.update, &h.round, &h.send, &h.arrive, &h.back, &h.unturn, &h.copies,
			&h.given} {
			*at = o.now - *at
		}
	}
}

func (o *scheduler) tick() int { o.now++; return o.now - 1 }

// cost is that of an operation that reads and writes so many bytes.
func (o *scheduler) cost(bytes int64) int64 {
	if o.counted {
		return 1
	}
	return max(bytes, 1)
}

// give turns what was gathered last, of what is not yet, into the order that the model takes.
func (o *scheduler) give() int64 {
	for o.gives < len(o.all) {
		h := &o.all[len(o.all)-1-o.gives]
		o.gives++
		if h.transposed {
			h.given = o.tick()
			return o.cost(2 * h.whole)
		}
	}
	return 0
}

// fill takes one more operation, and tells what it costs, and whether there was one.
func (o *scheduler) fill() (cost int64, ok bool) {
	if n := o.give(); n > 0 {
		return n, true
	}
	if o.vectors > 0 {
		o.vectors--
		o.tick()
		return o.cost(1), true
	}
	for !o.counted && o.backs == len(o.all) && o.copied < len(o.all) {
		if cost, _ = o.restore(); cost > 0 {
			return cost, true
		}
	}
	for k, i := range o.ready {
		h := &o.all[i]
		if h.back > 0 && (h.copies > 0 || o.counted) {
			o.ready = slices.Delete(o.ready, k, k+1)
			return o.compute(h), true
		}
	}
	if len(o.waiting) > 0 {
		i := o.waiting[0]
		h := &o.all[i]
		o.waiting = o.waiting[1:]
		h.round = o.tick()
		if !h.transposed { // updated and rounded at once, in place
			h.update = h.round
			return o.cost(7*h.shard + h.rounded), true
		}
		o.ready = append(o.ready, i)
		return o.cost(h.shard + h.rounded), true
	}
	return o.restore()
}

// restore puts a weight where the old one was, or, if all are, moments.
func (o *scheduler) restore() (cost int64, ok bool) {
	for o.backs < len(o.all) {
		h := &o.all[o.order[len(o.all)-1-o.backs]]
		if o.backs++; h.transposed {
			h.back = o.tick()
			return o.cost(2 * h.shard), true
		}
	}
	for o.copied < len(o.all) {
		h := &o.all[o.order[len(o.all)-1-o.copied]]
		if o.copied++; h.transposed && h.copies == 0 {
			return o.copy(h), true
		}
	}
	return 0, false
}

// copy puts moments where the old ones were, which XLA counts for nothing; those of a table are
// turned before.
func (o *scheduler) copy(h *sent) (cost int64) {
	h.copies = o.tick()
	h.unturn = h.copies
	if h.table {
		h.unturn = o.tick()
		cost += 2 * o.cost(3*h.shard)
	}
	return cost
}

// compute makes the new weight and moments, and before, if they did not fill time, copies these.
func (o *scheduler) compute(h *sent) (cost int64) {
	if h.copies == 0 {
		cost = o.copy(h)
	}
	h.update = o.tick()
	if h.table { // in steps
		return cost + 4*o.cost(3*h.shard)
	}
	return cost + o.cost(7*h.shard)
}
