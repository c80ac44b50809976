package aten

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// elementRules work element by element.
var elementRules = map[string]rule{
	"aten.add.Tensor": sole(func(m *maker, n *node) *tensor { return m.sum(n, 1) }),
	"aten.sub.Tensor": sole(func(m *maker, n *node) *tensor { return m.sum(n, -1) }),
	"aten.add.Scalar": sole(func(m *maker, n *node) *tensor { return m.sum(n, 1) }),
	"aten.sub.Scalar": sole(func(m *maker, n *node) *tensor { return m.sum(n, -1) }),
	"aten.mul.Scalar": sole(times), "aten.mul.Tensor": sole(times),
	"aten.div.Scalar": sole(divided), "aten.div.Tensor": sole(divided),
	"aten.rsub.Scalar": sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		from := m.b.Fill(ir.Type{Elem: x.v.Type.Elem}, within(x.v.Type.Elem, n.float("other", 0)))
		return x.with(m.b.Sub(from, m.scaled(x, n.float("alpha", 1)).v))
	}),
	"aten.rsub.Tensor": sole(func(m *maker, n *node) *tensor {
		return m.binary(n.number("other"), m.scaled(n.number("self"), n.float("alpha", 1)), m.b.Sub)
	}),
	"aten.pow.Tensor_Scalar": sole(power),
	"aten.reciprocal.default": sole(func(m *maker, n *node) *tensor {
		return m.reciprocal(n.number("self"))
	}),
	"aten.neg.default":  unary((*ir.Builder).Neg),
	"aten.exp.default":  unary((*ir.Builder).Exp),
	"aten.log.default":  unary((*ir.Builder).Log),
	"aten.sqrt.default": unary((*ir.Builder).Sqrt),
	"aten.rsqrt.default": sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return x.with(m.b.Rsqrt(x.v)).as(x.norm, shifted, inverted)
	}),
	"aten.sin.default": unary((*ir.Builder).Sin),
	"aten.cos.default": unary((*ir.Builder).Cos),
	"aten.tanh.default": sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return x.with(m.b.Tanh(x.v)).step(x, func(s *scores) bool {
			ok := s.stage == multiplied && s.how.SoftCap == 0 && !s.how.Causal && s.slopes == nil
			s.stage = capped
			return ok
		})
	}),
	"aten.sigmoid.default": unary((*ir.Builder).Sigmoid),
	"aten.relu.default":    unary((*ir.Builder).Relu),
	"aten.silu.default":    unary((*ir.Builder).Silu),
	"aten.gelu.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		if n.text("approximate", "none") == "tanh" {
			return x.with(m.b.Gelu(x.v))
		}
		return x.with(gelu(m.b, x.v))
	}),
	"aten.clamp.default": sole(func(m *maker, n *node) *tensor {
		low, high := n.float("min", math.Inf(-1)), n.float("max", math.Inf(1))
		return m.clamped(n.number("self"), low, high)
	}),
	"aten.eq.Scalar": compare("eq"), "aten.ne.Scalar": compare("ne"),
	"aten.lt.Scalar": compare("lt"), "aten.le.Scalar": compare("le"),
	"aten.gt.Scalar": compare("gt"), "aten.ge.Scalar": compare("ge"),
	"aten.eq.Tensor": compare("eq"), "aten.ne.Tensor": compare("ne"),
	"aten.lt.Tensor": compare("lt"), "aten.le.Tensor": compare("le"),
	"aten.gt.Tensor": compare("gt"), "aten.ge.Tensor": compare("ge"),
	"aten.bitwise_not.default": not, "aten.logical_not.default": not,
	"aten.where.self": sole(func(m *maker, n *node) *tensor {
		mask, x, y := n.tensor("condition"), n.value("self"), n.tensor("other")
		out := m.choose(m.real(mask), x, m.real(y))
		if len(y.known) == 0 || slices.Min(y.known) != slices.Max(y.known) {
			return out
		}
		return m.hidden(out, x, mask, y.known[0])
	}),
	"aten.masked_fill.Scalar": sole(func(m *maker, n *node) *tensor {
		return m.filledWhere(n, n.value("self"), n.float("value", 0))
	}),
	"aten.to.dtype": sole(convert), "aten.to.dtype_layout": sole(convert),
	"aten.to.device": sole(convert), "aten.float.default": sole(convert),
	"aten.type_as.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		return x.with(m.b.Convert(x.v, n.value("other").v.Type.Elem))
	}),
	"aten.dropout.default": sole(func(m *maker, n *node) *tensor {
		self, _ := selfOf(n.Node)
		x := m.value(n.graph, self)
		if n.float("p", 0) == 0 || !n.bool("train", true) {
			return x
		}
		return m.dropped(m.real(x), n)
	}),
	"aten.positive.default": same("self"),
	"aten.alias.default":    same("self"), "aten.contiguous.default": same("self"),
	"aten.clone.default": same("self"), "aten.lift_fresh_copy.default": same("self"),
	"aten.detach.default": sole(func(m *maker, n *node) *tensor {
		x := n.tensor("self")
		if x.known != nil || x.v.Type.Elem.Kind() != dtype.Float {
			return x
		}
		return x.with(m.b.StopGradient(x.v))
	}),
}

