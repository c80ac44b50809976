package cpu

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// attentionKernels print attention as one GEMM per head and sequence. Heads come before rows, so
// that the batch dimensions of each product are outermost, which YNNPACK wants.
func attentionKernels() []stablehlo.Kernel {
	row := func(kind string, print func(writer, *ir.Op, []val) []val) stablehlo.Kernel {
		return stablehlo.Kernel{Name: kernels.HeadFirst, Kinds: []string{kind}, Print: on(print),
			Applies: attends}
	}
	return []stablehlo.Kernel{
		row("attention", firstAttention),
		row("attention_grad", firstAttentionGrad),
		row(rewrite.AttentionSaving, savingAttention),
		row(rewrite.AttentionGradSaved, savedAttentionGrad),
	}
}

// attends asks the selector about an attention; for a gradient with saved values, about the
// gradient alone.
func attends(s *kernels.Selector, op *ir.Op) (string, bool) {
	if op.Kind == rewrite.AttentionGradSaved {
		op, _ = rewrite.SavedBy(op, op.In)
	}
	return kernels.Attending(kernels.HeadFirst)(s, op)
}

// A headFirst prints attention with heads before rows: Q is [..., kv, group, seq, head], K and V
// are [..., kv, keys, head].
type headFirst struct {
	*stablehlo.Attention
	w writer
}

// headsBeforeRows transposes [..., seq, kv, group, head] to [..., kv, group, seq, head]; a value
// without a head dimension, such as the log-sum-exp, likewise.
func (a *headFirst) headsBeforeRows(x val) val {
	last := []string{ir.KVHeads, stablehlo.QueryGroup, ir.Seq, ir.Keys, ir.HeadDim}
	has := func(name string) bool { return x.Type.Index(name) >= 0 }
	order := append(ir.Names(ir.Without(x.Type.Dims, last...)), lists.Filter(last, has)...)
	return a.w.transposeCopy(x, order)
}

// newHeadFirst prepares the operands. Products come out in the order [batch, rows, columns], so
// that no transpose follows them: XLA:CPU would run it as a copy.
func newHeadFirst(w writer, op *ir.Op, in []val) *headFirst {
	a := &headFirst{stablehlo.NewAttention(w.Writer.Writer, op, in, true), w}
	a.Mask = a.addMask
	a.Q, a.K, a.V = a.headsBeforeRows(a.Q), a.headsBeforeRows(a.K), a.headsBeforeRows(a.V)
	a.Matmul = func(x, y val, to dtype.DType, over ...string) val {
		b := newOperand(x, y.Type, over)
		c := newOperand(y, x.Type, over)
		return w.matmul(x, y, to, ir.Names(slices.Concat(b.batch, b.free, c.free)), over...)
	}
	return a
}

// addMask adds 0 or a large negative number to the scores, from a table [seq, keys] (or [batch,
// seq, keys] with documents) that all layers share. With a select instead of a sum, XLA:CPU writes
// the selected scores before it looks for the largest (8.98 against 4.42 ms for 48 heads of 256
// rows).
func (a *headFirst) addMask(score val) val {
	w := a.w
	t := ir.Type{Elem: score.Type.Elem}
	for _, d := range score.Type.Dims {
		rows := d.Name == ir.Seq || d.Name == ir.Keys
		byRow := len(a.Segments) > 0 || a.Lengths != nil
		if rows || byRow && d.Name != ir.KVHeads && d.Name != stablehlo.QueryGroup {
			t.Dims = append(t.Dims, d)
		}
	}
	key := fmt.Sprint(t, a.Op.Attrs.Bool("causal"), a.Op.Attrs.Int("window"), a.Lengths, a.Segments,
		a.Positions, a.QueryOffset)
	table := w.Once("mask "+key, func() (table val) {
		if sees := a.Visible(t); sees != nil {
			table = w.Barrier(w.Select(sees, w.Constant(t, 0), w.Constant(t, stablehlo.MaskedScore)))
		}
		return table
	})
	if table == nil { // all see all
		return score
	}
	return w.Elementwise("add", score, w.BroadcastTo(table, score.Type))
}

// A savedSoftmax is what attention saves for its gradient. The probabilities are never written: one
// factor per row, applied to [seq, head], costs less than one per score.
type savedSoftmax = rewrite.SavedSoftmax[val]

