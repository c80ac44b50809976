package aten

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A tensor is a value of the graph and the axes that the program sees in it.
type tensor struct {
	v    *ir.Value // nil for known numbers
	axes []axis
	// hidden are dimensions of the value that the program does not see: positions differ between the
	// rows of a batch, where the program counts once.
	hidden []dim

	known  []float64   // row by row, of what does not depend on inputs
	elem   dtype.DType // of known numbers, as the program has it
	label  bool        // comes from the labels as they are
	padded bool        // labels with one more place at the end
	token  bool        // numbers of tokens
	param  bool        // a parameter as it is
	buffer bool        // a parameter without a gradient
	line   bool        // known as a line alone
	norm   *norm       // what it is to a norm that is written out
	scores *scores     // what it is to attention that is written out
	// Twin gives the numbers of a buffer, which are in a checkpoint and so an input of the graph.
	twin func() *tensor
	// Grouped is what each element was repeated of along axis 1, as keys are for several heads.
	grouped *tensor
	parts   []*tensor // what it was joined of, along an axis
	joint   int
}

// An axis is a product of dimensions, major first. One without dimensions is repeated.
type axis struct {
	dims []dim
	size int64
}

// dims lists the dimensions of a tensor as the program orders them.
func (t *tensor) dims() []dim {
	var list []dim
	for _, a := range t.axes {
		list = append(list, a.dims...)
	}
	return list
}

func (t *tensor) sizes() []int64 {
	list := make([]int64, len(t.axes))
	for i, a := range t.axes {
		list[i] = a.size
	}
	return list
}

// with is a tensor of another value with the same axes.
func (t *tensor) with(v *ir.Value) *tensor { return &tensor{v: v, axes: t.axes, hidden: t.hidden} }

// at gives the place of an axis counted from either end.
func (t *tensor) at(i int64) int {
	if i < 0 {
		i += int64(len(t.axes))
	}
	if i < 0 || i >= int64(len(t.axes)) {
		panic(refusal(fmt.Sprintf("a tensor of %d axes has no axis %d", len(t.axes), i)))
	}
	return int(i)
}

// A refusal is why a node cannot be written; the rules panic with it, and one place recovers.
type refusal string

// name is the name of a dimension in the graph.
func (m *maker) name(d dim) string { return m.dims.name(d) }

func (m *maker) names(list []dim) []string {
	names := make([]string, len(list))
	for i, d := range list {
		names[i] = m.name(d)
	}
	return names
}

// fresh is a dimension that a node makes.
func (m *maker) fresh(what string, size int64, from dim) dim {
	return m.dims.root(m.dims.dim(m.key+what, size, "", from))
}

// tensor notes which dimensions stand together.
func (m *maker) tensor(v *ir.Value, hidden []dim, axes ...axis) *tensor {
	t := &tensor{v: v, axes: axes}
	all := t.dims()
	for _, h := range hidden {
		if !slices.Contains(all, h) {
			t.hidden = append(t.hidden, h)
		}
	}
	m.dims.meet(append(all, t.hidden...))
	return t
}

// swap renames a dimension of a tensor.
func (m *maker) swap(t *tensor, from, to dim) *tensor {
	out := &tensor{v: m.b.Rename(t.v, m.name(from), m.name(to)), hidden: slices.Clone(t.hidden)}
	for _, a := range t.axes {
		a.dims = slices.Clone(a.dims)
		if i := slices.Index(a.dims, from); i >= 0 {
			a.dims[i] = to
		}
		out.axes = append(out.axes, a)
	}
	if i := slices.Index(out.hidden, from); i >= 0 {
		out.hidden[i] = to
	}
	m.dims.meet(append(out.dims(), out.hidden...))
	return out
}

