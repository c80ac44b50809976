package spmd

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Traffic is the volume of the collectives of one kind along the same mesh axes, in one run of a
// graph.
type Traffic struct {
	Kind  hlo.Kind  `json:"kind"`
	Axes  []string  `json:"axes"`
	Group hlo.Group `json:"group"`
	// Count is the number of tensors that one device sends. Bytes is the sum of their full sizes: the
	// result of an all-gather, the argument of a reduce-scatter.
	Count int64 `json:"count"`
	Bytes int64 `json:"bytes"`
	// Redundant and RedundantBytes are the share that XLA:GPU may remove. Backward loops repeat
	// gathers, moves of a ring and exchanges of the weights of rows, of forward loops; collective
	// pipelining peels one iteration of each, and CSE may merge the peeled pair. Reductions of
	// replicated statistics may be rewritten as multiplications, and single numbers added before they
	// are reduced.
	Redundant      int64 `json:"twice,omitempty"`
	RedundantBytes int64 `json:"twice_bytes,omitempty"`

	// single and singleBytes are the share of it that loops of one iteration repeat, which every XLA
	// unrolls.
	single, singleBytes int64
}

// A Census is the traffic of a graph, sorted by kind and axes.
type Census []Traffic

// CensusOf counts the collectives of a graph, loops multiplied out. It reads only the graph:
// compiled programs are compared with it.
func CensusOf(g *ir.Graph) Census {
	c := censusTaker{mesh: g.Mesh, rows: map[string]*Traffic{}, sent: map[sent]bool{},
		alias: map[*ir.Value]*ir.Value{}, stacked: map[*ir.Value]bool{},
		numbers: map[*ir.Value]*ir.Send{}}
	c.graph(g, 1, false)
	var list Census
	for _, row := range c.rows {
		list = append(list, *row)
	}
	lists.Sort(list, func(a, b Traffic) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), slices.Compare(a.Axes, b.Axes))
	})
	return list
}

// Diff compares the collectives of a compiled program with the census: the same kinds in the same
// groups, as many tensors and bytes, less at most the redundant ones. The error names the first
// difference. XLA:GPU may combine all-reduces, whose counts are therefore not compared. XLA:CPU
// reduces bf16 in f32, so there sums are compared only if their type, sums, is f32.
func (c Census) Diff(compiled []hlo.Collective, cpu bool, sums dtype.DType) error {
	type meeting struct {
		kind  hlo.Kind
		group hlo.Group
	}
	type volume struct{ count, bytes int64 }
	got, want := map[meeting]volume{}, map[meeting]volume{}
	redundant := map[meeting]volume{}
	for _, x := range compiled {
		k := meeting{x.Kind, x.Group}
		got[k] = volume{got[k].count + x.Count, got[k].bytes + x.Count*x.Bytes()}
	}
	for _, row := range c {
		k := meeting{row.Kind, row.Group}
		want[k] = volume{want[k].count + row.Count, want[k].bytes + row.Bytes}
		more := volume{row.Redundant, row.RedundantBytes}
		if cpu {
			more = volume{row.single, row.singleBytes}
		}
		redundant[k] = volume{redundant[k].count + more.count, redundant[k].bytes + more.bytes}
	}
	var lines []string
	for _, k := range slices.Concat(slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got))) {
		g, w := got[k], want[k]
		less := volume{w.count - g.count, w.bytes - g.bytes}
		if r := redundant[k]; less.bytes > 0 &&
			(less.bytes == r.bytes && k.kind == hlo.AllReduce ||
				less.bytes <= r.bytes && less.count > 0 && less.count <= r.count) {
			continue // combined all-reduces lose all redundant bytes; their counts say nothing
		}
		sum := k.kind == hlo.AllReduce || k.kind == hlo.ReduceScatter
		if k.kind == hlo.AllReduce && !cpu {
			g.count = w.count
		}
		if g != w && (!sum || !cpu || sums == dtype.F32) {
			lines = append(lines, fmt.Sprintf("%s in %s: %d tensors, %d bytes; the graph has %d, %d",
				k.kind, k.group, got[k].count, g.bytes, w.count, w.bytes))
		}
	}
	slices.Sort(lines) // maps have no order
	if len(lines) == 0 {
		return nil
	}
	return errors.New(lines[0])
}

// A censusTaker walks a graph and adds its collectives up by kind and axes.
type censusTaker struct {
	mesh  []ir.Axis
	rows  map[string]*Traffic
	sent  map[sent]bool           // gathered values, and keys and values sent around a ring
	alias map[*ir.Value]*ir.Value // values that are others: XLA inlines loops of one iteration
	// inputs of loop bodies that are slices of stacks: parameters, and what a forward loop saved
	stacked map[*ir.Value]bool
	numbers map[*ir.Value]*ir.Send // single numbers that were all-reduced
}

// A sent is a value that was sent, gathered along some axes before.
type sent struct {
	of    *ir.Value
	along string
}

// graph counts a graph's collectives, times iterations each; back marks the body of a backward
// loop.
func (c *censusTaker) graph(g *ir.Graph, times int64, back bool) {
	for _, op := range g.Ops {
		switch op.Kind {
		case "repeat":
			l := op.Loop()
			if l.N == 1 {
				c.rename(op.Body.Inputs, op.In)
			}
			for i, v := range op.Body.Inputs {
				c.stacked[v] = l.IsStack(i)
			}
			c.graph(op.Body, times*l.N, l.Reverse)
			if l.N == 1 {
				c.rename(op.Out, op.Body.Results)
			}
		default:
			for _, send := range g.Work(op).Sends {
				c.send(g, op, send, times, back)
			}
			c.reassociate(g, op, times)
		}
	}
}

