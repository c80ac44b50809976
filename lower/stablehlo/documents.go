package stablehlo

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// Documents of a sequence that devices share: their numbers never fall along the sequence, so a
// document that a chunk of queries has in common with keys before it is the chunk's first and the
// keys' last. What these queries see is a rectangle, the first tokens of the chunk and a range of
// the keys, without a mask; both may be empty. Within chunks, documents are segments of a causal
// kernel.

// counted makes the document numbers [batch, tokens] of some chunks, which follow each other in the
// sequence but not without a gap, count from 0 on in each row.
func (s *split) counted(numbers Val, chunks int64) Val {
	w, dim := s.w, tokens(numbers.Type)
	each := numbers.Type.Size(dim) / chunks
	at := func(i int64) Val { return w.Slice(numbers, dim, i, i+1) }
	var list []Val
	var next Val // of the chunk's first document
	for c := range chunks {
		part := w.Slice(numbers, dim, c*each, (c+1)*each)
		first := at(c * each)
		if c == 0 {
			next = w.Constant(first.Type, 0)
		} else {
			other := w.Convert(w.Compare("NE", first, at(c*each-1)), numbers.Type.Elem)
			next = w.Elementwise("add", next, other)
		}
		less := w.Elementwise("subtract", first, next) // of all numbers of the chunk
		part = w.Elementwise("subtract", part, s.along(less, part.Type))
		list, next = append(list, part), w.Slice(part, dim, each-1, each)
	}
	return s.joined(list...)
}

// along repeats one number for each row, [batch, 1], along all tokens, or whatever else a type has.
func (s *split) along(one Val, like ir.Type) Val {
	row := ir.Type{Dims: one.Type.Dims[:1]}
	return s.w.BroadcastTo(s.w.Reshape(one, row), like)
}

// segmented adds documents to an operation on a device's own chunks, and their numbers to its
// arguments.
func (s *split) segmented(op *ir.Op, in []Val, numbers Val) (*ir.Op, []Val) {
	part := *op
	keys := numbers
	keys.Type.Dims = lists.Map(numbers.Type.Dims, func(d ir.Dim) ir.Dim {
		if d.Name == ir.Seq {
			d.Name = ir.Keys
		}
		return d
	})
	part.In = slices.Clip(op.In)
	for _, v := range []Val{numbers, keys} {
		part.In = append(part.In, &ir.Value{Name: "segments", Type: v.Type})
	}
	return &part, append(slices.Clip(in), numbers, keys)
}

// A keyRange is the keys that the queries of a chunk see, if they see any: start and length s32
// [batch], and which queries these are, pred[batch, seq].
type keyRange struct{ start, length, queries Val }

// suffix is the range of keys that come before a chunk of queries, all of which it would see
// without documents, by the numbers of both.
func (s *split) suffix(queries, keys Val) keyRange {
	w := s.w
	first := w.Slice(queries, ir.Seq, 0, 1)
	same := w.Compare("EQ", keys, s.along(first, keys.Type))
	length := w.Reduce(w.Convert(same, dtype.S32), "add", 0, ir.Keys)
	all := w.Constant(length.Type, float64(keys.Type.Size(ir.Keys)))
	return keyRange{start: w.Elementwise("subtract", all, length), length: length,
		queries: w.Compare("EQ", queries, s.along(first, queries.Type))}
}

// ranged computes a chunk of queries with a range of keys: as if nothing was seen where the range
// is empty, and by queries that are not of its document. in are the arguments of op.
func (s *split) ranged(op *ir.Op, in []Val, r keyRange, plain Rule) []Val {
	w := s.w
	part := *op
	part.Attrs = op.Attrs.With("ranges", true)
	part.In = slices.Clip(op.In)
	for _, v := range []Val{r.start, r.length} {
		part.In = append(part.In, &ir.Value{Name: "range", Type: v.Type})
	}
	seen := func(x Val, other float64) Val {
		return w.Select(w.BroadcastTo(r.queries, x.Type), x, w.Constant(x.Type, other))
	}
	in = append(slices.Clip(in), r.start, r.length)
	if op.Kind == "attention" {
		out := s.call(&part, in, plain)
		return []Val{seen(out[0], 0), seen(out[1], MaskedScore)}
	}
	in[4] = seen(in[4], -MaskedScore) // then probabilities are 0, and so is what keys get
	out := s.call(&part, in, plain)
	return []Val{seen(out[0], 0), out[1], out[2]}
}