// apart splits a dimension of a tensor, the minor part having a size.
func (m *maker) apart(t *tensor, d dim, minor int64) *tensor {
	hi, lo := m.split(d, minor, append(t.dims(), t.hidden...))
	out := &tensor{hidden: t.hidden}
	out.v = m.b.Split(t.v, m.name(d), m.name(hi), m.name(lo), minor)
	for _, a := range t.axes {
		if i := slices.Index(a.dims, d); i >= 0 {
			a.dims = slices.Concat(a.dims[:i], []dim{hi, lo}, a.dims[i+1:])
		}
		out.axes = append(out.axes, a)
	}
	m.dims.meet(append(out.dims(), out.hidden...))
	return out
}

// split gives the parts of a dimension, of which the minor has a size, in a tensor of dimensions:
// its own parts, or others where the tensor has these.
func (m *maker) split(d dim, minor int64, among []dim) (hi, lo dim) {
	hi, lo = m.dims.split(d, minor)
	if slices.Contains(among, hi) || slices.Contains(among, lo) {
		key := "split" + m.dims.all[d].key
		return m.fresh(key+"<", m.size(hi), hi), m.fresh(key+">", minor, lo)
	}
	return hi, lo
}

// whole makes an axis one dimension: it joins several, and repeats one that has none.
func (m *maker) whole(t *tensor, i int) *tensor {
	a := t.axes[i]
	switch len(a.dims) {
	case 1:
		return t
	case 0:
		d := m.fresh(fmt.Sprintf("whole%d.%d", i, a.size), a.size, -1)
		v := m.b.Broadcast(t.v, 0, ir.Dim{Name: m.name(d), Size: a.size})
		axes := slices.Clone(t.axes)
		axes[i].dims = []dim{d}
		return m.tensor(v, t.hidden, axes...)
	}
	t = m.ordered(t, a.dims)
	v, d := t.v, a.dims[0]
	for k, next := range a.dims[1:] {
		size := m.size(d) * m.size(next)
		to := m.fresh(fmt.Sprintf("join%d.%d.%d", i, k, size), size, -1)
		v, d = m.b.Merge(v, m.name(to), m.name(d), m.name(next)), to
	}
	axes := slices.Clone(t.axes)
	axes[i].dims = []dim{d}
	return m.tensor(v, t.hidden, axes...)
}

func (m *maker) size(d dim) int64 { return m.dims.all[d].size }

// ordered puts dimensions last in the value, in an order.
func (m *maker) ordered(t *tensor, last []dim) *tensor {
	ends := m.names(last)
	order := append(ir.Names(ir.Without(t.v.Type.Dims, ends...)), ends...)
	return t.with(m.b.Transpose(t.v, order...))
}

// match makes axis i of x and axis j of y the same dimensions, of equal size: it splits what one of
// them splits, makes dimensions one, and renames dimensions of y where that cannot be. An axis
// without dimensions goes with any.
func (m *maker) match(x, y *tensor, i, j int) (*tensor, *tensor) {
	if a, b := x.axes[i].dims, y.axes[j].dims; len(a) > 0 && len(b) > 0 {
		// Unequal sizes would be split for ever: 2 into 1 and 2 to go with 1.
		if n, l := m.elements(a), m.elements(b); n != l || n == 0 {
			panic(refusal(fmt.Sprintf("axes of %d and %d elements", n, l)))
		}
	}
	for k := 0; ; k++ {
		a, b := x.axes[i].dims, y.axes[j].dims
		if k >= len(a) || k >= len(b) {
			if len(a) == len(b) || len(a) == 0 || len(b) == 0 {
				return x, y
			}
			x, y = m.whole(x, i), m.whole(y, j) // one has dimensions of size 1 that the other lacks
			k = -1
			continue
		}
		p, q := a[k], b[k]
		switch n, l := m.size(p), m.size(q); {
		case p == q:
		case n == l:
			m.dims.unite(p, q)
			y = m.renamed(y, q, p)
		case n > l && n%l == 0:
			x = m.apart(x, p, n/l)
			k--
		case l > n && l%n == 0:
			y = m.apart(y, q, l/n)
			k--
		default:
			x, y = m.whole(x, i), m.whole(y, j)
			k = -1
		}
	}
}

