package aten

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// marginRules are losses of distances that stop at a margin, and the distances.
var marginRules = map[string]rule{
	"aten.margin_ranking_loss.default": sole(func(m *maker, n *node) *tensor {
		apart := m.binary(m.single(n.value("input1")), m.single(n.value("input2")), m.b.Sub)
		each := m.scaled(m.binary(apart, m.single(n.value("target")), m.b.Mul), -1)
		return m.lossOf(n, m.beyond(each, n.float("margin", 0)))
	}),
	"aten.hinge_embedding_loss.default": sole(func(m *maker, n *node) *tensor {
		x, y := m.single(n.value("self")), m.single(n.value("target"))
		far := m.beyond(m.scaled(x, -1), n.float("margin", 1))
		return m.lossOf(n, m.binary(m.unless(y, 1, far), m.unless(y, -1, x), m.b.Add))
	}),
	"aten.cosine_embedding_loss.default": sole(func(m *maker, n *node) *tensor {
		x, z, y := m.single(n.value("input1")), m.single(n.value("input2")), m.single(n.value("target"))
		last, b := []int{len(x.axes) - 1}, m.b
		sum := func(x, y *tensor) *tensor { return m.summed(m.binary(x, y, b.Mul), last, false) }
		square := func(x *tensor) *tensor {
			s := sum(x, x)
			return s.with(b.Shift(s.v, 1e-12))
		}
		size := m.binary(square(x), square(z), b.Mul)
		cos := m.binary(sum(x, z), size.with(b.Sqrt(size.v)), b.Div)
		near, far := cos.with(b.Shift(b.Neg(cos.v), 1)), m.beyond(cos, -n.float("margin", 0))
		return m.lossOf(n, m.binary(m.where(y, 1, near), m.where(y, -1, far), b.Add))
	}),
	"aten.pairwise_distance.default": sole(func(m *maker, n *node) *tensor {
		out := m.distance(n, n.value("x1"), n.value("x2"), n.bool("keepdim", false))
		return out.with(m.b.Convert(out.v, m.elem(n.type0())))
	}),
	"aten.triplet_margin_loss.default": sole(func(m *maker, n *node) *tensor {
		anchor, away := n.value("anchor"), n.value("negative")
		near := m.distance(n, anchor, n.value("positive"), false)
		far := m.distance(n, anchor, away, false)
		if n.bool("swap", false) {
			far = m.larger(far, m.distance(n, n.value("positive"), away, false), "lt")
		}
		return m.lossOf(n, m.beyond(m.binary(near, far, m.b.Sub), n.float("margin", 1)))
	}),
}

// distance is the norm of x - y + eps along the last axis.
func (m *maker) distance(n *node, x, y *tensor, keep bool) *tensor {
	apart := m.binary(m.single(x), m.single(y), m.b.Sub)
	apart = apart.with(m.b.Shift(apart.v, n.float("eps", 1e-6)))
	last := []int{len(apart.axes) - 1}
	order := n.float("p", 2)
	if math.IsInf(order, 0) {
		size := apart.with(absolute(m.b, apart.v))
		return m.extremeOf(size, last, keep, math.Copysign(1, order), false)
	}
	return m.normOf(apart, last, keep, order)
}

// beyond is x + margin, and 0 where that is less.
func (m *maker) beyond(x *tensor, margin float64) *tensor {
	return m.clamped(x.with(m.b.Shift(x.v, margin)), 0, math.Inf(1))
}

// where is x where y is a number, and 0 elsewhere.
func (m *maker) where(y *tensor, number float64, x *tensor) *tensor {
	return m.chooseBy("eq", y, number, x)
}

// unless is x where y is other than a number, and 0 elsewhere.
func (m *maker) unless(y *tensor, number float64, x *tensor) *tensor {
	return m.chooseBy("ne", y, number, x)
}

func (m *maker) chooseBy(how string, y *tensor, number float64, x *tensor) *tensor {
	mask := y.with(m.b.Compare(how, y.v, m.b.Fill(ir.Type{Elem: y.v.Type.Elem}, number)))
	return m.choose(mask, x, m.tensor(m.b.Fill(ir.Type{Elem: dtype.F32}, 0), nil))
}
