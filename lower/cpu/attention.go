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

// attentionKernels print attention as products of matrices, one for each head of each sequence.
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

// attends asks the selector about an attention, or about the gradient without what was saved.
func attends(s *kernels.Selector, op *ir.Op) (string, bool) {
	if op.Kind == rewrite.AttentionGradSaved {
		op, _ = rewrite.SavedBy(op, op.In)
	}
	return kernels.Attending(kernels.HeadFirst)(s, op)
}

// A headFirst prints attention with heads before rows.
type headFirst struct {
	*stablehlo.Attention
	w writer
}

// first puts a value's heads before its rows: what stands side by side, key heads, their share of
// query heads, rows, and the elements of a head if it has them.
func (a *headFirst) first(x val) val {
	last := []string{ir.KVHeads, stablehlo.QueryGroup, ir.Seq, ir.Keys, ir.HeadDim}
	has := func(name string) bool { return x.Type.Index(name) >= 0 }
	order := append(ir.Names(ir.Without(x.Type.Dims, last...)), lists.Filter(last, has)...)
	return a.w.transposeCopy(x, order)
}

func newHeadFirst(w writer, op *ir.Op, in []val) *headFirst {
	a := &headFirst{stablehlo.NewAttention(w.Writer.Writer, op, in, true), w}
	a.Mask = a.added
	a.Q, a.K, a.V = a.first(a.Q), a.first(a.K), a.first(a.V)
	a.Matmul = func(x, y val, to dtype.DType, over ...string) val {
		b := newSide(x, y.Type, over)
		c := newSide(y, x.Type, over)
		return w.matmul(x, y, to, ir.Names(slices.Concat(b.batch, b.free, c.free)), over...)
	}
	return a
}

// added takes the scores of unseen keys down by a sum, of a table that all layers share: with a
// choice instead of a sum, XLA:CPU writes the chosen scores before it looks for the largest
// (8.98 against 4.42 ms for 48 heads of 256 rows).
func (a *headFirst) added(score val) val {
	w := a.w
	t := ir.Type{Elem: score.Type.Elem}
	for _, d := range score.Type.Dims {
		rows := d.Name == ir.Seq || d.Name == ir.Keys
		if rows || len(a.Segments) > 0 && d.Name != ir.KVHeads && d.Name != stablehlo.QueryGroup {
			t.Dims = append(t.Dims, d)
		}
	}
	key := fmt.Sprint(t, a.Op.Attrs.Bool("causal"), a.Op.Attrs.Int("window"), a.Segments,
		a.Positions, a.QueryOffset)
	table := w.Once("mask "+key, func() (table val) {
		if sees := a.Visible(t); sees.Name != "" {
			table = w.Barrier(w.Select(sees, w.Constant(t, 0), w.Constant(t, stablehlo.MaskedScore)))
		}
		return table
	})
	if table.Name == "" { // all see all
		return score
	}
	return w.Elementwise("add", score, w.BroadcastTo(table, score.Type))
}

// A memo is what attention saves for its gradient. The probabilities are never written: one factor
// for each row of a head's width does the same for less.
type memo = rewrite.SavedSoftmax[val]

// part is the attendant of one piece: some queries, and the keys that they may see.
func (a *headFirst) part(p kernels.Piece) *headFirst {
	w, attention := a.w, *a.Attention
	b := &headFirst{&attention, w}
	b.Q = w.Slice(a.Q, ir.Seq, p.From, p.To)
	b.K, b.V = w.Slice(a.K, ir.Keys, p.Low, p.High), w.Slice(a.V, ir.Keys, p.Low, p.High)
	b.QueryOffset = p.From - p.Low
	if len(a.Segments) > 0 {
		b.Segments = []val{w.Slice(a.Segments[0], ir.Seq, p.From, p.To),
			w.Slice(a.Segments[1], ir.Keys, p.Low, p.High)}
	}
	b.Mask = b.added
	return b
}

// pieces cuts the queries of a causal attention, so that half of the scores need not be computed.
func (a *headFirst) pieces() []kernels.Piece {
	return a.w.Target.Pieces(a.Op, a.Q.Type.Elem, a.Q.Type.Size(ir.Seq), a.K.Type.Size(ir.Keys))
}

// joined puts pieces of queries one after another.
func (a *headFirst) joined(pieces []val) val {
	if len(pieces) == 1 {
		return pieces[0]
	}
	t := ir.Type{Elem: pieces[0].Type.Elem, Dims: slices.Clone(pieces[0].Type.Dims)}
	t.Dims[t.Index(ir.Seq)].Size = a.Q.Type.Size(ir.Seq)
	return a.w.Concat(ir.Seq, t, pieces...)
}

