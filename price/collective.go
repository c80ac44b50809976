package price

import (
	"math"
	"math/bits"
)

// A Kind is what a collective does. Bytes are always those of the whole: what a device has after
// all-gather and all-reduce, and before reduce-scatter and all-to-all.
type Kind string

// The kinds.
const (
	AllGather     Kind = "all-gather"
	ReduceScatter Kind = "reduce-scatter"
	AllReduce     Kind = "all-reduce"
	AllToAll      Kind = "all-to-all"
	Permute       Kind = "permute" // to one other device
)

const (
	kinds  = 4 // in the table
	groups = 7 // sizes 1, 2, 4 ... 64
)

func (k Kind) index() int {
	switch k {
	case AllGather:
		return 0
	case ReduceScatter:
		return 1
	case AllReduce:
		return 2
	}
	return 3
}

// A Group is devices that take part in a collective: Size of them, Stride apart in the order in
// which the cluster numbers them.
type Group struct{ Size, Stride int64 }

// connect takes the curves of the card, or of the one of the table that is most like it. Those of
// another card are stretched by the ratio of the links.
func (p *Prices) connect() {
	c := p.cluster.Card
	like := map[string]string{"b300": "b200", "h200": "h100", "a100": "h100", "gb300": "gb300",
		"gb200": "gb200", "b200": "b200", "h100": "h100"}[c.Name]
	if like == "" {
		return
	}
	if c.Name == "a100" {
		p.scale = 450.0 / 300.0 // bytes a second of one direction
	}
	for _, kind := range []Kind{AllGather, ReduceScatter, AllReduce, AllToAll} {
		// A size that was not measured takes that of the next smaller one, or the smallest.
		list := &p.links[kind.index()]
		var last *curve
		for g := range groups {
			if found := curves()[link{like, kind, 1 << g}]; found != nil {
				last = found
			}
			list[g] = last
		}
		for g := groups - 2; g >= 0; g-- {
			if list[g] == nil {
				list[g] = list[g+1]
			}
		}
	}
}

// inside is how many of the group are in one NVLink domain, and how many domains it spans.
func (p *Prices) inside(g Group) (in, out int64) {
	domain := int64(p.cluster.HostsPerDomain * p.cluster.DevicesPerHost)
	if p.cluster.Card.NVLinkDomain <= 1 {
		domain = int64(p.cluster.DevicesPerHost)
	}
	in = min(g.Size, max(1, domain/max(g.Stride, 1)))
	for g.Size%in != 0 { // a group that fills no whole number of domains is cut evenly
		in--
	}
	return in, g.Size / in
}

// Collective is the time of a collective of a group.
func (p *Prices) Collective(kind Kind, bytes float64, g Group) float64 {
	if g.Size <= 1 || bytes <= 0 {
		return 0
	}
	in, out := p.inside(g)
	near := p.near(kind, bytes, in)
	if out == 1 {
		return near
	}
	return max(near, p.far(kind, bytes, in, out)) + p.profile.Spread*float64(out-1) +
		p.profile.Latency*farLatency*math.Log2(float64(out))
}

// farLatency is what one round between hosts takes over InfiniBand with its switches and NCCL's
// proxy thread, in seconds.
const farLatency = 15e-6

// near is the time inside a domain.
func (p *Prices) near(kind Kind, bytes float64, n int64) float64 {
	if n <= 1 {
		return 0
	}
	factor := p.profile.Link
	if kind == AllToAll {
		factor = p.profile.Exchange
	}
	if kind == Permute {
		// 72 % of a link's rate, as one pair reaches with large messages in XLA's table.
		rate := 0.72 * float64(p.cluster.Card.NVLink)
		if rate == 0 {
			rate = p.pcie()
		}
		return p.profile.Latency*15e-6 + p.profile.Link*bytes/rate
	}
	at := min(bits.Len64(uint64(n-1)), groups-1)
	c := p.links[kind.index()][at]
	if c == nil {
		return p.bus(kind, bytes, n, factor)
	}
	floor := c[0]
	return p.profile.Latency*floor + factor*p.scale*max(c.time(bytes)-floor, 0)
}

func (p *Prices) pcie() float64 {
	if p.cluster.CPU() {
		return cpuBandwidth
	}
	c := p.cluster.Card
	return 0.7e9 * float64(max(c.PCIeLanes, 16)) * math.Exp2(float64(max(c.PCIeGen, 4)-3))
}

// bus is the time over PCIe, or through the memory of a processor.
func (p *Prices) bus(kind Kind, bytes float64, n int64, factor float64) float64 {
	share := float64(n-1) / float64(n)
	if kind == AllReduce {
		share *= 2
	}
	return p.profile.Latency*20e-6 + factor*bytes*share/p.pcie()
}

// far is the time between domains: every device sends what belongs elsewhere through its own
// network interface, and what is inside the domain goes by NVLink.
func (p *Prices) far(kind Kind, bytes float64, in, out int64) float64 {
	rate := float64(p.cluster.Card.NIC)
	if rate == 0 {
		rate = 50e9 // 400 Gb/s for each GPU, as machines of its generation have
	}
	if p.cluster.Card.NVLink == 0 {
		rate = min(rate, p.pcie()) // which all that leaves the device goes over
	}
	share := float64(out-1) / float64(out)
	switch kind {
	case AllReduce:
		share *= 2 / float64(in)
	case AllGather, ReduceScatter:
		share /= float64(in)
	case Permute:
		share = 1
	}
	return p.profile.Network * bytes * share / rate
}
