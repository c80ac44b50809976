package aten

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// shapeRules look at a tensor in another way, take a part of it, or join parts.
var shapeRules = map[string]rule{
	"aten.view.default": sole(view), "aten.reshape.default": sole(view),
	"aten._unsafe_view.default": sole(view), "aten.flatten.using_ints": sole(view),
	"aten.unsqueeze.default": sole(func(m *maker, n *node) *tensor {
		x, i := n.tensor("self"), n.int("dim", 0)
		if i < 0 {
			i += int64(len(x.axes)) + 1
		}
		return m.twinned(x, func(x *tensor) *tensor { return m.unsqueezed(x, int(i)) })
	}),
	"aten.squeeze.dim":   sole(view),
	"aten.unflatten.int": sole(view),
	"aten.transpose.int": sole(reordered), "aten.t.default": sole(reordered),
	"aten.permute.default": sole(reordered),
	"aten.expand.default": sole(func(m *maker, n *node) *tensor {
		return m.expanded(n.tensor("self"), n.out(0))
	}),
	"aten.slice.Tensor": sole(func(m *maker, n *node) *tensor {
		x := n.tensor("self")
		i := x.at(n.int("dim", 0))
		from, to := bounds(n, x.axes[i].size)
		if x.padded && from == 1 && i == len(x.axes)-1 {
			return m.shifted(x)
		}
		return m.twinned(x, func(x *tensor) *tensor {
			return m.sliced(x, i, from, to, n.int("step", 1), "")
		})
	}),
	"aten.narrow.default": sole(func(m *maker, n *node) *tensor {
		x := n.tensor("self")
		i, from, to := n.taken(x)
		return m.sliced(x, i, from, to, 1, "")
	}),
	"aten.select.int": sole(func(m *maker, n *node) *tensor {
		x := n.tensor("self")
		i, at := n.selected(x)
		return m.pickedAt(x, i, at, "")
	}),
	"aten.chunk.default":            chunks,
	"aten.split.Tensor":             chunks,
	"aten.split_with_sizes.default": chunks,
	"aten.cat.default":              sole(concatenated),
	"aten.pad.default": sole(func(m *maker, n *node) *tensor {
		x, by := n.tensor("self"), n.ints("pad")
		if x.label && slices.Equal(by, []int64{0, 1}) && n.float("value", 0) < 0 {
			return &tensor{v: x.v, axes: m.longer(x), hidden: x.hidden, padded: true}
		}
		if mode := n.text("mode", "constant"); mode != "constant" {
			return m.mirrored(m.real(x), by, mode)
		}
		if n.float("value", 0) != 0 {
			panic(refusal("padding with other numbers than 0"))
		}
		x = m.real(x)
		for k := 0; k+1 < len(by); k += 2 {
			i := len(x.axes) - 1 - k/2
			x = m.whole(x, i)
			v := m.b.Pad(x.v, m.name(x.axes[i].dims[0]), by[k], by[k+1])
			x = m.resized(x, v, i, x.axes[i].size+by[k]+by[k+1], fmt.Sprint("pad", k))
		}
		return x
	}),
}

// unsqueezed has an axis of size 1 at i.
func (m *maker) unsqueezed(x *tensor, i int) *tensor {
	if i > len(x.axes) {
		panic(refusal("an axis behind the last"))
	}
	if x.known != nil {
		return constant(x.elem, slices.Insert(x.sizes(), i, 1), x.known)
	}
	return m.tensor(x.v, x.hidden, slices.Insert(slices.Clone(x.axes), i, axis{size: 1})...)
}

// twinned applies a function to a tensor and to its numbers.
func (m *maker) twinned(x *tensor, f func(x *tensor) *tensor) *tensor {
	out := f(x)
	if x.twin == nil || out.known != nil {
		return out
	}
	t := *out
	t.twin = func() *tensor { return f(x.twin()) }
	return &t
}

