package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels/expr"
)

// A gatherer turns the operations before a quantization into an expression.
type gatherer struct {
	*fuser
	*fusion
	like     *ir.Op             // a quantization: rows and columns are as in its source
	roots    []*ir.Value        // the sources
	read     map[*ir.Value]bool // what could be computed and is read all the same
	computed map[*ir.Value]bool // what the kernel computes
	order    []*ir.Value        // what it reads, as it is found
	number   map[*ir.Value]int  // of operands and steps in the expression
}

// mostSteps is how many operations are recomputed at most, where another kernel computes the same.
const mostSteps = 6

// plan decides what is computed and what is read, and is false if the sources cannot be computed.
func (w *gatherer) plan() bool {
	w.read = map[*ir.Value]bool{}
	for again := true; again; {
		again = false
		w.computed, w.order = map[*ir.Value]bool{}, nil
		seen := map[*ir.Value]bool{}
		for _, v := range w.roots {
			w.reach(v, seen)
		}
		for v := range w.shared() {
			if !w.cheap(v) {
				w.read[v], again = true, true
			}
		}
	}
	for _, v := range w.order {
		if v.Type.Elem != dtype.BF16 && v.Type.Elem != dtype.F32 {
			return false
		}
	}
	return !slices.ContainsFunc(w.roots, func(v *ir.Value) bool { return !w.computed[v] })
}

// reach visits a value and what it is computed from.
func (w *gatherer) reach(v *ir.Value, seen map[*ir.Value]bool) {
	if seen[v] {
		return
	}
	seen[v] = true
	op := v.Def()
	if op != nil && op.Kind == "fill" {
		return
	}
	if op == nil || !w.full(v) || !steps[op.Kind] || w.read[v] ||
		slices.ContainsFunc(op.In, func(x *ir.Value) bool { _, ok := w.over(x); return !ok }) {
		w.order = append(w.order, v)
		return
	}
	w.computed[v] = true
	for _, x := range op.In {
		w.reach(x, seen)
	}
}

// alone tells whether only the kernel reads a value.
func (w *gatherer) alone(v *ir.Value) bool {
	return !slices.ContainsFunc(w.by[v], func(reader *ir.Op) bool {
		inside := len(reader.Out) == 1 && w.computed[reader.Out[0]]
		return !inside && !slices.Contains(w.quantize, reader) && !slices.Contains(w.twice, reader)
	})
}

// steps are the kinds of package ir that expressions have.
var steps = map[string]bool{"add": true, "sub": true, "mul": true, "div": true, "neg": true,
	"scale": true, "shift": true, "fill": true, "exp": true, "log": true, "sqrt": true, "rsqrt": true,
	"tanh": true, "sigmoid": true, "relu": true, "compare": true, "select": true, "convert": true,
	"stop_gradient": true}

// full tells whether a value has an element for each of the matrix.
func (w *gatherer) full(v *ir.Value) bool {
	return slices.Equal(v.Type.Dims, w.like.In[0].Type.Dims)
}

// over tells which elements of the matrix share an element of a value.
func (w *gatherer) over(v *ir.Value) (expr.Over, bool) {
	if v.Def() != nil && v.Def().Kind == "fill" {
		return expr.Scalar, true
	}
	dims := w.like.In[0].Type.Dims
	cols := len(dims) - len(along(w.like)) // where the columns begin
	if across := w.like.Attrs.List(attrAcross); len(across) > 0 {
		cols = following(w.like.In[0].Type, across) + len(across)
	}
	switch d := v.Type.Dims; {
	case slices.Equal(d, dims):
		return expr.Matrix, true
	case len(d) == 0:
		return expr.Scalar, true
	case slices.Equal(d, dims[:cols]):
		return expr.Rows, true
	case slices.Equal(d, dims[cols:]):
		return expr.Cols, true
	}
	return "", false
}

// shared are the values that the kernel computes and others need as well, but for the sources.
func (w *gatherer) shared() map[*ir.Value]bool {
	list := map[*ir.Value]bool{}
	var mark func(v *ir.Value)
	mark = func(v *ir.Value) {
		if !w.computed[v] || list[v] {
			return
		}
		list[v] = true
		for _, x := range v.Def().In {
			mark(x)
		}
	}
	for v := range w.computed {
		if !slices.Contains(w.roots, v) && !w.alone(v) {
			mark(v)
		}
	}
	return list
}

// private lists the operations that nothing but the kernel's own steps and the quantizations need.
func (w *gatherer) private() (list []*ir.Op) {
	shared := w.shared()
	for v := range w.computed {
		if !shared[v] {
			list = append(list, v.Def())
		}
	}
	return list
}

// cheap tells whether a value that others read as well follows in a few steps from what takes no
// more memory.
func (w *gatherer) cheap(v *ir.Value) bool {
	n := 0
	return w.fromBytes(v, &n) <= v.Type.Shape().Bytes() && n <= mostSteps
}

// fromBytes is the memory of the matrices that a value is computed from, each of which is read
// itself or computed, whichever takes less; n counts the operations.
func (w *gatherer) fromBytes(v *ir.Value, n *int) (bytes int64) {
	var seen []*ir.Value
	*n++
	for _, x := range v.Def().In {
		if over, _ := w.over(x); over != expr.Matrix || slices.Contains(seen, x) {
			continue
		}
		seen = append(seen, x)
		least := x.Type.Shape().Bytes()
		if op := x.Def(); op != nil && steps[op.Kind] && w.full(x) && *n <= mostSteps {
			least = min(least, w.fromBytes(x, n))
		}
		bytes += least
	}
	return bytes
}

// list numbers the operands.
func (w *gatherer) list() {
	for _, v := range w.order {
		over, _ := w.over(v)
		w.number[v] = len(w.expr.In)
		w.expr.In = append(w.expr.In, expr.Operand{Elem: v.Type.Elem, Over: over})
		w.operands = append(w.operands, v)
	}
}

// step adds what computes a value, and gives its number.
func (w *gatherer) step(v *ir.Value) int {
	if n, ok := w.number[v]; ok {
		return n
	}
	op := v.Def()
	var n int
	switch op.Kind {
	case "convert", "stop_gradient": // values are float32 until the end
		n = w.step(op.In[0])
	default:
		s := expr.Step{Op: op.Kind}
		switch op.Kind {
		case "scale", "shift":
			s.By = op.Attrs.Float("by")
		case "fill":
			s.By = op.Attrs.Float("value")
		case "compare":
			s.Op = op.Attrs.Text("how")
		}
		for _, x := range op.In {
			s.Args = append(s.Args, w.step(x))
		}
		n = len(w.expr.In) + len(w.expr.Steps)
		w.expr.Steps = append(w.expr.Steps, s)
	}
	w.number[v] = n
	return n
}