func firstAttention(w writer, op *ir.Op, in []val) []val {
	out, _ := attendHeadFirst(w, op, in)
	return out
}

// savingAttention is firstAttention that gives what it saves, too.
func savingAttention(w writer, op *ir.Op, in []val) []val {
	out, m := attendHeadFirst(w, op, in)
	return append(out, m.Results(op)...)
}

func attendHeadFirst(w writer, op *ir.Op, in []val) (out []val, m memo) {
	a := newHeadFirst(w, op, in)
	var os, shares, lses []val
	for _, p := range a.pieces() {
		b := a.part(p)
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
	m.Share = a.joined(shares)
	o := a.joined(os)
	o = w.Elementwise("multiply", o, w.BroadcastTo(m.Share, o.Type))
	t := op.Out[0].Type
	out = []val{w.Convert(a.UngroupHeads(o, t), t.Elem), a.UngroupHeads(a.joined(lses),
		op.Out[1].Type)}
	return out, m
}

// recomputed gives what the forward pass of another program did not save: the scores are computed
// again, and their exponentials come out with the sum taken off.
func (a *headFirst) recomputed(stat val, pieces []kernels.Piece) memo {
	w := a.w
	stat = a.first(a.GroupHeads(stat))
	m := memo{Share: w.Constant(stat.Type, 1)}
	for _, p := range pieces {
		b := a.part(p)
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

func headFirstGrad(w writer, op *ir.Op, in []val, m *memo) []val {
	a := newHeadFirst(w, op, in)
	o, do := a.GroupHeads(in[3]), a.GroupHeads(in[5])
	inner := w.Reduce(w.Convert(w.Elementwise("multiply", do, o), dtype.F32), "add", 0, ir.HeadDim)
	do, inner = a.first(do), a.first(inner)
	pieces := a.pieces()
	if m == nil {
		again := a.recomputed(in[4], pieces)
		m = &again
	}
	scaled := w.Elementwise("multiply", w.Convert(do, dtype.F32), w.BroadcastTo(m.Share, do.Type))
	short, scaled := w.CastOperand(op, do), w.Convert(scaled, a.V.Type.Elem)
	var dqs []val
	var dk, dv val
	for i, p := range pieces {
		b := a.part(p)
		row := func(v val) val { return w.Slice(v, ir.Seq, p.From, p.To) }
		dp := a.Matmul(row(short), b.V, dtype.F32, ir.HeadDim)
		e := w.Elementwise("multiply", w.Convert(m.Exp[i], dtype.F32), w.BroadcastTo(row(m.Share),
			dp.Type))
		ds := w.Elementwise("multiply", e, w.Elementwise("subtract", dp, w.BroadcastTo(row(inner),
			dp.Type)))
		var raw val
		if len(m.Scores) > 0 {
			raw = m.Scores[i]
		}
		ds = w.Convert(a.ScoreGrad(ds, raw), short.Type.Elem)
		dqs = append(dqs, a.Matmul(ds, b.K, dtype.F32, ir.Keys))
		dk = a.summed(dk, a.overRows(ds, b.Q), p)
		dv = a.summed(dv, a.overRows(m.Exp[i], row(scaled)), p)
	}
	out := func(i int, v val) val {
		t := op.Out[i].Type
		return w.Convert(w.Reshape(w.transposeCopy(v, a.GroupedDims(t)), t), t.Elem)
	}
	return []val{out(0, a.joined(dqs)), out(1, dk), out(2, dv)}
}

// overRows sums a product over the rows of queries. It gives [head, keys]: the argument that is
// turned is then the narrow one.
func (a *headFirst) overRows(x, y val) val {
	b := newSide(x, y.Type, []string{stablehlo.QueryGroup, ir.Seq})
	order := append(ir.Names(b.batch), ir.HeadDim, ir.Keys)
	return a.w.matmul(x, y, dtype.F32, order, stablehlo.QueryGroup, ir.Seq)
}

// summed adds what a piece gives to its keys.
func (a *headFirst) summed(total, v val, p kernels.Piece) val {
	w := a.w
	if keys := a.K.Type.Size(ir.Keys); p.High-p.Low < keys {
		v = w.Pad(v, ir.Keys, p.Low, keys-p.High)
	}
	if total.Name == "" {
		return v
	}
	return w.Elementwise("add", total, v)
}
