package rewrite

import (
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/expr"
)

// Attributes of a [QuantizeOnce] that computes its source.
const (
	attrExpr = "expr" // what it computes, as package kernels/expr prints it; none reads its source
	attrType = "type" // of each source
	attrKeep = "keep" // it returns its source, too
	// attrColumns are the sources, by their numbers, that are quantized across alone.
	attrColumns = "columns"
)

// fuseSources moves what computes a source element by element into the kernel that quantizes it, so
// that the source is neither written nor read: SwiGLU, GELU, norms, their gradients, the sum with a
// residual's gradient. Sources of one shape that are computed from common operands, such as the two
// gradients of SwiGLU, become one kernel, which reads the operands once. A source that others read
// as well is written by the kernel.
func fuseSources(s *kernels.Selector) func(g *ir.Graph) error {
	return func(g *ir.Graph) error {
		f := &fuser{by: readers(g), at: places(g), of: map[*ir.Op]*fusion{}, gone: map[*ir.Op]bool{},
			set: s}
		f.find(g)
		return rows().Edit(g, f.edit)
	}
}

// places numbers the operations of each graph.
func places(g *ir.Graph) map[*ir.Op]int {
	at := map[*ir.Op]int{}
	var add func(g *ir.Graph)
	add = func(g *ir.Graph) {
		for i, op := range g.Ops {
			at[op] = i
			if op.Body != nil {
				add(op.Body)
			}
		}
	}
	add(g)
	return at
}

// A fuser finds what can be fused, and then does it.
type fuser struct {
	by   map[*ir.Value][]*ir.Op
	at   map[*ir.Op]int
	of   map[*ir.Op]*fusion // by the operation in whose place it is made
	gone map[*ir.Op]bool    // operations that nothing reads afterwards
	set  *kernels.Selector  // which kernels may be used
}

// A fusion is one kernel: the quantizations of some sources, and what computes them.
type fusion struct {
	quantize []*ir.Op // one for each source; of NVFP4 the searches for largest magnitudes
	twice    []*ir.Op // the quantizations to NVFP4 that compute their sources again
	expr     expr.Expr
	operands []*ir.Value
	inside   []*ir.Op // operations that only the kernel's results need, in no order
	keep     bool
}

// maxMatrices is how many matrices one kernel reads: with more, registers spill.
const maxMatrices = 5

// find decides for every quantization of a graph, and of the bodies of its loops.
func (f *fuser) find(g *ir.Graph) {
	taken := map[*ir.Op]bool{}
	for i, op := range g.Ops {
		if op.Body != nil {
			f.find(op.Body)
		}
		if taken[op] || len(op.In) == 0 || !computable(op.In[0]) {
			continue
		}
		rest := lists.Filter(g.Ops[i+1:], func(other *ir.Op) bool {
			return other.Kind == op.Kind && !taken[other] && alike(op, other) && computable(other.In[0])
		})
		var best *fusion
		switch {
		case op.Kind == AmaxOnce:
			best = f.nvfp4(op, rest)
		case op.Kind == QuantizeOnce && beside(op, 1) == 0:
			best = f.widest(nil, op, rest)
		}
		if best == nil || len(best.expr.Steps) == 0 {
			continue
		}
		place := best.quantize[0]
		if best.keep {
			place = best.quantize[0].In[0].Def()
		}
		f.of[place] = best
		for _, q := range best.twice {
			f.of[best.twice[0]], taken[q] = best, true
		}
		for _, q := range best.quantize {
			taken[q] = true
		}
		for _, op := range best.inside {
			f.gone[op] = op != place
		}
	}
}

