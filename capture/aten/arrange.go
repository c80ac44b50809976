package aten

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// arrangeRules put elements into another order, repeat them, or take some.
var arrangeRules = map[string]rule{
	"aten.squeeze.default": sole(view), "aten.squeeze.dims": sole(view),
	"aten.view_as.default":    sole(view),
	"aten.reshape_as.default": sole(view), "aten.ravel.default": sole(view),
	"aten.mT.default": sole(reordered), "aten.mH.default": sole(reordered),
	"aten.adjoint.default": sole(reordered), "aten.numpy_T.default": sole(reordered),
	"aten.swapaxes.default": sole(reordered), "aten.swapdims.default": sole(reordered),
	"aten.movedim.int": sole(reordered), "aten.movedim.intlist": sole(reordered),
	"aten.expand_as.default": sole(func(m *maker, n *node) *tensor {
		return m.expanded(n.tensor("self"), n.out(0))
	}),
	"aten.broadcast_to.default": sole(func(m *maker, n *node) *tensor {
		return m.expanded(n.tensor("self"), n.out(0))
	}),
	"aten.broadcast_tensors.default": func(m *maker, n *node) []*tensor {
		list := n.tensors("tensors")
		for k := range list {
			list[k] = m.expanded(list[k], n.out(k))
		}
		return list
	},
	"aten.stack.default": sole(func(m *maker, n *node) *tensor {
		list := n.tensors("tensors")
		i := n.int("dim", 0)
		if i < 0 {
			i += int64(len(list[0].axes)) + 1
		}
		for k := range list {
			list[k] = m.unsqueezed(list[k], int(i))
		}
		return m.joined(list, int(i))
	}),
	"aten.unbind.int": func(m *maker, n *node) []*tensor {
		x := n.tensor("self")
		i := x.at(n.int("dim", 0))
		list := make([]*tensor, len(n.Outputs))
		for k := range list {
			list[k] = m.pickedAt(x, i, int64(k), fmt.Sprint("unbind", k))
		}
		return list
	},
	"aten.tensor_split.sections": chunks, "aten.tensor_split.indices": chunks,
	"aten.unsafe_chunk.default": chunks, "aten.unsafe_split.Tensor": chunks,
	"aten.split.sizes": chunks, "aten.unsafe_split_with_sizes.default": chunks,
	"aten.concat.default": sole(concatenated), "aten.concatenate.default": sole(concatenated),
	"aten.repeat.default": sole(repeated), "aten.tile.default": sole(repeated),
	"aten.repeat_interleave.self_int": sole(interleaved),
	"aten.flip.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		for k, d := range n.ints("dims") {
			x = m.chosen(x, x.at(d), fmt.Sprint("flip", k), func(i, size int64) int64 {
				return size - 1 - i
			})
		}
		return x
	}),
	"aten.roll.default": sole(rolled),
	"aten.tril.default": sole(func(m *maker, n *node) *tensor { return m.triangular(n, true) }),
	"aten.triu.default": sole(func(m *maker, n *node) *tensor { return m.triangular(n, false) }),
	"aten.diff.default": sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		i := x.at(n.int("dim", -1))
		if n.has("prepend") {
			x = m.joined([]*tensor{n.number("prepend"), x}, i)
		}
		if n.has("append") {
			x = m.joined([]*tensor{x, n.number("append")}, i)
		}
		for k := range n.int("n", 1) {
			size := x.axes[i].size
			next := m.sliced(x, i, 1, size, 1, fmt.Sprint("next", k))
			x = m.binary(next, m.sliced(x, i, 0, size-1, 1, fmt.Sprint("first", k)), m.b.Sub)
		}
		return x
	}),
	"aten.one_hot.default": sole(func(m *maker, n *node) *tensor {
		x, classes := n.value("self"), n.int("num_classes", -1)
		if classes < 1 {
			panic(refusal("classes that are counted in the numbers"))
		}
		count := make([]float64, classes)
		for i := range count {
			count[i] = float64(i)
		}
		places := m.real(constant(dtype.S64, []int64{classes}, count))
		hit := m.binary(m.unsqueezed(x, len(x.axes)), places, func(x, y *ir.Value) *ir.Value {
			return m.b.Compare("eq", x, y)
		})
		return hit.with(m.b.Convert(hit.v, m.elem(n.type0())))
	}),
	"aten.diagonal.default": sole(diagonal),
	"aten.constant_pad_nd.default": sole(func(m *maker, n *node) *tensor {
		return m.rule("aten.pad.default")(m, n)[0]
	}),
	"aten.select_scatter.default": sole(func(m *maker, n *node) *tensor {
		x, part := n.value("self"), n.value("src")
		i, at := n.selected(x)
		return m.put(x, m.cast(m.unsqueezed(part, i), n.type0()), i, at, at+1, 1)
	}),
	"aten.slice_scatter.default": sole(func(m *maker, n *node) *tensor {
		x, part := n.value("self"), n.value("src")
		i := x.at(n.int("dim", 0))
		from, to := bounds(n, x.axes[i].size)
		return m.put(x, m.cast(part, n.type0()), i, from, to, n.int("step", 1))
	}),
	"aten.eye.default": sole(eye), "aten.eye.m": sole(eye),
	"aten.linspace.default": sole(func(m *maker, n *node) *tensor {
		sizes := n.out(0)
		data, start, end := make([]float64, count(sizes)), n.float("start", 0), n.float("end", 0)
		for i := range data {
			data[i] = start
			if last := float64(len(data) - 1); last > 0 {
				data[i] = start + (end-start)*float64(i)/last
			}
		}
		return constant(n.type0(), sizes, data)
	}),
	"aten.scalar_tensor.default": sole(func(m *maker, n *node) *tensor {
		return constant(n.type0(), nil, []float64{n.float("s", 0)})
	}),
	"aten._to_copy.default": sole(func(m *maker, n *node) *tensor {
		return m.cast(n.tensor("self"), n.type0())
	}),
}

