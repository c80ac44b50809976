package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// normCodes puts a norm that is quantized along its rows alone into one kernel, which has whole
// rows and so their statistics: with the sum that it is a norm of, and with the statistics from
// which the backward pass recomputes the norm to quantize it along columns ([ir.GradPlan]).
func normCodes(s *kernels.Selector) func(g *ir.Graph) error {
	return func(g *ir.Graph) error {
		f := &codesFinder{by: readers(g), at: places(g), saved: savedBy(g),
			of: map[*ir.Op]*normCode{}, gone: map[*ir.Op]bool{}}
		each(g, func(op *ir.Op) { f.find(s, op) })
		return rows().Edit(g, f.edit)
	}
}

// A normCode is a norm whose codes a kernel of rows writes.
type normCode struct {
	norm, quantize *ir.Op
	inverse        *ir.Op // the statistics, or nil
	why            string
}

// A codesFinder finds such norms.
type codesFinder struct {
	by    map[*ir.Value][]*ir.Op
	at    map[*ir.Op]int
	saved func(*ir.Value) bool
	of    map[*ir.Op]*normCode // by the operation in whose place the kernel is
	gone  map[*ir.Op]bool
}

// find decides for one operation.
func (f *codesFinder) find(s *kernels.Selector, op *ir.Op) {
	if op.Kind != "rms_norm" || !lastDim(op.In[0].Type, op.Attrs.Text("dim")) ||
		len(f.by[op.Out[0]]) != 1 {
		return
	}
	q, x := f.by[op.Out[0]][0], op.In[0]
	if q.Kind != QuantizeOnce || beside(q, 1) > 0 || len(q.Attrs.List(attrAcross)) > 0 ||
		!slices.Equal(along(q), []string{op.Attrs.Text("dim")}) {
		return
	}
	n, place := &normCode{norm: op, quantize: q}, op
	if sum := x.Def(); sum != nil && sum.Kind == "add" && f.of[sum] == nil &&
		sum.In[0].Type.Equal(sum.In[1].Type) && there(f.at, op.In[1], sum) {
		place = sum
	}
	var chain []*ir.Op
	n.inverse, chain = f.inverse(x, op.Attrs.Text("dim"), op.Attrs.Float("eps"))
	one := kernels.Norming{Elem: x.Type.Elem, Scattered: kernels.Scattered(x.Type)}
	one.Norm, _ = NormOf(n.op(place))
	one.Saved = int64(len(lists.Filter([]*ir.Value{x}, f.saved)))
	why, ok := s.Norms(one)
	if !ok {
		return // the next pass has it
	}
	n.why = why
	f.of[place] = n
	for _, op := range append(chain, op, q) {
		f.gone[op] = op != place
	}
}

// inverse finds 1/√(mean(x²) + ε) of rows, and what computes only that.
func (f *codesFinder) inverse(x *ir.Value, dim string, eps float64) (*ir.Op, []*ir.Op) {
	next := func(v *ir.Value, is func(op *ir.Op) bool) *ir.Op {
		return lists.Find(f.by[v], is)
	}
	for _, wide := range f.by[x] {
		if wide.Kind != "convert" {
			continue
		}
		chain := []*ir.Op{wide}
		for _, is := range []func(op *ir.Op) bool{
			func(op *ir.Op) bool { return op.Kind == "mul" && op.In[0] == op.In[1] },
			func(op *ir.Op) bool {
				return op.Kind == "sum" && slices.Equal(op.Attrs.List("over"), []string{dim})
			},
			func(op *ir.Op) bool {
				return op.Kind == "scale" && op.Attrs.Float("by") == 1/float64(x.Type.Size(dim))
			},
			func(op *ir.Op) bool { return op.Kind == "shift" && op.Attrs.Float("by") == eps },
			func(op *ir.Op) bool { return op.Kind == "rsqrt" },
		} {
			if op := next(chain[len(chain)-1].Out[0], is); op != nil {
				chain = append(chain, op)
				continue
			}
			chain = nil
			break
		}
		if chain == nil {
			continue
		}
		last := chain[len(chain)-1]
		for i := len(chain) - 1; i > 0 && sole(f.by, chain[i-1], func(op *ir.Op) bool {
			return slices.Contains(chain[i:], op)
		}); i-- {
			if i == 1 {
				return last, chain
			}
		}
		return last, chain[len(chain)-1:]
	}
	return nil, nil
}

// op is the operation of a norm in its own place or of the sum before it.
func (n *normCode) op(place *ir.Op) *ir.Op {
	a := n.norm.Attrs.With(Codes, true).With(attrStats, n.inverse != nil).With(attrWhy, n.why)
	if place == n.norm {
		return &ir.Op{Kind: NormRows, In: n.norm.In, Attrs: a}
	}
	return &ir.Op{Kind: NormRows, In: []*ir.Value{place.In[0], place.In[1], n.norm.In[1]},
		Attrs: a.With(attrAdded, true)}
}

// edit puts the kernels in the place of what they compute.
func (f *codesFinder) edit(r *ir.Rewriter, op *ir.Op) []*ir.Value {
	n := f.of[op]
	switch {
	case f.gone[op]:
		return []*ir.Value{}
	case n == nil:
		return nil
	}
	one := n.op(op)
	in := lists.Map(one.In, func(v *ir.Value) *ir.Value { return now(r, v) })
	out := r.ReplaceWith(n.norm, NormRows, one.Attrs, in...)
	var own []*ir.Value
	if op != n.norm {
		own, out = out[:1], out[1:]
	} else {
		own = out[:1] // nobody reads the norm itself
	}
	r.Substitute(n.quantize.Out[0], out[0])
	r.Substitute(n.quantize.Out[1], out[1])
	if n.inverse != nil {
		r.Substitute(n.inverse.Out[0], out[2])
	}
	return own
}
