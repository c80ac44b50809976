package rewrite

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/rownorm"
)

// Attributes of norms of rows.
const (
	attrAdded    = "added"    // the first two arguments are added; their sum is the first result
	attrNormed   = "normed"   // the norm is a result
	attrStats    = "stats"    // 1/√(mean + ε) of rows is a result
	attrGrads    = "grads"    // how many gradients of the result are added
	attrResidual = "residual" // the last argument is added to the gradient
)

// Codes is the attribute of a norm of rows whose codes and scales, along rows, are results. A sum
// that is one, too, is read from its stack.
const Codes = "codes"

// NormOf reads a [NormRows] or a [NormGrad], and why it was chosen.
func NormOf(op *ir.Op) (n rownorm.Norm, why string) {
	x, a := op.In[0].Type, op.Attrs
	cols := x.Size(a.Text("dim"))
	return rownorm.Norm{Rows: int(x.Shape().Elements() / max(cols, 1)), Cols: int(cols),
		Eps: a.Float("eps"), Shift: a.Float("shift"), Added: a.Bool(attrAdded),
		Normed: a.Bool(attrNormed), Codes: a.Bool(Codes), Stats: a.Bool(attrStats),
		Grads: int(a.Int(attrGrads)), Residual: a.Bool(attrResidual)}, a.Text(attrWhy)
}

// lastDim tells whether a norm is of rows that lie together.
func lastDim(x ir.Type, dim string) bool { return x.Index(dim) == len(x.Dims)-1 }

// normRows puts a norm, and the sum that it is a norm of, into one kernel, where that moves fewer
// bytes. Norms that are quantized are others' ([writeNorms]).
func normRows(s *kernels.Selector) func(g *ir.Graph) error {
	return func(g *ir.Graph) error {
		at, saved := places(g), savedBy(g)
		norms, reasons := map[*ir.Op]*ir.Op{}, map[*ir.Op]string{} // by what the kernel replaces first
		each(g, func(op *ir.Op) {
			x := op.In
			switch {
			case op.Kind == "layer_norm":
				s.Note(kernels.Choice{Kind: op.Kind, Kernel: kernels.Plain,
					Why: "kernels of rows have RMS norm, not layer norm"})
			case op.Kind == "rms_norm" && lastDim(x[0].Type, op.Attrs.Text("dim")):
				place := op
				if sum := x[0].Def(); sum != nil && sum.Kind == "add" && norms[sum] == nil &&
					sum.In[0].Type.Equal(sum.In[1].Type) && there(at, x[1], sum) {
					place = sum
				}
				n := kernels.Norming{Elem: x[0].Type.Elem, Scattered: kernels.Scattered(x[0].Type)}
				n.Norm, _ = NormOf(asRows(op, place, ""))
				n.Saved = int64(len(lists.Filter(x[:1:1], saved)) + len(lists.Filter(op.Out, saved)))
				why, ok := s.Norms(n)
				if !ok {
					s.Note(kernels.Choice{Kind: op.Kind, Kernel: kernels.Plain, Why: why})
					return
				}
				norms[place], reasons[place] = op, why
			}
		})
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			norm := norms[op]
			if norm == nil {
				return nil
			}
			one := asRows(norm, op, reasons[op])
			in := lists.Map(one.In, func(v *ir.Value) *ir.Value { return now(r, v) })
			out := r.ReplaceWith(norm, NormRows, one.Attrs, in...)
			if op != norm {
				r.Substitute(norm.Out[0], out[1])
			}
			return out[:1]
		})
	}
}

// asRows is the operation of a norm in the place of itself or of the sum before it.
func asRows(norm, place *ir.Op, why string) *ir.Op {
	a := norm.Attrs.With(attrNormed, true).With(attrWhy, why)
	if place == norm {
		return &ir.Op{Kind: NormRows, In: norm.In, Attrs: a}
	}
	return &ir.Op{Kind: NormRows, In: []*ir.Value{place.In[0], place.In[1], norm.In[1]},
		Attrs: a.With(attrAdded, true)}
}

// there tells whether a value is there where an operation is.
func there(at map[*ir.Op]int, v *ir.Value, op *ir.Op) bool {
	return v.Def() == nil || at[v.Def()] < at[op]
}

// each calls a function for every operation of a graph and of the bodies of its loops.
func each(g *ir.Graph, f func(*ir.Op)) {
	for _, op := range g.Ops {
		if f(op); op.Body != nil {
			each(op.Body, f)
		}
	}
}

// savedBy tells which values loops save in stacks.
func savedBy(g *ir.Graph) func(*ir.Value) bool {
	saved := map[*ir.Value]bool{}
	each(g, func(op *ir.Op) {
		if op.Body != nil {
			for _, v := range op.Body.Results[len(op.Loop().Carries):] {
				saved[v] = true
			}
		}
	})
	return func(v *ir.Value) bool { return saved[v] }
}