func times(m *maker, n *node) *tensor {
	if by, ok := n.scalar("other"); ok {
		return m.scaled(n.number("self"), by)
	}
	x, y := n.number("self"), n.number("other")
	if t := m.normed(x, y); t != nil {
		return t
	}
	if t := m.normed(y, x); t != nil {
		return t
	}
	return m.binary(x, y, m.b.Mul)
}

func divided(m *maker, n *node) *tensor {
	if by, ok := n.scalar("other"); ok {
		return m.scaled(n.number("self"), 1/by)
	}
	return m.binary(n.number("self"), n.number("other"), m.b.Div)
}

// hidden gives scores to what was made of x where a mask does not hold: very low numbers.
func (m *maker) hidden(out, x, mask *tensor, by float64) *tensor {
	return out.step(x, func(s *scores) bool {
		next := s.masked(m, mask)
		if next == nil || !(by <= -1e9 || by == lowest(x.v.Type.Elem)) {
			return false
		}
		*s = *next
		return true
	})
}

// opposite is a mask that holds where another does not; nil if its numbers are not known.
func opposite(mask *tensor) *tensor {
	if mask.twin != nil {
		mask = mask.twin()
	}
	if mask.known == nil {
		return mask
	}
	out := constant(dtype.Pred, mask.sizes(), make([]float64, len(mask.known)))
	for i, v := range mask.known {
		if v == 0 {
			out.known[i] = 1
		}
	}
	return out
}

// lowest stands for minus infinity: scores of that size weigh nothing, and their gradients are
// numbers.
func lowest(elem dtype.DType) float64 {
	if elem == dtype.F16 {
		return -65504
	}
	return -1e30
}

func same(name string) rule {
	return sole(func(_ *maker, n *node) *tensor { return n.tensor(name) })
}

func unary(f func(*ir.Builder, *ir.Value) *ir.Value) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return x.with(f(m.b, x.v))
	})
}

// compare makes a mask of two tensors, or of a tensor and a number.
func compare(how string) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		if by, ok := n.scalar("other"); ok {
			if a, _ := n.Arg("other"); x.v.Type.Elem.Kind() != dtype.Float {
				if _, fraction := a.(float64); fraction {
					x = m.cast(x, dtype.F32) // torch's default type
				} else if x.v.Type.Elem == dtype.Pred {
					x = m.cast(x, dtype.S64)
				}
			}
			if math.IsInf(by, 1) || math.IsInf(by, -1) && m.own == nil {
				panic(refusal("a comparison with infinity, which masks have as a large number"))
			}
			elem := x.v.Type.Elem
			out := x.with(m.b.Compare(how, x.v, m.b.Fill(ir.Type{Elem: elem}, within(elem, by))))
			out.twin = comparedNumbers(n.tensor("self"), how, by)
			return out
		}
		return m.binary(x, n.value("other"), func(x, y *ir.Value) *ir.Value {
			return m.b.Compare(how, x, y)
		})
	})
}

// comparedNumbers compares the numbers of a tensor with a number; nil if they are not known.
func comparedNumbers(x *tensor, how string, by float64) func() *tensor {
	numbers := x.twin
	if x.known != nil {
		numbers = func() *tensor { return x }
	}
	if numbers == nil {
		return nil
	}
	return func() *tensor {
		x := numbers()
		out := constant(dtype.Pred, x.sizes(), make([]float64, len(x.known)))
		for i, v := range x.known {
			holds := map[string]bool{"eq": v == by, "ne": v != by, "lt": v < by, "le": v <= by,
				"gt": v > by, "ge": v >= by}
			if holds[how] {
				out.known[i] = 1
			}
		}
		return out
	}
}

var not = sole(func(m *maker, n *node) *tensor {
	x := n.tensor("self")
	if x.known != nil {
		return opposite(x)
	}
	if x.v.Type.Elem != dtype.Pred && n.type0() != dtype.Pred {
		panic(refusal("the bits of whole numbers"))
	}
	out := m.bits(x)
	out = x.with(m.b.Compare("eq", out.v, like(m.b, out.v, 0)))
	out.twin = comparedNumbers(x, "eq", 0)
	return out
})

// binary applies a function of two tensors that are broadcast against each other.
func (m *maker) binary(x, y *tensor, f func(x, y *ir.Value) *ir.Value) *tensor {
	if e, o := x.v.Type.Elem, y.v.Type.Elem; e != o {
		to := wider(e, o)
		x, y = x.with(m.b.Convert(x.v, to)), y.with(m.b.Convert(y.v, to))
	}
	list, axes := m.aligned(x, y)
	all, hidden := union(list...)
	x, y = list[0], list[1]
	if len(all) > len(x.v.Type.Dims) && len(all) > len(y.v.Type.Dims) {
		x = m.spread(x, all)
	}
	return m.tensor(f(x.v, y.v), hidden, axes...)
}

