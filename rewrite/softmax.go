package rewrite

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// saveSoftmax lets attention keep its exponentials for its gradient where both are in one graph and
// are printed as matrix products per head (XLA:CPU): the backward pass then reads them and does not
// recompute the scores. In separate programs the gradient recomputes, from the log-sum-exp.
func saveSoftmax(arch string) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		by := readers(g)
		saved := map[*ir.Value][]*ir.Value{} // by attention's result
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			switch op.Kind {
			case "attention":
				reads := func(o *ir.Op) bool {
					return o.Kind == "attention_grad" && o.In[3] == op.Out[0]
				}
				if !headFirst(arch, op) || !slices.ContainsFunc(by[op.Out[0]], reads) {
					return nil
				}
				out := r.ReplaceWith(op, AttentionSaving, op.Attrs.With("arch", arch), op.In...)
				saved[out[0]] = out[2:]
				return out[:2]
			case "attention_grad":
				list := saved[op.In[3]]
				if list == nil || !headFirst(arch, op) {
					return nil
				}
				a := op.Attrs.With(attrSaved, len(list))
				return r.ReplaceWith(op, AttentionGradSaved, a, slices.Concat(op.In, list)...)
			}
			return nil
		})
	}
}

// headFirst tells whether an attention becomes matrix products per head. One with sinks does, but
// its sums of exponentials are not the ones that its gradient reads. The selector is one of its
// own: what it notes is not a choice that a program makes.
func headFirst(arch string, op *ir.Op) bool {
	kernel, _ := kernels.For(arch).Attends(op)
	return kernel == kernels.HeadFirst && !op.Attrs.Bool("sinks")
}

// inferSaving gives the types of attention's results, then of what is saved: for each block of
// queries exponentials [..., kv, share, seq, keys] in the type of the products, and if scores are
// capped the scores in f32; at the end f32[..., kv, share, seq].
func inferSaving(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	types, err := inferAs("attention", g, op, op.In...)
	if err != nil {
		return nil, err
	}
	q, k := op.In[0].Type, op.In[1].Type
	elem := func(t ir.Type) dtype.DType {
		if in, err := dtype.Parse(op.Attrs.Text("in")); err == nil {
			return in
		}
		return t.Elem
	}
	rows := perHead(q, k)
	s := kernels.For(op.Attrs.Text("arch"))
	blocks := s.QueryBlocks(op, elem(q), q.Size(ir.Seq), k.Size(ir.Keys))
	for _, d := range [][]dtype.DType{{elem(op.In[2].Type)}, {dtype.F32}}[:1+capped(op)] {
		for _, b := range blocks {
			t := ir.Type{Elem: d[0], Dims: slices.Clone(rows.Dims), Place: rows.Place}
			t.Dims[t.Index(ir.Seq)].Size = b.To - b.From
			t.Dims = append(t.Dims, ir.Dim{Name: ir.Keys, Size: b.High - b.Low})
			types = append(types, t)
		}
	}
	return append(types, rows), nil
}

// capped is 1 if scores have a soft cap, whose slope the gradient takes at the scores.
func capped(op *ir.Op) int {
	if op.Attrs.Float("softcap") > 0 {
		return 1
	}
	return 0
}

// perHead is f32[..., kv, share, seq]: one number for each query of each head, with query heads in
// groups by the key head that they share. A group of one is no dimension.
func perHead(q, k ir.Type) ir.Type {
	t := ir.Type{Elem: dtype.F32, Dims: ir.Without(q.Dims, ir.Heads, ir.Seq, ir.HeadDim)}
	t.Dims = append(t.Dims, ir.Dim{Name: ir.KVHeads, Size: k.Size(ir.KVHeads)})
	if n := q.Size(ir.Heads) / k.Size(ir.KVHeads); n > 1 {
		t.Dims = append(t.Dims, ir.Dim{Name: "share", Size: n})
	}
	t.Dims = append(t.Dims, ir.Dim{Name: ir.Seq, Size: q.Size(ir.Seq)})
	for _, s := range q.Place {
		if s.Dim == ir.Heads {
			s.Dim = ir.KVHeads
		}
		t.Place = append(t.Place, s)
	}
	return t
}

// inferGradSaved is attention_grad without the saved values, which come last.
func inferGradSaved(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	n := len(op.In) - int(op.Attrs.Int(attrSaved))
	if n < 6 || n == len(op.In) {
		return nil, fmt.Errorf("takes %d saved values of %d arguments", op.Attrs.Int(attrSaved),
			len(op.In))
	}
	return inferAs("attention_grad", g, op, op.In[:n]...)
}

// A SavedSoftmax is what an attention saved for its gradient.
type SavedSoftmax[V any] struct {
	Exp    []V // exponentials of the scores less the largest of their row, by block of queries
	Scores []V // before their cap; none if there is no cap
	InvSum V   // one over the sums of exponentials
}

// Results lists the saved values in the order of the operation's results.
func (s SavedSoftmax[V]) Results(op *ir.Op) []V {
	return append(slices.Concat(s.Exp, s.Scores[:capped(op)*len(s.Scores)]), s.InvSum)
}

// SavedBy splits the arguments of an attention_grad_saved: attention_grad's own as an operation of
// that kind, and what was saved. V is what stands for a value: an [ir.Value], or a
// printed one.
func SavedBy[V any](op *ir.Op, in []V) (plain *ir.Op, s SavedSoftmax[V]) {
	n := len(in) - int(op.Attrs.Int(attrSaved))
	grad := *op
	grad.Kind, grad.In = "attention_grad", op.In[:n]
	list := in[n : len(in)-1]
	blocks := len(list) / (1 + capped(op))
	s = SavedSoftmax[V]{Exp: list[:blocks], Scores: list[blocks:], InvSum: in[len(in)-1]}
	return &grad, s
}
