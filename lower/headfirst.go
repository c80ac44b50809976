package lower

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// first puts a value's heads before its rows: what stands side by side, key heads, their share of
// query heads, rows, and the elements of a head if it has them.
func (a *attendant) first(x val) val {
	var order []string
	for _, d := range x.t.Dims {
		if !slices.Contains([]string{ir.KVHeads, share, ir.Seq, ir.Keys, ir.HeadDim}, d.Name) {
			order = append(order, d.Name)
		}
	}
	for _, name := range []string{ir.KVHeads, share, ir.Seq, ir.Keys, ir.HeadDim} {
		if x.t.Index(name) >= 0 {
			order = append(order, name)
		}
	}
	return a.w.turn(x, order)
}

func newHeadFirst(w *writer, op *ir.Op, in []val) *attendant {
	a := newAttendant(w, op, in, true)
	a.mask = a.added
	a.q, a.k, a.v = a.first(a.q), a.first(a.k), a.first(a.v)
	a.times = func(x, y val, to dtype.DType, over ...string) val {
		b := newSide(x, y.t, over)
		c := newSide(y, x.t, over)
		return w.product(x, y, to, dimNames(slices.Concat(b.batch, b.free, c.free)), over...)
	}
	return a
}

// added takes the scores of unseen keys down by a sum, of a table that all layers share: with a
// choice instead of a sum, XLA:CPU writes the chosen scores before it looks for the largest
// (8.98 against 4.42 ms for 48 heads of 256 rows).
func (a *attendant) added(score val) val {
	w := a.w
	t := ir.Type{Elem: score.t.Elem}
	for _, d := range score.t.Dims {
		rows := d.Name == ir.Seq || d.Name == ir.Keys
		if rows || len(a.segments) > 0 && d.Name != ir.KVHeads && d.Name != share {
			t.Dims = append(t.Dims, d)
		}
	}
	key := fmt.Sprint(t, a.op.Attrs.Bool("causal"), a.op.Attrs.Int("window"), a.segments,
		a.places)
	table, ok := w.masks[key]
	if !ok {
		sees := a.sees(t)
		if sees.name == "" {
			return score
		}
		table = w.barrier(w.choose(sees, w.constant(t, 0), w.constant(t, unseen)))
		w.masks[key] = table
	}
	return w.elementwise("add", score, w.as(table, score.t))
}

// split lists a graph value's dimensions with the heads cut, which is how a product gives it.
func (a *attendant) split(like ir.Type) []string {
	var order []string
	for _, d := range like.Dims {
		if d.Name == ir.Heads {
			if order = append(order, ir.KVHeads); d.Size > a.k.t.Size(ir.KVHeads) {
				order = append(order, share)
			}
			continue
		}
		order = append(order, d.Name)
	}
	return order
}

// A memo is what attention keeps for its gradient: the exponentials of the scores less the largest
// of their row, and one over their sum. The probabilities are never written: one factor for each
// row of a head's width does the same for less.
type memo struct{ e, share, raw val }

func firstAttention(w *writer, op *ir.Op, in []val) []val {
	a := newHeadFirst(w, op, in)
	score, raw := a.scores()
	top := w.reduce(score, "maximum", lowest, ir.Keys)
	e := w.elementwise("exponential", w.elementwise("subtract", score, w.as(top, score.t)))
	e = w.convert(e, a.v.t.Elem)
	total := w.reduce(w.convert(e, dtype.F32), "add", 0, ir.Keys)
	m := memo{e, w.elementwise("divide", w.constant(total.t, 1), total), raw}
	lse := w.elementwise("add", top, w.elementwise("log", total))
	o := a.times(e, a.v, dtype.F32, ir.Keys)
	o = w.elementwise("multiply", o, w.as(m.share, o.t))
	out := op.Out[0]
	w.memos[out] = m
	return []val{w.convert(a.ungrouped(o, out.Type), out.Type.Elem),
		a.ungrouped(lse, op.Out[1].Type)}
}

// remembered gives what the forward pass kept, if it stands in the same program. Else the scores
// are computed again, and their exponentials come out with the sum taken off.
func (a *attendant) remembered(stat val) (e, share, raw val) {
	w := a.w
	if m, ok := w.memos[a.op.In[3]]; ok {
		return m.e, m.share, m.raw
	}
	score, raw := a.scores()
	stat = a.first(a.grouped(stat))
	e = w.elementwise("exponential", w.elementwise("subtract", score, w.as(stat, score.t)))
	return w.convert(e, a.v.t.Elem), w.constant(stat.t, 1), raw
}

func firstAttentionGrad(w *writer, op *ir.Op, in []val) []val {
	a := newHeadFirst(w, op, in)
	o, do := a.grouped(in[3]), a.grouped(in[5])
	inner := w.reduce(w.convert(w.elementwise("multiply", do, o), dtype.F32), "add", 0, ir.HeadDim)
	e, share1, raw := a.remembered(in[4])
	do = a.first(do)
	short := w.narrow(op, do)
	dp := a.times(short, a.v, dtype.F32, ir.HeadDim)
	p := w.elementwise("multiply", w.convert(e, dtype.F32), w.as(share1, dp.t))
	ds := w.elementwise("multiply", p, w.elementwise("subtract", dp, w.as(a.first(inner), p.t)))
	ds = w.convert(a.slope(ds, raw), short.t.Elem)
	out := func(i int, x, y val, over ...string) val {
		t := op.Out[i].Type
		return w.reshape(w.product(x, y, t.Elem, a.split(t), over...), t)
	}
	scaled := w.elementwise("multiply", w.convert(do, dtype.F32), w.as(share1, do.t))
	return []val{out(0, ds, a.k, ir.Keys), out(1, ds, a.q, share, ir.Seq),
		out(2, e, w.convert(scaled, e.t.Elem), share, ir.Seq)}
}
