package footprint

import (
	"cmp"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
)

// The moments of a program that gives gradients, in their order.
const (
	atEmbed     = iota // the table is looked up
	atGather           // on the CPU, weights of all layers are gathered
	atForward          // the layers' loop
	atLogits           // the head
	atLoss             // its gradient by logits
	atHead             // by what came in
	atTable            // on the CPU, by the head's weights
	atSegment          // the loops back of layers that differ from the first
	atBackward         // the loop back, or the last of them
	atHeadGrad         // on a GPU, by the head's weights
	atEmbedGrad        // by the table
	atSettle           // gradients are brought to the form that they are kept in, one moment for each
)

// A buffer is so many bytes from one moment to another.
type buffer struct {
	bytes    int64
	from, to int
	alone    bool // it takes no place in results
}

func (b *buffer) meets(c *buffer) bool { return b.from <= c.to && c.from <= b.to }

// A host is a result of the program, and perhaps the argument whose place it takes: between the two
// others may use the place.
type host struct {
	bytes       int64
	until, from int // the last moment of the argument, or -1, and the first of the result
}

func (h *host) meets(b *buffer) bool { return b.from <= h.until || h.from <= b.to }

// A space is the buffers of a program.
type space struct {
	list  []buffer
	hosts []host

	tenants [][]buffer // of each host
	change  []int64    // at each moment
}

// cleared gives the space without buffers, with their room.
func (m *space) cleared() *space {
	m.list, m.hosts = m.list[:0], m.hosts[:0]
	return m
}

func (m *space) add(bytes int64, from, to int) {
	if bytes > 0 {
		m.list = append(m.list, buffer{bytes: bytes, from: from, to: to})
	}
}

func (m *space) host(bytes int64, until, from int) {
	m.hosts = append(m.hosts, host{bytes, until, from})
}

// peak is what lives together at most. As XLA does, buffers look for a place in results first, the
// largest of them first, each in the smallest that has room; of equals in the one that was added
// last.
func (m *space) peak() int64 {
	if len(m.hosts) > 0 {
		m.placeInResults()
	}
	last := lists.Max(m.list, 0, func(b buffer) int { return b.to })
	m.change = slices.Grow(m.change[:0], last+2)[:last+2]
	clear(m.change)
	for i := range m.list {
		b := &m.list[i]
		m.change[b.from] += b.bytes
		m.change[b.to+1] -= b.bytes
	}
	now, most := int64(0), int64(0)
	for _, n := range m.change {
		now += n
		most = max(most, now)
	}
	return most
}

// placeInResults takes away the buffers that find a place in results.
func (m *space) placeInResults() {
	slices.SortStableFunc(m.list, func(a, b buffer) int { return cmp.Compare(b.bytes, a.bytes) })
	slices.Reverse(m.hosts)
	slices.SortStableFunc(m.hosts, func(a, b host) int { return cmp.Compare(a.bytes, b.bytes) })
	m.tenants = slices.Grow(m.tenants[:0], len(m.hosts))[:len(m.hosts)]
	for i := range m.tenants {
		m.tenants[i] = m.tenants[i][:0]
	}
	m.list = slices.DeleteFunc(m.list, func(b buffer) bool {
		if b.alone {
			return false
		}
		for i := range m.hosts {
			if h := &m.hosts[i]; h.bytes >= b.bytes && !h.meets(&b) && m.free(i, &b) {
				m.tenants[i] = append(m.tenants[i], b)
				return true
			}
		}
		return false
	})
}

// free tells whether no guest of a host is there at the same time as another buffer.
func (m *space) free(host int, b *buffer) bool {
	return !slices.ContainsFunc(m.tenants[host], func(g buffer) bool { return g.meets(b) })
}
