package stablehlo

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A split is attention where devices share a sequence (context parallelism), as attentions of
// chunks whose masks a kernel has: none, causal, or lengths. Their outputs are combined by their
// log-sum-exp; gradients see each part with the statistics of the whole, so they just add up.
type split struct {
	w    *Writer
	op   *ir.Op
	axis string
	size int64 // devices
	// chunks is how many chunks of the sequence a device has, each their tokens: one chunk, or with
	// balancing one from the front and one from the back.
	chunks, each int64
	cudnn        bool
	// documents are the numbers of the documents of queries here, and of all keys; nil without
	// documents, and where attention is masked by them instead, since no kernel takes ranges.
	documents []Val
}

// newSplit asks the selector whether cuDNN computes the parts.
func newSplit(w *Writer, op *ir.Op, axis string, in []Val) split {
	s := split{w: w, op: op, axis: axis, chunks: 1}
	if s.size, _ = ir.Along(w.mesh, axis); op.Attrs.Bool("balanced") {
		s.chunks = 2
	}
	s.each = op.In[0].Type.Size(ir.Seq) / s.chunks
	if w.Target != nil {
		kernel, why := w.Target.Attends(op)
		w.Target.Note(kernels.Choice{Kind: op.Kind, Kernel: kernel, Why: why})
		s.cudnn = kernel == kernels.CuDNN
	}
	if segments, places := op.MaskArgs(); len(segments) > 0 && s.cudnn {
		s.documents = in[len(in)-len(segments)-len(places):][:2]
	}
	return s
}

// place is the device's index along the axis.
func (s *split) place() Val { return s.w.shardStart(s.axis, 1, indexType) }

// unmasked is the operation without documents and positions.
func (s *split) unmasked() *ir.Op {
	op := *s.op
	segments, places := op.MaskArgs()
	op.In = op.In[:len(op.In)-len(segments)-len(places)]
	op.Attrs = op.Attrs.With("placed", false)
	return &op
}

// sized is an operation on other sizes: rows times as many sequences, with queries and keys each.
func sized(op *ir.Op, rows, queries, keys int64) *ir.Op {
	size := func(v *ir.Value) *ir.Value {
		h := *v
		h.Type.Dims = slices.Clone(v.Type.Dims)
		for i := range h.Type.Dims {
			switch d := &h.Type.Dims[i]; {
			case d.Name == ir.Seq:
				d.Size = queries
			case d.Name == ir.Keys:
				d.Size = keys
			case i == 0:
				d.Size *= rows
			}
		}
		return &h
	}
	part := *op
	part.In, part.Out = lists.Map(op.In, size), lists.Map(op.Out, size)
	return &part
}

// call prints attention, or its gradient, of a part.
func (s *split) call(op *ir.Op, in []Val, plain Rule) []Val {
	if s.cudnn {
		plain = s.w.table.named(kernels.CuDNN, s.op.Kind)
	}
	return plain(s.w, op, in)
}

// tokens names the dimension of a value's tokens: of queries or of keys.
func tokens(t ir.Type) string {
	if t.Index(ir.Seq) >= 0 {
		return ir.Seq
	}
	return ir.Keys
}

// folded makes rows of a device's chunks: [batch, chunks·n, ...] becomes [batch·chunks, n, ...],
// which moves no element.
func (s *split) folded(list ...Val) []Val {
	return lists.Map(list, func(x Val) Val {
		t := ir.Type{Dims: slices.Clone(x.Type.Dims)}
		t.Dims[0].Size *= s.chunks
		t.Dims[t.Index(tokens(t))].Size /= s.chunks
		return s.w.Reshape(x, t)
	})
}

// unfolded is the inverse of folded.
func (s *split) unfolded(list ...Val) []Val {
	return lists.Map(list, func(x Val) Val {
		t := ir.Type{Dims: slices.Clone(x.Type.Dims)}
		t.Dims[0].Size /= s.chunks
		t.Dims[t.Index(tokens(t))].Size *= s.chunks
		return s.w.Reshape(x, t)
	})
}

// home computes a device's chunks with their own keys, under the causal mask and the window: its
// rows are folded.
func (s *split) home(queries, keys []Val, plain Rule) []Val {
	op := sized(s.unmasked(), s.chunks, s.each, s.each)
	args := s.args(s.folded(queries...), s.folded(keys...))
	if s.documents != nil {
		op, args = s.segmented(op, args, s.counted(s.folded(s.documents[0])[0], 1))
	}
	return s.call(op, args, plain)
}

// args puts arguments into the order of an operation: q, k, v, and of a gradient what goes with
// queries, the output, the log-sum-exp and the output's gradient.
func (s *split) args(queries, keys []Val) []Val {
	return slices.Concat(queries[:1], keys, queries[1:])
}

// queries are the arguments that go with queries: q, and of a gradient o, the log-sum-exp and do.
func (s *split) queries(in []Val) []Val {
	if s.op.Kind == "attention_grad" {
		return slices.Concat(in[:1], in[3:6])
	}
	return in[:1:1]
}

// sliced takes the tokens [from, to) of each value.
func (s *split) sliced(list []Val, from, to int64) []Val {
	return lists.Map(list, func(x Val) Val { return s.w.Slice(x, tokens(x.Type), from, to) })
}

// joined concatenates values along their tokens.
func (s *split) joined(list ...Val) Val {
	if len(list) == 1 {
		return list[0]
	}
	t, n := ir.Type{Dims: slices.Clone(list[0].Type.Dims)}, int64(0)
	dim := tokens(t)
	for _, x := range list {
		n += x.Type.Size(dim)
	}
	t.Dims[t.Index(dim)].Size = n
	return s.w.Concat(dim, t, list...)
}

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
	keys := &Value{numbers.Name, numbers.Type}
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
