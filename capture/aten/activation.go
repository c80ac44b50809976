package aten

import "github.com/deepwell/deepwell/ir"

// activationRules are activation functions. At kinks they have torch's gradients.
var activationRules = map[string]rule{
	"aten.leaky_relu.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Select(b.Compare("gt", x, like(b, x, 0)), x, b.Scale(x, n.float("negative_slope", 0.01)))
	}),
	"aten.elu.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return elu(b, x, n.float("alpha", 1), n.float("scale", 1), n.float("input_scale", 1))
	}),
	"aten.celu.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		alpha := n.float("alpha", 1)
		return elu(b, x, alpha, 1, 1/alpha)
	}),
	"aten.selu.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return elu(b, x, 1.6732632423543772, 1.0507009873554805, 1)
	}),
	"aten.softplus.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return softplus(b, x, n.float("beta", 1), n.float("threshold", 20))
	}),
	"aten.mish.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Mul(x, b.Tanh(softplus(b, x, 1, 20)))
	}),
	"aten.log_sigmoid.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return logSigmoid(b, x)
	}),
	"aten.hardtanh.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return hardtanh(b, x, n.float("min_val", -1), n.float("max_val", 1))
	}),
	"aten.relu6.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return hardtanh(b, x, 0, 6)
	}),
	"aten.hardsigmoid.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return hardsigmoid(b, x)
	}),
	"aten.hardswish.default": shaped(func(_ *node, b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Mul(x, hardsigmoid(b, x))
	}),
	"aten.threshold.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		low := b.Compare("le", x, like(b, x, n.float("threshold", 0)))
		return b.Select(low, b.Fill(x.Type, n.float("value", 0)), x)
	}),
	"aten.softshrink.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		l := n.float("lambd", 0.5)
		small := b.Compare("le", absolute(b, b.StopGradient(x)), like(b, x, l))
		far := b.Select(b.Compare("gt", x, like(b, x, l)), b.Shift(x, -l), b.Shift(x, l))
		return b.Select(small, b.Fill(x.Type, 0), far)
	}),
	"aten.hardshrink.default": shaped(func(n *node, b *ir.Builder, x *ir.Value) *ir.Value {
		small := b.Compare("le", absolute(b, b.StopGradient(x)), like(b, x, n.float("lambd", 0.5)))
		return b.Select(small, b.Fill(x.Type, 0), x)
	}),
	"aten.prelu.default": sole(func(m *maker, n *node) *tensor {
		x, w := n.value("self"), n.value("weight")
		if len(w.axes) == 1 && w.axes[0].size > 1 { // one for each channel, which is axis 1
			sizes := []int64{w.axes[0].size}
			for range x.axes[min(2, len(x.axes)):] {
				sizes = append(sizes, 1)
			}
			w = m.viewed(w, sizes)
		}
		y := m.binary(x, w, m.b.Mul)
		mask := x.with(m.b.Compare("gt", x.v, like(m.b, x.v, 0)))
		return m.choose(mask, x, m.viewed(y, x.sizes()))
	}),
	"aten.glu.default": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		i := x.at(n.int("dim", -1))
		half := x.axes[i].size / 2
		a, gate := m.sliced(x, i, 0, half, 1, "a"), m.sliced(x, i, half, 2*half, 1, "gate")
		return m.binary(a, gate.with(m.b.Sigmoid(gate.v)), m.b.Mul)
	}),
}

// shaped is a rule for a function with numbers that shape it, which is computed in f32 where its
// argument has fewer bits.
func shaped(f func(n *node, b *ir.Builder, x *ir.Value) *ir.Value) rule {
	return sole(func(m *maker, n *node) *tensor {
		x := n.number("self")
		return x.with(inSingle(m.b, x.v, func(b *ir.Builder, x *ir.Value) *ir.Value {
			return f(n, b, x)
		}))
	})
}

// elu is scale·x above 0, and scale·alpha·expm1(inner·x) below.
func elu(b *ir.Builder, x *ir.Value, alpha, scale, inner float64) *ir.Value {
	high := b.Compare("gt", x, like(b, x, 0))
	low := b.Select(high, b.Fill(x.Type, 0), x)
	return b.Scale(b.Select(high, x, b.Scale(expm1(b, b.Scale(low, inner)), alpha)), scale)
}

// softplus is log1p(exp(beta·x))/beta, and x beyond a threshold.
func softplus(b *ir.Builder, x *ir.Value, beta, threshold float64) *ir.Value {
	z := b.Scale(x, beta)
	far := b.Compare("gt", z, like(b, x, threshold))
	z = b.Select(far, b.Fill(x.Type, 0), z)
	return b.Select(far, x, b.Scale(log1p(b, b.Exp(z)), 1/beta))
}

// logSigmoid is min(x, 0) - log1p(exp(-|x|)).
func logSigmoid(b *ir.Builder, x *ir.Value) *ir.Value {
	below := b.Compare("lt", x, like(b, x, 0))
	rest := log1p(b, b.Exp(b.Select(below, x, b.Neg(x))))
	return b.Sub(b.Select(below, x, b.Fill(x.Type, 0)), rest)
}

// hardtanh bounds x; no gradient flows at the bounds.
func hardtanh(b *ir.Builder, x *ir.Value, low, high float64) *ir.Value {
	x, _ = bounded(b, x, "le", low)
	x, _ = bounded(b, x, "ge", high)
	return x
}

func hardsigmoid(b *ir.Builder, x *ir.Value) *ir.Value {
	return b.Scale(hardtanh(b, b.Shift(x, 3), 0, 6), 1.0/6)
}
