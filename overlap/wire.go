package overlap

import (
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/machine"
)

// The networks that a collective may use. One that crosses domains is counted to the network even
// if a part of its way is inside them.
const (
	nvlink  = "nvlink"
	network = "network"
)

// scaleUp is how XLA:GPU calls the stream of collectives that stay inside a partition.
const scaleUp = "scale_up_fabric"

// A wire knows how devices reach each other.
type wire struct {
	rates   Rates
	devices int64 // of the program
	domain  int64 // devices that NVLink joins, which have numbers in a row
}

func newWire(m *hlo.Module, t machine.Cluster, r Rates) wire {
	n := max(m.NumReplicas, 1) * max(m.NumPartitions, 1)
	return wire{rates: r, devices: n, domain: int64(t.HostsPerDomain) * int64(t.DevicesPerHost)}
}

// A way is how one instruction's tensors travel.
type way struct {
	fabric  string
	seconds float64
}

// travel adds up the tensors of one instruction: they go as one.
func (w wire) travel(list []hlo.Collective, domain string) (out way) {
	out.fabric = nvlink
	for _, c := range list {
		n := w.size(c.Group)
		inside := w.inside(c.Group)
		if domain == scaleUp {
			inside = n
		}
		if inside < n {
			out.fabric = network
		}
		out.seconds += w.seconds(c, float64(n), float64(inside))
	}
	return out
}

// seconds is how long a ring takes, where n devices take part of which a domain has some. Every
// domain has the network of all its members for what crosses its border.
func (w wire) seconds(c hlo.Collective, n, inside float64) float64 {
	if n <= 1 {
		return 0
	}
	speed := w.rates.NVLink
	if inside < n {
		speed = w.rates.Network * inside
		if inside > 1 {
			speed = min(speed, w.rates.NVLink)
		}
	}
	bytes, part := float64(c.Bytes()), (n-1)/n
	switch c.Kind {
	case hlo.AllReduce:
		return 2 * part * bytes / speed
	case hlo.AllToAll, hlo.RaggedAllToAll: // each pair by its own way, both ways at once
		near, far := bytes*(inside-1)/n/w.rates.NVLink, 0.0
		if inside < n {
			far = bytes * (n - inside) / n / w.rates.Network
		}
		return max(near, far)
	case hlo.CollectivePermute, hlo.CollectiveBroadcast, hlo.CollectiveReduce:
		return bytes / speed
	}
	return part * bytes / speed
}

// size is the number of devices in a group. A permute is a ring of at least two.
func (w wire) size(g hlo.Group) int64 {
	switch {
	case g.Pairs > 0:
		return 2
	case g.Count == 0:
		return w.devices
	}
	return g.Size
}

// inside is how many devices of a group one domain has. Groups are taken to lie as regularly as
// their stride says; of those without a stride, and of pairs, no two are taken to be neighbours,
// unless there is only one domain.
func (w wire) inside(g hlo.Group) int64 {
	n := w.size(g)
	if w.devices <= w.domain || n <= 1 {
		return n
	}
	stride := g.Stride
	if g.Count == 0 && g.Pairs == 0 {
		stride = 1
	}
	if stride == 0 || w.domain%stride != 0 {
		return 1
	}
	return min(n, w.domain/stride)
}