// kindsOf maps the graph's kinds of collectives to XLA's.
var kindsOf = map[string]hlo.Kind{"all_reduce": hlo.AllReduce, "all_gather": hlo.AllGather,
	"reduce_scatter": hlo.ReduceScatter, "all_to_all": hlo.AllToAll,
	ir.Permute: hlo.CollectivePermute}

// send counts one operation's collective, unless XLA reuses an identical earlier one.
func (c *censusTaker) send(g *ir.Graph, op *ir.Op, s ir.Send, times int64, back bool) {
	gathers := s.Kind == "all_gather"
	of, along := source(s.Of)
	known := !gathers || op.Tag == ir.Gather && c.alias[of] != nil
	if of != nil && known && c.again(of, along) {
		return
	}
	c.count(kindsOf[s.Kind], s.Axes, times*s.Count, s.Bytes)
	redundant := int64(0)
	switch {
	case (gathers || s.Kind == ir.Permute) && back && of != nil && of.Role == ir.Residual:
		redundant = s.Count
		if row := c.rows[key(kindsOf[s.Kind], s.Axes)]; gathers && times == 1 {
			row.single, row.singleBytes = row.single+s.Count, row.singleBytes+s.Count*s.Bytes
		}
	case op.Kind == "all_to_all" && back && c.saved(op.In[0]):
		redundant = s.Count
	case op.Kind == "join_stats" && replicated(g, op, s.Axes):
		redundant = times * s.Count
	default:
		return
	}
	row := c.rows[key(kindsOf[s.Kind], s.Axes)]
	row.Redundant, row.RedundantBytes = row.Redundant+redundant, row.RedundantBytes+redundant*s.Bytes
}

// reassociate marks sums of two numbers that were all-reduced along the same axes: XLA:GPU adds
// them first, and reduces once. They are squares of gradients, of stacks of one layer.
func (c *censusTaker) reassociate(g *ir.Graph, op *ir.Op, times int64) {
	if len(op.Out) != 1 || op.Out[0].Type.Shape().Elements() != 1 {
		return
	}
	out := op.Out[0]
	switch op.Kind {
	case "all_reduce":
		if sends := g.Work(op).Sends; len(sends) == 1 {
			c.numbers[out] = &sends[0]
		}
	case "sum":
		if of := op.In[0]; of.Type.Shape().Elements() == 1 {
			c.numbers[out] = c.numbers[of]
		}
	case "add":
		x, y := c.numbers[op.In[0]], c.numbers[op.In[1]]
		if x == nil || y == nil || !slices.Equal(x.Axes, y.Axes) {
			return
		}
		c.numbers[out] = x
		row := c.rows[key(hlo.AllReduce, x.Axes)]
		row.Redundant, row.RedundantBytes = row.Redundant+times, row.RedundantBytes+times*x.Bytes
	}
}

// saved reports whether a value is what the forward pass saved, but for its type and order.
func (c *censusTaker) saved(v *ir.Value) bool {
	for v.Def() != nil && (v.Def().Kind == "convert" || v.Def().Kind == "dispatch") {
		v = v.Def().In[0]
	}
	return c.stacked[v]
}

// replicated reports whether the devices along some axes compute statistics of the same bytes,
// because they gathered them, or what they quantize, along just these axes.
func replicated(g *ir.Graph, join *ir.Op, axes []string) bool {
	var same func(v *ir.Value) bool
	same = func(v *ir.Value) bool {
		if v.Def() == nil {
			return false
		}
		if sends := g.Work(v.Def()).Sends; len(sends) > 0 {
			return len(sends) == 1 && sends[0].Kind == "all_gather" && slices.Equal(sends[0].Axes, axes)
		}
		return !slices.ContainsFunc(v.Def().In, func(x *ir.Value) bool { return !same(x) })
	}
	return join.In[0].Def() != nil && same(join.In[0])
}

// rename records that values are aliases of others, following aliases of aliases.
func (c *censusTaker) rename(values, others []*ir.Value) {
	for i, v := range values {
		c.alias[v] = others[i]
		if a := c.alias[others[i]]; a != nil {
			c.alias[v] = a
		}
	}
}

// source is the value that others were gathered from, one axis after another, and the axes: of
// parameters that are sharded along several.
func source(v *ir.Value) (of *ir.Value, along string) {
	for v != nil && v.Def() != nil && v.Def().Kind == "all_gather" {
		v, along = v.Def().In[0], v.Def().Attrs.Text("axis")+" "+along
	}
	return v, along
}

// again reports whether a value was sent before, and records it: XLA's CSE leaves one collective.
func (c *censusTaker) again(v *ir.Value, along string) bool {
	if a := c.alias[v]; a != nil {
		v = a
	}
	one := sent{v, along}
	was := c.sent[one]
	c.sent[one] = true
	return was
}

// key identifies a row of the census.
func key(kind hlo.Kind, axes []string) string {
	return string(kind) + " " + strings.Join(axes, " ")
}

// count adds a collective that moves bytes, times per run of the graph.
func (c *censusTaker) count(kind hlo.Kind, axes []string, times, bytes int64) {
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

// groupOf describes the replica groups along axes in the terms of hlo.Group: count, size and stride
// of device numbers; stride 0 if the members are not evenly spaced.
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
