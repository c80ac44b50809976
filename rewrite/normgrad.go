package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// maxGrads is how many gradients of a norm's result one kernel adds: with more, registers spill.
const maxGrads = 3

// normGradients puts the gradient of RMS norm into one kernel, which reads its matrices once: with
// the sum of the gradients that come back to the norm, and with the residual's gradient that is
// added to what it gives.
func normGradients(s *kernels.Selector) func(g *ir.Graph) error {
	return func(g *ir.Graph) error {
		f := &gradFinder{by: readers(g), at: places(g), gone: map[*ir.Op]bool{}}
		of := map[*ir.Op]*normGrad{} // by the operation in whose place the kernel is
		each(g, func(op *ir.Op) {
			n := f.find(op)
			if n == nil {
				return
			}
			norm, _ := NormOf(n.op())
			why, ok := s.Norms(kernels.Norming{Norm: norm, Elem: n.x.Type.Elem,
				Scattered: kernels.Scattered(n.x.Type)})
			if !ok {
				s.Note(kernels.Choice{Kind: SourceKind(NormGrad), Kernel: kernels.Plain, Why: why})
				return
			}
			of[op], n.why = n, why
			f.leave(n)
		})
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			n := of[op]
			switch {
			case n != nil:
				one := n.op()
				in := lists.Map(one.In, func(v *ir.Value) *ir.Value { return now(r, v) })
				out := r.ReplaceWith(op, NormGrad, one.Attrs, in...)
				if n.weight != nil {
					r.Substitute(n.weight.Out[0], out[1])
				}
				if n.sum == nil {
					return out[:1]
				}
				r.Substitute(n.sum.Out[0], out[0])
				return []*ir.Value{}
			case f.gone[op]:
				return []*ir.Value{}
			}
			return nil
		})
	}
}

// A normGrad is the gradient of a norm in a graph.
type normGrad struct {
	x, w     *ir.Value
	grads    []*ir.Value // of the norm's result, which are added
	residual *ir.Value   // that is added to the result, or nil
	sum      *ir.Op      // that adds it
	weight   *ir.Op      // the sum that is the weight's gradient; nil if the weight is frozen
	eps      float64
	shift    float64
	dim      string
	inside   []*ir.Op // what computes it
	why      string
}

// op is the operation that computes it.
func (n *normGrad) op() *ir.Op {
	dw := ir.Type{Elem: dtype.F32, Dims: n.w.Type.Dims} // that nobody reads
	if n.weight != nil {
		dw = n.weight.Out[0].Type
	}
	a := ir.Attrs{}.With("dim", n.dim).With("eps", n.eps).With("shift", n.shift).
		With(attrGrads, int64(len(n.grads))).With(attrType, dw.String()).With(attrWhy, n.why)
	in := append([]*ir.Value{n.x, n.w}, n.grads...)
	if n.residual != nil {
		in, a = append(in, n.residual), a.With(attrResidual, true)
	}
	return &ir.Op{Kind: NormGrad, In: in, Attrs: a}
}

// A gradFinder finds gradients of norms.
type gradFinder struct {
	by   map[*ir.Value][]*ir.Op
	at   map[*ir.Op]int
	gone map[*ir.Op]bool
}

// A chain follows operations from results to arguments; once one is not what it must be, all are
// nil.
type chain struct{ ops []*ir.Op }

// to gives the operation of a kind that computes a value.
func (c *chain) to(v *ir.Value, kind string) *ir.Op {
	if v == nil || v.Def() == nil || v.Def().Kind != kind {
		return nil
	}
	if op := v.Def(); !slices.Contains(c.ops, op) {
		c.ops = append(c.ops, op)
	}
	return v.Def()
}

// arg is an argument of an operation; nil without one.
func arg(op *ir.Op, i int) *ir.Value {
	if op == nil || i >= len(op.In) {
		return nil
	}
	return op.In[i]
}

