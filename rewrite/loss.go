package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// lossInPlace lets a kernel of our own compute a loss and the gradient of its logits where the
// selector says so. Both must be in one graph: what the gradient is multiplied by comes before the
// loss, or can be computed before it.
func lossInPlace(s *kernels.Selector) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		by := readers(g)
		pairs := map[*ir.Op]*ir.Op{} // the gradients, by their losses
		whys := map[*ir.Op]string{}
		var find func(g *ir.Graph)
		find = func(g *ir.Graph) {
			for _, op := range slices.Clone(g.Ops) {
				if op.Body != nil {
					find(op.Body)
				}
				if op.Kind != "cross_entropy" {
					continue
				}
				grad := gradOfLoss(op, by)
				if grad == nil || !slices.Contains(g.Ops, grad) {
					continue // a loss without a gradient reads logits twice, and writes nothing
				}
				l := lossOf(op)
				l.Others = len(by[op.In[0]]) != 2
				l.Late = !advance(g, op, grad.In[3])
				why, ok := s.Losses(l)
				if ok {
					pairs[op], whys[op] = grad, why
					s.Note(kernels.Choice{Kind: grad.Kind, Kernel: kernels.Triton, Why: why})
				} else if why != "" {
					s.Note(kernels.Choice{Kind: op.Kind, Kernel: kernels.Plain, Why: why})
				}
			}
		}
		find(g)
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			grad := pairs[op]
			if grad == nil {
				return nil
			}
			in := []*ir.Value{op.In[0], op.In[1], grad.In[3]}
			if now := r.Replacement[in[2]]; now != nil {
				in[2] = now
			}
			out := r.ReplaceWith(op, LossInPlace, op.Attrs.With(attrWhy, whys[op]), in...)
			r.Substitute(grad.Out[0], out[2])
			return out[:2]
		})
	}
}

// lossOf is what the choice of a loss's kernel depends on, by the loss alone.
func lossOf(op *ir.Op) kernels.Loss {
	x, dim := op.In[0].Type, op.Attrs.Text("dim")
	cols := x.Size(dim)
	elements := lists.Product(x.Dims, func(d ir.Dim) int64 { return d.Size })
	return kernels.Loss{Rows: elements / max(cols, 1), Cols: cols, Elem: x.Elem,
		Labels: op.In[1].Type.Elem, Sharded: len(op.Axes()) > 0,
		Across: x.Index(dim) != len(x.Dims)-1}
}

// gradOfLoss finds the gradient of a loss, nil if it has not exactly one.
func gradOfLoss(op *ir.Op, by map[*ir.Value][]*ir.Op) (grad *ir.Op) {
	for _, o := range by[op.Out[1]] {
		if o.Kind != "cross_entropy_grad" || o.In[0] != op.In[0] || o.In[1] != op.In[1] || grad != nil {
			return nil
		}
		grad = o
	}
	return grad
}

// advance moves what computes a value before an operation. It is false, and nothing moves, if the
// value depends on the operation.
func advance(g *ir.Graph, before *ir.Op, v *ir.Value) bool {
	at := slices.Index(g.Ops, before)
	needed := map[*ir.Op]bool{}
	list := []*ir.Value{v}
	for len(list) > 0 {
		def := list[len(list)-1].Def()
		list = list[:len(list)-1]
		if def == nil || needed[def] || slices.Contains(g.Ops[:at], def) {
			continue
		}
		if def == before {
			return false
		}
		needed[def] = true
		list = append(list, def.In...)
	}
	var first, rest []*ir.Op
	for _, op := range g.Ops[at:] {
		if needed[op] {
			first = append(first, op)
		} else {
			rest = append(rest, op)
		}
	}
	g.Ops = slices.Concat(g.Ops[:at], first, rest)
	return true
}

// inferLoss gives the types of a loss, of its log-sum-exp and of its logits' gradient.
func inferLoss(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	types, err := inferAs("cross_entropy", g, op, op.In[:2]...)
	if err != nil {
		return nil, err
	}
	return append(types, op.In[0].Type), nil
}

// writtenLoss is a loss and its gradient apart: what they mean to the interpreter.
func writtenLoss(b *ir.Builder, op *ir.Op) []*ir.Value {
	constants := map[string]any{"dim": op.Attrs.Text("dim")}
	out := b.Op("cross_entropy", constants, op.In[:2]...)
	grad := b.Op("cross_entropy_grad", constants, op.In[0], op.In[1], out[1], op.In[2])
	return append(out, grad...)
}

// WhyOf is the selector's reason for an operation that a pass put in the place of others.
func WhyOf(op *ir.Op) string { return op.Attrs.Text(attrWhy) }
