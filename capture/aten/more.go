package aten

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// otherNames are operators of ATen that are another by a second name, with the same arguments.
var otherNames = map[string]string{
	"clip": "clamp", "absolute": "abs", "negative": "neg", "multiply": "mul", "divide": "div",
	"true_divide": "div", "subtract": "sub", "greater": "gt", "greater_equal": "ge", "less": "lt",
	"less_equal": "le", "not_equal": "ne", "arctan": "atan", "arcsin": "asin", "arccos": "acos",
	"arctan2": "atan2", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "fix": "trunc",
	"special_erf": "erf", "special_expm1": "expm1", "special_exp2": "exp2",
	"special_log1p": "log1p", "special_logsumexp": "logsumexp", "special_expit": "sigmoid",
	"special_logit": "logit",
}

// aliasRules are the rules of operators by their second names.
func aliasRules() map[string]rule {
	first := map[string]rule{}
	for _, g := range []map[string]rule{elementRules, mathRules, pairRules, reduceRules, moreRules} {
		maps.Copy(first, g)
	}
	list := map[string]rule{}
	for other, name := range otherNames {
		for target, f := range first {
			if rest, ok := strings.CutPrefix(target, "aten."+name+"."); ok {
				list["aten."+other+"."+rest] = f
			}
		}
	}
	return list
}

// moreRules are composed of what the other rules have.
var moreRules = map[string]rule{
	"aten.empty.memory_format": filled(0),
	"aten.nan_to_num.default":  sole(nanToNumber),
	"aten.logaddexp.default": sole(func(m *maker, n *node) *tensor {
		return m.binary(n.number("self"), n.number("other"), func(x, y *ir.Value) *ir.Value {
			return logAddExp(m.b, x, y)
		})
	}),
	"aten.logit.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		if n.has("eps") {
			panic(refusal("a logit with bounds"))
		}
		return b.Log(b.Div(x, b.Shift(b.Neg(x), 1)))
	}),
	"aten.nansum.default": sole(func(m *maker, n *node) *tensor {
		x := m.present0(n)
		return m.inF32(x, func(x *tensor) *tensor {
			return m.summed(x, n.over(x), n.bool("keepdim", false))
		})
	}),
	"aten.nanmean.default": sole(func(m *maker, n *node) *tensor {
		x, keep := n.number("self"), n.bool("keepdim", false)
		there := x.with(m.b.Convert(m.b.Compare("eq", x.v, x.v), dtype.F32))
		count := m.summed(there, n.over(x), keep)
		return m.inF32(m.present0(n), func(x *tensor) *tensor {
			sum := m.summed(x, n.over(x), keep)
			return sum.with(m.b.Div(sum.v, m.b.Convert(count.v, sum.v.Type.Elem)))
		})
	}),
	"aten.aminmax.default": func(m *maker, n *node) []*tensor {
		return []*tensor{m.extreme(n, -1), m.extreme(n, 1)}
	},
	"aten.trace.default": sole(func(m *maker, n *node) *tensor {
		return m.summed(diagonal(m, n), []int{0}, false)
	}),
	"aten.scatter_reduce.two":        sole(scatterReduce),
	"aten.reflection_pad1d.default":  padded("reflect"),
	"aten.reflection_pad2d.default":  padded("reflect"),
	"aten.reflection_pad3d.default":  padded("reflect"),
	"aten.replication_pad1d.default": padded("replicate"),
	"aten.replication_pad2d.default": padded("replicate"),
	"aten.replication_pad3d.default": padded("replicate"),
	"aten.vstack.default":            stacked(0, 2),
	"aten.row_stack.default":         stacked(0, 2),
	"aten.hstack.default":            stacked(1, 1),
	"aten.take_along_dim.default":    sole(takeAlong),
	"aten.isposinf.default":          infinite(1),
	"aten.isneginf.default":          infinite(-1),
}

// present0 is the argument of a node with 0 in place of NaN.
func (m *maker) present0(n *node) *tensor {
	x := n.number("self")
	return x.with(m.b.Select(m.b.Compare("ne", x.v, x.v), m.b.Fill(x.v.Type, 0), x.v))
}

// nanToNumber puts numbers in place of NaN and of infinities, the largest of the type if none are
// given. No gradient flows there.
func nanToNumber(m *maker, n *node) *tensor {
	x := n.value("self")
	elem := x.v.Type.Elem
	if elem.Kind() != dtype.Float {
		return x
	}
	n.finite()
	most := map[dtype.DType]float64{dtype.F32: math.MaxFloat32, dtype.F64: math.MaxFloat64,
		dtype.BF16: 0x1.fep127, dtype.F16: 65504}[elem]
	b, v := m.b, x.v
	put := func(where *ir.Value, by float64) { v = b.Select(where, b.Fill(v.Type, by), v) }
	put(b.Compare("ne", x.v, x.v), n.float("nan", 0))
	put(b.Compare("eq", x.v, infinity(b, x.v)), n.float("posinf", most))
	put(b.Compare("eq", x.v, like(b, x.v, math.Inf(-1))), n.float("neginf", -most))
	return x.with(v)
}

