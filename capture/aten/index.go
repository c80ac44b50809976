package aten

import (
	"slices"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// indexRules read and write elements by their numbers, and fill.
var indexRules = map[string]rule{
	"aten.gather.default": sole(gathered),
	"aten.scatter.value": sole(func(m *maker, n *node) *tensor {
		base, where := n.value("self"), n.value("index")
		i := base.at(n.int("dim", -1))
		if i != len(base.axes)-1 {
			panic(refusal("scatter along another axis than the last"))
		}
		where = m.whole(where, i)
		d := where.axes[i].dims[0]
		where = m.ordered(where, []dim{d})
		count := m.b.Shift(m.b.Scale(m.b.Convert(where.v, dtype.F32), 0), 1)
		size := base.axes[i].size
		hits := m.b.Scatter(count, where.v, m.name(d), size)
		mask := m.b.Compare("gt", hits, m.b.Fill(ir.Type{Elem: dtype.F32}, 0))
		by := m.b.Fill(ir.Type{Elem: base.v.Type.Elem}, n.float("value", 0))
		return m.choose(m.resized(where, mask, i, size, "hit"), m.tensor(by, nil), base)
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
		i, where := n.indices("indices")
		return m.rows(n.value("self"), where, i)
	}),
	"aten.index_select.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		return m.rows(x, n.tensor("index"), x.at(n.int("dim", 0)))
	}),
	"aten.index_add.default": sole(func(m *maker, n *node) *tensor {
		base, part := n.value("self"), m.scaled(n.value("source"), n.float("alpha", 1))
		i := base.at(n.int("dim", 0))
		sum, _ := m.scattered(part, n.value("index"), i, base.axes[i].size)
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

// scattered adds up, in an axis of another size, the places of axis i of x that numbers [n] name;
// hits counts how many came to each place.
func (m *maker) scattered(x, where *tensor, i int, size int64) (sum, hits *tensor) {
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
	for _, other := range slices.Backward(ir.Without(x.v.Type.Dims, m.name(d))) {
		places = m.b.Broadcast(places, 0, other)
	}
	one := m.b.Fill(where.v.Type, 1)
	count := where.with(m.b.Scatter(m.b.Convert(one, dtype.F32), where.v, m.name(d), size))
	sum = m.resized(x, m.b.Scatter(x.v, places, m.name(d), size), i, size, "into")
	hits = m.resized(count, count.v, 0, size, "hits")
	sum, hits = m.match(sum, hits, i, 0)
	return sum, hits
}

// indexPut replaces places that numbers name, or adds to them, or replaces by one number where a
// mask holds. As in torch, a number that stands twice is the caller's mistake unless it adds.
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
	sum, hits := m.scattered(m.expanded(value, sizes), where, i, base.axes[i].size)
	if add {
		return m.binary(base, sum, m.b.Add)
	}
	mask := hits.with(m.b.Compare("gt", hits.v, m.b.Fill(ir.Type{Elem: dtype.F32}, 0)))
	for k := i + 1; k < len(base.axes); k++ {
		mask.axes = append(slices.Clone(mask.axes), axis{size: 1})
	}
	return m.choose(mask, sum, base)
}

// gathered picks along an axis by numbers, which the last axis of the graph allows.
func gathered(m *maker, n *node) *tensor {
	x, where := n.tensor("self"), n.tensor("index")
	i := x.at(n.int("dim", 0))
	if x.known != nil && repeats(x.known, x.axes[i].size, strides(x.sizes())[i]) {
		// Whatever is picked is the same.
		return m.expanded(m.sliced(x, i, 0, 1, 1, ""), where.sizes())
	}
	x, where = m.real(x), m.real(where)
	if i != len(x.axes)-1 {
		panic(refusal("gather along another axis than the last"))
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