// longer gives the axes of labels with one more place.
func (m *maker) longer(x *tensor) []axis {
	axes := slices.Clone(x.axes)
	axes[len(axes)-1].size++
	return axes
}

// shifted undoes the shift of labels: they are given where the logits stand.
func (m *maker) shifted(x *tensor) *tensor {
	axes := slices.Clone(x.axes)
	axes[len(axes)-1].size--
	m.shift = true
	return &tensor{v: x.v, axes: axes, hidden: x.hidden, label: true}
}

// view gives a tensor the sizes of the node's output, with the same elements in the same order.
func view(m *maker, n *node) *tensor {
	x, sizes := n.tensor("self"), n.out(0)
	out := m.viewed(x, sizes)
	// [batch, kv, n, keys, head], each n times, is [batch, heads, keys, head].
	if len(x.axes) == 5 && len(sizes) == 4 && x.known == nil && len(x.axes[2].dims) == 0 {
		old := x.sizes()
		if slices.Equal(slices.Delete(old, 2, 3), slices.Replace(slices.Clone(sizes), 1, 2, old[1])) &&
			sizes[1] == x.axes[1].size*x.axes[2].size {
			t := *out
			t.grouped = m.tensor(x.v, x.hidden, slices.Delete(slices.Clone(x.axes), 2, 3)...)
			return &t
		}
	}
	return out
}

func (m *maker) viewed(x *tensor, sizes []int64) *tensor {
	if x.known != nil {
		return constant(x.elem, sizes, x.known)
	}
	if slices.Equal(x.sizes(), sizes) {
		return x
	}
	x = m.regrouped(x, sizes)
	out := &tensor{v: x.v, hidden: x.hidden, label: x.label}
	rest := slices.Clone(x.axes)
	for _, size := range sizes {
		var a axis
		a, rest, out.v = m.take(out, rest, size)
		out.axes = append(out.axes, a)
	}
	for _, a := range rest {
		if len(a.dims) > 0 && len(out.axes) > 0 { // dimensions of size 1
			last := &out.axes[len(out.axes)-1]
			last.dims = append(slices.Clone(last.dims), a.dims...)
		}
	}
	m.dims.meet(append(out.dims(), out.hidden...))
	return out
}

// regrouped makes the axes of a tensor that repeat such that a view of the given sizes finds each
// whole: what repeats cannot be regrouped with what does not.
func (m *maker) regrouped(x *tensor, sizes []int64) *tensor {
	var axes []axis
	for i, j := 0, 0; i < len(x.axes); {
		from, to, have, want := i, j, x.axes[i].size, int64(1)
		// The fewest axes with equal products.
		for i++; have != want && (want > have && i < len(x.axes) || want < have && j < len(sizes)); {
			if want < have {
				want *= sizes[j]
				j++
			} else {
				have *= x.axes[i].size
				i++
			}
		}
		repeated, some := 0, 0
		for _, a := range x.axes[from:i] {
			if a.size > 1 && len(a.dims) == 0 {
				repeated++
			}
			some += len(a.dims)
		}
		switch {
		case repeated > 0 && some == 0:
			for _, size := range sizes[to:j] {
				axes = append(axes, axis{size: size})
			}
			continue
		case repeated > 0:
			for k := from; k < i; k++ {
				if x.axes[k].size > 1 {
					x = m.some(x, k)
				}
			}
		}
		axes = append(axes, x.axes[from:i]...)
	}
	out := *x
	out.axes = axes
	return &out
}

