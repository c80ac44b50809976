package aten

import (
	"fmt"
	"math/bits"
	"slices"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// indexRules read and write elements by their numbers, and fill.
var indexRules = map[string]rule{
	"aten.gather.default": sole(gather),
	"aten.scatter.value": sole(func(m *maker, n *node) *tensor {
		base, where := n.value("self"), n.value("index")
		by := like(m.b, base.v, n.float("value", 0))
		src := m.alike(where, 0).with(by)
		return m.scatter(base, where, src, base.at(n.int("dim", -1)), false)
	}),
	"aten.scatter.src": sole(func(m *maker, n *node) *tensor {
		base := n.value("self")
		return m.scatter(base, n.value("index"), n.value("src"), base.at(n.int("dim", -1)), false)
	}),
	"aten.scatter_add.default": sole(func(m *maker, n *node) *tensor {
		base := n.value("self")
		return m.scatter(base, n.value("index"), n.value("src"), base.at(n.int("dim", -1)), true)
	}),
	"aten.index_fill.int_Scalar": sole(func(m *maker, n *node) *tensor {
		base := n.value("self")
		i := base.at(n.int("dim", 0))
		where := n.value("index")
		each := m.tensor(like(m.b, base.v, 0), nil, axis{size: where.axes[0].size})
		_, hits := m.scattered(each, where, 0, base.axes[i].size, true)
		return m.putWhere(base, m.tensor(like(m.b, base.v, n.float("value", 0)), nil), hits, i)
	}),
	"aten.index_copy.default": sole(func(m *maker, n *node) *tensor {
		base := n.value("self")
		i := base.at(n.int("dim", 0))
		sum, hits := m.scattered(n.value("source"), n.value("index"), i, base.axes[i].size, false)
		return m.putWhere(base, sum, hits, i)
	}),
	"aten.copy.default": sole(func(m *maker, n *node) *tensor {
		return m.expanded(n.tensor("src"), n.tensor("self").sizes())
	}),
	"aten.fill.Scalar": sole(func(m *maker, n *node) *tensor {
		return m.alike(n.tensor("self"), n.float("value", 0))
	}),
	"aten.zero.default": sole(func(m *maker, n *node) *tensor {
		return m.alike(n.tensor("self"), 0)
	}),
	"aten.index.Tensor": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		a, _ := n.Arg("indices")
		if list, _ := a.([]pt2.Ref); len(refs(list)) > 1 {
			return m.rowsOf(x, n, list)
		}
		i, where := n.indices("indices")
		return m.rows(x, where, i)
	}),
	"aten.index_select.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		return m.rows(x, n.tensor("index"), x.at(n.int("dim", 0)))
	}),
	"aten.index_add.default": sole(func(m *maker, n *node) *tensor {
		base, part := n.value("self"), m.scaled(n.value("source"), n.float("alpha", 1))
		i := base.at(n.int("dim", 0))
		sum, _ := m.scattered(part, n.value("index"), i, base.axes[i].size, true)
		return m.binary(base, sum, m.b.Add)
	}),
	"aten.index_put.default": sole(indexPut),
}

// alike is a tensor of one number with the sizes of another.
func (m *maker) alike(x *tensor, by float64) *tensor {
	axes := make([]axis, len(x.axes))
	for i, size := range x.sizes() {
		axes[i].size = size
	}
	elem := m.elem(x.elem)
	if x.v != nil {
		elem = x.v.Type.Elem
	}
	return m.tensor(m.b.Fill(ir.Type{Elem: elem}, by), nil, axes...)
}

// indices gives the one tensor of a list that indexes, and its axis.
func (n *node) indices(name string) (int, *tensor) {
	a, _ := n.Arg(name)
	list, _ := a.([]pt2.Ref)
	at := slices.IndexFunc(list, func(r pt2.Ref) bool { return r != "" })
	if at < 0 || slices.ContainsFunc(list[at+1:], func(r pt2.Ref) bool { return r != "" }) {
		panic(refusal("an index of several tensors"))
	}
	return at, n.m.value(n.graph, list[at])
}

