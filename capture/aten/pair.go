package aten

import (
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// pairRules take two tensors element by element, or a tensor and a number.
var pairRules = map[string]rule{
	"aten.maximum.default": sole(func(m *maker, n *node) *tensor {
		return m.larger(n.number("self"), n.number("other"), "gt")
	}),
	"aten.minimum.default": sole(func(m *maker, n *node) *tensor {
		return m.larger(n.number("self"), n.number("other"), "lt")
	}),
	"aten.fmax.default": sole(func(m *maker, n *node) *tensor {
		return m.present(n.number("self"), n.number("other"), "gt")
	}),
	"aten.fmin.default": sole(func(m *maker, n *node) *tensor {
		return m.present(n.number("self"), n.number("other"), "lt")
	}),
	"aten.clamp.Tensor": sole(clampedBy), "aten.clamp_min.Tensor": sole(clampedBy),
	"aten.clamp_max.Tensor":    sole(clampedBy),
	"aten.logical_and.default": logical(and), "aten.logical_or.default": logical(or),
	"aten.logical_xor.default": logical(xor),
	"aten.bitwise_and.Tensor":  bitwise(and), "aten.__and__.Tensor": bitwise(and),
	"aten.bitwise_or.Tensor": bitwise(or), "aten.__or__.Tensor": bitwise(or),
	"aten.bitwise_xor.Tensor": bitwise(xor), "aten.__xor__.Tensor": bitwise(xor),
	"aten.pow.Tensor_Tensor": sole(func(m *maker, n *node) *tensor {
		return m.raised(n.number("self"), n.number("exponent"))
	}),
	"aten.pow.Scalar": sole(func(m *maker, n *node) *tensor {
		y := n.number("exponent")
		return m.raised(m.tensor(like(m.b, y.v, n.float("self", 0)), nil), y)
	}),
	"aten.atan2.default": sole(func(m *maker, n *node) *tensor {
		return m.binary(n.number("self"), n.number("other"), func(y, x *ir.Value) *ir.Value {
			return angle(m.b, y, x)
		})
	}),
	"aten.div.Tensor_mode": sole(dividedWhole), "aten.div.Scalar_mode": sole(dividedWhole),
	"aten.floor_divide.default": sole(dividedWhole), "aten.floor_divide.Scalar": sole(dividedWhole),
	"aten.remainder.Tensor": remainder(true), "aten.remainder.Scalar": remainder(true),
	"aten.fmod.Tensor": remainder(false), "aten.fmod.Scalar": remainder(false),
	"aten.addcmul.default": sole(func(m *maker, n *node) *tensor {
		y := m.binary(n.value("tensor1"), n.value("tensor2"), m.b.Mul)
		return m.binary(n.value("self"), m.scaled(y, n.float("value", 1)), m.b.Add)
	}),
	"aten.addcdiv.default": sole(func(m *maker, n *node) *tensor {
		y := m.binary(n.value("tensor1"), n.value("tensor2"), m.b.Div)
		return m.binary(n.value("self"), m.scaled(y, n.float("value", 1)), m.b.Add)
	}),
	"aten.lerp.Scalar": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		return m.binary(x, m.scaled(m.binary(n.value("end"), x, m.b.Sub), n.float("weight", 0)), m.b.Add)
	}),
	"aten.lerp.Tensor": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		step := m.binary(m.binary(n.value("end"), x, m.b.Sub), n.value("weight"), m.b.Mul)
		return m.binary(x, step, m.b.Add)
	}),
	"aten.where.ScalarOther": sole(whereScalar), "aten.where.ScalarSelf": sole(whereScalar),
	"aten.where.Scalar": sole(whereScalar),
	"aten.masked_fill.Tensor": sole(func(m *maker, n *node) *tensor {
		x, by := n.value("self"), n.tensor("value")
		if len(by.known) == 1 {
			return m.filledWhere(n, x, by.known[0])
		}
		return m.choose(n.value("mask"), m.cast(m.real(by), n.type0()), x)
	}),
	"aten.clamp_min.default": sole(func(m *maker, n *node) *tensor {
		return m.clamped(n.number("self"), n.float("min", math.Inf(-1)), math.Inf(1))
	}),
	"aten.clamp_max.default": sole(func(m *maker, n *node) *tensor {
		return m.clamped(n.number("self"), math.Inf(-1), n.float("max", math.Inf(1)))
	}),
}

