package price

import (
	"math"
	"math/bits"
	"slices"
)

// A Kind is the kind of a collective. Bytes are always of the whole tensor: a device's result of
// all-gather and all-reduce, and its input of reduce-scatter and all-to-all.
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

// index is the row of a kind in the table; one that is not there has AllToAll's.
func (k Kind) index() int {
	if i := slices.Index(tabled, k); i >= 0 {
		return i
	}
	return slices.Index(tabled, AllToAll)
}

var tabled = []Kind{AllGather, ReduceScatter, AllReduce, AllToAll}

// A Group is devices that take part in a collective: Size of them, Stride apart in the order in
// which the cluster numbers them.
type Group struct{ Size, Stride int64 }

// connect loads the measured curves of the GPU's links, or of the most similar GPU, scaled by the
// ratio of link bandwidths.
func (p *Prices) connect() {
	c := p.cluster.GPU
	like := map[string]string{"b300": "b200", "h200": "h100", "a100": "h100", "gb300": "gb300",
		"gb200": "gb200", "b200": "b200", "h100": "h100"}[c.Name]
	if like == "" {
		return
	}
	if c.Name == "a100" {
		p.scale = 450.0 / 300.0 // bytes a second of one direction
	}
	for i, kind := range tabled {
		// A group size that was not measured uses the next smaller one's curve, or the smallest.
		list := &p.links[i]
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

// A spread is how a group lies over NVLink domains: the most and the least of its devices that are
// in one, and how many domains it has devices in.
type spread struct{ most, least, domains int64 }

// spread is how the worst group of a size and stride spans NVLink domains: an axis is as fast as
// its slowest group, since the others wait.
func (p *Prices) spread(g Group) spread {
	domain, stride := p.cluster.Domain(), max(g.Stride, 1)
	span := g.Size * stride
	switch {
	case stride >= domain:
		return spread{1, 1, g.Size}
	case domain%stride == 0 && domain%span == 0:
		return spread{g.Size, g.Size, 1}
	case domain%stride == 0 && span%domain == 0:
		return spread{domain / stride, domain / stride, span / domain}
	}
	if s, ok := p.uneven.Load(g); ok {
		return s.(spread)
	}
	s := p.worst(g.Size, stride, domain)
	p.uneven.Store(g, s)
	return s
}

// worst visits the distinct alignments of groups to domains, for strides that do not divide a
// domain.
func (p *Prices) worst(size, stride, domain int64) spread {
	span := size * stride
	s := spread{0, size, 1}
	shifts := domain / gcd(domain, span)
	for k := range min(shifts, max(1, int64(p.cluster.Count)/span)) {
		for r := range stride {
			at, left, domains := (k*span+r)%domain, size, int64(0)
			for ; left > 0; domains++ {
				here := min(left, (domain-at+stride-1)/stride)
				s.most, s.least = max(s.most, here), min(s.least, here)
				at, left = at+here*stride-domain, left-here
			}
			s.domains = max(s.domains, domains)
		}
	}
	return s
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Collective is the time of a collective of a group.
func (p *Prices) Collective(kind Kind, bytes float64, g Group) float64 {
	if g.Size <= 1 || bytes <= 0 {
		return 0
	}
	s := p.spread(g)
	near := p.near(kind, bytes, s.most)
	if s.domains == 1 {
		return p.slower * near
	}
	out := float64(s.domains)
	return p.slower * (max(near, p.far(kind, bytes, s.least, g.Size)) +
		p.profile.Spread*(out-1) + p.profile.Latency*farLatency*math.Log2(out))
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
		rate := 0.72 * float64(p.cluster.GPU.NVLink)
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
	c := p.cluster.GPU
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

// far is the seconds between domains: every device sends through its own network interface, and
// traffic inside a domain uses NVLink. The domain with the fewest members of the group (in of
// size) is slowest, because each of them receives the most.
func (p *Prices) far(kind Kind, bytes float64, in, size int64) float64 {
	rate := p.cluster.GPU.Network()
	if p.cluster.GPU.NVLink == 0 {
		rate = min(rate, p.pcie()) // which all that leaves the device goes over
	}
	share := float64(size-in) / float64(size)
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