// take takes dimensions from the front of a list of axes until their product is a size, and splits
// the last if it is too large.
func (m *maker) take(t *tensor, rest []axis, size int64) (axis, []axis, *ir.Value) {
	v := t.v
	a, have := axis{size: size}, int64(1)
	for len(rest) > 0 {
		first := rest[0]
		switch {
		case have == size && (first.size != 1 || len(a.dims) > 0):
			return a, rest, v
		case first.size == 1 && len(first.dims) == 0:
			rest = rest[1:]
			continue
		case len(first.dims) == 0: // repeated
			if have == 1 && first.size == size {
				if len(a.dims) > 0 { // of size 1
					v, a.dims = m.b.Sum(v, m.names(a.dims)...), nil
				}
				return a, rest[1:], v
			}
			panic(refusal("a view of a repeated axis"))
		}
		d := first.dims[0]
		n := m.size(d)
		if have*n > size || size%(have*n) != 0 {
			need := size / have
			if n%need != 0 {
				panic(refusal("a view that regroups sizes without a common factor"))
			}
			others := slices.Concat(t.dims(), t.hidden, (&tensor{axes: rest}).dims(), a.dims)
			hi, lo := m.split(d, n/need, others)
			v = m.b.Split(v, m.name(d), m.name(hi), m.name(lo), n/need)
			a.dims = append(a.dims, hi)
			dims := append([]dim{lo}, first.dims[1:]...)
			rest = append([]axis{{dims, first.size / need}}, rest[1:]...)
			return a, rest, v
		}
		a.dims, have = append(a.dims, d), have*n
		left := axis{first.dims[1:], first.size / n}
		if rest = rest[1:]; len(left.dims) > 0 {
			rest = append([]axis{left}, rest...)
		}
	}
	if have != size {
		panic(refusal("a view of another number of elements"))
	}
	return a, rest, v
}

// order is how a node puts the axes of its argument.
func (n *node) order(x *tensor) []int {
	order := make([]int, len(x.axes))
	for i := range order {
		order[i] = i
	}
	switch n.Target {
	case "aten.permute.default":
		for k, d := range n.ints("dims") {
			order[k] = x.at(d)
		}
	case "aten.t.default", "aten.numpy_T.default":
		slices.Reverse(order)
	case "aten.mT.default", "aten.mH.default", "aten.adjoint.default":
		slices.Reverse(order[max(len(order)-2, 0):])
	case "aten.movedim.int", "aten.movedim.intlist":
		return moved(x, n.ints("source"), n.ints("destination"))
	case "aten.swapaxes.default":
		i, j := x.at(n.int("axis0", 0)), x.at(n.int("axis1", 0))
		order[i], order[j] = j, i
	default:
		i, j := x.at(n.int("dim0", 0)), x.at(n.int("dim1", 0))
		order[i], order[j] = j, i
	}
	return order
}

// moved is the order of axes after some went to other places, the rest staying as they were.
func moved(x *tensor, from, to []int64) []int {
	order := make([]int, len(x.axes))
	taken, source := map[int]bool{}, map[int]bool{}
	for k := range from {
		i, j := x.at(from[k]), x.at(to[k])
		order[j], taken[j], source[i] = i, true, true
	}
	next := 0
	for j := range order {
		if taken[j] {
			continue
		}
		for source[next] {
			next++
		}
		order[j] = next
		next++
	}
	return order
}

func reordered(m *maker, n *node) *tensor {
	x := n.tensor("self")
	return m.permuted(x, n.order(x))
}

// selected is the axis of a select, and the place that it takes.
func (n *node) selected(x *tensor) (i int, at int64) {
	i, at = x.at(n.int("dim", 0)), n.int("index", 0)
	if at < 0 {
		at += x.axes[i].size
	}
	return i, at
}

// taken is the axis of aten.narrow, and the range that it takes.
func (n *node) taken(x *tensor) (i int, from, to int64) {
	i, from = x.at(n.int("dim", 0)), n.int("start", 0)
	if from < 0 {
		from += x.axes[i].size
	}
	return i, from, from + n.int("length", 0)
}