// type0 is the type of the first result, as the program has it.
func (n *node) type0() dtype.DType { return n.graph.Values[string(n.Outputs[0])].Type }

// larger is the larger of two (gt), or the smaller (lt). Where they are equal each gets half of the
// gradient. Where one is NaN the result is, and both get all of it, as in torch.
func (m *maker) larger(x, y *tensor, how string) *tensor {
	return m.binary(x, y, func(x, y *ir.Value) *ir.Value {
		b := m.b
		if x.Type.Elem.Kind() != dtype.Float {
			return b.Select(b.Compare(how, x, y), x, y)
		}
		out := b.Select(b.Compare(how, y, x), y, b.Add(x, y))
		out = b.Select(b.Compare(how, x, y), x, out)
		return b.Select(b.Compare("eq", x, y), middle(b, x, y), out)
	})
}

// present is the larger of two (gt), or the smaller (lt), a number being either beside NaN. Where
// they are equal each gets half of the gradient; of two NaN the second gets it.
func (m *maker) present(x, y *tensor, how string) *tensor {
	return m.binary(x, y, func(x, y *ir.Value) *ir.Value {
		b := m.b
		if x.Type.Elem.Kind() != dtype.Float {
			return b.Select(b.Compare(how, x, y), x, y)
		}
		out := b.Select(b.Compare("ne", y, y), x, b.Select(b.Compare(how, x, y), x, y))
		out = b.Select(b.Compare("ne", x, x), y, out)
		return b.Select(b.Compare("eq", x, y), middle(b, x, y), out)
	})
}

// middle is the mean of two, which share the gradient.
func middle(b *ir.Builder, x, y *ir.Value) *ir.Value {
	return b.Add(b.Scale(x, 0.5), b.Scale(y, 0.5))
}

// clamped bounds x by numbers. No gradient flows at a bound, nor to NaN.
func (m *maker) clamped(x *tensor, low, high float64) *tensor {
	v := x.v
	if !math.IsInf(low, -1) {
		v, _ = bounded(m.b, v, "le", bound(x.v.Type.Elem, low))
	}
	if !math.IsInf(high, 1) {
		v, _ = bounded(m.b, v, "ge", bound(x.v.Type.Elem, high))
	}
	if v.Type.Elem.Kind() == dtype.Float {
		v = m.b.Select(m.b.Compare("ne", x.v, x.v), m.b.StopGradient(x.v), v)
	}
	return x.with(v)
}

// bound is a bound of numbers of a type, as far as the type goes.
func bound(elem dtype.DType, x float64) float64 {
	low, high := -float64(exact), float64(exact)
	if elem.Kind() == dtype.Float {
		return x
	} else if elem.Bits() < 64 && elem.Kind() == dtype.Unsigned {
		low, high = 0, math.Exp2(float64(elem.Bits()))-1
	} else if elem.Bits() < 64 {
		high = math.Exp2(float64(elem.Bits()-1)) - 1
		low = -high - 1
	} else if math.Abs(x) > exact {
		return within(elem, x)
	}
	return min(max(x, low), high)
}

