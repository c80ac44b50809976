package footprint

import (
	"cmp"
	"slices"
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
	atBackward         // the loop back
	atHeadGrad         // on a GPU, by the head's weights
	atEmbedGrad        // by the table
	atSettle           // gradients are brought to the form that they are kept in, one moment for each
)

// A buffer is so many bytes from one moment to another.
type buffer struct {
	bytes    int64
	from, to int
}

func (b *buffer) meets(c *buffer) bool { return b.from <= c.to && c.from <= b.to }

// A space is the buffers of a program.
type space struct {
	list  []buffer
	hosts []buffer // results of the program: before they are written, others may use their place

	guests [][]buffer // of each host
}

// cleared gives the space without buffers, with their room.
func (m *space) cleared() *space {
	m.list, m.hosts = m.list[:0], m.hosts[:0]
	return m
}

func (m *space) add(bytes int64, from, to int) {
	if bytes > 0 {
		m.list = append(m.list, buffer{bytes, from, to})
	}
}

// peak is what lives together at most. As XLA does, buffers look for a place in results first, the
// largest of them first, each in the smallest that has room; of equals those that come last.
func (m *space) peak() int64 {
	if len(m.hosts) > 0 {
		slices.SortStableFunc(m.list, func(a, b buffer) int {
			return cmp.Or(cmp.Compare(b.bytes, a.bytes), b.to-a.to)
		})
		slices.SortStableFunc(m.hosts, func(a, b buffer) int {
			return cmp.Or(cmp.Compare(a.bytes, b.bytes), b.from-a.from)
		})
		guests := slices.Grow(m.guests[:0], len(m.hosts))[:len(m.hosts)]
		m.guests = guests
		for i := range guests {
			guests[i] = guests[i][:0]
		}
		m.list = slices.DeleteFunc(m.list, func(b buffer) bool {
			for i := range m.hosts {
				h := &m.hosts[i]
				if h.bytes < b.bytes || h.meets(&b) ||
					slices.ContainsFunc(guests[i], func(g buffer) bool { return g.meets(&b) }) {
					continue
				}
				guests[i] = append(guests[i], b)
				return true
			}
			return false
		})
	}
	last := 0
	for i := range m.list {
		last = max(last, m.list[i].to)
	}
	most := int64(0)
	for t := range last + 1 {
		now := int64(0)
		for i := range m.list {
			if b := &m.list[i]; b.from <= t && t <= b.to {
				now += b.bytes
			}
		}
		most = max(most, now)
	}
	return most
}