// permuted puts axes in another order; nothing moves.
func (m *maker) permuted(x *tensor, order []int) *tensor {
	axes := make([]axis, len(order))
	for i, j := range order {
		axes[i] = x.axes[j]
	}
	if x.known == nil {
		return &tensor{v: x.v, axes: axes, hidden: x.hidden}
	}
	step, sizes := strides(x.sizes()), make([]int64, len(order))
	for i, j := range order {
		sizes[i] = x.axes[j].size
	}
	return x.picked(sizes, func(at []int64) (k int64) {
		for i, j := range order {
			k += at[i] * step[j]
		}
		return k
	})
}

// expanded repeats axes of size 1.
func (m *maker) expanded(x *tensor, sizes []int64) *tensor {
	shift := len(sizes) - len(x.axes)
	if x.known != nil {
		step := strides(x.sizes())
		return x.picked(sizes, func(at []int64) (k int64) {
			for i, a := range x.axes {
				if a.size > 1 {
					k += at[i+shift] * step[i]
				}
			}
			return k
		})
	}
	axes := make([]axis, len(sizes))
	for i, n := range sizes {
		axes[i].size = n
		if i < shift {
			continue
		}
		if x.axes[i-shift].size == 1 && n > 1 {
			x = m.squeezed(x, i-shift)
		}
		axes[i].dims = x.axes[i-shift].dims
	}
	return &tensor{v: x.v, axes: axes, hidden: x.hidden}
}

// bounds gives the range of a slice as torch means it.
func bounds(n *node, size int64) (from, to int64) {
	place := func(name string, absent int64) int64 {
		if !n.has(name) {
			return absent
		}
		p := n.int(name, absent)
		if p < 0 {
			p += size
		}
		return min(max(p, 0), size)
	}
	from, to = place("start", 0), place("end", size)
	return from, max(from, to)
}

// resized is a tensor whose axis i got another size by an operation on its one dimension; a single
// element needs none.
func (m *maker) resized(x *tensor, v *ir.Value, i int, size int64, key string) *tensor {
	old := x.axes[i].dims[0]
	if size == 1 {
		return m.squeezed(x.with(v), i)
	}
	d := m.fresh(fmt.Sprint("part", i, key), size, old)
	if m.name(d) != m.name(old) {
		v = m.b.Rename(v, m.name(old), m.name(d))
	}
	axes := slices.Clone(x.axes)
	axes[i] = axis{[]dim{d}, size}
	return m.tensor(v, x.hidden, axes...)
}

// sliced takes a range of an axis.
func (m *maker) sliced(x *tensor, i int, from, to, step int64, key string) *tensor {
	n := x.axes[i].size
	size := (to - from + step - 1) / step
	if from == 0 && to == n && step == 1 {
		return x
	}
	if t := m.partsOf(x, i, from, to, key); t != nil && step == 1 {
		return t
	}
	if x.known != nil {
		stride, sizes := strides(x.sizes()), x.sizes()
		sizes[i] = size
		return x.picked(sizes, func(at []int64) (k int64) {
			for j := range at {
				if j == i {
					k += (from + at[j]*step) * stride[j]
				} else {
					k += at[j] * stride[j]
				}
			}
			return k
		})
	}
	axes := slices.Clone(x.axes)
	switch a := x.axes[i]; {
	case size == 0:
		axes[i] = axis{}
		return &tensor{v: x.v, axes: axes, hidden: x.hidden}
	case len(a.dims) == 0:
		axes[i].size = size
		return &tensor{v: x.v, axes: axes, hidden: x.hidden}
	}
	// A range of whole rows of the major dimension needs no joining: [heads, 3, head] is taken so.
	if a := x.axes[i]; step == 1 && len(a.dims) > 1 {
		inner := n / m.size(a.dims[0])
		if from%inner == 0 && to%inner == 0 {
			major := a.dims[0]
			v := m.b.Slice(x.v, m.name(major), from/inner, to/inner)
			if size == inner {
				axes[i] = axis{a.dims[1:], size}
				return m.tensor(m.b.Sum(v, m.name(major)), x.hidden, axes...)
			}
			d := m.fresh(fmt.Sprint("rows", i, key), size/inner, major)
			if m.name(d) != m.name(major) {
				v = m.b.Rename(v, m.name(major), m.name(d))
			}
			axes[i] = axis{append([]dim{d}, a.dims[1:]...), size}
			return m.tensor(v, x.hidden, axes...)
		}
	}
	x = m.whole(x, i)
	if step == 1 {
		v := m.b.Slice(x.v, m.name(x.axes[i].dims[0]), from, to)
		return m.resized(x, v, i, size, key)
	}
	if n%step != 0 || from >= step || to != n {
		panic(refusal("a slice whose step does not divide the size"))
	}
	x = m.apart(x, x.axes[i].dims[0], step)
	hi, lo := x.axes[i].dims[0], x.axes[i].dims[1]
	v := m.b.Sum(m.b.Slice(x.v, m.name(lo), from, from+1), m.name(lo))
	axes = slices.Clone(x.axes)
	axes[i] = axis{[]dim{hi}, size}
	if out := m.tensor(v, x.hidden, axes...); size > 1 {
		return out
	} else {
		return m.squeezed(out, i)
	}
}