// clampedBy bounds x by tensors, the upper bound last. At one bound, it and x share the gradient; x
// gets all of it where both bounds are x, or where one of the three is NaN.
func clampedBy(m *maker, n *node) *tensor {
	x := n.number("self")
	switch {
	case !n.has("max"):
		return m.larger(x, n.number("min"), "gt")
	case !n.has("min"):
		return m.larger(x, n.number("max"), "lt")
	}
	low, high := n.number("min"), n.number("max")
	b := m.b
	is := func(x *tensor, how string, y *tensor) *tensor {
		return m.binary(x, y, func(x, y *ir.Value) *ir.Value {
			return b.Compare(how, b.StopGradient(x), b.StopGradient(y))
		})
	}
	half := func(x, y *ir.Value) *ir.Value { return middle(b, x, y) }
	if x.v.Type.Elem.Kind() != dtype.Float {
		half = func(x, _ *ir.Value) *ir.Value { return x }
	}
	out := m.choose(is(x, "eq", high), m.binary(x, high, half), x)
	out = m.choose(is(x, "eq", low), m.binary(x, low, half), out)
	out = m.choose(m.choose(is(x, "eq", low), is(low, "eq", high), is(x, "ne", x)), x, out)
	out = m.choose(is(x, "lt", low), low, m.choose(is(x, "gt", high), high, out))
	out = m.choose(is(low, "gt", high), high, out)
	if x.v.Type.Elem.Kind() != dtype.Float {
		return out
	}
	bad := func(x, y *ir.Value) *ir.Value { return b.Add(x, b.StopGradient(y)) }
	for _, t := range []*tensor{low, high, x} {
		out = m.choose(is(t, "ne", t), m.binary(x, t, bad), out)
	}
	return out
}

// A connective joins masks: as truth values, and as whole numbers that are 0 or 1.
type connective struct {
	known func(x, y bool) bool
	write func(b *ir.Builder, x, y *ir.Value) *ir.Value
}

var (
	and = connective{func(x, y bool) bool { return x && y },
		func(b *ir.Builder, x, y *ir.Value) *ir.Value {
			return b.Compare("gt", b.Add(x, y), like(b, x, 1))
		}}
	or = connective{func(x, y bool) bool { return x || y },
		func(b *ir.Builder, x, y *ir.Value) *ir.Value {
			return b.Compare("gt", b.Add(x, y), like(b, x, 0))
		}}
	xor = connective{func(x, y bool) bool { return x != y },
		func(b *ir.Builder, x, y *ir.Value) *ir.Value { return b.Compare("ne", x, y) }}
)

// logical is a rule for a connective of what is not 0.
func logical(f connective) rule {
	return sole(func(m *maker, n *node) *tensor {
		return m.connected(n.tensor("self"), n.tensor("other"), f)
	})
}

// bitwise is a rule for a connective of masks.
func bitwise(f connective) rule {
	return sole(func(m *maker, n *node) *tensor {
		if n.type0() != dtype.Pred {
			panic(refusal("the bits of whole numbers"))
		}
		return m.connected(n.tensor("self"), n.tensor("other"), f)
	})
}

// connected joins masks, whose numbers stay known where both are.
func (m *maker) connected(x, y *tensor, f connective) *tensor {
	if x.known != nil && y.known != nil {
		sizes := commonSizes(x, y)
		x, y = m.expanded(x, sizes), m.expanded(y, sizes)
		data := make([]float64, len(x.known))
		for i := range data {
			if f.known(x.known[i] != 0, y.known[i] != 0) {
				data[i] = 1
			}
		}
		return constant(dtype.Pred, sizes, data)
	}
	return m.binary(m.bits(x), m.bits(y), func(x, y *ir.Value) *ir.Value { return f.write(m.b, x, y) })
}

// bits are 1 where x is not 0, and 0 elsewhere.
func (m *maker) bits(x *tensor) *tensor {
	x = m.real(x)
	v := m.b.StopGradient(x.v)
	if v.Type.Elem != dtype.Pred {
		v = m.b.Compare("ne", v, like(m.b, v, 0))
	}
	return x.with(m.b.Convert(v, dtype.S32))
}

// commonSizes are the sizes that tensors are broadcast to.
func commonSizes(list ...*tensor) []int64 {
	var sizes []int64
	for _, t := range list {
		have := t.sizes()
		for len(sizes) < len(have) {
			sizes = slices.Insert(sizes, 0, 1)
		}
		for i, n := range have {
			if at := i + len(sizes) - len(have); sizes[at] == 1 {
				sizes[at] = n
			}
		}
	}
	return sizes
}

