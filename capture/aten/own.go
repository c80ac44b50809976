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
	smooth := n.float("label_smoothing", 0)
	switch {
	case labels.v.Type.Elem.Kind() == dtype.Float:
		return m.softLoss(n, m.single(x), smooth)
	case len(x.axes) != 2 || len(labels.axes) != 1 || n.has("weight") || smooth != 0:
		return m.classLoss(n, m.logSoftmax(m.single(x), min(1, len(x.axes)-1)), smooth)
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
	if fill == 0 || n.text("mode", "constant") != "constant" {
		return rules["aten.pad.default"](m, n)[0]
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
	x, p := n.tensor("input"), n.float("p", 0)
	if p == 0 || !n.bool("train", true) {
		return x
	}
	return m.drawn(m.real(x), n, p)
}

// drawn multiplies by a mask that the caller draws, and by what makes up for what is lost.
func (m *maker) drawn(x *tensor, n *node, p float64) *tensor {
	if p >= 1 {
		panic(refusal("dropout of everything"))
	}
	for i, a := range x.axes {
		if a.size > 1 {
			x = m.some(x, i)
		}
	}
	name := MaskInput(graphName("x"+n.path()), m.calls[n.path()])
	m.calls[n.path()]++
	t := ir.Type{Elem: x.v.Type.Elem}
	for _, d := range x.dims() {
		t.Dims = append(t.Dims, ir.Dim{Name: m.name(d), Size: m.size(d)})
	}
	m.draws = append(m.draws, Draw{name, 1 - p})
	mask := m.b.Input(name, ir.Data, t, "")
	return x.with(m.b.Scale(m.b.Mul(x.v, mask), 1/(1-p)))
}

// paddedAttention is dw.attention with a mask [batch, keys] of the keys that are no padding: real
// keys and all queries are of one document, and padding is of another.
func paddedAttention(m *maker, n *node) *tensor {
	if p := n.float("dropout", 0); p > 0 {
		if n.has("mask") || n.has("sinks") || n.int("window", 0) > 0 || n.float("softcap", 0) != 0 {
			panic(refusal("dropout inside attention with a mask, a window or sinks"))
		}
		return m.writtenOut(n, [3]string{"q", "k", "v"}, n.float("scale", 1), nil,
			n.bool("causal", false), p)
	}
	if !n.has("mask") || n.has("sinks") {
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

// maskedAttention is attention with a mask [..., queries, keys] that is computed: true where a key
// is seen, or added to the scores. It is written out, and so is attention with dropout.
func maskedAttention(m *maker, n *node) *tensor {
	p := n.float("dropout_p", 0)
	if p == 0 && (!n.has("attn_mask") || n.tensor("attn_mask").known != nil) {
		return rules["aten.scaled_dot_product_attention.default"](m, n)[0]
	}
	var mask *tensor
	if n.has("attn_mask") {
		mask = n.value("attn_mask")
	}
	q := n.value("query")
	scale := n.float("scale", 1/math.Sqrt(float64(q.axes[len(q.axes)-1].size)))
	return m.writtenOut(n, [3]string{"query", "key", "value"}, scale, mask,
		n.bool("is_causal", false), p)
}

// writtenOut is attention of queries, keys and values as operations, with a mask that may be nil
// and a probability of dropout.
func (m *maker) writtenOut(n *node, names [3]string, scale float64, mask *tensor, causal bool,
	p float64) *tensor {
	q, k, v := n.value(names[0]), n.value(names[1]), n.value(names[2])
	last := len(q.axes) - 1
	if last < 2 || len(k.axes) != len(q.axes) {
		panic(refusal("attention of other than [..., heads, sequence, head]"))
	}
	if h := last - 2; q.axes[h].size != k.axes[h].size { // several heads share keys and values
		each := q.axes[h].size / k.axes[h].size
		k = m.copies(k, h, h+1, each)
		outer := m.key
		m.key += "values:"
		v = m.copies(v, h, h+1, each)
		m.key = outer
	}
	order := make([]int, len(k.axes))
	for i := range order {
		order[i] = i
	}
	slices.Reverse(order[last-1:])
	scores := m.scaled(m.matmul(q, m.permuted(k, order)), scale)
	elem := scores.v.Type.Elem
	hidden := m.tensor(m.b.Fill(ir.Type{Elem: elem}, lowest(elem)), nil)
	if rows, cols := q.axes[last-1].size, k.axes[last-1].size; causal && cols > 1 {
		seen := make([]float64, rows*cols)
		for r := range rows {
			for c := range min(r+1, cols) {
				seen[r*cols+c] = 1
			}
		}
		scores = m.choose(m.real(constant(dtype.Pred, []int64{rows, cols}, seen)), scores, hidden)
	}
	seen := mask
	if mask != nil && mask.v.Type.Elem.Kind() == dtype.Float {
		low := m.b.Fill(ir.Type{Elem: mask.v.Type.Elem}, math.Inf(-1))
		seen = mask.with(m.b.Compare("gt", mask.v, low))
		scores = m.binary(scores, mask, m.b.Add)
	}
	if mask != nil {
		scores = m.choose(seen, scores, hidden)
	}
	scores = m.whole(scores, last)
	probs := scores.with(m.b.Softmax(scores.v, m.name(scores.axes[last].dims[0])))
	if mask != nil { // who sees no key gets nothing
		probs = m.binary(probs, seen.with(m.b.Convert(seen.v, elem)), m.b.Mul)
	}
	if p > 0 {
		probs = m.drawn(probs, n, p)
	}
	return m.matmul(probs, v)
}
