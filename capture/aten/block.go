package aten

import (
	"fmt"
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// blockRules are the operators that a Transformer is made of.
var blockRules = map[string]rule{
	"aten.layer_norm.default": sole(func(m *maker, n *node) *tensor {
		if len(n.ints("normalized_shape")) != 1 {
			return normRules["aten.native_layer_norm.default"](m, n)[0]
		}
		x := n.value("input")
		i := len(x.axes) - 1
		x = m.whole(x, i)
		w, bias := m.normWeight(n, "weight", &x, 1), m.normWeight(n, "bias", &x, 0)
		m.dims.wish(x.axes[i].dims[0], ir.EmbedDim)
		dim := m.name(x.axes[i].dims[0])
		return x.with(m.b.LayerNorm(x.v, w, bias, dim, n.float("eps", 1e-5)))
	}),
	"aten.rms_norm.default": sole(func(m *maker, n *node) *tensor {
		if len(n.ints("normalized_shape")) != 1 {
			panic(refusal("a norm over several axes"))
		}
		x := n.value("input")
		i := len(x.axes) - 1
		x = m.whole(x, i)
		w := m.normWeight(n, "weight", &x, 1)
		return x.with(m.b.RMSNorm(x.v, w, m.name(x.axes[i].dims[0]), n.float("eps", 0x1p-23), 0))
	}),
	"aten.cross_entropy_loss.default": sole(crossEntropy),
}

// normWeight gives the weight or bias of a norm over the last axis, [dim] of the type of x.
func (m *maker) normWeight(n *node, name string, x **tensor, absent float64) *ir.Value {
	i := len((*x).axes) - 1
	if !n.has(name) {
		d := (*x).axes[i].dims[0]
		t := ir.Type{Elem: (*x).v.Type.Elem, Dims: []ir.Dim{{Name: m.name(d), Size: m.size(d)}}}
		return m.b.Fill(t, absent)
	}
	w := m.whole(n.value(name), 0)
	_, w = m.match(*x, w, i, 0)
	return m.b.Convert(w.v, (*x).v.Type.Elem)
}

// A norm is how far x·rsqrt(mean(x²) + eps) has come that a program writes out. It becomes one
// operation, which computes in f32 whatever the type of x.
type norm struct {
	of    *tensor
	stage int
	eps   float64
}

const (
	squared = iota + 1
	averaged
	shifted
	inverted
	whole // but for the weight
)

// as is a tensor that is the next stage of a norm.
func (t *tensor) as(n *norm, from, to int) *tensor {
	if n == nil || n.stage != from {
		return t
	}
	out := *t
	out.norm = &norm{n.of, to, n.eps}
	return &out
}

// normed gives x·y if y is the inverse root of x's mean square, or a norm that lacks its weight x.
func (m *maker) normed(x, y *tensor) *tensor {
	if y.norm == nil {
		return nil
	}
	of := y.norm.of
	last := len(of.axes) - 1
	if last < 0 || len(of.axes[last].dims) != 1 {
		return nil
	}
	d := of.axes[last].dims[0]
	switch t := x.v.Type; {
	case y.norm.stage == inverted && x.v == of.v:
		one := m.b.Fill(ir.Type{Elem: t.Elem, Dims: []ir.Dim{{Name: m.name(d), Size: m.size(d)}}}, 1)
		out := of.with(m.b.RMSNorm(of.v, one, m.name(d), y.norm.eps, 0))
		return out.as(y.norm, inverted, whole)
	case y.norm.stage == whole && len(x.axes) == 1 && len(x.axes[0].dims) == 1 &&
		t.Elem == of.v.Type.Elem && len(t.Dims) == 1 && x.axes[0].size == m.size(d):
		_, w := m.match(of, x, last, 0)
		return of.with(m.b.RMSNorm(of.v, w.v, m.name(d), y.norm.eps, 0))
	}
	return nil
}

// crossEntropy is the sum of the losses of all labels that are not negative, times their share.
func crossEntropy(m *maker, n *node) *tensor {
	x, labels := n.value("self"), n.value("target")
	switch {
	case len(x.axes) != 2 || !labels.label:
		panic(refusal("a loss of other than logits [tokens, vocabulary] and labels"))
	case n.has("weight") || n.int("reduction", 1) != 1 || n.float("label_smoothing", 0) != 0:
		panic(refusal("a loss with weights or smoothing, or that is no mean"))
	case n.int("ignore_index", -100) >= 0:
		panic(refusal("a loss that ignores a token"))
	}
	x = m.whole(x, 1)
	labels, x = m.match(labels, x, 0, 0)
	m.dims.wish(x.axes[1].dims[0], ir.Vocab)
	rows := labels.axes[0].dims
	vocab := x.axes[1].dims[0]
	v := m.b.Transpose(x.v, append(m.names(rows), m.name(vocab))...)
	l := m.b.Transpose(labels.v, m.names(rows)...)
	loss := m.b.Sum(m.b.CrossEntropy(v, l, m.name(vocab)), m.names(rows)...)
	return m.tensor(m.b.Mul(loss, m.share), nil)
}

// makerRules make tensors of nothing.
var makerRules = map[string]rule{
	"aten.arange.default": sole(arange), "aten.arange.start": sole(arange),
	"aten.arange.start_step":  sole(arange),
	"aten.zeros_like.default": filled(0), "aten.ones_like.default": filled(1),
	"aten.new_empty.default": filled(0), "aten.empty_like.default": filled(0),
	"aten.zeros.default": filled(0), "aten.ones.default": filled(1),
	"aten.full.default": filledBy("fill_value"), "aten.full_like.default": filledBy("fill_value"),
	"aten.new_full.default":  filledBy("fill_value"),
	"aten.new_zeros.default": filled(0), "aten.new_ones.default": filled(1),
}

// arange counts; along the whole sequence it is the positions of tokens.
func arange(m *maker, n *node) *tensor {
	sizes, start, step := n.out(0), n.float("start", 0), n.float("step", 1)
	want := math.Ceil((n.float("end", 0) - start) / step)
	if len(sizes) != 1 || float64(sizes[0]) != want {
		panic(refusal(fmt.Sprintf("%v numbers where the program says %v", want, sizes)))
	}
	size := sizes[0]
	elem := n.graph.Values[string(n.Outputs[0])].Type
	if start == 0 && step == 1 && elem == dtype.S64 && m.positions != nil && size == m.shape.Seq {
		return m.positions
	}
	data := make([]float64, count(sizes))
	for i := range data {
		data[i] = start + step*float64(i)
	}
	return constant(elem, []int64{size}, data)
}

// filled repeats one number.
func filled(by float64) rule {
	return fill(func(*node) float64 { return by })
}

// filledBy repeats the number that an argument gives.
func filledBy(name string) rule {
	return fill(func(n *node) float64 { return n.float(name, 0) })
}

func fill(by func(n *node) float64) rule {
	return sole(func(m *maker, n *node) *tensor {
		sizes := n.out(0)
		axes := make([]axis, len(sizes))
		for i, size := range sizes {
			axes[i].size = size
		}
		elem := m.elem(n.graph.Values[string(n.Outputs[0])].Type)
		v := m.b.Fill(ir.Type{Elem: elem}, by(n))
		if m.fills == nil {
			m.fills = map[*ir.Value]float64{}
		}
		m.fills[v] = by(n)
		return m.tensor(v, nil, axes...)
	})
}

// dropped multiplies by a mask that is an input, and by what makes up for what is lost.
func (m *maker) dropped(x *tensor, n *node) *tensor {
	p := n.float("p", 0)
	switch {
	case !m.masked:
		panic(refusal(fmt.Sprintf("dropout of %v: export the module with dropout 0", p)))
	case p >= 1:
		panic(refusal("dropout of everything"))
	}
	for i, a := range x.axes {
		if a.size > 1 {
			x = m.some(x, i)
		}
	}
	call := m.calls[n.path()]
	m.calls[n.path()]++
	t := ir.Type{Elem: x.v.Type.Elem}
	for _, d := range x.dims() {
		t.Dims = append(t.Dims, ir.Dim{Name: m.name(d), Size: m.size(d)})
	}
	mask := m.b.Input(MaskInput(n.path(), call), ir.Data, t, "")
	return x.with(m.b.Scale(m.b.Mul(x.v, mask), 1/(1-p)))
}