// raised is x to the power of y: exp(y·log|x|), negative for an odd y of a negative x, and NaN
// where y is not whole there. The slopes are y·x^(y-1) and x^y·log(x), the latter 0
// where x is not positive.
func (m *maker) raised(x, y *tensor) *tensor {
	if x.v.Type.Elem.Kind() != dtype.Float {
		panic(refusal("a power of whole numbers"))
	}
	return m.binary(x, y, func(x, y *ir.Value) *ir.Value { return powered(m.b, x, y) })
}

func powered(b *ir.Builder, x, y *ir.Value) *ir.Value {
	elem := x.Type.Elem
	if elem.Bits() < 32 && b.Err() == nil { // after an error values have no type
		return b.Convert(powered(b, b.Convert(x, dtype.F32), b.Convert(y, dtype.F32)), elem)
	}
	s, t := b.StopGradient(x), b.StopGradient(y)
	value := powerOf(b, s, t)
	slope := b.Mul(powerOf(b, s, b.Shift(t, -1)), t)
	zero := b.Fill(slope.Type, 0)
	slope = b.Select(b.Compare("eq", t, like(b, t, 0)), zero, slope)
	log := b.Log(b.Select(b.Compare("gt", s, like(b, s, 0)), s, b.Fill(s.Type, 1)))
	return b.Add(sloped(b, value, x, slope), sloped(b, zero, y, b.Mul(value, log)))
}

// powerOf is x to the power of y without gradients.
func powerOf(b *ir.Builder, x, y *ir.Value) *ir.Value {
	zero := like(b, x, 0)
	size := b.Exp(b.Mul(y, b.Log(b.Select(b.Compare("lt", x, zero), b.Neg(x), x))))
	whole := b.Compare("eq", truncated(b, y), y)
	odd := b.Compare("ne", b.Scale(truncated(b, b.Scale(y, 0.5)), 2), y)
	one := b.Fill(size.Type, 1)
	// A fraction of minus infinity is a power of infinity.
	some := b.Compare("gt", b.Add(x, b.Fill(size.Type, 0)), like(b, x, math.Inf(-1)))
	none := b.Select(some, notNumber(b, size), size)
	below := b.Select(whole, b.Select(odd, b.Neg(size), size), none)
	out := b.Select(b.Compare("lt", x, zero), below, size)
	out = b.Select(b.Compare("eq", x, like(b, x, 1)), one, out)
	return b.Select(b.Compare("eq", y, like(b, y, 0)), one, out)
}

// angle is atan2: the angle of a point x, y.
func angle(b *ir.Builder, y, x *ir.Value) *ir.Value {
	elem := x.Type.Elem
	if elem.Bits() < 32 && b.Err() == nil { // after an error values have no type
		return b.Convert(angle(b, b.Convert(y, dtype.F32), b.Convert(x, dtype.F32)), elem)
	}
	s, t := b.StopGradient(x), b.StopGradient(y)
	zero, flat := like(b, s, 0), b.Compare("eq", s, like(b, s, 0))
	side := b.Select(negative(b, t), b.Fill(t.Type, -1), b.Fill(t.Type, 1))
	value := arctangent(b, b.Div(t, b.Select(flat, b.Fill(s.Type, 1), s)))
	none := b.Fill(value.Type, 0)
	half := b.Add(none, b.Scale(side, math.Pi))
	behind := b.Select(b.Compare("lt", s, zero), half, none)
	up := b.Add(none, b.Mul(signOf(b, t), b.Fill(t.Type, math.Pi/2)))
	up = b.Select(b.Compare("eq", t, zero), b.Select(negative(b, s), half, b.Add(none, t)), up)
	value = b.Select(flat, up, b.Add(value, behind))
	square := b.Add(b.Mul(s, s), b.Add(none, b.Mul(t, t)))
	out := sloped(b, value, y, b.Div(s, square))
	return b.Add(out, sloped(b, none, x, b.Neg(b.Div(t, square))))
}

