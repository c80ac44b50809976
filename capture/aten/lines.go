package aten

import (
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A line is a tensor of whole numbers that is known by its places: from + Σ by[i]·place[i]. A mask
// holds where such a sum is within bounds. Masks that programs compute of counted queries and keys
// are found so, for sequences of any length, where their elements would be too many.
type line struct {
	sizes []int64
	by    []float64 // for each axis
	from  float64
	mask  bool
	low   float64 // bounds of a mask
	high  float64
}

// even is a line of one number.
func even(sizes []int64, number float64, mask bool) *line {
	l := &line{sizes: sizes, by: make([]float64, len(sizes)), from: number, mask: mask}
	if mask {
		l.low, l.high = 1, 1
	}
	return l
}

// ends are the least and the largest number of a line.
func (l *line) ends() (low, high float64) {
	low, high = l.from, l.from
	for i, by := range l.by {
		end := by * float64(l.sizes[i]-1)
		low, high = low+math.Min(end, 0), high+math.Max(end, 0)
	}
	return low, high
}

// number gives the one number of a line, 0 or 1 for a mask.
func (l *line) number() (float64, bool) {
	low, high := l.ends()
	switch {
	case !l.mask:
		return low, low == high
	case low >= l.low && high <= l.high:
		return 1, true
	case low > l.high || high < l.low || l.low > l.high:
		return 0, true
	}
	return 0, false
}

// wide is a line broadcast to sizes.
func (l *line) wide(sizes []int64) *line {
	out := *l
	out.sizes, out.by = sizes, make([]float64, len(sizes))
	copy(out.by[len(sizes)-len(l.by):], l.by)
	return &out
}

// plus adds another line times a factor.
func (l *line) plus(o *line, times float64) *line {
	var sizes []int64
	for i := range max(len(l.sizes), len(o.sizes)) {
		size := int64(1)
		for _, list := range [][]int64{l.sizes, o.sizes} {
			if k := len(list) - 1 - i; k >= 0 && list[k] != 1 {
				size = list[k]
			}
		}
		sizes = slices.Insert(sizes, 0, size)
	}
	out := l.wide(sizes)
	for i, by := range o.wide(sizes).by {
		out.by[i] += by * times
	}
	out.from += o.from * times
	return out
}

// held is the mask of where a line compares with 0.
func (l *line) held(how string) *line {
	out := *l
	out.mask, out.low, out.high = true, math.Inf(-1), math.Inf(1)
	switch how {
	case "eq":
		out.low, out.high = 0, 0
	case "lt":
		out.high = -1
	case "le":
		out.high = 0
	case "gt":
		out.low = 1
	case "ge":
		out.low = 0
	default: // ne
		out.low, out.high = 0, 0
		if v, ok := out.number(); ok {
			return even(l.sizes, 1-v, true)
		}
		return nil
	}
	if v, ok := out.number(); ok {
		return even(l.sizes, v, true)
	}
	return &out
}

// both is where two masks hold; nil where they bound different sums.
func (l *line) both(o *line) *line {
	sizes := l.plus(o, 0).sizes
	for _, pair := range [][2]*line{{l, o}, {o, l}} {
		if v, ok := pair[0].number(); ok && v == 0 {
			return even(sizes, 0, true)
		} else if ok {
			return pair[1].wide(sizes)
		}
	}
	a, b := l.wide(sizes), o.wide(sizes)
	opposite := a.plus(b, 1)
	switch differ := a.plus(b, -1); {
	case !slices.ContainsFunc(differ.by, func(x float64) bool { return x != 0 }):
		a.low = math.Max(a.low, b.low+differ.from)
		a.high = math.Min(a.high, b.high+differ.from)
	case !slices.ContainsFunc(opposite.by, func(x float64) bool { return x != 0 }):
		a.low = math.Max(a.low, opposite.from-b.high)
		a.high = math.Min(a.high, opposite.from-b.low)
	default:
		return nil
	}
	if v, ok := a.number(); ok {
		return even(sizes, v, true)
	}
	return a
}

// sees gives what attention a mask [..., queries, keys] makes: every key that a query may see is as
// far from it in each row.
func (l *line) sees(how ir.Attention) (ir.Attention, bool) {
	rank := len(l.sizes)
	if v, ok := l.number(); ok {
		return how, v == 1
	}
	q, k := rank-2, rank-1
	if rank < 2 || l.sizes[q] != l.sizes[k] || l.by[k] != -l.by[q] || math.Abs(l.by[k]) != 1 ||
		slices.ContainsFunc(l.by[:q], func(x float64) bool { return x != 0 }) {
		return how, false
	}
	low, high := l.low-l.from, l.high-l.from // of keys behind queries
	if l.by[k] < 0 {
		low, high = -high, -low
	}
	window := 1 - low
	if high != 0 || window < 1 {
		return how, false
	}
	how.Causal = true
	if window < float64(l.sizes[k]) && (how.Window == 0 || int64(window) < how.Window) {
		how.Window = int64(window)
	}
	return how, true
}

// line gives what is known of an argument; nil if it depends on inputs.
func (n *node) line(name string) *line {
	a, _ := n.Arg(name)
	if ref, ok := a.(pt2.Ref); ok {
		return n.m.lines[n.graph][ref]
	}
	if v, ok := n.scalar(name); ok && v == math.Trunc(v) {
		return even(nil, v, false)
	}
	return nil
}

// lineOf follows the numbers of a node by the places of its arguments; nil if they are not known.
func (m *maker) lineOf(n *node) *line {
	value, ok := n.graph.Values[string(n.Outputs[0])]
	if m.own != nil || !ok || value.Type.Kind() == dtype.Float || len(n.Outputs) != 1 {
		return nil
	}
	mask, sizes := value.Type == dtype.Pred, n.out(0)
	name, _, _ := strings.Cut(strings.TrimPrefix(n.Target, "aten."), ".")
	switch name {
	case "arange":
		l := even(sizes, n.float("start", 0), false)
		l.by[0] = n.float("step", 1)
		return l
	case "ones", "new_ones", "ones_like":
		return even(sizes, 1, mask)
	case "zeros", "new_zeros", "zeros_like":
		return even(sizes, 0, mask)
	case "full", "new_full", "full_like":
		return even(sizes, n.float("fill_value", 0), mask)
	}
	x := n.line("self")
	if x == nil {
		return nil
	}
	return m.lineFrom(n, name, x, mask, sizes)
}

// lineFrom follows an operator of x.
func (m *maker) lineFrom(n *node, name string, x *line, mask bool, sizes []int64) *line {
	one, constant := x.number()
	switch name {
	case "eq", "ne", "lt", "le", "gt", "ge":
		if y := n.line("other"); y != nil && !x.mask && !y.mask {
			return x.plus(y, -1).held(name)
		}
	case "add", "sub":
		sign := map[string]float64{"add": 1, "sub": -1}[name]
		if y := n.line("other"); y != nil && !x.mask && !y.mask && n.float("alpha", 1) == 1 {
			return x.plus(y, sign)
		}
	case "__and__", "bitwise_and", "logical_and":
		if y := n.line("other"); y != nil && x.mask && y.mask {
			return x.both(y)
		}
	case "to", "_to_copy", "clone", "alias", "contiguous", "detach":
		if x.mask == mask {
			return x
		}
	case "cumsum":
		if i := (&tensor{axes: make([]axis, len(sizes))}).at(n.int("dim", 0)); constant {
			l := even(sizes, one, false)
			l.by[i] = one
			return l
		}
	case "index":
		if constant {
			return even(sizes, one, mask)
		}
	case "diff":
		return m.lineOfDiff(n, x, sizes)
	case "expand":
		return x.wide(sizes)
	case "unsqueeze":
		i := n.int("dim", 0)
		if i < 0 {
			i += int64(len(sizes))
		}
		out := *x
		out.sizes, out.by = sizes, slices.Insert(slices.Clone(x.by), int(i), 0)
		return &out
	case "slice":
		i := (&tensor{axes: make([]axis, len(sizes))}).at(n.int("dim", 0))
		from, _ := bounds(n, x.sizes[i])
		out := *x
		out.sizes, out.by = sizes, slices.Clone(x.by)
		out.from += out.by[i] * float64(from)
		out.by[i] *= float64(n.int("step", 1))
		return &out
	}
	return nil
}

// lineOfDiff follows differences along an axis, with one element or none before the first, which
// goes on in the same steps.
func (m *maker) lineOfDiff(n *node, x *line, sizes []int64) *line {
	i := (&tensor{axes: make([]axis, len(sizes))}).at(n.int("dim", -1))
	if x.mask || n.int("n", 1) != 1 || n.has("append") {
		return nil
	}
	if n.has("prepend") {
		before := n.line("prepend")
		if before == nil || before.mask || before.sizes[i] != 1 {
			return nil
		}
		first := *x
		first.by = slices.Clone(x.by)
		first.by[i] = 0
		step := first.plus(before, -1)
		if v, ok := step.number(); !ok || v != x.by[i] {
			return nil
		}
	}
	return even(sizes, x.by[i], false)
}

// follow keeps the line of a node. A change in place makes what was known of views uncertain: none
// is followed from there on.
func (m *maker) follow(n *node, change bool) *line {
	if change {
		if self, ok := selfOf(n.Node); ok && m.lines[n.graph][self] != nil {
			m.lines, m.unsure = nil, true
		}
		return nil
	}
	if m.unsure {
		return nil
	}
	l := m.lineOf(n)
	if l == nil || !slices.Equal(l.sizes, n.out(0)) {
		return nil
	}
	for i, size := range l.sizes {
		if size == 1 && l.by[i] != 0 { // it may be broadcast
			l.by = slices.Clone(l.by)
			l.by[i] = 0
		}
	}
	if m.lines == nil {
		m.lines = map[*pt2.Graph]map[pt2.Ref]*line{}
	}
	if m.lines[n.graph] == nil {
		m.lines[n.graph] = map[pt2.Ref]*line{}
	}
	m.lines[n.graph][n.Outputs[0]] = l
	return l
}

// followed is a tensor of which the line alone is known.
func followed(l *line) *tensor {
	t := &tensor{line: true}
	for _, size := range l.sizes {
		t.axes = append(t.axes, axis{size: size})
	}
	return t
}