// partsOf takes a range of what was joined, if it is some of the parts; nil if not.
func (m *maker) partsOf(x *tensor, i int, from, to int64, key string) *tensor {
	if x.parts == nil || x.joint != i {
		return nil
	}
	var list []*tensor
	at := int64(0)
	for _, t := range x.parts {
		size := t.axes[i].size
		if at >= from && at+size <= to {
			list = append(list, t)
			from = at + size
		} else if at+size > from && at < to {
			return nil
		}
		at += size
	}
	if len(list) == 0 {
		return nil
	}
	outer := m.key
	defer func() { m.key = outer }()
	m.key += "parts" + key + ":"
	return m.joined(list, i)
}

// chunks takes an axis apart into as many parts as the node has outputs.
func chunks(m *maker, n *node) []*tensor {
	x := n.tensor("self")
	i := x.at(n.int("dim", 0))
	equal := true
	for k := range n.Outputs {
		equal = equal && n.out(k)[i] == n.out(0)[i]
	}
	if a := x.axes[i]; equal && len(n.Outputs) > 1 && x.known == nil && !x.param &&
		len(a.dims) == 1 && m.dims.all[a.dims[0]].param {
		// Weights side by side, as of queries, keys and values: they are one axis more, so that each is
		// sharded like the others.
		x = m.apart(x, a.dims[0], n.out(0)[i])
	}
	var list []*tensor
	from := int64(0)
	for k := range n.Outputs {
		to := from + n.out(k)[i]
		list = append(list, m.sliced(x, i, from, to, 1, fmt.Sprint("chunk", k)))
		from = to
	}
	return list
}