// wider is the type that torch computes two in.
func wider(a, b dtype.DType) dtype.DType {
	if (a.Kind() == dtype.Float) != (b.Kind() == dtype.Float) {
		if a.Kind() == dtype.Float {
			return a
		}
		return b
	}
	if a.Bits() >= b.Bits() {
		return a
	}
	return b
}

// choose takes x where a mask holds and y elsewhere.
func (m *maker) choose(mask, x, y *tensor) *tensor {
	list, axes := m.aligned(mask, x, y)
	all, hidden := union(list...)
	mask, x, y = list[0], list[1], list[2]
	if len(x.v.Type.Dims) < len(all) && len(y.v.Type.Dims) < len(all) {
		x = m.spread(x, all)
	}
	return m.tensor(m.b.Select(mask.v, x.v, y.v), hidden, axes...)
}

// sum adds or subtracts, with the factor alpha.
func (m *maker) sum(n *node, sign float64) *tensor {
	sign *= n.float("alpha", 1)
	x := n.promoted("self")
	by, ok := n.scalar("other")
	switch {
	case ok && by == 0:
		return x
	case ok && x.known != nil:
		out := make([]float64, len(x.known))
		for i, v := range x.known {
			out[i] = v + sign*by
		}
		return constant(x.elem, x.sizes(), out)
	case ok && m.real(x).v.Type.Elem.Kind() == dtype.Float:
		out := x.with(m.b.Shift(x.v, sign*by)).as(x.norm, averaged, shifted)
		if out.norm != nil {
			out.norm.eps = sign * by
		}
		return out
	case ok:
		by = within(x.v.Type.Elem, sign*by)
		return x.with(m.b.Add(x.v, m.b.Fill(ir.Type{Elem: x.v.Type.Elem}, by)))
	}
	bias := n.promoted("other")
	y := m.real(bias)
	switch sign {
	case 1:
		return m.binary(m.real(x), y, m.b.Add).step(x, func(s *scores) bool {
			next := s.masked(m, bias)
			if next != nil {
				*s = *next
			}
			return next != nil && bias.elem != dtype.Pred
		})
	case -1:
		return m.binary(m.real(x), y, m.b.Sub)
	}
	return m.binary(m.real(x), m.scaled(y, sign), m.b.Add)
}

// scaled multiplies by a number.
func (m *maker) scaled(x *tensor, by float64) *tensor {
	v := x.v
	switch elem := v.Type.Elem; {
	case by == 1:
		return x
	case elem.Kind() != dtype.Float && elem != dtype.S64 && math.Abs(by) >= 1<<16:
		// Such factors make numbers that 32 bits do not hold, as in sums that hash.
		panic(refusal(fmt.Sprintf("whole numbers of 64 bits: a factor of %g", by)))
	case elem == dtype.F16:
		// XLA makes one constant of the factors of a product, which may be more than f16 holds.
		v = m.b.Convert(m.b.Scale(m.b.Convert(v, dtype.F32), by), elem)
	default:
		v = m.b.Scale(v, within(elem, by))
	}
	return x.with(v).step(x, scaledBy(by))
}

// reciprocal gives 1/x.
func (m *maker) reciprocal(x *tensor) *tensor {
	return x.with(m.b.Div(m.b.Fill(ir.Type{Elem: x.v.Type.Elem}, 1), x.v))
}

// power raises to a number: to small whole ones by multiplying.
func power(m *maker, n *node) *tensor {
	x, by := n.number("self"), n.float("exponent", 0)
	switch by {
	case 2:
		out := x.with(m.b.Mul(x.v, x.v))
		out.norm = &norm{of: x, stage: squared}
		return out
	case 0.5:
		return x.with(m.b.Sqrt(x.v))
	case -0.5:
		return x.with(m.b.Rsqrt(x.v))
	}
	if by != math.Trunc(by) || by == 0 || math.Abs(by) > maxPower {
		return m.raised(x, m.tensor(like(m.b, x.v, by), nil))
	}
	v := x.v
	for range int(math.Abs(by)) - 1 {
		v = m.b.Mul(v, x.v)
	}
	if by < 0 {
		return m.reciprocal(x.with(v))
	}
	return x.with(v)
}

// maxPower bounds powers that are written as products.
const maxPower = 8

// convert changes the element type.
func convert(m *maker, n *node) *tensor {
	x := n.tensor("self")
	to, ok := n.dtype("dtype")
	if !ok {
		return x
	}
	return m.cast(x, to)
}

// bounded puts a limit where x is at it or beyond (le or ge), and says where. No gradient flows
// there, as in torch, and infinity is bounded, too.
func bounded(b *ir.Builder, x *ir.Value, beyond string, limit float64) (v, where *ir.Value) {
	end := b.Fill(ir.Type{Elem: x.Type.Elem}, limit)
	where = b.Compare(beyond, x, end)
	return b.Select(where, end, x), where
}
