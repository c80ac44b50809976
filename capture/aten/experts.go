package aten

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// expertRules choose experts, and compute them.
var expertRules = map[string]rule{
	"aten.topk.default": func(m *maker, n *node) []*tensor {
		x := n.value("self")
		i, k := x.at(n.int("dim", -1)), n.int("k", 1)
		if i != len(x.axes)-1 || !n.bool("largest", true) {
			panic(refusal("top-k along another axis than the last, or of the smallest"))
		}
		x = m.whole(x, i)
		d := x.axes[i].dims[0]
		m.dims.wish(d, ir.RouterDim)
		x = m.ordered(x, []dim{d})
		values, places := m.b.TopK(x.v, m.name(d), k)
		return []*tensor{m.resized(x, values, i, k, "top"), m.resized(x, places, i, k, "top")}
	},
	"dw.experts.default": sole(experts),
}

// experts adds up, for each row of x [tokens, embed], the gated MLPs that index [tokens, choice]
// names, times weight [tokens, choice]. Every expert has room for all tokens.
func experts(m *maker, n *node) *tensor {
	x, index, weight := n.value("x"), n.value("index"), n.value("weight")
	up, down := m.expertWeight(n, "gate_up"), m.expertWeight(n, "down")
	x, index = m.match(x, index, 0, 0)
	index, weight = m.match(m.whole(index, 1), m.whole(weight, 1), 0, 0)
	index, weight = m.match(index, weight, 1, 1)
	x, up = m.match(m.whole(x, 1), up, 1, 2) // up is [experts, 2·mlp, embed]
	m.dims.wish(index.axes[1].dims[0], ir.Choice)
	tokens, embed, choice := x.axes[0].dims, x.axes[1].dims[0], index.axes[1].dims[0]

	count := up.axes[0].size
	two := []int64{count, 2, up.axes[1].size / 2, up.axes[2].size}
	both := 1
	if n.bool("interleaved", false) {
		two[1], two[2], both = two[2], two[1], 2
	}
	up = m.viewed(up, two)
	halves := up.axes[both].dims[0]
	up, down = m.match(up, down, 3-both, 2) // down is [experts, embed, mlp]
	m.wishes(up, ir.ExpertDim)
	m.dims.wish(up.axes[3-both].dims[0], ir.MLPDim)
	if n.has("gate_up_bias") {
		bias := m.viewed(n.value("gate_up_bias"), two[:3])
		for i := range 3 {
			up, bias = m.match(up, bias, i, i)
		}
		return m.dispatched(n, routed{x, index, weight, up, bias, down, halves, tokens, embed, choice})
	}
	return m.dispatched(n, routed{x, index, weight, up, nil, down, halves, tokens, embed, choice})
}

// expertWeight gives the weights of experts as [experts, out, in].
func (m *maker) expertWeight(n *node, name string) *tensor {
	w := n.value(name)
	if n.bool("transposed", false) {
		w = m.permuted(w, []int{0, 2, 1})
	}
	return w
}

// routed is what experts compute with, its axes matched.
type routed struct {
	x, index, weight, up, upBias, down *tensor
	halves                             dim // gate and up
	tokens                             []dim
	embed, choice                      dim
}

// dispatched copies rows to experts, computes these, and adds up what they give.
func (m *maker) dispatched(n *node, r routed) *tensor {
	b := m.b
	rowNames := m.names(r.tokens)
	call := func(t *tensor, last dim, as string) *ir.Value {
		v := b.Transpose(t.v, append(slices.Clone(rowNames), m.name(last))...)
		if as != "" && as != m.name(last) {
			v = b.Rename(v, m.name(last), as)
		}
		return v
	}
	expert := func(t *tensor) *ir.Value {
		if t == nil || m.name(t.axes[0].dims[0]) == ir.ExpertDim {
			return t.value()
		}
		return b.Rename(t.v, m.name(t.axes[0].dims[0]), ir.ExpertDim)
	}
	count := r.up.axes[0].size
	idx := b.Convert(call(r.index, r.choice, ir.Choice), dtype.S32)
	pos := b.ExpertPositions(idx, count, true, append(slices.Clone(rowNames), ir.Choice)...)
	tokens := int64(1)
	for _, d := range r.tokens {
		tokens *= m.size(d)
	}
	if e := m.shape.Experts; e.Capacity > 0 || e.ZLoss > 0 || e.AuxLoss != nil && *e.AuxLoss > 0 {
		panic(refusal("a capacity factor or losses of the router that the program does not have"))
	}
	slots := m.shape.Experts.Room(tokens, m.size(r.choice), count)
	b.Tagged(ir.Router, func() { m.count(idx, pos, count, slots) })
	to := func(v *ir.Value) *ir.Value {
		return b.Dispatch(v, idx, pos, count, slots, m.shape.Experts.Blocks)
	}
	rows, gates := to(call(r.x, r.embed, "")), to(call(r.weight, r.choice, ir.Choice))
	gates = b.Convert(gates, rows.Type.Elem)
	h := b.LinearIn(rows, expert(r.up), m.matmulType)
	if r.upBias != nil {
		bias := b.Broadcast(expert(r.upBias), 1, ir.Dim{Name: ir.Slots, Size: slots})
		h = b.Add(h, bias)
	}
	part := func(i int64) *ir.Value {
		return b.Sum(b.Slice(h, m.name(r.halves), i, i+1), m.name(r.halves))
	}
	h = b.Mul(m.gated(n, part(0), part(1)), gates)
	_, r.down = m.match(r.up, r.down, 0, 0)
	y := b.LinearIn(h, expert(r.down), m.matmulType)
	if n.has("down_bias") {
		_, bias := m.match(r.down, n.value("down_bias"), 0, 0)
		_, bias = m.match(r.down, bias, 1, 1)
		wide := b.Broadcast(expert(bias), 1, ir.Dim{Name: ir.Slots, Size: slots})
		y = b.Add(y, b.Mul(wide, gates))
	}
	out := b.Combine(y, idx, pos)
	return m.tensor(out, nil, axis{r.tokens, tokens}, r.down.axes[1])
}

// value is the value of a tensor, or nil.
func (t *tensor) value() *ir.Value {
	if t == nil {
		return nil
	}
	return t.v
}

// gated is act(gate)·up; gpt-oss bounds both.
func (m *maker) gated(n *node, gate, up *ir.Value) *ir.Value {
	b := m.b
	switch act := n.text("act", ""); act {
	case "silu", "swish":
		gate = b.Silu(gate)
	case "gelu":
		gate = gelu(b, gate)
	case "gelu_pytorch_tanh":
		gate = b.Gelu(gate)
	case "relu":
		gate = b.Relu(gate)
	case "clamped_swiglu":
		limit := n.float("limit", 0)
		gate, _ = bounded(b, gate, "ge", limit)
		up, _ = bounded(b, up, "ge", limit)
		up, _ = bounded(b, up, "le", -limit)
		up = b.Shift(up, 1)
		gate = b.Mul(gate, b.Sigmoid(b.Scale(gate, n.float("alpha", 1))))
	default:
		panic(refusal("experts with activation " + act))
	}
	return b.Mul(gate, up)
}