// inferNormRows gives the types of the sum, the norm and the statistics, if they are asked for.
func inferNormRows(g *ir.Graph, op *ir.Op) (types []ir.Type, err error) {
	a, n := op.Attrs, 1
	for _, name := range []string{attrAdded, attrNormed, Codes} {
		if a.Bool(name) {
			n++
		}
	}
	if len(op.In) != n {
		return nil, fmt.Errorf("takes %d arguments, got %d", n, len(op.In))
	}
	x := op.In[0].Type
	if !lastDim(x, a.Text("dim")) || a.Bool(attrAdded) && !op.In[1].Type.Equal(x) {
		return nil, fmt.Errorf("%s has no rows along %s", x, a.Text("dim"))
	}
	for _, name := range []string{attrAdded, attrNormed} {
		if a.Bool(name) {
			types = append(types, x)
		}
	}
	if a.Bool(Codes) {
		one := &ir.Op{Kind: "quantize", Attrs: codesOf(a)}
		list, err := inferAs("quantize", g, one, &ir.Value{Type: x})
		if err != nil {
			return nil, err
		}
		types = append(types, list...)
	}
	if a.Bool(attrStats) {
		types = append(types, ir.Type{Elem: dtype.F32, Dims: ir.Without(x.Dims, a.Text("dim")),
			Place: x.Place})
	}
	return types, nil
}

// codesOf are the attributes of the quantize that a norm of rows does.
func codesOf(a ir.Attrs) ir.Attrs {
	return ir.Attrs{}.With("format", string(ir.MXFP8)).With("along", []string{a.Text("dim")})
}

// writtenRows is what a [NormRows] means to the interpreter.
func writtenRows(b *ir.Builder, op *ir.Op) (out []*ir.Value) {
	a, x := op.Attrs, op.In[0]
	if a.Bool(attrAdded) {
		x = b.Add(x, op.In[1])
		out = append(out, x)
	}
	dim := a.Text("dim")
	if a.Bool(attrNormed) || a.Bool(Codes) {
		y := b.RMSNorm(x, op.In[len(op.In)-1], dim, a.Float("eps"), a.Float("shift"))
		if a.Bool(Codes) {
			codes, scales := b.Quantize(y, ir.Quantize{Format: ir.MXFP8, Along: []string{dim}})
			out = append(out, codes, scales)
		} else {
			out = append(out, y)
		}
	}
	if a.Bool(attrStats) {
		out = append(out, inverseOf(b, b.Convert(x, dtype.F32), dim, a.Float("eps")))
	}
	return out
}

// inverseOf is 1/√(mean(x²) + ε) of rows.
func inverseOf(b *ir.Builder, x *ir.Value, dim string, eps float64) *ir.Value {
	return b.Rsqrt(b.Shift(b.Scale(b.Sum(b.Mul(x, x), dim), 1/float64(x.Type.Size(dim))), eps))
}

// inferNormGrad gives the type of what is normalized, and the one that the weight's gradient has.
func inferNormGrad(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	n := 2 + int(op.Attrs.Int(attrGrads))
	if op.Attrs.Bool(attrResidual) {
		n++
	}
	if len(op.In) != n {
		return nil, fmt.Errorf("takes %d arguments, got %d", n, len(op.In))
	}
	x := op.In[0].Type
	for _, v := range op.In[2:] {
		if !v.Type.Equal(x) {
			return nil, fmt.Errorf("a gradient is %s, not %s", v.Type, x)
		}
	}
	if !lastDim(x, op.Attrs.Text("dim")) {
		return nil, fmt.Errorf("%s has no rows along %s", x, op.Attrs.Text("dim"))
	}
	dw, err := ir.ParseType(op.Attrs.Text(attrType))
	return []ir.Type{x, dw}, err
}

// writtenGrad is what a [NormGrad] means to the interpreter.
func writtenGrad(b *ir.Builder, op *ir.Op) []*ir.Value {
	a, dim := op.Attrs, op.Attrs.Text("dim")
	wide := func(v *ir.Value) *ir.Value { return b.Convert(v, dtype.F32) }
	x, w, dy := wide(op.In[0]), wide(op.In[1]), wide(op.In[2])
	n := 2 + int(a.Int(attrGrads))
	for _, v := range op.In[3:n] {
		dy = b.Add(dy, wide(v))
	}
	if s := a.Float("shift"); s != 0 {
		w = b.Shift(w, s)
	}
	r := inverseOf(b, x, dim, a.Float("eps"))
	h, g := b.Mul(x, r), b.Mul(dy, w)
	mean := b.Scale(b.Sum(b.Mul(g, h), dim), 1/float64(x.Type.Size(dim)))
	dx := b.Mul(b.Sub(g, b.Mul(h, mean)), r)
	if a.Bool(attrResidual) {
		dx = b.Add(dx, wide(op.In[n]))
	}
	others := ir.Names(ir.Without(x.Type.Dims, dim))
	return []*ir.Value{b.Convert(dx, op.In[0].Type.Elem), b.Sum(b.Mul(dy, h), others...)}
}

// sole tells whether all readers of an operation's results are among some operations.
func sole(by map[*ir.Value][]*ir.Op, op *ir.Op, among func(*ir.Op) bool) bool {
	return !slices.ContainsFunc(op.Out, func(v *ir.Value) bool {
		return slices.ContainsFunc(by[v], func(reader *ir.Op) bool { return !among(reader) })
	})
}
