package aten

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A function maps numbers with a fraction element by element.
type function = func(b *ir.Builder, x *ir.Value) *ir.Value

// mathRules are element-wise functions that are composed of the graph's own. Where these lose
// digits near a point, a form that does not is taken there.
var mathRules = map[string]rule{
	"aten.abs.default": element(absolute), "aten.square.default": element(square),
	"aten.sign.default": element(signOf), "aten.sgn.default": element(signOf),
	"aten.log1p.default": precise(log1p), "aten.expm1.default": precise(expm1),
	"aten.log2.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Scale(b.Log(x), 1/math.Ln2)
	}),
	"aten.log10.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Scale(b.Log(x), 1/math.Ln10)
	}),
	"aten.exp2.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Exp(b.Scale(x, math.Ln2))
	}),
	"aten.tan.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Div(b.Sin(x), b.Cos(x))
	}),
	"aten.sinh.default": precise(sinh),
	"aten.cosh.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Scale(b.Add(b.Exp(x), b.Exp(b.Neg(x))), 0.5)
	}),
	"aten.asinh.default": precise(asinh),
	"aten.acosh.default": precise(acosh),
	"aten.atanh.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		value := b.Scale(log1p(b, b.Div(b.Scale(x, 2), b.Shift(b.Neg(x), 1))), 0.5)
		return sloped(b, value, x, b.Div(b.Fill(x.Type, 1), b.Shift(b.Neg(b.Mul(x, x)), 1)))
	}),
	"aten.atan.default": precise(arctangent), "aten.asin.default": precise(arcsine),
	"aten.acos.default": precise(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Shift(b.Neg(arcsine(b, x)), math.Pi/2)
	}),
	"aten.erf.default":   precise(errorFunction),
	"aten.floor.default": element(floor), "aten.ceil.default": element(ceiling),
	"aten.trunc.default": element(truncated), "aten.round.default": element(rounded),
	"aten.frac.default": element(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Sub(x, truncated(b, x))
	}),
	"aten.isnan.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		return x.with(m.b.Compare("ne", x.v, x.v))
	}),
	"aten.isinf.default": sole(func(m *maker, n *node) *tensor {
		x := n.finite()
		return x.with(m.b.Compare("eq", absolute(m.b, x.v), infinity(m.b, x.v)))
	}),
	"aten.isfinite.default": sole(func(m *maker, n *node) *tensor {
		x := n.finite()
		return x.with(finite(m.b, x.v))
	}),
}

// element is a rule for a function that needs no more digits than its argument has.
func element(f function) rule { return unary(f) }

// precise is a rule for a function that is computed in f32 where its argument has fewer bits, as
// torch computes it.
func precise(f function) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return x.with(inSingle(m.b, x.v, f))
	})
}

// inSingle computes a function in f32 where its argument has fewer bits.
func inSingle(b *ir.Builder, x *ir.Value, f function) *ir.Value {
	elem := x.Type.Elem
	if elem.Bits() >= 32 {
		return f(b, x)
	}
	return b.Convert(f(b, b.Convert(x, dtype.F32)), elem)
}

// finite gives the argument of a question for infinity. Masks of a [Model] have minus infinity as a
// large number, about which the graph would be wrong.
func (n *node) finite() *tensor {
	if n.m.own == nil {
		panic(refusal("a question for infinity, which masks have as a large number"))
	}
	x := n.value("self")
	if x.v.Type.Elem.Kind() != dtype.Float {
		return n.m.cast(x, dtype.F32)
	}
	return x
}

// like is a number of the type of x.
func like(b *ir.Builder, x *ir.Value, number float64) *ir.Value {
	return b.Fill(ir.Type{Elem: x.Type.Elem}, number)
}

// infinity is of the type of x. Programs have minus infinity alone as a constant.
func infinity(b *ir.Builder, x *ir.Value) *ir.Value { return b.Neg(like(b, x, math.Inf(-1))) }

// sloped gives a value the gradient of its argument x times a slope, whatever it was made by. None
// flows to an infinite x. A slope may be infinite: its two factors are numbers, since 0 times
// infinity would be in the value. A slope that is NaN is 0 unless the value is NaN as well.
func sloped(b *ir.Builder, value, x, slope *ir.Value) *ir.Value {
	value, slope = b.StopGradient(value), b.StopGradient(slope)
	zero := b.Fill(slope.Type, 0)
	both := b.Select(b.Compare("ne", slope, slope), value, zero)
	wrong := b.Compare("ne", both, both)
	wide := b.Add(x, zero)
	at := b.Select(wrong, wide, b.Select(finite(b, wide), wide, zero))
	nothing := b.Sub(at, b.StopGradient(at))
	large, most := finite(b, slope), b.Fill(slope.Type, 3e38)
	first := b.Select(large, slope, b.Mul(signOf(b, slope), most))
	second := b.Select(large, b.Fill(slope.Type, 1), most)
	first = b.Select(wrong, notNumber(b, first), first)
	return b.Add(value, b.Mul(b.Mul(nothing, first), second))
}

