package footprint

import (
	"cmp"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A link is the cost of FSDP gathers in XLA's latency-hiding scheduler, relative to other
// operations.
type link struct {
	// counted means that XLA has no figures for the GPU and its links: an operation costs one, a
	// collective five, whatever their sizes.
	counted bool
	// bytes is the number of bytes that operations read and write in the time of sending one.
	bytes int64
}

// If XLA knows the GPU it computes with rates: 8 TB/s of memory, and 570 GB/s of NVLink, inferred
// from how much it overlaps with gathers in the plans of bench/memory. Networks are so much slower
// that everything fits beside one gather.
const (
	inHost  = 14
	outside = 140
)

// gatherTime is the cost of a gather where operations are counted (XLA's kHighLatency over
// kMediumCost).
const gatherTime = 5

// link returns the cost of a plan's gathers. XLA has figures for NVLink hosts with a network
// between them, but not for PCI Express, nor for an NVLink domain of several hosts.
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

// A place is the device layout of the last plan.
type place struct {
	cluster string
	counted bool
	perHost int64
}

// A sent is a parameter whose gradient or copy is sent: its sizes in bytes, and the points of its
// operations in the update's schedule.
type sent struct {
	shard, rounded, whole int64 // the shard in f32, as sent, and gathered
	terms, sum, result    int64 // its gradient before and after reduction, and as stored
	param, turn           int   // its index among all, and among those sent
	cut                   bool
	transposed            bool // sent in another order than it is stored
	table                 bool // and updated in that order
	quantized             bool // its copies are quantized

	update, round, send, arrive int // new weight and moments; rounding; start and end of the send
	back, unturn, copies, given int // writing back weight and moments; handing the copy to the model
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
	lists.Sort(all, func(a, b sent) int { return cmp.Compare(rank(&a), rank(&b)) })
	for i := range all {
		all[i].turn = i
	}
	return all
}

// A scheduler orders the operations of an update as XLA's latency-hiding scheduler does: from the
// end to the beginning, with one gather in flight, beside which other ready operations are placed
// until its time is used up.
type scheduler struct {
	link
	devices int64
	all     []sent // in send order
	order   []int  // order of writing back
	now     int    // time, counted from the end
	vectors int    // updates of parameters that are not sent

	gives, backs, copied int // operations done, counted from the last

	waiting []int // sent, not yet rounded
	ready   []int // rounded, not yet updated
}

// arrange sorts what is sent. With a transposed table the smallest go first, and results are put
// back in the same order. Without one, the last of equals goes first, or, if operations are
// counted, the largest; results are put back in reverse. The same holds for shards from 2 GiB on,
// which are fused differently.
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
		lists.Sort(o.all, func(a, b sent) int { return cmp.Compare(a.shard, b.shard) })
	}
	slices.Reverse(o.order)
}

// schedule assigns points to all operations.
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

// tick returns the current time and advances it by one.
func (o *scheduler) tick() int { o.now++; return o.now - 1 }

// cost is the cost of an operation that reads and writes that many bytes.
func (o *scheduler) cost(bytes int64) int64 {
	if o.counted {
		return 1
	}
	return max(bytes, 1)
}

// give transposes the most recently gathered parameter to the order that the model reads.
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

// fill schedules one more operation beside a gather, and returns its cost; ok is false if none is
// ready.
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

// restore writes a weight back to the old one's buffer, or, if all are, moments.
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

// copy writes moments back to the old buffers, which XLA counts as free; a table's moments are
// transposed before.
func (o *scheduler) copy(h *sent) (cost int64) {
	h.copies = o.tick()
	h.unturn = h.copies
	if h.table {
		h.unturn = o.tick()
		cost += 2 * o.cost(3*h.shard)
	}
	return cost
}

// compute makes the new weight and moments, and copies the moments first if they did not fill
// time.
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