// rows takes the places of axis i that numbers name: the axes of these are put in its place.
func (m *maker) rows(x, where *tensor, i int) *tensor {
	where = m.real(where)
	if where.v.Type.Elem == dtype.Pred {
		panic(refusal("an index by a mask, whose result has no fixed size"))
	}
	size, rank := x.axes[i].size, len(x.axes)
	where = m.counted(where, size)
	order := []int{i}
	for k := range rank {
		if k != i {
			order = append(order, k)
		}
	}
	x = m.permuted(x, order)
	rest := x.sizes()[1:]
	flat := int64(1)
	for _, n := range rest {
		flat *= n
	}
	table := m.whole(m.whole(m.viewed(x, []int64{size, flat}), 0), 1)
	v := m.b.Embedding(where.v, m.b.Transpose(table.v, m.names(table.dims())...))
	out := m.tensor(v, where.hidden, append(slices.Clone(where.axes), table.axes[1])...)
	out = m.viewed(out, slices.Concat(where.sizes(), rest))
	n := len(where.axes)
	back := make([]int, 0, n+rank-1) // the axes before i, the numbers', the axes behind i
	for k := range i {
		back = append(back, n+k)
	}
	for k := range n {
		back = append(back, k)
	}
	for k := i; k < rank-1; k++ {
		back = append(back, n+k)
	}
	return m.permuted(out, back)
}

// counted gives numbers that count from the end as numbers that count from the front.
func (m *maker) counted(where *tensor, size int64) *tensor {
	zero := m.b.Fill(ir.Type{Elem: where.v.Type.Elem}, 0)
	all := m.b.Fill(ir.Type{Elem: where.v.Type.Elem}, float64(size))
	return where.with(m.b.Select(m.b.Compare("lt", where.v, zero), m.b.Add(where.v, all), where.v))
}

// scattered adds up, in an axis of another size, the places of axis i of x that numbers [n] name,
// or takes the last of them; hits counts how many came to each place.
func (m *maker) scattered(x, where *tensor, i int, size int64, add bool) (sum, hits *tensor) {
	if len(where.axes) != 1 || where.v.Type.Elem == dtype.Pred {
		panic(refusal("an index that is no list of numbers"))
	}
	where = m.counted(where, size)
	x, where = m.match(m.whole(x, i), m.whole(where, 0), i, 0)
	if len(x.axes[i].dims) != 1 || len(where.axes[0].dims) != 1 {
		x, where = m.match(m.whole(x, i), m.whole(where, 0), i, 0)
	}
	d := x.axes[i].dims[0]
	x = m.ordered(x, []dim{d})
	places := where.v
	if !add {
		x = x.with(m.lastAlone(x.v, m.lastHits(places, m.name(d), size)))
	}
	for _, other := range slices.Backward(ir.Without(x.v.Type.Dims, m.name(d))) {
		places = m.b.Broadcast(places, 0, other)
	}
	count := where.with(m.b.Scatter(ones(m.b, where.v), where.v, m.name(d), size))
	sum = m.resized(x, m.b.Scatter(x.v, places, m.name(d), size), i, size, "into")
	hits = m.resized(count, count.v, 0, size, "hits")
	sum, hits = m.match(sum, hits, i, 0)
	return sum, hits
}

// ones has a 1 for each number. It is computed of them, so that it is sharded as they are.
func ones(b *ir.Builder, places *ir.Value) *ir.Value {
	return b.Shift(b.Scale(b.Convert(places, dtype.F32), 0), 1)
}

// lastHits is a mask of the numbers along a dimension, their last, that no later one is equal to.
// Bit by bit from the highest, what stands at a place without the bit gives way to what has it.
func (m *maker) lastHits(places *ir.Value, d string, size int64) *ir.Value {
	b, n := m.b, places.Type.Size(d)
	line := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: d, Size: n}}}
	left := ones(b, places)
	for bit := bits.Len64(uint64(n-1)) - 1; bit >= 0; bit-- {
		half := b.Div(b.Iota(line, d), b.Fill(line, float64(int64(1)<<bit)))
		odd := b.Sub(half, b.Scale(b.Div(half, b.Fill(line, 2)), 2))
		high := b.Mul(left, b.Convert(odd, dtype.F32))
		some := b.Gather(b.Scatter(high, places, d, size), places, d)
		left = b.Select(b.Compare("gt", some, like(b, some, 0)), high, left)
	}
	return b.Compare("gt", left, like(b, left, 0))
}