// block restricts the operands to one block of queries and the keys that it may see.
func (a *headFirst) block(p kernels.QueryBlock) *headFirst {
	w, attention := a.w, *a.Attention
	b := &headFirst{&attention, w}
	b.Q = w.Slice(a.Q, ir.Seq, p.From, p.To)
	b.K, b.V = w.Slice(a.K, ir.Keys, p.Low, p.High), w.Slice(a.V, ir.Keys, p.Low, p.High)
	b.QueryOffset = p.From - p.Low
	if len(a.Segments) > 0 {
		b.Segments = []val{w.Slice(a.Segments[0], ir.Seq, p.From, p.To),
			w.Slice(a.Segments[1], ir.Keys, p.Low, p.High)}
	}
	b.Mask = b.addMask
	return b
}

// queryBlocks splits the queries of a causal attention, so that about half of the scores need not
// be computed.
func (a *headFirst) queryBlocks() []kernels.QueryBlock {
	return a.w.Target.QueryBlocks(a.Op, a.Q.Type.Elem, a.Q.Type.Size(ir.Seq), a.K.Type.Size(ir.Keys))
}

// concatBlocks concatenates blocks along the sequence.
func (a *headFirst) concatBlocks(blocks []val) val {
	if len(blocks) == 1 {
		return blocks[0]
	}
	t := ir.Type{Elem: blocks[0].Type.Elem, Dims: slices.Clone(blocks[0].Type.Dims)}
	t.Dims[t.Index(ir.Seq)].Size = a.Q.Type.Size(ir.Seq)
	return a.w.Concat(ir.Seq, t, blocks...)
}

// firstAttention returns [..., seq, heads, head] and the log-sum-exp [..., seq, heads].
func firstAttention(w writer, op *ir.Op, in []val) []val {
	out, _ := attendHeadFirst(w, op, in)
	return out
}

// savingAttention also returns what its gradient reads, see [rewrite.AttentionSaving].
func savingAttention(w writer, op *ir.Op, in []val) []val {
	out, m := attendHeadFirst(w, op, in)
	return append(out, m.Results(op)...)
}

// attendHeadFirst computes softmax without dividing the exponentials: the output is multiplied by
// one over their sum, per row.
func attendHeadFirst(w writer, op *ir.Op, in []val) (out []val, m savedSoftmax) {
	a := newHeadFirst(w, op, in)
	var os, shares, lses []val
	// Per block: score [..., kv, group, rows, keys], exponentials alike, sums [..., kv, group, rows].
	for _, p := range a.queryBlocks() {
		b := a.block(p)
		score, raw := b.Scores()
		top := w.Reduce(score, "maximum", stablehlo.NegInf, ir.Keys)
		e := w.Elementwise("exponential", w.Elementwise("subtract", score, w.BroadcastTo(top,
			score.Type)))
		total := w.Reduce(e, "add", 0, ir.Keys)
		e = w.Convert(e, b.V.Type.Elem)
		m.Exp, m.Scores = append(m.Exp, e), append(m.Scores, raw)
		shares = append(shares, w.Elementwise("divide", w.Constant(total.Type, 1), total))
		lses = append(lses, w.Elementwise("add", top, w.Elementwise("log", total)))
		os = append(os, a.Matmul(e, b.V, dtype.F32, ir.Keys))
	}
	m.InvSum = a.concatBlocks(shares)
	o := a.concatBlocks(os)
	o = w.Elementwise("multiply", o, w.BroadcastTo(m.InvSum, o.Type))
	t := op.Out[0].Type
	out = []val{w.Convert(a.UngroupHeads(o, t), t.Elem), a.UngroupHeads(a.concatBlocks(lses),
		op.Out[1].Type)}
	return out, m
}

