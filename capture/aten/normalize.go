package aten

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// normRules are norms other than over the last axis, which block.go has.
var normRules = map[string]rule{
	"aten.native_layer_norm.default": func(m *maker, n *node) []*tensor {
		x := n.value("input")
		list := lastAxes(x, len(n.ints("normalized_shape")))
		out, mean, inverse := m.normalized(x, list, n.float("eps", 1e-5))
		out = m.affine(n, out, len(x.axes)-len(list))
		return []*tensor{out.with(m.b.Convert(out.v, x.v.Type.Elem)), mean, inverse}
	},
	"aten.group_norm.default": sole(func(m *maker, n *node) *tensor {
		return m.groupNorm(n, n.value("input"), n.int("num_groups", 1))
	}),
	"aten.native_group_norm.default": func(m *maker, n *node) []*tensor {
		if n.Outputs[1] != "" || n.Outputs[2] != "" {
			panic(refusal("the mean of a group"))
		}
		return []*tensor{m.groupNorm(n, n.value("input"), n.int("group", 1)), nil, nil}
	},
	"aten.instance_norm.default": sole(func(m *maker, n *node) *tensor {
		if n.has("running_mean") {
			panic(refusal("statistics of batches before"))
		}
		x := n.value("input")
		return m.groupNorm(n, x, x.axes[1].size)
	}),
	"aten.batch_norm.default": sole(func(m *maker, n *node) *tensor {
		if n.bool("training", true) && n.has("running_mean") {
			panic(refusal("statistics that a call changes: export the module in eval mode"))
		}
		return m.batchNorm(n, n.value("input"), n.bool("training", true))
	}),
	"aten._native_batch_norm_legit_no_training.default": func(m *maker, n *node) []*tensor {
		none := constant(dtype.F32, []int64{0}, nil)
		return []*tensor{m.batchNorm(n, n.value("input"), false), none, none}
	},
}

func lastAxes(x *tensor, count int) []int {
	var list []int
	for i := len(x.axes) - count; i < len(x.axes); i++ {
		list = append(list, i)
	}
	return list
}

// normalized subtracts the mean along axes and divides by the root of the variance, in f32.
func (m *maker) normalized(x *tensor, list []int, eps float64) (out, mean, inverse *tensor) {
	x = m.single(x)
	mean = m.mean(x, list, true)
	out = m.binary(x, mean, m.b.Sub)
	square := m.mean(out.with(m.b.Mul(out.v, out.v)), list, true)
	inverse = square.with(m.b.Rsqrt(m.b.Shift(square.v, eps)))
	return m.binary(out, inverse, m.b.Mul), mean, inverse
}

// affine multiplies by a weight and adds a bias, if a node has them. Their first axis is axis i
// of x.
func (m *maker) affine(n *node, x *tensor, i int) *tensor {
	for _, part := range []struct {
		name string
		join func(x, y *ir.Value) *ir.Value
	}{{"weight", m.b.Mul}, {"bias", m.b.Add}} {
		if !n.has(part.name) {
			continue
		}
		w := m.single(n.value(part.name))
		for len(w.axes) < len(x.axes)-i {
			w = m.unsqueezed(w, len(w.axes))
		}
		x = m.binary(x, w, part.join)
	}
	return x
}

// groupNorm normalizes groups of the channels of x [rows, channels, ...].
func (m *maker) groupNorm(n *node, x *tensor, groups int64) *tensor {
	sizes := x.sizes()
	if len(sizes) < 2 || groups < 1 || sizes[1]%groups != 0 {
		panic(refusal("channels that are no groups"))
	}
	apart := slices.Insert(slices.Clone(sizes), 2, sizes[1]/groups)
	apart[1] = groups
	y := m.viewed(x, apart)
	y, _, _ = m.normalized(y, lastAxes(y, len(apart)-2), n.float("eps", 1e-5))
	y = m.affine(n, m.viewed(y, sizes), 1)
	return y.with(m.b.Convert(y.v, x.v.Type.Elem))
}

// batchNorm normalizes channels, which are axis 1, by this batch or by stored statistics.
func (m *maker) batchNorm(n *node, x *tensor, batch bool) *tensor {
	elem, eps := x.v.Type.Elem, n.float("eps", 1e-5)
	var y *tensor
	if batch {
		list := []int{0}
		for i := 2; i < len(x.axes); i++ {
			list = append(list, i)
		}
		y, _, _ = m.normalized(x, list, eps)
	} else {
		side := func(name string) *tensor {
			w := m.single(n.value(name))
			for range len(x.axes) - 2 {
				w = m.unsqueezed(w, len(w.axes))
			}
			return w
		}
		root := side("running_var")
		root = root.with(m.b.Rsqrt(m.b.Shift(root.v, eps)))
		y = m.binary(m.binary(m.single(x), side("running_mean"), m.b.Sub), root, m.b.Mul)
	}
	y = m.affine(n, y, 1)
	return y.with(m.b.Convert(y.v, elem))
}