// lastAlone has 0 where a mask does not hold. Gradients flow there as well: torch gives all that
// came to a place the gradient of the place.
func (m *maker) lastAlone(x, last *ir.Value) *ir.Value {
	b, zero := m.b, m.b.Fill(x.Type, 0)
	if x.Type.Elem.Kind() != dtype.Float {
		return b.Select(last, x, zero)
	}
	nothing := b.Select(finite(b, x), b.Sub(x, b.StopGradient(x)), zero)
	return b.Select(last, x, nothing)
}

// indexPut replaces places that numbers name, or adds to them, or replaces by one number where a
// mask holds. Of a place that is named twice the last value stays, as in torch on one thread.
func indexPut(m *maker, n *node) *tensor {
	base, value := n.value("self"), n.value("values")
	i, where := n.indices("indices")
	where = m.real(where)
	add := n.bool("accumulate", false)
	if where.v.Type.Elem == dtype.Pred {
		if i != 0 || len(value.dims()) > 0 || add {
			panic(refusal("a list of numbers put where a mask holds"))
		}
		value = m.alike(base, 0).with(value.v)
		sizes := where.sizes()
		for len(sizes) < len(base.axes) {
			sizes = append(sizes, 1)
		}
		return m.choose(m.viewed(where, sizes), value, base)
	}
	if len(where.axes) != 1 {
		panic(refusal("an index that is no list of numbers"))
	}
	sizes := base.sizes()
	sizes[i] = where.axes[0].size
	sum, hits := m.scattered(m.expanded(value, sizes), where, i, base.axes[i].size, add)
	if add {
		return m.binary(base, sum, m.b.Add)
	}
	return m.putWhere(base, sum, hits, i)
}

// putWhere replaces the places of axis i that were hit.
func (m *maker) putWhere(base, by, hits *tensor, i int) *tensor {
	mask := hits.with(m.b.Compare("gt", hits.v, m.b.Fill(ir.Type{Elem: dtype.F32}, 0)))
	for k := i + 1; k < len(base.axes); k++ {
		mask.axes = append(slices.Clone(mask.axes), axis{size: 1})
	}
	return m.choose(mask, by, base)
}

// scatter puts the elements of src to the places of axis i that numbers name, the last to a place,
// or adds them. One number in place of src is put wherever something comes.
func (m *maker) scatter(base, where, src *tensor, i int, add bool) *tensor {
	if last := len(base.axes) - 1; i != last {
		order := swapped(len(base.axes), i, last)
		out := m.scatter(m.permuted(base, order), m.permuted(where, order), m.permuted(src, order), last,
			add)
		return m.permuted(out, order)
	}
	for k := range base.axes {
		if n := where.axes[k].size; n < src.axes[k].size {
			src = m.sliced(src, k, 0, n, 1, fmt.Sprint("src", k))
		}
	}
	value := src.v
	for k := range base.axes {
		where, src = m.some(where, k), m.some(src, k)
	}
	where, src = m.whole(where, i), m.whole(src, i)
	for k := range base.axes {
		where, src = m.match(where, src, k, k)
	}
	d := where.axes[i].dims[0]
	order := m.names(where.dims())
	places := m.b.Transpose(where.v, order...)
	one := ones(m.b, places)
	size := base.axes[i].size
	hits := m.b.Scatter(one, places, m.name(d), size)
	hit := m.lengthened(m.resized(where, hits, i, size, "into"), base)
	mask := hit.with(m.b.Compare("gt", hit.v, like(m.b, hit.v, 0)))
	if len(value.Type.Dims) == 0 && !add {
		return m.choose(mask, m.tensor(value, nil), base)
	}
	parts := m.b.Transpose(m.spread(src, where.dims()).v, order...)
	if !add {
		parts = m.lastAlone(parts, m.lastHits(places, m.name(d), size))
	}
	sum := m.b.Scatter(parts, places, m.name(d), size)
	into := m.lengthened(m.resized(where, sum, i, size, "into"), base)
	if add {
		return m.binary(base, into, m.b.Add)
	}
	return m.choose(mask, into, base)
}