// elements is the size of an axis of dimensions.
func (m *maker) elements(list []dim) int64 {
	n := int64(1)
	for _, d := range list {
		n *= m.size(d)
	}
	return n
}

// renamed makes dimension q of a tensor p, and moves p out of the way where the tensor has it.
func (m *maker) renamed(t *tensor, q, p dim) *tensor {
	if slices.Contains(t.dims(), p) || slices.Contains(t.hidden, p) {
		t = m.swap(t, p, m.fresh("aside"+m.dims.all[p].key, m.size(p), p))
	}
	return m.swap(t, q, p)
}

// squeezed drops the dimensions of an axis of size 1.
func (m *maker) squeezed(t *tensor, i int) *tensor {
	a := t.axes[i]
	if len(a.dims) == 0 {
		return t
	}
	v := m.b.Sum(t.v, m.names(a.dims)...)
	axes := slices.Clone(t.axes)
	axes[i] = axis{size: 1}
	return m.tensor(v, t.hidden, axes...)
}

// aligned lines up the axes of tensors as broadcasting does, and gives the axes of the result.
func (m *maker) aligned(list ...*tensor) ([]*tensor, []axis) {
	rank := 0
	for _, t := range list {
		rank = max(rank, len(t.axes))
	}
	out := make([]axis, rank)
	owner := make([]int, rank)
	for i := range out {
		out[i], owner[i] = axis{size: 1}, -1
	}
	for k := range list {
		shift := rank - len(list[k].axes)
		for i := range list[k].axes {
			size := list[k].axes[i].size
			if at := &out[i+shift]; at.size == 1 || size > 1 {
				at.size = max(size, at.size)
			}
			if size == 0 {
				out[i+shift].size = 0
			}
		}
	}
	for turn := range 2 * len(list) { // what one splits, those before it split as well
		k := turn % len(list)
		shift := rank - len(list[k].axes)
		for i := range list[k].axes {
			o := i + shift
			if list[k].axes[i].size == 1 && out[o].size > 1 {
				list[k] = m.squeezed(list[k], i)
			}
			if len(list[k].axes[i].dims) == 0 {
				continue
			}
			if owner[o] < 0 {
				owner[o] = k
			}
			if w := owner[o]; w != k {
				j := o - (rank - len(list[w].axes))
				list[w], list[k] = m.match(list[w], list[k], j, i)
			}
		}
	}
	m.crossed(list, rank)
	for _, t := range list { // one may have more dimensions of size 1
		for i, a := range t.axes {
			if o := &out[i+rank-len(t.axes)]; len(a.dims) > len(o.dims) {
				o.dims = a.dims
			}
		}
	}
	return list, out
}

// crossed renames dimensions that tensors have at different axes of their result, as x[:, None] and
// x[None] have: they are not one.
func (m *maker) crossed(list []*tensor, rank int) {
	place := map[dim]int{}
	for k := range list {
		for i, a := range list[k].axes {
			o := i + rank - len(list[k].axes)
			for _, d := range a.dims {
				if at, ok := place[d]; ok && at != o {
					key := fmt.Sprint("crossed", o, m.dims.all[d].key)
					list[k] = m.swap(list[k], d, m.fresh(key, m.size(d), d))
				} else {
					place[d] = o
				}
			}
		}
	}
}

// spread repeats a tensor along the dimensions that it lacks.
func (m *maker) spread(t *tensor, all []dim) *tensor {
	have := append(t.dims(), t.hidden...)
	v := t.v
	for _, d := range all {
		if !slices.Contains(have, d) {
			v = m.b.Broadcast(v, 0, ir.Dim{Name: m.name(d), Size: m.size(d)})
		}
	}
	return t.with(v)
}

// union lists the dimensions of tensors.
func union(list ...*tensor) (all, hidden []dim) {
	for _, t := range list {
		for _, d := range append(t.dims(), t.hidden...) {
			if !slices.Contains(all, d) {
				all = append(all, d)
			}
		}
		hidden = append(hidden, t.hidden...)
	}
	return all, hidden
}