// notNumber is NaN of the type of x. The graph has no constant for it.
func notNumber(b *ir.Builder, x *ir.Value) *ir.Value {
	low := b.Fill(x.Type, math.Inf(-1))
	return b.Sub(low, low)
}

// finite is a mask of what is neither infinite nor NaN.
func finite(b *ir.Builder, x *ir.Value) *ir.Value {
	x = b.StopGradient(x)
	return b.Compare("lt", absolute(b, x), infinity(b, x))
}

// signOf is 1, 0 or -1, and 0 for NaN.
func signOf(b *ir.Builder, x *ir.Value) *ir.Value {
	x = b.StopGradient(x)
	zero, elem := like(b, x, 0), x.Type.Elem
	return b.StopGradient(b.Sub(b.Convert(b.Compare("gt", x, zero), elem),
		b.Convert(b.Compare("lt", x, zero), elem)))
}

// absolute has the slope 0 at 0, as in torch.
func absolute(b *ir.Builder, x *ir.Value) *ir.Value { return b.Mul(x, signOf(b, x)) }

func square(b *ir.Builder, x *ir.Value) *ir.Value { return b.Mul(x, x) }

// nearZero gives a mask of |x| < limit, and x where it holds and 0 elsewhere: a form that is taken
// near 0 alone must not give infinite gradients elsewhere.
func nearZero(b *ir.Builder, x *ir.Value, limit float64) (mask, small *ir.Value) {
	mask = b.Compare("lt", absolute(b, b.StopGradient(x)), like(b, x, limit))
	return mask, b.Select(mask, x, b.Fill(x.Type, 0))
}

// log1p is log(1+x); near 0 it is 2·artanh(x/(2+x)) as a series.
func log1p(b *ir.Builder, x *ir.Value) *ir.Value {
	mask, small := nearZero(b, x, 0.3)
	s := b.Div(small, b.Shift(small, 2))
	square := b.Mul(s, s)
	last := 13.0 // s² is below 0.032
	if x.Type.Elem == dtype.F64 {
		last = 25
	}
	sum := b.Fill(x.Type, 1/last)
	for odd := last - 2; odd > 0; odd -= 2 {
		sum = b.Shift(b.Mul(sum, square), 1/odd)
	}
	far := b.Select(mask, b.Fill(x.Type, 0), x)
	return b.Select(mask, b.Scale(b.Mul(s, sum), 2), b.Log(b.Shift(far, 1)))
}

// expm1 is exp(x) - 1; near 0 it is 2t/(1-t) with t = tanh(x/2).
func expm1(b *ir.Builder, x *ir.Value) *ir.Value {
	mask, small := nearZero(b, x, 0.5)
	t := b.Tanh(b.Scale(small, 0.5))
	near := b.Div(b.Scale(t, 2), b.Shift(b.Neg(t), 1))
	return b.Select(mask, near, b.Shift(b.Exp(x), -1))
}

// sinh is (u + u/(u+1))/2 near 0, with u = expm1(x).
func sinh(b *ir.Builder, x *ir.Value) *ir.Value {
	mask, small := nearZero(b, x, 1)
	u := expm1(b, small)
	near := b.Add(u, b.Div(u, b.Shift(u, 1)))
	return b.Scale(b.Select(mask, near, b.Sub(b.Exp(x), b.Exp(b.Neg(x)))), 0.5)
}

// asinh is sign(x)·log1p(|x| + x²/(1+√(x²+1))), and log(2|x|) for large x.
func asinh(b *ir.Builder, x *ir.Value) *ir.Value {
	size := absolute(b, x)
	mask, small := nearZero(b, size, 1e8)
	square := b.Mul(small, small)
	root := b.Sqrt(b.Shift(square, 1))
	near := log1p(b, b.Add(small, b.Div(square, b.Shift(root, 1))))
	value := b.Select(mask, near, b.Shift(b.Log(size), math.Ln2))
	slope := b.Select(mask, b.Div(b.Fill(x.Type, 1), root), b.Div(b.Fill(x.Type, 1), size))
	return sloped(b, b.Mul(value, signOf(b, x)), x, slope)
}