// pickedAt takes one place of an axis, which is gone.
func (m *maker) pickedAt(x *tensor, i int, at int64, key string) *tensor {
	y := m.sliced(x, i, at, at+1, 1, key)
	if y.known != nil {
		return constant(y.elem, slices.Delete(y.sizes(), i, i+1), y.known)
	}
	y = m.squeezed(y, i)
	return m.tensor(y.v, y.hidden, slices.Delete(slices.Clone(y.axes), i, i+1)...)
}

// elemOf is the type of the elements of a tensor in the graph.
func (m *maker) elemOf(t *tensor) dtype.DType {
	if t.known != nil {
		return m.elem(t.elem)
	}
	return t.v.Type.Elem
}

// concatenated joins along an axis.
func concatenated(m *maker, n *node) *tensor {
	list := slices.DeleteFunc(n.tensors("tensors"), func(t *tensor) bool {
		return slices.Contains(t.sizes(), 0)
	})
	if len(list) == 0 {
		panic(refusal("a tensor without elements"))
	}
	if slices.ContainsFunc(list, func(t *tensor) bool { return m.elemOf(t) != m.elemOf(list[0]) }) {
		for k := range list {
			list[k] = m.cast(list[k], n.type0())
		}
	}
	return m.joined(list, list[0].at(n.int("dim", 0)))
}

// repeated repeats whole axes; axes that x lacks come first.
func repeated(m *maker, n *node) *tensor {
	x, by := n.tensor("self"), n.ints("repeats")
	if by == nil {
		by = n.ints("dims")
	}
	for len(by) < len(x.axes) {
		by = slices.Insert(slices.Clone(by), 0, 1)
	}
	for len(x.axes) < len(by) {
		x = m.unsqueezed(x, 0)
	}
	if slices.Contains(by, 0) {
		panic(refusal("a tensor without elements"))
	}
	for i, times := range by {
		if times > 1 {
			x = m.copies(x, i, i, times)
		}
	}
	return x
}

// interleaved repeats each element of an axis.
func interleaved(m *maker, n *node) *tensor {
	x, times := n.tensor("self"), n.int("repeats", 1)
	if !n.has("dim") {
		x = m.viewed(x, []int64{elementsOf(x, n.over(x))})
	}
	i := x.at(n.int("dim", 0))
	if times < 1 {
		panic(refusal("a tensor without elements"))
	}
	return m.copies(x, i, i+1, times)
}

// copies repeats axis i: as a whole where the copies stand before it, at i, or each element of it
// where they stand behind, at i+1.
func (m *maker) copies(x *tensor, i, before int, times int64) *tensor {
	sizes := x.sizes()
	x = m.unsqueezed(x, before)
	x = m.expanded(x, slices.Insert(slices.Clone(sizes), before, times))
	sizes[i] *= times
	if x.known == nil {
		x = m.whole(m.whole(x, i), i+1)
	}
	return m.viewed(x, sizes)
}

// chosen takes, for each place of axis i, the element that from names.
func (m *maker) chosen(x *tensor, i int, key string, from func(at, size int64) int64) *tensor {
	size := x.axes[i].size
	if len(x.axes[i].dims) == 0 {
		return x
	}
	outer := m.key
	defer func() { m.key = outer }()
	m.key += key + ":"
	where := make([]float64, size)
	for k := range where {
		where[k] = float64(from(int64(k), size))
	}
	return m.rows(x, constant(dtype.S64, []int64{size}, where), i)
}

