package aten

import (
	"math"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// vectorNorm is a norm along axes: of order 0, 1, 2, infinity, or any other.
func vectorNorm(m *maker, n *node) *tensor {
	order := n.float("ord", 2)
	if strings.HasPrefix(n.Target, "aten.norm.") {
		order = n.float("p", 2)
	}
	x := n.number("self")
	if to, ok := n.dtype("dtype"); ok {
		x = m.cast(x, to)
	}
	list, keep := n.over(x), n.bool("keepdim", false)
	if math.IsInf(order, 0) {
		return m.extremeOf(x.with(absolute(m.b, x.v)), list, keep, math.Copysign(1, order), false)
	}
	return m.inF32(x, func(x *tensor) *tensor {
		return m.normOf(x, list, keep, order)
	})
}

// normOf is (Σ|x|^order)^(1/order) along axes. Its gradient at 0 is 0.
func (m *maker) normOf(x *tensor, list []int, keep bool, order float64) *tensor {
	b := m.b
	switch order {
	case 0:
		some := b.Compare("ne", b.StopGradient(x.v), like(b, x.v, 0))
		return m.summed(x.with(b.Convert(some, x.v.Type.Elem)), list, keep)
	case 1:
		return m.summed(x.with(absolute(b, x.v)), list, keep)
	case 2:
		out := m.summed(x.with(b.Mul(x.v, x.v)), list, keep)
		return out.with(rootOf(b, out.v))
	}
	size := absolute(b, x.v)
	sum := m.summed(x.with(powered(b, size, like(b, size, order))), list, keep)
	none := b.Compare("eq", sum.v, like(b, sum.v, 0))
	some := b.Select(none, b.Fill(sum.v.Type, 1), sum.v)
	root := b.Exp(b.Scale(b.Log(some), 1/order))
	return sum.with(b.Select(none, b.Fill(sum.v.Type, 0), root))
}

// cosineSimilarity is x·y/(max(|x|, eps)·max(|y|, eps)) along an axis.
func cosineSimilarity(m *maker, n *node) *tensor {
	x, y, eps := n.value("x1"), n.value("x2"), n.float("eps", 1e-8)
	elem := wider(x.v.Type.Elem, y.v.Type.Elem)
	if elem.Bits() < 32 {
		x, y = x.with(m.b.Convert(x.v, dtype.F32)), y.with(m.b.Convert(y.v, dtype.F32))
	}
	sizes := commonSizes(x, y)
	i := constant(elem, sizes, nil).at(n.int("dim", 1))
	unit := func(t *tensor) *tensor {
		at := i - (len(sizes) - len(t.axes))
		size := m.clamped(m.normOf(t, []int{at}, true, 2), eps, math.Inf(1))
		return m.binary(t, size, m.b.Div)
	}
	both := m.binary(unit(x), unit(y), m.b.Mul)
	out := m.summed(both, []int{i}, false)
	return out.with(m.b.Convert(out.v, elem))
}

// logSumExp is log Σ exp(x) along axes. Infinities are no offset.
func (m *maker) logSumExp(x *tensor, list []int, keep bool) *tensor {
	b := m.b
	top := m.largest(x, list)
	top = b.Select(finite(b, top), top, b.Fill(top.Type, 0))
	sum := m.summed(x.with(b.Exp(b.Sub(x.v, top))), list, keep)
	return sum.with(b.Add(b.Log(sum.v), top))
}

// logSoftmax is log(softmax(x)) along an axis.
func logSoftmax(m *maker, n *node) *tensor {
	x := n.number("self")
	to, ok := n.dtype("dtype")
	if n.bool("half_to_float", false) {
		to, ok = dtype.F32, true
	}
	if ok {
		x = m.cast(x, to)
	}
	if len(x.axes) == 0 {
		return x.with(m.b.Scale(x.v, 0))
	}
	i := x.at(n.int("dim", -1))
	return m.inF32(x, func(x *tensor) *tensor { return m.logSoftmax(x, i) })
}

func (m *maker) logSoftmax(x *tensor, i int) *tensor {
	b, list := m.b, []int{i}
	apart := x.with(b.Sub(x.v, m.largest(x, list)))
	sum := m.summed(apart.with(b.Exp(apart.v)), list, true)
	return apart.with(b.Sub(apart.v, b.Log(sum.v)))
}

// accumulated adds up the elements before each along an axis and itself, or multiplies them: at
// each step those that stand twice as far away join. rest changes nothing.
func (m *maker) accumulated(n *node, rest float64, join func(x, y *ir.Value) *ir.Value) *tensor {
	x := n.number("self")
	if to, ok := n.dtype("dtype"); ok {
		x = m.cast(x, to)
	}
	if x.v.Type.Elem == dtype.Pred {
		x = m.cast(x, dtype.S64)
	}
	if len(x.axes) == 0 {
		return x
	}
	i := x.at(n.int("dim", 0))
	return m.inF32(x, func(x *tensor) *tensor {
		x = m.whole(x, i)
		d, size := m.name(x.axes[i].dims[0]), x.axes[i].size
		v := x.v
		for by := int64(1); by < size; by *= 2 {
			before := m.b.Slice(v, d, 0, size-by)
			if rest == 0 {
				before = m.b.Pad(before, d, by, 0)
			} else {
				t := v.Type
				t.Dims = append([]ir.Dim(nil), t.Dims...)
				t.Dims[t.Index(d)].Size = by
				before = m.b.Concat(d, m.b.Fill(t, rest), before)
			}
			v = join(v, before)
		}
		return x.with(v)
	})
}

// extremeOf is the largest element along axes, or with the sign -1 the smallest. Elements that are
// equal to it share its gradient. Where some are NaN, these share it, or every gradient is NaN.
func (m *maker) extremeOf(x *tensor, list []int, keep bool, sign float64, shared bool) *tensor {
	if x.v.Type.Elem.Kind() != dtype.Float {
		if sign < 0 {
			x = m.reversed(x)
			return m.reversed(m.without(x, m.largest(x, list), list, keep))
		}
		return m.without(x, m.largest(x, list), list, keep)
	}
	x = m.scaled(x, sign)
	names := m.along(x, list)
	if len(names) == 0 {
		return m.scaled(m.without(x, m.largest(x, list), list, keep), sign)
	}
	b, elem := m.b, x.v.Type.Elem
	top := m.largest(x, list)
	hit := b.Compare("eq", x.v, top)
	count := b.Convert(b.Sum(b.Convert(hit, dtype.F32), names...), elem)
	share := b.Div(b.Sum(b.Select(hit, x.v, b.Fill(x.v.Type, 0)), names...), count)
	// The sum of equal elements has their number in it: it is exact for infinity and NaN, and the
	// element itself is taken elsewhere.
	nothing := b.Sub(share, b.StopGradient(share))
	v := b.Select(finite(b, top), b.Add(top, nothing), share)
	// The engine's maximum may pass over NaN.
	wrong := b.Max(b.Convert(b.Compare("ne", x.v, x.v), dtype.F32), names...)
	some := b.Compare("gt", wrong, like(b, wrong, 0))
	one := b.Fill(v.Type, 1)
	nan := b.Add(infinity(b, one), like(b, one, math.Inf(-1)))
	all := b.Mul(b.Sum(x.v, names...), b.Select(some, nan, one))
	if shared {
		bad := b.Compare("ne", x.v, x.v)
		times := b.Convert(b.Sum(b.Convert(bad, dtype.F32), names...), elem)
		all = b.Div(b.Sum(b.Select(bad, x.v, b.Fill(x.v.Type, 0)), names...), b.Select(some, times, one))
	}
	v = b.Select(some, all, v)
	return m.scaled(m.without(x, v, list, keep), sign)
}