// find reads the gradient of RMS norm, as package ir writes it, from its last conversion on:
// dx = (g − h·mean(g·h))·r with h = x·r and g = dy·w, r = (mean(x²) + ε)^-½.
func (f *gradFinder) find(op *ir.Op) *normGrad {
	if op.Kind != "convert" || op.Out[0].Type.Elem != dtype.BF16 || f.gone[op] {
		return nil
	}
	c := &chain{ops: []*ir.Op{op}}
	product := c.to(op.In[0], "mul")
	difference, r := c.to(arg(product, 0), "sub"), c.to(arg(product, 1), "rsqrt")
	g, back := c.to(arg(difference, 0), "mul"), c.to(arg(difference, 1), "mul")
	h, mean := c.to(arg(back, 0), "mul"), c.to(arg(back, 1), "scale")
	sum := c.to(arg(mean, 0), "sum")
	both := c.to(arg(sum, 0), "mul")
	shift := c.to(arg(r, 0), "shift")
	squares := c.to(arg(shift, 0), "scale")
	total := c.to(arg(squares, 0), "sum")
	square := c.to(arg(total, 0), "mul")
	x, dy := c.to(arg(h, 0), "convert"), c.to(arg(g, 0), "convert")
	if both == nil || square == nil || x == nil || dy == nil || arg(h, 1) != r.Out[0] ||
		arg(both, 0) != g.Out[0] || arg(both, 1) != h.Out[0] ||
		arg(square, 0) != x.Out[0] || arg(square, 1) != x.Out[0] {
		return nil
	}
	n := &normGrad{x: x.In[0], eps: shift.Attrs.Float("by")}
	over, t := total.Attrs.List("over"), n.x.Type
	if len(over) != 1 || !slices.Equal(over, sum.Attrs.List("over")) || !lastDim(t, over[0]) ||
		!dy.In[0].Type.Equal(t) || !op.Out[0].Type.Equal(t) {
		return nil
	}
	n.dim = over[0]
	part := 1 / float64(t.Size(n.dim))
	if squares.Attrs.Float("by") != part || mean.Attrs.Float("by") != part {
		return nil
	}
	if w := c.to(arg(g, 1), "shift"); w != nil {
		n.shift, n.w = w.Attrs.Float("by"), arg(c.to(arg(w, 0), "convert"), 0)
	} else {
		n.w = arg(c.to(arg(g, 1), "convert"), 0)
	}
	if n.w == nil || n.w.Type.Elem != t.Elem || len(n.w.Type.Dims) != 1 {
		return nil
	}
	if f.weightOf(n, c, dy, h) && f.at[n.weight] < f.at[op] {
		return nil
	}
	n.inside = c.ops
	f.added(n, op)
	f.gather(n, dy)
	return n
}

// weightOf finds the weight's gradient, Σ dy·h over all rows. A frozen weight has none, and then a
// result of the kernel is not read.
func (f *gradFinder) weightOf(n *normGrad, c *chain, dy, h *ir.Op) bool {
	others := ir.Names(ir.Without(n.x.Type.Dims, n.dim))
	for _, product := range f.by[h.Out[0]] {
		if product.Kind != "mul" || product.In[0] != dy.Out[0] || product.In[1] != h.Out[0] {
			continue
		}
		for _, sum := range f.by[product.Out[0]] {
			if sum.Kind == "sum" && slices.Equal(sum.Attrs.List("over"), others) {
				n.weight = sum
				c.ops = append(c.ops, product, sum)
				return true
			}
		}
	}
	return false
}

// added finds the residual's gradient that is added to the result, if nothing else reads that.
func (f *gradFinder) added(n *normGrad, op *ir.Op) {
	list := f.by[op.Out[0]]
	if len(list) != 1 || list[0].Kind != "add" || list[0].In[0] == list[0].In[1] {
		return
	}
	other := list[0].In[0]
	if other == op.Out[0] {
		other = list[0].In[1]
	}
	if other.Type.Equal(n.x.Type) && there(f.at, other, op) {
		n.residual, n.sum = other, list[0]
		n.inside = append(n.inside, list[0])
	}
}

// gather takes the sum of gradients apart that the norm's result has, if nothing else reads it.
func (f *gradFinder) gather(n *normGrad, dy *ir.Op) {
	n.grads = []*ir.Value{dy.In[0]}
	for i := 0; i < len(n.grads) && len(n.grads) < maxGrads; {
		sum := n.grads[i].Def()
		if sum == nil || sum.Kind != "add" || len(f.by[sum.Out[0]]) != 1 ||
			slices.ContainsFunc(sum.In, func(v *ir.Value) bool { return !v.Type.Equal(n.x.Type) }) {
			i++
			continue
		}
		n.grads = slices.Replace(n.grads, i, i+1, sum.In...)
		n.inside = append(n.inside, sum)
	}
}

// leave notes what nothing reads once the kernel is there.
func (f *gradFinder) leave(n *normGrad) {
	read := n.inside[0].Out[0] // the result, or the sum with the residual's
	if n.sum != nil {
		read = n.sum.Out[0]
	}
	for found := true; found; {
		found = false
		for _, op := range n.inside {
			replaced := op.Out[0] == read || op == n.weight
			if !f.gone[op] && (replaced || sole(f.by, op, func(r *ir.Op) bool { return f.gone[r] })) {
				f.gone[op], found = true, true
			}
		}
	}
}
