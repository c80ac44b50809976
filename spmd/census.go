package spmd

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/ir"
)

// A Traffic is what the collectives of one kind along the same axes move in one run of a graph.
type Traffic struct {
	Kind  hlo.Kind  `json:"kind"`
	Axes  []string  `json:"axes"`
	Group hlo.Group `json:"group"`
	// Count is the number of tensors that one device sends, and Bytes their sizes added up, each as a
	// group sees the whole of it: the result of a gather, the argument of a scatter.
	Count int64 `json:"count"`
	Bytes int64 `json:"bytes"`
	// Twice and TwiceBytes are those among them that XLA:GPU may find out to be needless. Those that
	// a loop back makes of what a loop forward gathered already, in one round: a compiler that takes
	// the last round of the one and the first of the other out of their loops, to fetch ahead, finds
	// that they are the same. And sums of what all devices have copies of: those are products.
	Twice      int64 `json:"twice,omitempty"`
	TwiceBytes int64 `json:"twice_bytes,omitempty"`
}

// Census counts the collectives of a graph, with loops multiplied out. Nothing but the graph is
// asked: what a compiled program does is held to it.
func Census(g *ir.Graph) []Traffic {
	c := census{mesh: g.Mesh, rows: map[string]*Traffic{}, sent: map[*ir.Value]bool{},
		alias: map[*ir.Value]*ir.Value{}}
	c.graph(g, 1, false)
	var list []Traffic
	for _, row := range c.rows {
		list = append(list, *row)
	}
	slices.SortFunc(list, func(a, b Traffic) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), slices.Compare(a.Axes, b.Axes))
	})
	return list
}

// Sends holds what a compiled program sends to a census: the same kinds along the same groups, as
// many tensors, as many bytes, or less by some of what is gathered twice. It gives the first
// difference in words, or "". XLA:GPU may join the arguments of an all-reduce, which are then held
// to their bytes alone; XLA:CPU widens sums of bf16, which are not held to anything there.
func Sends(list []Traffic, compiled []hlo.Collective, cpu bool, sums dtype.DType) string {
	type meeting struct {
		kind  hlo.Kind
		group hlo.Group
	}
	type volume struct{ count, bytes int64 }
	got, want, twice := map[meeting]volume{}, map[meeting]volume{}, map[meeting]volume{}
	for _, c := range compiled {
		k := meeting{c.Kind, c.Group}
		got[k] = volume{got[k].count + c.Count, got[k].bytes + c.Count*c.Bytes()}
	}
	for _, c := range list {
		k := meeting{c.Kind, c.Group}
		want[k] = volume{want[k].count + c.Count, want[k].bytes + c.Bytes}
		twice[k] = volume{twice[k].count + c.Twice, twice[k].bytes + c.TwiceBytes}
	}
	var lines []string
	for _, k := range slices.Concat(slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got))) {
		g, w := got[k], want[k]
		less := volume{w.count - g.count, w.bytes - g.bytes}
		if t := twice[k]; !cpu && less.bytes > 0 && (less.bytes == t.bytes && k.kind == hlo.AllReduce ||
			less.bytes <= t.bytes && less.count > 0 && less.count <= t.count) {
			continue // of all-reduces all that are needless, however they were joined
		}
		sum := k.kind == hlo.AllReduce || k.kind == hlo.ReduceScatter
		if k.kind == hlo.AllReduce && !cpu {
			g.count = w.count
		}
		if g != w && (!sum || !cpu || sums == dtype.F32) {
			lines = append(lines, fmt.Sprintf("%s in %s: %d tensors, %d bytes; the graph has %d, %d", k.kind,
				k.group, got[k].count, g.bytes, w.count, w.bytes))
		}
	}
	slices.Sort(lines) // maps have no order
	if len(lines) == 0 {
		return ""
	}
	return lines[0]
}

type census struct {
	mesh  []ir.Axis
	rows  map[string]*Traffic
	sent  map[*ir.Value]bool      // what was gathered, and keys and values that a ring handed on
	alias map[*ir.Value]*ir.Value // what is another: loops of one round are none to XLA
}

