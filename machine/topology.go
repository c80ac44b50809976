package machine

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/nvml"
)

// A Topology is what is wired to what. Edges go both ways and carry the same in each direction.
type Topology struct {
	Nodes []Node `json:"nodes"`
	Edges []Edge `json:"edges"`
	// Pairs is the rate at which GPU i reaches GPU j, in bytes a second in one direction, by the
	// fastest path there is; 0 on the diagonal and where it is not known.
	Pairs [][]int64 `json:"pairs,omitempty"`
}

// A Node is a part of the host that bytes stop at or pass through.
type Node struct {
	ID   string `json:"id"`   // numa0, gpu3, nvswitch0, a NIC's name, network
	Kind string `json:"kind"` // numa, gpu, nvswitch, nic, network
}

// An Edge joins two nodes.
type Edge struct {
	A              string `json:"a"`
	B              string `json:"b"`
	Kind           string `json:"kind"` // nvlink, pcie, numa, nic
	BytesPerSecond int64  `json:"bytes_per_second,omitempty"`
	Links          int    `json:"links,omitempty"`    // NVLinks taken together
	Distance       int    `json:"distance,omitempty"` // of NUMA nodes, as the firmware tells it
}

func (t *Topology) node(id, kind string) {
	if !slices.Contains(t.Nodes, Node{id, kind}) {
		t.Nodes = append(t.Nodes, Node{id, kind})
	}
}

// newTopology draws the graph from the parts; s may be nil where there is no NVIDIA driver.
func newTopology(h Host, gpus []GPU, nics []NIC, s *nvml.Snapshot) Topology {
	var t Topology
	t.hostNodes(h)
	for _, g := range gpus {
		t.node(gpuID(g.Index), "gpu")
	}
	for _, g := range gpus {
		t.attach(gpuID(g.Index), g.NUMA, h, g.pcie())
		t.nvlinks(g, gpus)
	}
	for _, n := range nics {
		t.node(n.Name, "nic")
		if n.PCI != "" {
			t.attach(n.Name, n.NUMA, h, pcieBytes(n.PCIeGen, n.PCIeLanes))
		}
		if n.Up {
			t.node("network", "network")
			t.Edges = append(t.Edges, Edge{A: n.Name, B: "network", Kind: "nic",
				BytesPerSecond: n.BytesPerSecond})
		}
	}
	t.pairs(gpus, s)
	return t
}

func gpuID(i int) string { return fmt.Sprintf("gpu%d", i) }

func numaID(i int) string { return fmt.Sprintf("numa%d", i) }

func (t *Topology) hostNodes(h Host) {
	if len(h.NUMA) == 0 {
		t.node(numaID(0), "numa")
	}
	for _, n := range h.NUMA {
		t.node(numaID(n.ID), "numa")
	}
	for i, n := range h.NUMA {
		for j := range i {
			e := Edge{A: numaID(h.NUMA[j].ID), B: numaID(n.ID), Kind: "numa"}
			if j < len(n.Distances) {
				e.Distance = n.Distances[j]
			}
			t.Edges = append(t.Edges, e)
		}
	}
}

// attach connects a PCI device to its NUMA node. If the node is unknown there must be only one, or
// the edge would be a guess.
func (t *Topology) attach(id string, numa int, h Host, bytes int64) {
	if numa < 0 && len(h.NUMA) <= 1 {
		numa = 0
		if len(h.NUMA) == 1 {
			numa = h.NUMA[0].ID
		}
	}
	if slices.Contains(t.Nodes, Node{numaID(numa), "numa"}) {
		t.Edges = append(t.Edges, Edge{A: numaID(numa), B: id, Kind: "pcie", BytesPerSecond: bytes})
	}
}

// nvlinks joins a GPU to its switches, or to the GPUs that its links lead to. All switches of one
// domain are one node: a GPU has links to each, and the driver spreads traffic over them.
func (t *Topology) nvlinks(g GPU, gpus []GPU) {
	for _, l := range g.Links {
		e := Edge{A: gpuID(g.Index), Kind: "nvlink", Links: l.Count,
			BytesPerSecond: int64(l.Count) * l.BytesPerSecond}
		switch {
		case toSwitch(l):
			e.B = switchID(g, gpus)
			t.node(e.B, "nvswitch")
		case l.To == "cpu":
			e.B = numaID(max(0, g.NUMA))
			t.node(e.B, "numa")
		case l.To > e.A && slices.Contains(t.Nodes, Node{l.To, "gpu"}):
			e.B = l.To // the other end has the same links; one edge stands for both
		default:
			continue
		}
		t.Edges = append(t.Edges, e)
	}
}

// toSwitch reports whether links go to a switch. An active link whose end the driver does not name
// is taken for one: between GPUs of a host it would have found the address.
func toSwitch(l Link) bool { return l.To == "switch" || l.To == "unknown" }

// switchID numbers the domains of a host in the order of their first GPU. GPUs without a rack's
// fabric share the host's own switches.
func switchID(g GPU, gpus []GPU) string {
	var domains []string
	for _, o := range gpus {
		if !slices.Contains(domains, o.FabricDomain) && slices.ContainsFunc(o.Links, toSwitch) {
			domains = append(domains, o.FabricDomain)
		}
	}
	return fmt.Sprintf("nvswitch%d", slices.Index(domains, g.FabricDomain))
}

// pairs finds the fastest path between every two GPUs: NVLink where both are on it, else PCIe.
func (t *Topology) pairs(gpus []GPU, s *nvml.Snapshot) {
	if len(gpus) < 2 {
		return
	}
	t.Pairs = make([][]int64, len(gpus))
	for i := range gpus {
		t.Pairs[i] = make([]int64, len(gpus))
	}
	for i := range gpus {
		for j := range i {
			rate := t.direct(gpuID(j), gpuID(i))
			if rate == 0 && linked(gpus, s, i, j) {
				rate = min(t.switched(gpuID(i)), t.switched(gpuID(j)))
			}
			if rate == 0 {
				rate = min(gpus[i].pcie(), gpus[j].pcie())
			}
			t.Pairs[i][j], t.Pairs[j][i] = rate, rate
		}
	}
}

// linked reports whether two GPUs reach each other through switches: the driver says so, or, where
// it has no such answer to give, both have links to switches of the same domain.
func linked(gpus []GPU, s *nvml.Snapshot, i, j int) bool {
	if s != nil && s.NVLink[i][j] {
		return true
	}
	known := s != nil && slices.ContainsFunc(s.NVLink, func(row []bool) bool {
		return slices.Contains(row, true)
	})
	both := slices.ContainsFunc(gpus[i].Links, toSwitch) &&
		slices.ContainsFunc(gpus[j].Links, toSwitch)
	return !known && both && gpus[i].FabricDomain == gpus[j].FabricDomain
}

func (t *Topology) direct(a, b string) int64 {
	return t.sum(func(e Edge) bool {
		return e.Kind == "nvlink" && (e.A == a && e.B == b || e.A == b && e.B == a)
	})
}

func (t *Topology) switched(gpu string) int64 {
	return t.sum(func(e Edge) bool {
		return e.Kind == "nvlink" && e.A == gpu && strings.HasPrefix(e.B, "nvswitch")
	})
}

func (t *Topology) sum(match func(Edge) bool) int64 {
	return lists.Sum(lists.Filter(t.Edges, match), func(e Edge) int64 { return e.BytesPerSecond })
}
