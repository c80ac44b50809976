package gpu

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// A ranged is attention of all queries of a row to a range of its keys: one segment for each row,
// and as many empty ones, since cuDNN takes offsets for two segments a row or more.
type ranged struct {
	w               writer
	op              *ir.Op
	starts, lengths val // s32[batch], of keys; a length may be 0
}

// ranged takes the last two arguments of an operation with the attribute ranges.
func (w writer) ranged(op *ir.Op, in []val) *ranged {
	n := len(in)
	return &ranged{w: w, op: op, starts: in[n-2], lengths: in[n-1]}
}

// rangedSegments is how many segments the calls have for each row.
const rangedSegments = 2

// operands are lengths and offsets. A row without keys has one, whose part in the results is taken
// out again.
func (r *ranged) operands() []val {
	w, q, k := r.w, r.op.In[0].Type, r.op.In[1].Type
	rows, queries, keys := q.Dims[0].Size, q.Size(ir.Seq), k.Size(ir.Keys)
	row := s32(ir.Dim{Name: segmentDim, Size: rows})
	list := func(n int64, of val, rest float64) val {
		parts := []val{of, w.Constant(s32(ir.Dim{Name: segmentDim, Size: n - rows}), rest)}
		return w.Concat(segmentDim, s32(ir.Dim{Name: segmentDim, Size: n}), parts...)
	}
	times := func(v val, by int64) val {
		return w.Elementwise("multiply", v, w.Constant(v.Type, float64(by)))
	}
	index := w.Iota(row, segmentDim)
	start := w.Elementwise("minimum", renamed(r.starts, segmentDim),
		w.Constant(row, float64(keys-1)))
	first := w.Elementwise("add", times(index, keys), start)
	length := w.Elementwise("maximum", renamed(r.lengths, segmentDim), w.Constant(row, 1))
	n := rangedSegments * rows
	offsets := func(token ir.Type, first val, total int64) val {
		return w.offsets(list(n+1, first, float64(total)), total, token)
	}
	return []val{list(n, w.Constant(row, float64(queries)), 0), list(n, length, 0),
		offsets(q, times(index, queries), rows*queries), offsets(k, first, rows*keys)}
}

// seen tells of which rows any key is seen, broadcast to a type.
func (r *ranged) seen(like ir.Type) val {
	w := r.w
	some := w.Compare("GT", r.lengths, w.Constant(r.lengths.Type, 0))
	return w.BroadcastTo(renamed(some, like.Dims[0].Name), like)
}

// attention gives O and the log-sum-exp [batch, seq, heads], which is a masked score where a row
// sees nothing.
func (r *ranged) attention(in []val) []val {
	w, rows := r.w, r.op.In[0].Type.Dims[0].Size
	out := w.attend(r.op, append(in[:3:3], r.operands()...), rangedSegments)
	stat := w.Slice(out[1], out[1].Type.Dims[0].Name, 0, rows)
	lse := w.Transpose(stat, ir.Names(r.op.Out[1].Type.Dims))
	out[1] = w.Select(r.seen(lse.Type), lse, w.Constant(lse.Type, stablehlo.MaskedScore))
	return out
}

// attentionGrad gives dQ, dK and dV, with zeros where nothing is seen, or by none.
func (r *ranged) attentionGrad(in []val) []val {
	w, rows := r.w, in[4].Type.Dims[0]
	stat := w.Transpose(in[4], ir.Names(headsFirst(in[4].Type).Dims))
	stat = w.Pad(stat, rows.Name, 0, (rangedSegments-1)*rows.Size)
	args := append([]val{in[0], in[1], in[2], stat, in[5], in[3]}, r.operands()...)
	out := w.attendGrad(r.op, args, rangedSegments)
	for i, g := range out {
		mask := r.seen(g.Type)
		if i > 0 {
			wide := ir.Type{Elem: dtype.S32, Dims: g.Type.Dims}
			key := w.Elementwise("subtract", w.Iota(wide, ir.Keys),
				w.BroadcastTo(renamed(r.starts, g.Type.Dims[0].Name), wide))
			length := w.BroadcastTo(renamed(r.lengths, g.Type.Dims[0].Name), wide)
			mask = w.Elementwise("and", w.Compare("GE", key, w.Constant(wide, 0)),
				w.Compare("LT", key, length))
		}
		out[i] = w.Select(mask, g, w.Constant(g.Type, 0))
	}
	return out
}

// lengths are the operands of the mask PADDING: all queries of each row count, and of the keys as
// many as are seen. What cuDNN does with a row without keys is not known: it gets one, whose part
// in the results is taken out again.
func (w writer) lengths(op *ir.Op, in []val) []val {
	keys := in[op.KeyLengths()]
	queries := w.Constant(keys.Type, float64(op.In[0].Type.Size(ir.Seq)))
	return []val{queries, w.Elementwise("maximum", keys, w.Constant(keys.Type, 1))}
}

// lengthsAttention gives O and the log-sum-exp [batch, seq, heads], which is a masked score where a
// row sees nothing.
func (w writer) lengthsAttention(op *ir.Op, in []val) []val {
	out, keys := w.attend(op, append(in[:3:3], w.lengths(op, in)...), 1), in[op.KeyLengths()]
	lse := w.Transpose(out[1], ir.Names(op.Out[1].Type.Dims))
	none := w.Compare("LE", keys, w.Constant(keys.Type, 0))
	out[1] = w.Select(w.BroadcastTo(none, lse.Type), w.Constant(lse.Type, stablehlo.MaskedScore), lse)
	return out
}

// lengthsAttentionGrad gives dQ, dK and dV, with zeros for queries without a key, and for keys from
// the length on, of which it is not known whether cuDNN writes them.
func (w writer) lengthsAttentionGrad(op *ir.Op, in []val) []val {
	stat := w.Transpose(in[4], ir.Names(headsFirst(in[4].Type).Dims))
	args := append([]val{in[0], in[1], in[2], stat, in[5], in[3]}, w.lengths(op, in)...)
	out, keys := w.attendGrad(op, args, 1), in[op.KeyLengths()]
	for i, g := range out {
		wide := ir.Type{Elem: keys.Type.Elem, Dims: g.Type.Dims}
		key := w.Constant(wide, 0) // the first, for queries
		if i > 0 {
			key = w.Iota(wide, ir.Keys)
		}
		seen := w.Compare("LT", key, w.BroadcastTo(keys, wide))
		out[i] = w.Select(seen, g, w.Constant(g.Type, 0))
	}
	return out
}