// recomputed gives the exponentials where the forward pass ran in another program: they are
// recomputed from the log-sum-exp, so the sum is one and InvSum is 1.
func (a *headFirst) recomputed(stat val, blocks []kernels.QueryBlock) savedSoftmax {
	w := a.w
	stat = a.headsBeforeRows(a.GroupHeads(stat))
	m := savedSoftmax{InvSum: w.Constant(stat.Type, 1)}
	for _, p := range blocks {
		b := a.block(p)
		score, raw := b.Scores()
		less := w.BroadcastTo(w.Slice(stat, ir.Seq, p.From, p.To), score.Type)
		e := w.Elementwise("exponential", w.Elementwise("subtract", score, less))
		m.Exp = append(m.Exp, w.Convert(e, a.V.Type.Elem))
		m.Scores = append(m.Scores, raw)
	}
	return m
}

func firstAttentionGrad(w writer, op *ir.Op, in []val) []val {
	return headFirstGrad(w, op, in, nil)
}

// savedAttentionGrad is firstAttentionGrad with what the forward pass saved.
func savedAttentionGrad(w writer, op *ir.Op, in []val) []val {
	op, m := rewrite.SavedBy(op, in)
	return headFirstGrad(w, op, in[:len(op.In)], &m)
}

// headFirstGrad computes dQ, dK and dV (Dao et al., 2022, algorithm 4): with P the probabilities,
// dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − rowsum(dO ∘ O)), dQ = dS K, dK = dSᵀ Q.
func headFirstGrad(w writer, op *ir.Op, in []val, m *savedSoftmax) []val {
	a := newHeadFirst(w, op, in)
	o, do := a.GroupHeads(in[3]), a.GroupHeads(in[5])
	inner := w.Reduce(w.Convert(w.Elementwise("multiply", do, o), dtype.F32), "add", 0, ir.HeadDim)
	do, inner = a.headsBeforeRows(do), a.headsBeforeRows(inner)
	blocks := a.queryBlocks()
	if m == nil {
		again := a.recomputed(in[4], blocks)
		m = &again
	}
	scaled := w.Elementwise("multiply", w.Convert(do, dtype.F32), w.BroadcastTo(m.InvSum, do.Type))
	short, scaled := w.CastOperand(op, do), w.Convert(scaled, a.V.Type.Elem)
	var dqs []val
	var dk, dv val
	for i, p := range blocks {
		b := a.block(p)
		row := func(v val) val { return w.Slice(v, ir.Seq, p.From, p.To) }
		dp := a.Matmul(row(short), b.V, dtype.F32, ir.HeadDim)
		e := w.Elementwise("multiply", w.Convert(m.Exp[i], dtype.F32), w.BroadcastTo(row(m.InvSum),
			dp.Type))
		ds := w.Elementwise("multiply", e, w.Elementwise("subtract", dp, w.BroadcastTo(row(inner),
			dp.Type)))
		var raw val
		if len(m.Scores) > 0 {
			raw = m.Scores[i]
		}
		ds = w.Convert(a.ScoreGrad(ds, raw), short.Type.Elem)
		dqs = append(dqs, a.Matmul(ds, b.K, dtype.F32, ir.Keys))
		dk = a.addToKeys(dk, a.sumOverQueries(ds, b.Q), p)
		dv = a.addToKeys(dv, a.sumOverQueries(m.Exp[i], row(scaled)), p)
	}
	out := func(i int, v val) val {
		t := op.Out[i].Type
		return w.Convert(w.Reshape(w.transposeCopy(v, a.GroupedDims(t)), t), t.Elem)
	}
	return []val{out(0, a.concatBlocks(dqs)), out(1, dk), out(2, dv)}
}

// sumOverQueries sums a product over queries. It returns [..., head, keys]: the operand that must
// be transposed is then the smaller one, [seq, head].
func (a *headFirst) sumOverQueries(x, y val) val {
	b := newOperand(x, y.Type, []string{stablehlo.QueryGroup, ir.Seq})
	order := append(ir.Names(b.batch), ir.HeadDim, ir.Keys)
	return a.w.matmul(x, y, dtype.F32, order, stablehlo.QueryGroup, ir.Seq)
}

// addToKeys adds the gradient of one block's keys, padded to all keys.
func (a *headFirst) addToKeys(total, v val, p kernels.QueryBlock) val {
	w := a.w
	if keys := a.K.Type.Size(ir.Keys); p.High-p.Low < keys {
		v = w.Pad(v, ir.Keys, p.Low, keys-p.High)
	}
	if total == nil {
		return v
	}
	return w.Elementwise("add", total, v)
}