// negative is where x has a sign, as -0 has.
func negative(b *ir.Builder, x *ir.Value) *ir.Value {
	zero := like(b, x, 0)
	none := b.Compare("eq", x, zero)
	side := b.Select(none, b.Div(b.Fill(x.Type, 1), b.Select(none, x, b.Fill(x.Type, 1))), x)
	return b.Compare("lt", side, zero)
}

// other gives the second argument of a pair, a tensor or a number, in the type of the result.
func (n *node) other(elem dtype.DType) *tensor {
	if by, ok := n.scalar("other"); ok {
		return n.m.tensor(n.m.b.Fill(ir.Type{Elem: elem}, within(elem, by)), nil)
	}
	return n.number("other")
}

// dividedWhole is x/y rounded down or towards 0.
func dividedWhole(m *maker, n *node) *tensor {
	down := n.text("rounding_mode", "floor") == "floor"
	if !strings.HasPrefix(n.Target, "aten.floor_divide.") && !n.has("rounding_mode") {
		return rules["aten.div.Tensor"](m, n)[0]
	}
	x := n.number("self")
	return m.binary(x, n.other(x.v.Type.Elem), func(x, y *ir.Value) *ir.Value {
		return m.b.Convert(quotient(m.b, x, y, down), x.Type.Elem)
	})
}

// quotient is x/y rounded down or towards 0, of numbers with a fraction in f64. No gradient flows.
func quotient(b *ir.Builder, x, y *ir.Value, down bool) *ir.Value {
	x, y = b.StopGradient(x), b.StopGradient(y)
	if elem := x.Type.Elem; elem.Kind() != dtype.Float {
		q := b.Div(x, y) // towards 0
		if !down {
			return q
		}
		rest := b.Sub(x, b.Mul(y, q))
		other := b.Compare("lt", b.Mul(signOf(b, rest), signOf(b, y)), like(b, x, 0))
		return b.Sub(q, b.Convert(other, elem))
	}
	q := b.Div(b.Convert(x, dtype.F64), b.Convert(y, dtype.F64))
	if down {
		return floor(b, q)
	}
	return truncated(b, q)
}

// remainder is a rule for what is left of x behind the multiple of y below it, or towards 0.
func remainder(down bool) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return m.binary(x, n.other(x.v.Type.Elem), func(x, y *ir.Value) *ir.Value {
			b, elem := m.b, x.Type.Elem
			if elem.Kind() != dtype.Float {
				return b.Sub(x, b.Mul(y, quotient(b, x, y, down)))
			}
			multiple := b.Mul(b.Convert(y, dtype.F64), quotient(b, x, y, down))
			return b.Convert(b.Sub(b.Convert(x, dtype.F64), multiple), elem)
		})
	})
}

// whereScalar chooses between tensors and numbers, in the type of the result.
func whereScalar(m *maker, n *node) *tensor {
	elem := m.elem(n.type0())
	side := func(name string) *tensor {
		if by, ok := n.scalar(name); ok {
			return m.tensor(m.b.Fill(ir.Type{Elem: elem}, within(elem, by)), nil)
		}
		return m.cast(n.value(name), n.type0())
	}
	mask, x, y := n.tensor("condition"), side("self"), side("other")
	out := m.choose(m.real(mask), x, y)
	if by, ok := n.scalar("other"); ok {
		return m.hidden(out, x, mask, by)
	}
	return out
}

// filledWhere puts a number where a mask holds; a low one hides scores.
func (m *maker) filledWhere(n *node, x *tensor, by float64) *tensor {
	if math.IsInf(by, -1) && m.own == nil {
		by = lowest(x.v.Type.Elem)
	}
	y := m.tensor(m.b.Fill(ir.Type{Elem: x.v.Type.Elem}, by), nil)
	mask := n.tensor("mask")
	return m.hidden(m.choose(m.real(mask), y, x), x, opposite(mask), by)
}