// joined concatenates along axis i.
func (m *maker) joined(list []*tensor, i int) *tensor {
	if len(list) == 1 {
		return list[0]
	}
	if t := joinedNumbers(list, i); t != nil {
		return t
	}
	size := int64(0)
	var hidden []dim
	parts := slices.Clone(list)
	for k := range list {
		list[k] = m.whole(m.real(list[k]), i)
		size += list[k].axes[i].size
		hidden = append(hidden, list[k].hidden...)
	}
	if partly(list, i) {
		out := *m.padded(list, i, size)
		out.parts, out.joint = parts, i
		return &out
	}
	to := m.fresh("cat", size, list[0].axes[i].dims[0])
	// All other axes must be the same, and all parts have the joined dimension.
	for j := range list[0].axes {
		some := slices.IndexFunc(list, func(t *tensor) bool { return len(t.axes[j].dims) > 0 })
		if j == i || some < 0 {
			continue
		}
		for k := range list {
			if len(list[k].axes[j].dims) == 0 {
				list[k] = m.likeAxis(list[k], list[some], j)
			}
		}
		for k := 1; k < 2*len(list)-1; k++ { // what one splits, those before it split as well
			r := k % len(list)
			if r > 0 {
				list[0], list[r] = m.match(list[0], list[r], j, j)
			}
		}
	}
	axes := slices.Clone(list[0].axes)
	axes[i] = axis{[]dim{to}, size}
	out := m.tensor(nil, hidden, axes...)
	all, _ := union(out)
	var values []*ir.Value
	for k := range list {
		own := list[k].axes[i].dims[0]
		rest := slices.DeleteFunc(slices.Clone(all), func(d dim) bool { return d == to })
		v := m.spread(list[k], rest).v
		if m.name(own) != m.name(to) {
			v = m.b.Rename(v, m.name(own), m.name(to))
		}
		values = append(values, v)
	}
	// The order is the parts' own if it is the same, and the program's otherwise.
	order := ir.Names(values[0].Type.Dims)
	for _, v := range values[1:] {
		if !slices.Equal(ir.Names(v.Type.Dims), order) {
			order = append(m.names(out.hidden), m.names(out.dims())...)
		}
	}
	for k, v := range values {
		values[k] = m.b.Transpose(v, order...)
	}
	out.v = m.b.Concat(m.name(to), values...)
	out.parts, out.joint = parts, i
	return out
}

// partly reports whether floating-point parts that are joined along axis i repeat along an axis
// that others have, as the rotated elements of latent attention do along heads.
func partly(list []*tensor, i int) bool {
	for j := range list[0].axes {
		some, none := false, false
		for _, t := range list {
			if t.v.Type.Elem.Kind() != dtype.Float || t.v.Type.Elem != list[0].v.Type.Elem {
				return false
			}
			some, none = some || len(t.axes[j].dims) > 0, none || len(t.axes[j].dims) == 0
		}
		if j != i && some && none {
			return true
		}
	}
	return false
}

// padded joins parts as a sum, each with zeros in place of the others: what repeats need not be
// copied, and is sharded like what does not.
func (m *maker) padded(list []*tensor, i int, size int64) *tensor {
	var out *tensor
	at := int64(0)
	for k, t := range list {
		n := t.axes[i].size
		v := m.b.Pad(t.v, m.name(t.axes[i].dims[0]), at, size-at-n)
		wide := m.resized(t, v, i, size, fmt.Sprint("pad", k))
		if at += n; out == nil {
			out = wide
		} else {
			out = m.binary(out, wide, m.b.Add)
		}
	}
	return out.with(m.b.Transpose(out.v, append(m.names(out.hidden), m.names(out.dims())...)...))
}

// joinedNumbers concatenates known numbers; nil if some are not known.
func joinedNumbers(list []*tensor, i int) *tensor {
	sizes := list[0].sizes()
	sizes[i] = 0
	for _, t := range list {
		if t.known == nil {
			return nil
		}
		sizes[i] += t.axes[i].size
	}
	out := constant(list[0].elem, sizes, nil)
	inner := strides(sizes)[i]
	for row := int64(0); row < int64(len(list[0].known))/(inner*list[0].axes[i].size); row++ {
		for _, t := range list {
			n := inner * t.axes[i].size
			out.known = append(out.known, t.known[row*n:(row+1)*n]...)
		}
	}
	return out
}

// likeAxis repeats a tensor along the dimensions that another has at an axis.
func (m *maker) likeAxis(t, like *tensor, j int) *tensor {
	have := t.dims()
	if slices.ContainsFunc(like.axes[j].dims, func(d dim) bool { return slices.Contains(have, d) }) {
		return m.whole(t, j)
	}
	axes := slices.Clone(t.axes)
	axes[j].dims = like.axes[j].dims
	return m.tensor(m.spread(t, like.axes[j].dims).v, t.hidden, axes...)
}

// some gives an axis a dimension if it has none.
func (m *maker) some(t *tensor, i int) *tensor {
	if len(t.axes[i].dims) > 0 {
		return t
	}
	return m.whole(t, i)
}
