package aten

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// lossRules are losses, the mean over all elements, their sum, or one for each.
var lossRules = map[string]rule{
	"aten.mse_loss.default": apartBy(func(_ *node, b *ir.Builder, d *ir.Value) *ir.Value {
		return b.Mul(d, d)
	}),
	"aten.l1_loss.default": apartBy(func(_ *node, b *ir.Builder, d *ir.Value) *ir.Value {
		return absolute(b, d)
	}),
	"aten.smooth_l1_loss.default": apartBy(func(n *node, b *ir.Builder, d *ir.Value) *ir.Value {
		beta := n.float("beta", 1)
		if beta == 0 {
			return absolute(b, d)
		}
		near := b.Compare("lt", absolute(b, b.StopGradient(d)), like(b, d, beta))
		return b.Select(near, b.Scale(b.Mul(d, d), 0.5/beta), b.Shift(absolute(b, d), -beta/2))
	}),
	"aten.huber_loss.default": apartBy(func(n *node, b *ir.Builder, d *ir.Value) *ir.Value {
		delta := n.float("delta", 1)
		near := b.Compare("le", absolute(b, b.StopGradient(d)), like(b, d, delta))
		far := b.Scale(b.Shift(absolute(b, d), -delta/2), delta)
		return b.Select(near, b.Scale(b.Mul(d, d), 0.5), far)
	}),
	"aten.soft_margin_loss.default": pairLoss(func(_ *node, b *ir.Builder, x, y *ir.Value) *ir.Value {
		return b.Neg(logSigmoid(b, b.Mul(x, y)))
	}),
	"aten.kl_div.default": pairLoss(func(n *node, b *ir.Builder, x, y *ir.Value) *ir.Value {
		if n.bool("log_target", false) {
			return b.Mul(b.Exp(y), b.Sub(y, x))
		}
		some := b.Compare("gt", y, like(b, y, 0))
		log := b.Mul(y, b.Log(b.Select(some, y, b.Fill(y.Type, 1)))) // 0·log(0) is 0
		return b.Sub(log, b.Mul(y, x))
	}),
	"aten.poisson_nll_loss.default": pairLoss(func(n *node, b *ir.Builder, x, y *ir.Value) *ir.Value {
		if n.bool("full", false) {
			panic(refusal("Stirling's approximation"))
		}
		if n.bool("log_input", true) {
			return b.Sub(b.Exp(x), b.Mul(y, x))
		}
		return b.Sub(x, b.Mul(y, b.Log(b.Shift(x, n.float("eps", 1e-8)))))
	}),
	"aten.binary_cross_entropy.default":             sole(binaryCrossEntropy),
	"aten.binary_cross_entropy_with_logits.default": sole(binaryCrossEntropyOfLogits),
	"aten.nll_loss.default":                         sole(nllLoss),
	"aten.nll_loss_nd.default":                      sole(nllLoss),
	"aten.nll_loss2d.default":                       sole(nllLoss),
}

// apartBy is a rule for a loss of the difference of two tensors.
func apartBy(f func(n *node, b *ir.Builder, d *ir.Value) *ir.Value) rule {
	return pairLoss(func(n *node, b *ir.Builder, x, y *ir.Value) *ir.Value {
		return f(n, b, b.Sub(x, y))
	})
}

// pairLoss is a rule for a loss of each element of two tensors.
func pairLoss(f func(n *node, b *ir.Builder, x, y *ir.Value) *ir.Value) rule {
	return sole(func(m *maker, n *node) *tensor {
		name := "self"
		if n.has("input") {
			name = "input"
		}
		x := m.single(n.number(name))
		each := m.binary(x, m.single(n.number("target")), func(x, y *ir.Value) *ir.Value {
			return f(n, m.b, x, y)
		})
		return m.lossOf(n, each)
	})
}

// single has at least the bits of f32.
func (m *maker) single(x *tensor) *tensor {
	if x.v.Type.Elem.Bits() >= 32 && x.v.Type.Elem.Kind() == dtype.Float {
		return x
	}
	return x.with(m.b.Convert(x.v, dtype.F32))
}

// lossOf reduces the losses of all elements as a node says, in the type of its result.
func (m *maker) lossOf(n *node, each *tensor) *tensor {
	all := make([]int, len(each.axes))
	for i := range all {
		all[i] = i
	}
	switch n.int("reduction", 1) {
	case 1:
		each = m.mean(each, all, false)
	case 2:
		each = m.summed(each, all, false)
	}
	return each.with(m.b.Convert(each.v, m.elem(n.type0())))
}

// binaryCrossEntropy is -(y·log(x) + (1-y)·log(1-x)), with logarithms of at least -100. The slope
// of x is (x-y)/(x·(1-x)), with a bound where that is infinite.
func binaryCrossEntropy(m *maker, n *node) *tensor {
	b := m.b
	log := func(x *ir.Value) *ir.Value {
		v, _ := bounded(b, b.Log(b.StopGradient(x)), "le", -100)
		return v
	}
	each := m.binary(m.single(n.value("self")), m.single(n.value("target")),
		func(x, y *ir.Value) *ir.Value {
			rest := b.Shift(b.Neg(x), 1)
			value := b.Neg(b.Add(b.Mul(y, log(x)), b.Mul(b.Shift(b.Neg(y), 1), log(rest))))
			width, _ := bounded(b, b.Mul(x, rest), "le", 1e-12)
			slope := b.StopGradient(b.Div(b.Sub(x, y), width))
			return b.Add(value, b.Mul(slope, b.Sub(x, b.StopGradient(x))))
		})
	return m.lossOf(n, m.withWeights(n, each))
}