// graph counts; back says that the graph is the body of a loop that goes back.
func (c *census) graph(g *ir.Graph, times int64, back bool) {
	for _, op := range g.Ops {
		switch op.Kind {
		case "repeat":
			l := op.Loop()
			if l.N == 1 {
				c.rename(op.Body.Inputs, op.In)
			}
			c.graph(op.Body, times*l.N, l.Reverse)
			if l.N == 1 {
				c.rename(op.Out, op.Body.Results)
			}
		default:
			for _, send := range g.Work(op).Sends {
				c.send(g, op, send, times, back)
			}
		}
	}
}

// kindsOf gives the words of compiled programs for those of graphs.
var kindsOf = map[string]hlo.Kind{"all_reduce": hlo.AllReduce, "all_gather": hlo.AllGather,
	"reduce_scatter": hlo.ReduceScatter, ir.Permute: hlo.CollectivePermute}

// send counts what an operation sends, unless XLA finds that it was sent before.
func (c *census) send(g *ir.Graph, op *ir.Op, s ir.Send, times int64, back bool) {
	gathers := s.Kind == "all_gather"
	known := !gathers || op.Tag == ir.Gather && c.alias[s.Of] != nil
	if s.Of != nil && known && c.again(s.Of) {
		return
	}
	c.count(kindsOf[s.Kind], s.Axes, times*s.Count, s.Bytes)
	needless := int64(0)
	switch {
	case gathers && back && s.Of.Role == ir.Residual:
		needless = 1
	case op.Kind == "join_stats" && replicated(g, op, s.Axes):
		needless = times * s.Count
	default:
		return
	}
	row := c.rows[key(kindsOf[s.Kind], s.Axes)]
	row.Twice, row.TwiceBytes = row.Twice+needless, row.TwiceBytes+needless*s.Bytes
}

// replicated tells whether all devices along some axes report on the same bytes, having gathered
// them.
func replicated(g *ir.Graph, join *ir.Op, axes []string) bool {
	stats := join.In[0].Def()
	return stats != nil && !slices.ContainsFunc(stats.In, func(v *ir.Value) bool {
		if v.Def() == nil {
			return true
		}
		sends := g.Work(v.Def()).Sends
		return len(sends) != 1 || sends[0].Kind != "all_gather" || !slices.Equal(sends[0].Axes, axes)
	})
}

// rename says what values are.
func (c *census) rename(values, others []*ir.Value) {
	for i, v := range values {
		c.alias[v] = others[i]
		if a := c.alias[others[i]]; a != nil {
			c.alias[v] = a
		}
	}
}

// again tells whether a value was sent before: XLA finds that who asks again has it.
func (c *census) again(v *ir.Value) bool {
	if a := c.alias[v]; a != nil {
		v = a
	}
	was := c.sent[v]
	c.sent[v] = true
	return was
}

// key tells rows apart.
func key(kind hlo.Kind, axes []string) string {
	return string(kind) + " " + strings.Join(axes, " ")
}

func (c *census) count(kind hlo.Kind, axes []string, times, bytes int64) {
	key := key(kind, axes)
	if c.rows[key] == nil {
		c.rows[key] = &Traffic{Kind: kind, Axes: axes, Group: groupOf(c.mesh, axes)}
		if kind == hlo.CollectivePermute { // every device sends to one
			c.rows[key].Group = hlo.Group{Pairs: ir.Devices(c.mesh)}
		}
	}
	c.rows[key].Count += times
	c.rows[key].Bytes += times * bytes
}

// groupOf describes the groups of devices that meet along axes as the reader of compiled programs
// does.
func groupOf(mesh []ir.Axis, axes []string) hlo.Group {
	g := hlo.Group{Count: 1, Size: 1}
	stride, next := int64(1), int64(0)
	for _, a := range slices.Backward(mesh) {
		if !slices.Contains(axes, a.Name) {
			g.Count *= a.Size
		} else {
			switch {
			case g.Size == 1:
				g.Stride = stride
			case stride != next: // a gap between the axes
				g.Stride = 0
			}
			g.Size *= a.Size
			next = stride * a.Size
		}
		stride *= a.Size
	}
	return g
}
