package gpu

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

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