// acosh is log1p(t + √(t·(t+2))) with t = x-1, log(2x) for large x, and NaN below 1. Its slope is
// torch's, a number below -1 as well.
func acosh(b *ir.Builder, x *ir.Value) *ir.Value {
	s, one := b.StopGradient(x), like(b, x, 1)
	large := b.Compare("gt", s, like(b, s, 1e8))
	t := b.Shift(b.Select(large, b.Fill(s.Type, 1), s), -1)
	near := log1p(b, b.Add(t, b.Sqrt(b.Mul(t, b.Shift(t, 2)))))
	value := b.Select(large, b.Shift(b.Log(b.Select(large, s, b.Fill(s.Type, 1))), math.Ln2), near)
	value = b.Select(b.Compare("lt", s, one), notNumber(b, s), value)
	return sloped(b, value, x, b.Rsqrt(b.Shift(b.Mul(s, s), -1)))
}

// arctangent reduces |x| to at most tan(π/8), where a polynomial is exact to single precision (as
// in Cephes).
func arctangent(b *ir.Builder, x *ir.Value) *ir.Value {
	if x.Type.Elem == dtype.F64 {
		panic(refusal("an arc in f64"))
	}
	size, one := absolute(b, x), b.Fill(x.Type, 1)
	large := b.Compare("gt", size, like(b, x, math.Tan(3*math.Pi/8)))
	middle := b.Compare("gt", size, like(b, x, math.Tan(math.Pi/8)))
	z := b.Select(large, b.Neg(b.Div(one, size)),
		b.Select(middle, b.Div(b.Shift(size, -1), b.Shift(size, 1)), size))
	base := b.Select(large, b.Fill(x.Type, math.Pi/2),
		b.Select(middle, b.Fill(x.Type, math.Pi/4), b.Fill(x.Type, 0)))
	square := b.Mul(z, z)
	sum := b.Shift(b.Scale(square, 8.05374449538e-2), -1.38776856032e-1)
	for _, c := range []float64{1.99777106478e-1, -3.33329491539e-1} {
		sum = b.Shift(b.Mul(sum, square), c)
	}
	value := b.Add(base, b.Add(b.Mul(b.Mul(sum, square), z), z))
	slope := b.Div(one, b.Shift(b.Mul(x, x), 1))
	return sloped(b, b.Mul(value, signOf(b, x)), x, slope)
}

// arcsine is 2·atan(x/(1+√(1-x²))).
func arcsine(b *ir.Builder, x *ir.Value) *ir.Value {
	square := b.Mul(b.Shift(b.Neg(x), 1), b.Shift(x, 1))
	value := b.Scale(arctangent(b, b.Div(x, b.Shift(b.Sqrt(square), 1))), 2)
	return sloped(b, value, x, b.Rsqrt(square))
}

// errorFunction has the slope 2/√π·exp(-x²).
func errorFunction(b *ir.Builder, x *ir.Value) *ir.Value {
	slope := b.Scale(b.Exp(b.Neg(b.Mul(x, x))), 2/math.Sqrt(math.Pi))
	return sloped(b, erf(b, x), x, slope)
}

// truncated drops the fraction; no gradient flows.
func truncated(b *ir.Builder, x *ir.Value) *ir.Value {
	elem := x.Type.Elem
	if elem.Kind() != dtype.Float {
		return x
	}
	x = b.StopGradient(x)
	// Larger numbers have no fraction, and NaN is not less.
	limit, whole := float64(1<<23), dtype.S32
	switch elem {
	case dtype.F64:
		limit, whole = 1<<52, dtype.S64
	case dtype.F16:
		limit = 1 << 11
	}
	mask := b.Compare("lt", absolute(b, x), like(b, x, limit))
	return b.Select(mask, b.Convert(b.Convert(x, whole), elem), x)
}

func floor(b *ir.Builder, x *ir.Value) *ir.Value {
	t := truncated(b, x)
	return b.Select(b.Compare("gt", t, x), b.Sub(t, b.Fill(t.Type, 1)), t)
}

func ceiling(b *ir.Builder, x *ir.Value) *ir.Value {
	t := truncated(b, x)
	return b.Select(b.Compare("lt", t, x), b.Add(t, b.Fill(t.Type, 1)), t)
}

// rounded goes to the nearest whole number, and to the even one of two.
func rounded(b *ir.Builder, x *ir.Value) *ir.Value {
	if x.Type.Elem.Kind() != dtype.Float {
		return x
	}
	x = b.StopGradient(x)
	low := floor(b, x)
	rest, half, one := b.Sub(x, low), like(b, x, 0.5), b.Fill(x.Type, 1)
	odd := b.Sub(low, b.Scale(floor(b, b.Scale(low, 0.5)), 2)) // 0 or 1
	next := b.Select(b.Compare("gt", rest, half), b.Add(low, one), low)
	return b.Select(b.Compare("eq", rest, half), b.Add(low, odd), next)
}
