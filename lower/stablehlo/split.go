package stablehlo

import (
	"slices"

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
