package aten

import (
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// reduceRules take something of the elements along axes, or add them up on the way.
var reduceRules = map[string]rule{
	"aten.amax.default": sole(func(m *maker, n *node) *tensor { return m.extreme(n, 1) }),
	"aten.amin.default": sole(func(m *maker, n *node) *tensor { return m.extreme(n, -1) }),
	"aten.max.default":  sole(func(m *maker, n *node) *tensor { return m.extreme(n, 1) }),
	"aten.min.default":  sole(func(m *maker, n *node) *tensor { return m.extreme(n, -1) }),
	"aten.max.dim":      extremeAt(1), "aten.min.dim": extremeAt(-1),
	"aten.max.other":      pairRules["aten.maximum.default"],
	"aten.min.other":      pairRules["aten.minimum.default"],
	"aten.argmax.default": sole(func(m *maker, n *node) *tensor { return m.placeOfExtreme(n, 1) }),
	"aten.argmin.default": sole(func(m *maker, n *node) *tensor { return m.placeOfExtreme(n, -1) }),
	"aten.any.default":    holds(false), "aten.any.dim": holds(false), "aten.any.dims": holds(false),
	"aten.all.default": holds(true), "aten.all.dim": holds(true), "aten.all.dims": holds(true),
	"aten.prod.default": sole(productOf), "aten.prod.dim_int": sole(productOf),
	"aten.var.default": spreadOf(false, false), "aten.var.dim": spreadOf(false, false),
	"aten.var.correction": spreadOf(false, false), "aten.std.default": spreadOf(true, false),
	"aten.std.dim": spreadOf(true, false), "aten.std.correction": spreadOf(true, false),
	"aten.var_mean.correction": spreadOf(false, true),
	"aten.std_mean.correction": spreadOf(true, true),
	"aten.var_mean.dim":        spreadOf(false, true), "aten.std_mean.dim": spreadOf(true, true),
	"aten.linalg_vector_norm.default": sole(vectorNorm),
	"aten.norm.Scalar":                sole(vectorNorm), "aten.norm.ScalarOpt_dim": sole(vectorNorm),
	"aten.norm.ScalarOpt_dim_dtype": sole(vectorNorm), "aten.norm.ScalarOpt_dtype": sole(vectorNorm),
	"aten.logsumexp.default": sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return m.inF32(x, func(x *tensor) *tensor {
			return m.logSumExp(x, n.over(x), n.bool("keepdim", false))
		})
	}),
	"aten.log_softmax.int": sole(logSoftmax), "aten._log_softmax.default": sole(logSoftmax),
	"aten._softmax.default": sole(func(m *maker, n *node) *tensor {
		if n.bool("half_to_float", false) {
			panic(refusal("a softmax of another type than its argument"))
		}
		return rules["aten.softmax.int"](m, n)[0]
	}),
	"aten.cumsum.default": sole(func(m *maker, n *node) *tensor {
		return m.accumulated(n, 0, m.b.Add)
	}),
	"aten.cumprod.default": sole(func(m *maker, n *node) *tensor {
		return m.accumulated(n, 1, m.b.Mul)
	}),
	"aten.count_nonzero.default":     sole(countNonzero),
	"aten.count_nonzero.dim_IntList": sole(countNonzero),
	"aten.cosine_similarity.default": sole(cosineSimilarity),
}

// over gives the axes that a node reduces, all of them where it names none.
func (n *node) over(x *tensor) []int {
	var list []int
	for _, d := range n.ints("dim") {
		if len(x.axes) > 0 {
			list = append(list, x.at(d))
		}
	}
	if len(list) == 0 {
		for i := range x.axes {
			list = append(list, i)
		}
	}
	return list
}

// inF32 computes in f32 where x has fewer bits, and gives the result in the type of x.
func (m *maker) inF32(x *tensor, f func(x *tensor) *tensor) *tensor {
	elem := x.v.Type.Elem
	if elem.Bits() >= 32 || elem.Kind() != dtype.Float {
		return f(x)
	}
	out := f(x.with(m.b.Convert(x.v, dtype.F32)))
	return out.with(m.b.Convert(out.v, elem))
}

// without is what a reduction over axes gives: these are gone, or of size 1.
func (m *maker) without(x *tensor, v *ir.Value, list []int, keep bool) *tensor {
	var axes []axis
	for i, a := range x.axes {
		switch {
		case !slices.Contains(list, i):
			axes = append(axes, a)
		case keep:
			axes = append(axes, axis{size: 1})
		}
	}
	return m.tensor(v, x.hidden, axes...)
}