// widest fuses a quantization with those among the rest that are computed from common operands.
// Also gives what else reads the source of one, in the kernel's place.
func (f *fuser) widest(also func(*ir.Op) []*ir.Op, op *ir.Op, rest []*ir.Op) *fusion {
	best := f.fusion(also, op)
	if all := f.together(also, best, rest); all != nil {
		return all
	}
	for _, other := range rest {
		if best == nil || best.keep {
			break
		}
		alone := f.fusion(also, other)
		both := f.fusion(also, append(slices.Clone(best.quantize), other)...)
		if alone != nil && both != nil && !both.keep &&
			both.expr.Matrices() < best.expr.Matrices()+alone.expr.Matrices() {
			best = both
		}
	}
	return best
}

// together fuses a quantization with all of the rest that share an operand with it, if that reads
// fewer matrices than they do alone: two of three sources may have steps in common with the third
// that are too many to recompute.
func (f *fuser) together(also func(*ir.Op) []*ir.Op, first *fusion, rest []*ir.Op) *fusion {
	if first == nil || first.keep || also != nil {
		return nil
	}
	list, matrices := slices.Clone(first.quantize), first.expr.Matrices()
	for _, other := range rest {
		alone := f.fusion(nil, other)
		if alone != nil && !alone.keep && slices.ContainsFunc(alone.operands, func(v *ir.Value) bool {
			return slices.Contains(first.operands, v)
		}) {
			list, matrices = append(list, other), matrices+alone.expr.Matrices()
		}
	}
	if len(list) < 3 {
		return nil
	}
	all := f.fusion(nil, list...)
	if all == nil || all.keep || all.expr.Matrices() >= matrices {
		return nil
	}
	return all
}

// alike tells whether two quantizations have one shape and one manner; to MXFP8, one may be across
// alone.
func alike(a, b *ir.Op) bool {
	return a.Attrs.Text("format") == b.Attrs.Text("format") && a.In[0].Type.Equal(b.In[0].Type) &&
		(slices.Equal(along(a), along(b)) || (acrossAlone(a) || acrossAlone(b)) && beside(a, 1) == 0) &&
		slices.Equal(a.Attrs.List(attrAcross), b.Attrs.List(attrAcross))
}

// acrossAlone tells a quantization that has no codes along rows.
func acrossAlone(op *ir.Op) bool { return op.Kind == QuantizeOnce && len(along(op)) == 0 }

// computable tells whether a value is computed element by element.
func computable(v *ir.Value) bool {
	return v.Def() != nil && v.Def().Elementwise() && v.Type.Elem == dtype.BF16
}

// fusion gives the kernel of some quantizations, or nil if they have no common one. Also is as in
// widest.
func (f *fuser) fusion(also func(*ir.Op) []*ir.Op, quantize ...*ir.Op) *fusion {
	out := &fusion{quantize: quantize}
	for _, q := range quantize {
		if also != nil {
			out.twice = append(out.twice, also(q)...)
		}
	}
	roots := lists.Map(quantize, func(q *ir.Op) *ir.Value { return q.In[0] })
	w := &gatherer{fuser: f, fusion: out, like: quantize[0], roots: roots, number: map[*ir.Value]int{}}
	if !w.plan() {
		return nil
	}
	w.list()
	for _, v := range roots {
		out.expr.Out = append(out.expr.Out, w.step(v))
	}
	if out.expr.Matrices() > maxMatrices || out.expr.Check() != nil ||
		f.set.Refuses(keyOf(quantize[0], out.expr.String())) {
		return nil
	}
	out.keep = slices.ContainsFunc(roots, func(v *ir.Value) bool { return !w.alone(v) })
	out.inside = w.private()
	if out.keep && len(roots) > 1 {
		return nil
	}
	place := quantize[0]
	if out.keep {
		place = roots[0].Def()
	}
	for _, v := range out.operands { // they must be there where the kernel is made
		if v.Def() != nil && f.at[v.Def()] >= f.at[place] {
			return nil
		}
	}
	return out
}

