package footprint

import (
	"cmp"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
)

// The points of a gradient program, in execution order. A buffer's live range is a pair of them.
const (
	atEmbed     = iota // embedding lookup
	atGather           // CPU: weights of all layers are gathered
	atForward          // forward loop over layers
	atLogits           // head
	atLoss             // gradient of the logits
	atHead             // head's dgrad
	atTable            // CPU: head's wgrad
	atSegment          // backward loops of layers that differ from the first
	atBackward         // backward loop, or the last of them
	atHeadGrad         // GPU: head's wgrad
	atEmbedGrad        // gradient of the embedding table
	atSettle           // gradients are reduced and accumulated; one point each from here on
)

// A buffer is bytes that are live from one point to another.
type buffer struct {
	bytes    int64
	from, to int
	alone    bool // XLA does not place it in an output
}

// meets reports whether two live ranges overlap. Both ends are included.
func (b *buffer) meets(c *buffer) bool { return b.from <= c.to && c.from <= b.to }

// A host is an output of the program, and perhaps the input that it aliases. Between the input's
// last use and the output's first write, other buffers may be placed in it.
type host struct {
	bytes       int64
	until, from int // last use of the input, or -1; first write of the output
}

// meets reports whether a buffer is live while the host's own input or output is.
func (h *host) meets(b *buffer) bool { return b.from <= h.until || h.from <= b.to }

// A space is the buffers of a program.
type space struct {
	list  []buffer
	hosts []host

	tenants [][]buffer // buffers placed in each host
	change  []int64    // net bytes at each point
}

// cleared returns an empty space that reuses the old one's memory.
func (m *space) cleared() *space {
	m.list, m.hosts = m.list[:0], m.hosts[:0]
	return m
}

// add adds a buffer that is live from one point to another, both included.
func (m *space) add(bytes int64, from, to int) {
	if bytes > 0 {
		m.list = append(m.list, buffer{bytes: bytes, from: from, to: to})
	}
}

// host adds an output that is first written at from, in place of an input last read at until (-1
// for none).
func (m *space) host(bytes int64, until, from int) {
	m.hosts = append(m.hosts, host{bytes, until, from})
}

// peak is the largest sum of live buffers. As XLA's buffer assignment does, buffers are first
// placed in outputs, the largest buffer first, each in the smallest output with room; among equals
// in the one added last.
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

// placeInResults drops buffers that XLA places in output buffers not yet written.
func (m *space) placeInResults() {
	lists.Sort(m.list, func(a, b buffer) int { return cmp.Compare(b.bytes, a.bytes) })
	slices.Reverse(m.hosts)
	lists.Sort(m.hosts, func(a, b host) int { return cmp.Compare(a.bytes, b.bytes) })
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

// free reports whether no tenant of a host is live at the same time as b.
func (m *space) free(host int, b *buffer) bool {
	return !slices.ContainsFunc(m.tenants[host], func(g buffer) bool { return g.meets(b) })
}