// lengthened has zeros behind its elements along axes that another has longer.
func (m *maker) lengthened(x, to *tensor) *tensor {
	for k, a := range to.axes {
		if n := x.axes[k].size; n < a.size {
			x = m.whole(x, k)
			v := m.b.Pad(x.v, m.name(x.axes[k].dims[0]), 0, a.size-n)
			x = m.resized(x, v, k, a.size, fmt.Sprint("longer", k))
		}
	}
	return x
}

// rowsOf takes the places that numbers for several neighbouring axes name together: x[i, j].
func (m *maker) rowsOf(x *tensor, n *node, list []pt2.Ref) *tensor {
	at := slices.IndexFunc(list, func(r pt2.Ref) bool { return r != "" })
	rest := slices.Clone(list[at:])
	for len(rest) > 0 && rest[len(rest)-1] == "" {
		rest = rest[:len(rest)-1]
	}
	if slices.Contains(rest, "") {
		panic(refusal("an index of tensors for axes that are no neighbours"))
	}
	sizes := x.sizes()
	var place *tensor
	for k, ref := range rest {
		where := m.real(m.value(n.graph, ref))
		if where.v.Type.Elem == dtype.Pred {
			panic(refusal("an index by a mask, whose result has no fixed size"))
		}
		size := sizes[at+k]
		if where = m.counted(where, size); place == nil {
			place = where
			continue
		}
		place = m.binary(m.scaled(place, float64(size)), where, m.b.Add)
	}
	flat := elementsOf(x, lastAxes(&tensor{axes: x.axes[:at+len(rest)]}, len(rest)))
	for k := range rest {
		x = m.whole(x, at+k)
	}
	x = m.viewed(x, slices.Concat(sizes[:at], []int64{flat}, sizes[at+len(rest):]))
	return m.rows(x, place, at)
}

// gather picks along an axis by numbers.
func gather(m *maker, n *node) *tensor {
	x, where := n.tensor("self"), n.tensor("index")
	i := x.at(n.int("dim", 0))
	if x.known != nil && repeats(x.known, x.axes[i].size, strides(x.sizes())[i]) {
		// Whatever is picked is the same.
		return m.expanded(m.sliced(x, i, 0, 1, 1, ""), where.sizes())
	}
	x, where = m.real(x), m.real(where)
	if last := len(x.axes) - 1; i != last {
		order := swapped(len(x.axes), i, last)
		return m.permuted(m.gathered(m.permuted(x, order), m.permuted(where, order)), order)
	}
	return m.gathered(x, where)
}

// swapped is the order of axes in which two have changed places.
func swapped(rank, i, j int) []int {
	order := make([]int, rank)
	for k := range order {
		order[k] = k
	}
	order[i], order[j] = j, i
	return order
}

// gathered picks along the last axis. Numbers that are fewer along another pick from its beginning.
func (m *maker) gathered(x, where *tensor) *tensor {
	i := len(x.axes) - 1
	for k := range i {
		if n := where.axes[k].size; n < x.axes[k].size {
			x = m.sliced(x, k, 0, n, 1, fmt.Sprint("rows", k))
		}
	}
	x, where = m.whole(x, i), m.whole(where, i)
	for k := range i {
		x, where = m.match(m.some(x, k), m.some(where, k), k, k)
	}
	along, own := x.axes[i].dims[0], where.axes[i].dims[0]
	rows, _ := union(&tensor{axes: x.axes[:i]})
	order := append(m.names(rows), m.name(along))
	places := where.v
	if m.name(own) != m.name(along) {
		places = m.b.Rename(places, m.name(own), m.name(along))
	}
	v := m.b.Gather(m.b.Transpose(x.v, order...), m.b.Transpose(places, order...), m.name(along))
	if m.name(own) != m.name(along) {
		v = m.b.Rename(v, m.name(along), m.name(own))
	}
	return m.tensor(v, nil, where.axes...)
}