// edit puts the kernels in the place of what they compute.
func (f *fuser) edit(r *ir.Rewriter, op *ir.Op) []*ir.Value {
	if u := f.of[op]; u != nil {
		if len(u.twice) > 0 && op == u.twice[0] {
			return u.writeAgain(r)
		}
		return f.write(r, u)
	}
	if f.gone[op] {
		return []*ir.Value{}
	}
	return nil
}

// write adds the operation of a fusion, and gives the results of the one in whose place it is.
func (f *fuser) write(r *ir.Rewriter, u *fusion) (own []*ir.Value) {
	q := u.quantize[0]
	in := lists.Map(u.operands, func(v *ir.Value) *ir.Value { return now(r, v) })
	out := r.ReplaceWith(q, q.Kind, u.attrs(q), in...)
	if u.keep {
		handOut(r, u.quantize, out[1:])
		return out[:1]
	}
	handOut(r, u.quantize[1:], out[len(q.Out):])
	return out[:len(q.Out)]
}

// handOut gives the outputs of one kernel to what read the outputs of the ones that it replaces.
func handOut(r *ir.Rewriter, list []*ir.Op, out []*ir.Value) {
	for _, op := range list {
		for i, v := range op.Out {
			r.Substitute(v, out[i])
		}
		out = out[len(op.Out):]
	}
}

// attrs are the attributes of an operation that computes what it quantizes.
func (u *fusion) attrs(q *ir.Op) ir.Attrs {
	a := q.Attrs
	var columns []string
	for i, one := range u.quantize {
		if acrossAlone(one) {
			columns = append(columns, strconv.Itoa(i))
		} else {
			a = a.With("along", along(one))
		}
	}
	if len(columns) > 0 && len(columns) < len(u.quantize) {
		a = a.With(attrColumns, columns)
	}
	return a.With(attrExpr, u.expr.String()).With(attrType, q.In[0].Type.String()).
		With(attrKeep, u.keep)
}

// ExprOf gives what a [QuantizeOnce] computes for each element of its sources.
func ExprOf(op *ir.Op) (*expr.Expr, error) {
	text := op.Attrs.Text(attrExpr)
	if text == "" {
		text = "bf16 -> 0"
	}
	return expr.Parse(text)
}

// writtenOut is what a [QuantizeOnce] means to the interpreter: its sources, and a quantize for
// each orientation.
func writtenOut(b *ir.Builder, op *ir.Op) (out []*ir.Value) {
	list := writtenSources(b, op)
	for part, y := range list {
		if op.Attrs.Bool(attrKeep) {
			out = append(out, y)
		}
		for way, dims := range waysOf(op, part) {
			if len(dims) > 0 {
				codes, scales := b.Quantize(y, orientedBy(op, part, len(list), way, dims))
				out = append(out, codes, scales)
			}
		}
	}
	return out
}

// writtenSources computes sources in steps of float32, and rounds them once.
func writtenSources(b *ir.Builder, op *ir.Op) (out []*ir.Value) {
	e, source, err := sources(op)
	if err != nil {
		return nil
	}
	in := lists.Map(op.In[:len(e.In)], func(v *ir.Value) *ir.Value { return b.Convert(v, dtype.F32) })
	for _, y := range expr.Do(e, in, func(s expr.Step, args []*ir.Value) *ir.Value {
		return writtenStep(b, s, args, source)
	}) {
		out = append(out, b.Convert(y, source.Elem))
	}
	return out
}

// writtenStep is one step of an expression as an operation of package ir.
func writtenStep(b *ir.Builder, s expr.Step, args []*ir.Value, source ir.Type) *ir.Value {
	attrs, kind := map[string]any{}, s.Op
	switch {
	case s.Op == "fill":
		return b.Fill(ir.Type{Elem: dtype.F32, Dims: source.Dims, Place: source.Place}, s.By)
	case expr.Compares(s.Op):
		kind, attrs["how"] = "compare", s.Op
	case expr.Ops[s.Op].Number:
		attrs["by"] = s.By
	}
	return b.Op(kind, attrs, args...)[0]
}
