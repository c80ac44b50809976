package gpu

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// Calls with offsets exist for some sizes of heads ([kernels.Attention.Offsets]). Others get their
// segments as rows instead: tokens of documents are gathered into rows as long as the longest, and
// results gathered back; of a range of keys the keys are rotated, so that the range is first. Then
// lengths are enough.

// withOffsets tells a call of segments, for documents or ranges of keys, that takes offsets.
func withOffsets(op *ir.Op) bool {
	return kernels.Attention{Head: op.In[0].Type.Size(ir.HeadDim),
		Value: op.In[2].Type.Size(ir.HeadDim)}.Offsets()
}

// gathered gives rows of a value [a, b, heads, head], by their numbers among a·b tokens [rows], as
// a value [a', b', heads, head].
func (w writer) gathered(x, numbers val, rows, length int64) val {
	d := x.Type.Dims
	table := ir.Type{Elem: x.Type.Elem, Dims: []ir.Dim{{Name: tokenDim, Size: d[0].Size * d[1].Size},
		{Name: "width", Size: elements(d[2:])}}}
	return w.Reshape(w.Rows(w.Reshape(x, table), numbers), resized(x.Type, rows, length))
}

// asRows is an operation on one row for each segment of a call, with lengths.
func (p *packing) asRows(op *ir.Op, s segments) *ir.Op {
	n := s.starts.Type.Dims[0].Size
	one := *op
	one.Attrs = op.Attrs.With("rows", true)
	resize := func(v *ir.Value) *ir.Value {
		c := *v
		c.Type = resized(v.Type, n, s.length)
		return &c
	}
	one.In, one.Out = slices.Clone(op.In[:3]), slices.Clone(op.Out)
	for _, list := range [][]*ir.Value{one.In, one.Out} {
		for i, v := range list {
			list[i] = resize(v)
		}
	}
	return &one
}

// rowTokens numbers the tokens of each segment's row, s32[segment · length]. What is behind its
// end is not read.
func (p *packing) rowTokens(s segments) val {
	w := p.w
	list := s32(s.starts.Type.Dims[0], ir.Dim{Name: tokenDim, Size: s.length})
	token := w.Elementwise("add", w.BroadcastTo(s.starts, list), w.Iota(list, tokenDim))
	token = w.Elementwise("minimum", token, w.Constant(list, float64(p.tokens-1)))
	return w.Reshape(token, s32(ir.Dim{Name: tokenDim, Size: list.Dims[0].Size * s.length}))
}

// rowLengths are the lengths of queries and keys. An empty row has one of each, which none reads.
func (p *packing) rowLengths(s segments) []val {
	n := p.w.Elementwise("maximum", s.lengths, p.w.Constant(s.lengths.Type, 1))
	return []val{n, n}
}

// rowsAttention is attention with a row for each segment.
func (p *packing) rowsAttention(op *ir.Op, in []val) []val {
	w, out := p.w, make([]val, 2)
	for _, s := range p.calls {
		one, tokens := p.asRows(op, s), p.rowTokens(s)
		n := s.starts.Type.Dims[0].Size
		var args []val
		for _, x := range in[:3] {
			args = append(args, w.gathered(x, tokens, n, s.length))
		}
		o := w.attend(one, append(args, p.rowLengths(s)...), 1)
		d := op.Out[0].Type.Dims
		back := w.gathered(o[0], s.at, d[0].Size, d[1].Size)
		out[0] = p.joined(out[0], back, s, op.Out[0].Type)
		out[1] = p.joined(out[1], p.perToken(o[1], s), s, op.Out[1].Type)
	}
	return out
}

// rowsAttentionGrad is the gradient with a row for each segment.
func (p *packing) rowsAttentionGrad(op *ir.Op, in []val) []val {
	w, out := p.w, make([]val, 3)
	for _, s := range p.calls {
		one, tokens := p.asRows(op, s), p.rowTokens(s)
		n := s.starts.Type.Dims[0].Size
		take := func(i int) val { return w.gathered(in[i], tokens, n, s.length) }
		args := []val{take(0), take(1), take(2), p.statistics(in[4], s, tokens), take(5), take(3)}
		for j, g := range w.attendGrad(one, append(args, p.rowLengths(s)...), 1) {
			d := op.Out[j].Type.Dims
			back := w.gathered(g, s.at, d[0].Size, d[1].Size)
			out[j] = p.joined(out[j], back, s, op.Out[j].Type)
		}
	}
	return out
}

// rotated moves the keys of each row [batch, keys, ...] by a number of places s32[batch] to the
// front, or back again.
func (r *ranged) rotated(x val, back bool) val {
	w, batch, keys := r.w, x.Type.Dims[0], x.Type.Dims[1]
	t := s32(batch, keys)
	start := w.BroadcastTo(renamed(r.starts, batch.Name), t)
	if back { // keys - start, which is not below 0
		start = w.Elementwise("subtract", w.Constant(t, float64(keys.Size)), start)
	}
	at := w.Elementwise("add", w.Iota(t, keys.Name), start)
	at = w.Elementwise("remainder", at, w.Constant(t, float64(keys.Size)))
	row := w.Elementwise("multiply", w.Iota(t, batch.Name), w.Constant(t, float64(keys.Size)))
	at = w.Elementwise("add", at, row)
	numbers := w.Reshape(at, s32(ir.Dim{Name: tokenDim, Size: batch.Size * keys.Size}))
	return w.gathered(x, numbers, batch.Size, keys.Size)
}

// withLengths is the operation with the length of the range as lengths of keys, and its arguments,
// the keys rotated.
func (r *ranged) withLengths(in []val) (*ir.Op, []val) {
	n := len(in) - 2
	one := *r.op
	one.Attrs = r.op.Attrs.With("ranges", false).With("lengths", true)
	one.In = append(slices.Clone(r.op.In[:n]), r.op.In[len(r.op.In)-1])
	args := append(slices.Clone(in[:n]), r.lengths)
	args[1], args[2] = r.rotated(in[1], false), r.rotated(in[2], false)
	return &one, args
}

// rowsAttention is attention to a range of keys by their number.
func (r *ranged) rowsAttention(in []val) []val { return r.w.lengthsAttention(r.withLengths(in)) }

// rowsAttentionGrad is its gradient.
func (r *ranged) rowsAttentionGrad(in []val) []val {
	out := r.w.lengthsAttentionGrad(r.withLengths(in))
	return []val{out[0], r.rotated(out[1], true), r.rotated(out[2], true)}
}