// infinite is a rule for where x is infinity, or minus infinity.
func infinite(sign float64) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.finite()
		x = x.with(m.scaled(x, -sign).v)
		return x.with(m.b.Compare("eq", x.v, like(m.b, x.v, math.Inf(-1))))
	})
}

// logAddExp is log(exp(x) + exp(y)): the larger, and softplus of the distance.
func logAddExp(b *ir.Builder, x, y *ir.Value) *ir.Value {
	elem := x.Type.Elem
	if elem.Bits() < 32 {
		return b.Convert(logAddExp(b, b.Convert(x, dtype.F32), b.Convert(y, dtype.F32)), elem)
	}
	same, less := b.Compare("eq", x, y), b.Compare("lt", x, y)
	both := b.Add(x, y)
	// Where a form is not taken it has no infinite gradient.
	distance := b.Select(same, b.Fill(both.Type, 0), b.Sub(x, y))
	high := b.Add(y, log1p(b, b.Exp(b.Select(less, distance, b.Fill(both.Type, 0)))))
	low := b.Add(x, log1p(b, b.Exp(b.Select(less, b.Fill(both.Type, 0), b.Neg(distance)))))
	return b.Select(same, b.Shift(middle(b, x, y), math.Ln2), b.Select(less, high, low))
}

// scatterReduce adds up what comes to a place, with what was there or without.
func scatterReduce(m *maker, n *node) *tensor {
	if how := n.text("reduce", ""); how != "sum" {
		panic(refusal("a scatter that reduces by " + how))
	}
	base, where, src := n.value("self"), n.value("index"), n.value("src")
	i := base.at(n.int("dim", 0))
	if !n.bool("include_self", true) {
		zeros := m.alike(where, 0)
		base = m.scatter(base, where, zeros.with(m.b.Convert(zeros.v, base.v.Type.Elem)), i, false)
	}
	return m.scatter(base, where, src, i, true)
}

// padded is a rule for padding by the elements of the tensor itself.
func padded(mode string) rule {
	return sole(func(m *maker, n *node) *tensor {
		return m.mirrored(n.value("self"), n.ints("padding"), mode)
	})
}

// mirrored pads the last axes by their own elements: as a mirror at the ends shows them (reflect),
// the last one again (replicate), or from the other end (circular).
func (m *maker) mirrored(x *tensor, by []int64, mode string) *tensor {
	outer := m.key
	defer func() { m.key = outer }()
	for k := 0; k+1 < len(by); k += 2 {
		i := len(x.axes) - 1 - k/2
		size := x.axes[i].size
		if by[k] == 0 && by[k+1] == 0 {
			continue
		}
		m.key = fmt.Sprint(outer, "mirror", k, ":")
		var where []float64
		for p := -by[k]; p < size+by[k+1]; p++ {
			at := min(max(p, 0), size-1)
			switch {
			case mode == "circular":
				at = (p%size + size) % size
			case mode == "reflect" && p < 0:
				at = -p
			case mode == "reflect" && p >= size:
				at = 2*(size-1) - p
			}
			where = append(where, float64(at))
		}
		x = m.rows(m.whole(m.some(x, i), i), constant(dtype.S64, []int64{int64(len(where))}, where), i)
	}
	return x
}

// stacked is a rule that joins along an axis, of tensors with at least as many axes; vectors are
// joined along their only one.
func stacked(axis, rank int) rule {
	return sole(func(m *maker, n *node) *tensor {
		list := n.tensors("tensors")
		for k := range list {
			for len(list[k].axes) < rank {
				list[k] = m.unsqueezed(list[k], 0)
			}
		}
		return m.joined(list, min(axis, len(list[0].axes)-1))
	})
}

// takeAlong is gather with numbers that are broadcast against x.
func takeAlong(m *maker, n *node) *tensor {
	x, where := n.value("self"), n.value("indices")
	if !n.has("dim") {
		sizes := []int64{elementsOf(x, n.over(x))}
		x, where = m.viewed(x, sizes), m.viewed(where, []int64{elementsOf(where, n.over(where))})
	}
	i := x.at(n.int("dim", 0))
	sizes := commonSizes(x, where)
	wide, short := slices.Clone(sizes), slices.Clone(sizes)
	wide[i], short[i] = x.axes[i].size, where.axes[i].size
	x, where = m.expanded(x, wide), m.expanded(where, short)
	last := len(sizes) - 1
	order := swapped(len(sizes), i, last)
	return m.permuted(m.gathered(m.permuted(x, order), m.permuted(where, order)), order)
}