// along lists the names of the dimensions of axes.
func (m *maker) along(x *tensor, list []int) []string {
	var names []string
	for _, i := range list {
		names = append(names, m.names(x.axes[i].dims)...)
	}
	return names
}

// times is how many times elements of x stand along axes that repeat.
func (x *tensor) times(list []int) float64 {
	n := 1.0
	for _, i := range list {
		if len(x.axes[i].dims) == 0 {
			n *= float64(x.axes[i].size)
		}
	}
	return n
}

// summed adds up along axes.
func (m *maker) summed(x *tensor, list []int, keep bool) *tensor {
	v := x.v
	if names := m.along(x, list); len(names) > 0 {
		v = m.b.Sum(v, names...)
	}
	return m.scaled(m.without(x, v, list, keep), x.times(list))
}

// mean takes the mean along axes.
func (m *maker) mean(x *tensor, list []int, keep bool) *tensor {
	return m.scaled(m.summed(x, list, keep), 1/float64(elementsOf(x, list)))
}

func elementsOf(x *tensor, list []int) int64 {
	n := int64(1)
	for _, i := range list {
		n *= x.axes[i].size
	}
	return n
}

// largest is the largest element along axes, without a gradient.
func (m *maker) largest(x *tensor, list []int) *ir.Value {
	v := m.b.StopGradient(x.v)
	if names := m.along(x, list); len(names) > 0 {
		v = m.b.Max(v, names...)
	}
	return v
}

// extreme reduces to the largest element or the smallest.
func (m *maker) extreme(n *node, sign float64) *tensor {
	x := n.value("self")
	shared := strings.HasPrefix(n.Target, "aten.max.") || strings.HasPrefix(n.Target, "aten.min.")
	out := m.extremeOf(m.comparable(x), n.over(x), n.bool("keepdim", false), sign, shared)
	return out.with(m.b.Convert(out.v, x.v.Type.Elem))
}

// comparable has masks and short whole numbers in 32 bits, whose least one the graph knows.
func (m *maker) comparable(x *tensor) *tensor {
	if elem := x.v.Type.Elem; elem.Kind() == dtype.Float || elem == dtype.S64 {
		return x
	} else if elem.Kind() == dtype.Unsigned && elem.Bits() >= 32 {
		panic(refusal("the order of unsigned numbers of 32 bits or more"))
	}
	return x.with(m.b.Convert(x.v, dtype.S32))
}

// reversed has the opposite order: -x, and of whole numbers -1-x, which each type holds.
func (m *maker) reversed(x *tensor) *tensor {
	if x.v.Type.Elem.Kind() == dtype.Float {
		return x.with(m.b.Neg(x.v))
	}
	return x.with(m.b.Sub(m.b.Fill(x.v.Type, -1), x.v))
}

// placed numbers the first of the largest elements along axis i, which is one dimension, NaN being
// the largest of all.
func (m *maker) placed(x *tensor, i int) *ir.Value {
	b, d := m.b, x.axes[i].dims[0]
	v, top := b.StopGradient(x.v), m.largest(x, []int{i})
	size := float64(x.axes[i].size)
	if size >= 1<<24 {
		panic(refusal("an axis of more elements than f32 counts"))
	}
	line := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: m.name(d), Size: x.axes[i].size}}}
	whole := ir.Type{Elem: dtype.F32, Dims: v.Type.Dims}
	left := b.Add(b.Shift(b.Neg(b.Iota(line, m.name(d))), size), b.Fill(whole, 0)) // size to 1
	rank := b.Select(b.Compare("eq", v, top), left, b.Fill(whole, 0))
	if v.Type.Elem.Kind() == dtype.Float {
		wrong := b.Select(b.Compare("ne", v, v), left, b.Fill(whole, 0))
		some := b.Max(wrong, m.name(d)) // 0 without NaN
		rank = b.Select(b.Compare("gt", some, like(b, some, 0)), wrong, rank)
	}
	return b.Shift(b.Neg(b.Max(rank, m.name(d))), size)
}

// extremeAt is a rule for the largest element along an axis and its place, or with the sign -1 the
// smallest. The gradient flows to that place alone.
func extremeAt(sign float64) rule {
	return func(m *maker, n *node) []*tensor {
		x := n.number("self")
		if len(x.axes) == 0 {
			panic(refusal("a place in a tensor without axes"))
		}
		i, keep := x.at(n.int("dim", -1)), n.bool("keepdim", false)
		elem := x.v.Type.Elem
		x = m.comparable(m.whole(x, i))
		ranked := x
		if sign < 0 {
			ranked = m.reversed(x)
		}
		place := m.placed(ranked, i)
		b, d := m.b, x.axes[i].dims[0]
		line := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: m.name(d), Size: x.axes[i].size}}}
		here := b.Compare("eq", b.Add(b.Iota(line, m.name(d)), b.Fill(ir.Type{Elem: dtype.F32,
			Dims: x.v.Type.Dims}, 0)), place)
		v := b.Sum(b.Select(here, x.v, b.Fill(x.v.Type, 0)), m.name(d))
		return []*tensor{m.without(x, b.Convert(v, elem), []int{i}, keep),
			m.without(x, b.Convert(place, m.elem(dtype.S64)), []int{i}, keep)}
	}
}

