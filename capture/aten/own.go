package aten

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A Draw is a mask of dropout that the caller draws for each call: an input of the graph that is 1
// with the probability Keep and 0 elsewhere.
type Draw struct {
	Name string
	Keep float64
}

// functionRules are rules of a [Function] where it differs from a [Model].
var functionRules = map[string]rule{
	"aten.cross_entropy_loss.default":           sole(ownLoss),
	"aten.pad.default":                          sole(ownPad),
	"aten.dropout.default":                      sole(ownDropout),
	"dw.attention.default":                      sole(paddedAttention),
	"aten.scaled_dot_product_attention.default": sole(maskedAttention),
}

// ownLoss is the cross-entropy as the program has it: the mean over labels, their sum, or one of
// each. Labels that are ignored become -1, which operations know.
func ownLoss(m *maker, n *node) *tensor {
	x, labels := n.value("self"), n.value("target")
	if len(x.axes) != 2 || len(labels.axes) != 1 || labels.v.Type.Elem.Kind() == dtype.Float {
		panic(refusal("a loss of other than logits [tokens, classes] and labels [tokens]"))
	}
	if n.has("weight") || n.float("label_smoothing", 0) != 0 {
		panic(refusal("a loss with weights or smoothing"))
	}
	x = m.whole(x, 1)
	labels, x = m.match(labels, x, 0, 0)
	m.dims.wish(x.axes[1].dims[0], ir.Vocab)
	rows, vocab := m.names(labels.axes[0].dims), m.name(x.axes[1].dims[0])
	l := m.b.Transpose(labels.v, rows...)
	number := func(to float64) *ir.Value { return m.b.Fill(ir.Type{Elem: l.Type.Elem}, to) }
	if skip := n.int("ignore_index", -100); skip >= 0 {
		l = m.b.Select(m.b.Compare("eq", l, number(float64(skip))), m.b.Fill(l.Type, -1), l)
	}
	each := m.b.CrossEntropy(m.b.Transpose(x.v, append(slices.Clone(rows), vocab)...), l, vocab)
	elem := m.elem(n.graph.Values[string(n.Outputs[0])].Type)
	switch n.int("reduction", 1) {
	case 0:
		return m.tensor(m.b.Convert(each, elem), nil, labels.axes...)
	case 2:
		return m.tensor(m.b.Convert(m.b.Sum(each, rows...), elem), nil)
	}
	counted := m.b.Convert(m.b.Compare("ge", l, number(0)), each.Type.Elem)
	mean := m.b.Div(m.b.Sum(each, rows...), m.b.Sum(counted, rows...))
	return m.tensor(m.b.Convert(mean, elem), nil)
}

// ownPad pads with any number.
func ownPad(m *maker, n *node) *tensor {
	by, fill := n.ints("pad"), n.float("value", 0)
	if fill == 0 {
		return rules["aten.pad.default"](m, n)[0]
	}
	if n.text("mode", "constant") != "constant" {
		panic(refusal("padding with other than a number"))
	}
	x := n.value("self")
	for k := 0; k+1 < len(by); k += 2 {
		i := len(x.axes) - 1 - k/2
		var list []*tensor
		if by[k] < 0 || by[k+1] < 0 {
			panic(refusal("padding with less than nothing"))
		}
		beside := func(count int64) {
			if count > 0 {
				axes := slices.Clone(x.axes)
				for j := range axes {
					axes[j].dims = nil
				}
				axes[i].size = count
				list = append(list, m.tensor(m.b.Fill(ir.Type{Elem: x.v.Type.Elem}, fill), nil, axes...))
			}
		}
		beside(by[k])
		list = append(list, x)
		beside(by[k+1])
		x = m.joined(list, i)
	}
	return x
}

// ownDropout multiplies by a mask that the caller draws.
func ownDropout(m *maker, n *node) *tensor {
	p, call := n.float("p", 0), m.calls[n.path()]
	if p > 0 && n.bool("train", true) {
		m.draws = append(m.draws, Draw{MaskInput(n.path(), call), 1 - p})
	}
	return rules["aten.dropout.default"](m, n)[0]
}

// paddedAttention is dw.attention with a mask [batch, keys] of the keys that are no padding: real
// keys and all queries are of one document, and padding is of another.
func paddedAttention(m *maker, n *node) *tensor {
	if !n.has("mask") || n.has("sinks") || n.float("dropout", 0) != 0 {
		return rules["dw.attention.default"](m, n)[0]
	}
	how := ir.Attention{Causal: n.bool("causal", false), Scale: n.float("scale", 1),
		Window: n.int("window", 0), SoftCap: n.float("softcap", 0), Documents: 2}
	if how.Window > 0 && !how.Causal {
		panic(refusal("a window without causality"))
	}
	q, mask := m.whole(n.value("q"), 0), n.value("mask")
	if len(q.axes) != 4 || len(mask.axes) != 2 || mask.axes[0].size != q.axes[0].size {
		panic(refusal("a mask of other than [batch, keys]"))
	}
	q, mask = m.match(q, m.whole(m.whole(mask, 0), 1), 0, 0)
	if mask.v.Type.Elem != dtype.S32 {
		mask = mask.with(m.b.Convert(mask.v, dtype.S32))
	}
	batch := ir.Dim{Name: m.name(q.axes[0].dims[0]), Size: q.axes[0].size}
	rows := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{batch, {Name: ir.Seq, Size: q.axes[2].size}}}
	how.Segments = m.b.Fill(rows, 1)
	how.KeySegments = m.called(mask, []int{0, 1}, []string{"", ir.Keys})
	return m.attention(q, n.value("k"), n.value("v"), how)
}

// maskedAttention is attention with a mask [..., queries, keys] that is computed: true where a
// key is seen, or added to the scores. It is written out.
func maskedAttention(m *maker, n *node) *tensor {
	if !n.has("attn_mask") || n.tensor("attn_mask").known != nil {
		return rules["aten.scaled_dot_product_attention.default"](m, n)[0]
	}
	q, k, v, mask := n.value("query"), n.value("key"), n.value("value"), n.value("attn_mask")
	switch last := len(q.axes) - 1; {
	case n.float("dropout_p", 0) != 0:
		panic(refusal("dropout inside attention"))
	case n.bool("is_causal", false) || n.bool("enable_gqa", false) || last < 2:
		panic(refusal("a mask beside causality or groups of heads"))
	default:
		order := make([]int, len(k.axes))
		for i := range order {
			order[i] = i
		}
		slices.Reverse(order[len(order)-2:])
		scale := n.float("scale", 1/math.Sqrt(float64(q.axes[last].size)))
		scores := m.scaled(m.matmul(q, m.permuted(k, order)), scale)
		if mask.v.Type.Elem.Kind() == dtype.Float {
			scores = m.binary(scores, mask, m.b.Add)
		} else {
			elem := scores.v.Type.Elem
			hidden := m.tensor(m.b.Fill(ir.Type{Elem: elem}, lowest(elem)), nil)
			scores = m.choose(mask, scores, hidden)
		}
		scores = m.whole(scores, last)
		probs := scores.with(m.b.Softmax(scores.v, m.name(scores.axes[last].dims[0])))
		return m.matmul(probs, v)
	}
}