// withWeights multiplies losses by the weight of each, if a node has them.
func (m *maker) withWeights(n *node, each *tensor) *tensor {
	if !n.has("weight") {
		return each
	}
	return m.binary(each, m.single(n.value("weight")), m.b.Mul)
}

// binaryCrossEntropyOfLogits is (1-y)·x - (1 + (w-1)·y)·log(sigmoid(x)), with the weight w of what
// is 1.
func binaryCrossEntropyOfLogits(m *maker, n *node) *tensor {
	b := m.b
	x, y := m.single(n.value("self")), m.single(n.value("target"))
	log := x.with(b.Neg(logSigmoid(b, x.v)))
	if n.has("pos_weight") {
		more := m.single(n.value("pos_weight"))
		more = m.binary(more.with(b.Shift(more.v, -1)), y, b.Mul)
		log = m.binary(log, more.with(b.Shift(more.v, 1)), b.Mul)
	}
	each := m.binary(m.binary(y.with(b.Shift(b.Neg(y.v), 1)), x, b.Mul), log, b.Add)
	return m.lossOf(n, m.withWeights(n, each))
}

// nllLoss takes logarithms of probabilities.
func nllLoss(m *maker, n *node) *tensor {
	return m.classLoss(n, m.single(n.value("self")), 0)
}

// classLoss is the loss of logarithms of probabilities [rows, classes, ...], or [classes], against
// classes, with a weight for each class and smoothing.
func (m *maker) classLoss(n *node, x *tensor, smooth float64) *tensor {
	at := min(1, len(x.axes)-1)
	order := make([]int, 0, len(x.axes))
	for i := range x.axes {
		if i != at {
			order = append(order, i)
		}
	}
	last := len(x.axes) - 1
	x = m.whole(m.permuted(x, append(order, at)), last)
	labels := n.value("target")
	if labels.v.Type.Elem.Kind() == dtype.Float || len(labels.axes) != last {
		panic(refusal("a loss of other than classes"))
	}
	b, classes := m.b, x.axes[last].size
	skip := n.int("ignore_index", -100)
	number := func(to float64) *ir.Value { return like(b, labels.v, to) }
	counted := labels.with(b.Convert(b.Compare("ne", labels.v, number(float64(skip))), dtype.F32))
	weight := m.tensor(b.Fill(ir.Type{Elem: dtype.F32}, 1), nil, axis{size: classes})
	if n.has("weight") {
		weight = m.single(n.value("weight"))
	}
	count := make([]float64, classes)
	for i := range count {
		count[i] = float64(i)
	}
	place := m.real(constant(dtype.S64, []int64{classes}, count))
	hit := m.binary(m.unsqueezed(labels, last), place, func(x, y *ir.Value) *ir.Value {
		return b.Compare("eq", x, y)
	})
	x = m.binary(x, weight, b.Mul)
	zero := m.tensor(b.Fill(ir.Type{Elem: x.v.Type.Elem}, 0), nil)
	each := m.summed(m.choose(hit, x, zero), []int{last}, false)
	own := m.summed(m.choose(hit, m.expanded(weight, x.sizes()), m.cast(zero, dtype.F32)),
		[]int{last}, false)
	own = m.binary(own, counted, b.Mul) // the weight of each label
	each = m.binary(each, counted, b.Mul)
	if smooth > 0 {
		all := m.binary(m.summed(x, []int{last}, false), counted, b.Mul)
		each = m.binary(m.scaled(each, 1-smooth), m.scaled(all, smooth/float64(classes)), b.Add)
	}
	each = m.scaled(each, -1)
	if n.int("reduction", 1) != 1 {
		return m.lossOf(n, each)
	}
	rows := make([]int, len(each.axes))
	for i := range rows {
		rows[i] = i
	}
	out := m.binary(m.summed(each, rows, false), m.summed(own, rows, false), b.Div)
	return out.with(b.Convert(out.v, m.elem(n.type0())))
}

// softLoss is the cross-entropy of logits against probabilities of the same sizes.
func (m *maker) softLoss(n *node, x *tensor, smooth float64) *tensor {
	at := min(1, len(x.axes)-1)
	y, classes := m.single(n.value("target")), float64(x.axes[at].size)
	log := m.logSoftmax(x, at)
	if smooth > 0 {
		y = y.with(m.b.Shift(m.b.Scale(y.v, 1-smooth), smooth/classes))
	}
	each := m.binary(log, y, m.b.Mul)
	if n.has("weight") {
		w := m.single(n.value("weight"))
		sizes := slices.Repeat([]int64{1}, len(x.axes)-at)
		sizes[0] = w.axes[0].size
		each = m.binary(each, m.viewed(w, sizes), m.b.Mul)
	}
	each = m.scaled(m.summed(each, []int{at}, false), -1)
	return m.lossOf(n, each)
}