// rolled moves elements along axes, the last ones to the front.
func rolled(m *maker, n *node) *tensor {
	x, shifts, dims := n.value("self"), n.ints("shifts"), n.ints("dims")
	sizes := x.sizes()
	if len(dims) == 0 {
		x, dims = m.viewed(x, []int64{elementsOf(x, n.over(x))}), []int64{0}
	}
	for k, d := range dims {
		i := x.at(d)
		size := x.axes[i].size
		by := ((shifts[k] % size) + size) % size
		if by == 0 {
			continue
		}
		front := m.sliced(x, i, size-by, size, 1, fmt.Sprint("front", k))
		outer := m.key
		m.key += fmt.Sprint("roll", k, ":")
		x = m.joined([]*tensor{front, m.sliced(x, i, 0, size-by, 1, "back")}, i)
		m.key = outer
	}
	return m.viewed(x, sizes)
}

// triangular keeps the elements of the last two axes at and below a diagonal, or above it.
func (m *maker) triangular(n *node, low bool) *tensor {
	x, diagonal := n.tensor("self"), n.int("diagonal", 0)
	r := len(x.axes) - 2
	if r < 0 {
		panic(refusal("a triangle of a vector"))
	}
	rows, cols := x.axes[r].size, x.axes[r+1].size
	keep := make([]float64, count([]int64{rows, cols}))
	for i := range rows {
		for j := range cols {
			if (j-i <= diagonal) && low || (j-i >= diagonal) && !low {
				keep[i*cols+j] = 1
			}
		}
	}
	x = m.real(x)
	zero := m.tensor(like(m.b, x.v, 0), nil)
	how := map[bool]string{true: "le", false: "ge"}[low]
	out := m.choose(m.diagonalMask(rows, cols, diagonal, how), x, zero)
	if by, ok := m.fills[x.v]; ok { // a mask: attention knows it by its numbers
		out.twin = func() *tensor {
			data := make([]float64, len(keep))
			for i, k := range keep {
				if k != 0 {
					data[i] = by
				}
			}
			return m.expanded(constant(n.type0(), []int64{rows, cols}, data), x.sizes())
		}
	}
	return out
}

// diagonalMask is a mask [rows, cols] of places at a diagonal (eq), or also below it (le) or above
// it (ge).
func (m *maker) diagonalMask(rows, cols, diagonal int64, how string) *tensor {
	axes := []axis{{size: rows}, {size: cols}}
	all := ir.Type{Elem: dtype.S32}
	for i, size := range []int64{rows, cols} {
		d := m.fresh(fmt.Sprint("diagonal", i), size, -1)
		axes[i].dims = []dim{d}
		all.Dims = append(all.Dims, ir.Dim{Name: m.name(d), Size: size})
	}
	across := m.b.Sub(m.b.Iota(all, all.Dims[1].Name), m.b.Iota(all, all.Dims[0].Name))
	v := m.b.Compare(how, across, like(m.b, across, float64(diagonal)))
	return m.tensor(v, nil, axes...)
}

// diagonal takes the elements of two axes whose places differ by an offset; they are the last axis.
func diagonal(m *maker, n *node) *tensor {
	x := n.value("self")
	i, j, off := x.at(n.int("dim1", 0)), x.at(n.int("dim2", 1)), n.int("offset", 0)
	var order []int
	for k := range x.axes {
		if k != i && k != j {
			order = append(order, k)
		}
	}
	x = m.permuted(x, append(order, i, j))
	last := len(x.axes) - 1
	rows, cols := x.axes[last-1].size, x.axes[last].size
	size := min(rows+min(off, 0), cols-max(off, 0))
	if size < 1 {
		panic(refusal("a tensor without elements"))
	}
	where := make([]float64, size)
	for k := range where {
		where[k] = float64((int64(k)+max(-off, 0))*cols + int64(k) + max(off, 0))
	}
	flat := append(slices.Clone(x.sizes()[:last-1]), rows*cols)
	x = m.viewed(m.whole(m.whole(x, last-1), last), flat)
	return m.rows(x, constant(dtype.S64, []int64{size}, where), last-1)
}

// eye is 1 on the diagonal and 0 elsewhere.
func eye(m *maker, n *node) *tensor {
	sizes := n.out(0)
	mask := m.diagonalMask(sizes[0], sizes[1], 0, "eq")
	return mask.with(m.b.Convert(mask.v, m.elem(n.type0())))
}