// placeOfExtreme is argmax or argmin, of the flat tensor where there is no dim.
func (m *maker) placeOfExtreme(n *node, sign float64) *tensor {
	x := n.value("self")
	x = m.comparable(x)
	if sign < 0 {
		x = m.reversed(x)
	}
	rank, keep := len(x.axes), n.bool("keepdim", false)
	if !n.has("dim") {
		x = m.viewed(x, []int64{elementsOf(x, n.over(x))})
	}
	i := x.at(n.int("dim", 0))
	x = m.whole(x, i)
	place := m.b.Convert(m.placed(x, i), m.elem(dtype.S64))
	out := m.without(x, place, []int{i}, keep && n.has("dim"))
	if keep && !n.has("dim") {
		out = m.tensor(out.v, out.hidden, slices.Repeat([]axis{{size: 1}}, rank)...)
	}
	return out
}

// holds is a rule for whether any element is not 0, or all.
func holds(all bool) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := m.bits(n.tensor("self"))
		list, keep := n.over(x), n.bool("keepdim", false)
		v := m.b.Convert(x.v, dtype.F32)
		if all {
			v = m.b.Neg(v)
		}
		top := m.largest(x.with(v), list)
		limit := -0.5 // of the largest of -1 and 0
		how := "lt"
		if !all {
			limit, how = 0.5, "gt"
		}
		return m.without(x, m.b.Compare(how, top, like(m.b, top, limit)), list, keep)
	})
}

func countNonzero(m *maker, n *node) *tensor {
	x := m.cast(m.bits(n.tensor("self")), dtype.S64)
	return m.summed(x, n.over(x), false)
}

// productOf is the product along an axis: the halves of it are multiplied until one is left, so
// that zeros have their gradients.
func productOf(m *maker, n *node) *tensor {
	x := n.number("self")
	if to, ok := n.dtype("dtype"); ok {
		x = m.cast(x, to)
	}
	if !n.has("dim") {
		x = m.viewed(x, []int64{elementsOf(x, n.over(x))})
	}
	i := x.at(n.int("dim", 0))
	x = m.whole(x, i)
	d := m.name(x.axes[i].dims[0])
	v := x.v
	for size := x.axes[i].size; size > 1; size = (size + 1) / 2 {
		half := size / 2
		both := m.b.Mul(m.b.Slice(v, d, 0, half), m.b.Slice(v, d, half, 2*half))
		if size%2 == 1 {
			both = m.b.Concat(d, both, m.b.Slice(v, d, size-1, size))
		}
		v = both
	}
	return m.without(x, m.b.Sum(v, d), []int{i}, n.bool("keepdim", false))
}

// spreadOf is a rule for the variance along axes, or its root, the standard deviation, with the
// mean as a second result.
func spreadOf(root, mean bool) rule {
	return func(m *maker, n *node) []*tensor {
		x := n.number("self")
		list, keep := n.over(x), n.bool("keepdim", false)
		less := n.float("correction", 1)
		if n.has("unbiased") {
			less = n.float("unbiased", 1)
		}
		var middle *tensor
		out := m.inF32(x, func(x *tensor) *tensor {
			middle = m.mean(x, list, true)
			apart := m.binary(x, middle, m.b.Sub)
			count := math.Max(float64(elementsOf(x, list))-less, 0)
			v := m.summed(apart.with(m.b.Mul(apart.v, apart.v)), list, keep)
			v = v.with(m.b.Div(v.v, like(m.b, v.v, count)))
			if root {
				return v.with(rootOf(m.b, v.v))
			}
			return v
		})
		if !mean {
			return []*tensor{out}
		}
		return []*tensor{out, m.inF32(x, func(x *tensor) *tensor { return m.mean(x, list, keep) })}
	}
}

// rootOf is a square root whose gradient at 0 is 0.
func rootOf(b *ir.Builder, x *ir.Value) *ir.Value {
	none := b.Compare("eq", x, like(b, x, 0))
	return b.Select(none, b.Fill(x.Type, 0), b.Sqrt(b.Select(none, b.Fill(x.Type, 1), x)))
}
