package rewrite

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/expr"
)

// attrAcross lists the dimensions that a [QuantizeOnce] sums over in the second orientation; the
// first has "along", as in quantize. Either may be empty.
const attrAcross = "across"

// quantizeOnce joins the quantizations of one source, along its last dimensions and across, into
// one operation, which a kernel of our own computes in one read. XLA:GPU reads a source for its
// scales and again for its codes. The largest magnitudes that scales of NVFP4 come from are found
// before, also in one read.
func quantizeOnce(s *kernels.Selector) func(g *ir.Graph) error {
	return func(g *ir.Graph) error {
		j := &joiner{set: s, by: readers(g), done: map[*ir.Value]bool{}}
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) (own []*ir.Value) {
			switch {
			case op.Kind == "amax":
				own = j.amax(r, op)
			case j.once(op):
				own = j.quantize(r, op)
			}
			for _, v := range op.Out {
				j.done[v] = true
			}
			return own
		})
	}
}

// once tells whether a kernel of our own quantizes.
func (j *joiner) once(op *ir.Op) bool {
	return op.Kind == "quantize" && once(op) && !j.set.Refuses(keyOf(op, "bf16 -> 0"))
}

// keyOf names the kernel of a quantization of what an expression computes ([fused.Spec.Key]).
func keyOf(op *ir.Op, expression string) string {
	return op.Attrs.Text("format") + ": " + expression
}

// quantize puts a quantization and, if there is one, the same source's in the other orientation
// into one kernel.
func (j *joiner) quantize(r *ir.Rewriter, op *ir.Op) (own []*ir.Value) {
	var ops [2]*ir.Op // along, and across
	ops[orientation(op)] = op
	for _, q := range j.by[op.In[0]] {
		if k := 1 - orientation(op); j.once(q) && orientation(q) == k &&
			ops[k] == nil && fits(ops, q) && j.joins(r, op, q) {
			ops[k] = q
		}
	}
	a, in := op.Attrs.With("along", nil), []*ir.Value(nil)
	for k, q := range ops {
		if q != nil {
			a = a.With([]string{"along", attrAcross}[k], q.Attrs.List("along"))
		}
	}
	if ir.Format(a.Text("format")).TensorScale() {
		a, in = scales(r, a, ops)
	}
	out := r.ReplaceWith(op, QuantizeOnce, a, append([]*ir.Value{op.In[0]}, in...)...)
	for _, q := range ops {
		switch {
		case q == op:
			own, out = out[:2], out[2:]
		case q != nil:
			r.Substitute(q.Out[0], out[0])
			r.Substitute(q.Out[1], out[1])
			out = out[2:]
		}
	}
	return own
}

// once tells whether a quantization is one of those that the kernels have: of bfloat16, along
// dimensions that follow each other, to MXFP8 or as [onceNVFP4] says.
func once(op *ir.Op) bool {
	x, dims := op.In[0].Type, op.Attrs.List("along")
	if x.Elem != dtype.BF16 || following(x, dims) < 0 {
		return false
	}
	switch ir.Format(op.Attrs.Text("format")) {
	case ir.MXFP8:
		return len(op.In) == 1 && !op.Attrs.Bool("tile") && !op.Attrs.Bool("hadamard")
	case ir.NVFP4:
		return onceNVFP4(op)
	}
	return false
}

// following gives the place of the first of some dimensions, which follow each other in a type, or
// -1.
func following(x ir.Type, dims []string) int {
	at := x.Index(dims[0])
	if at < 0 || at+len(dims) > len(x.Dims) ||
		!slices.Equal(ir.Names(x.Dims[at:at+len(dims)]), dims) {
		return -1
	}
	return at
}

// orientation is 0 for what lies along the last dimensions of its source, and 1 across.
func orientation(op *ir.Op) int {
	dims := op.Attrs.List("along")
	if following(op.In[0].Type, dims)+len(dims) == len(op.In[0].Type.Dims) {
		return 0
	}
	return 1
}

// fits tells whether a quantization across ends before the one along begins: both are of one
// matrix, whose columns are what comes behind the dimensions across.
func fits(ops [2]*ir.Op, q *ir.Op) bool {
	pair := ops
	pair[orientation(q)] = q
	x := q.In[0].Type
	along, across := pair[0].Attrs.List("along"), pair[1].Attrs.List("along")
	return following(x, across)+len(across) <= following(x, along)
}

// Matrices are what a [QuantizeOnce] or an [AmaxOnce] reads, [rows, cols] one after the other, and
// in which orientations it quantizes them.
type Matrices struct {
	Batch, Rows, Cols int64
	Along, Across     bool
	Keep              bool // the matrices themselves are returned, too
}

// MatricesOf reads the attributes of a [QuantizeOnce] or an [AmaxOnce].
func MatricesOf(op *ir.Op) (Matrices, error) {
	x, err := sourceOf(op)
	along, across := op.Attrs.List("along"), op.Attrs.List(attrAcross)
	first, last := 0, len(x.Dims)-len(along) // of the rows
	if len(across) > 0 {
		first = following(x, across)
		last = first + len(across)
	} else if x.StackDepth() > 1 && ir.Format(op.Attrs.Text("format")).TensorScale() {
		// Each layer has a largest magnitude.
		first = 1
	}
	size := func(dims []ir.Dim) int64 {
		return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
	}
	if err != nil || first < 0 || last > len(x.Dims) || first > last {
		return Matrices{}, fmt.Errorf("%v across %v of %s: %w", along, across, x, err)
	}
	return Matrices{size(x.Dims[:first]), size(x.Dims[first:last]), size(x.Dims[last:]),
		len(along) > 0, len(across) > 0, op.Attrs.Bool(attrKeep)}, nil
}

// sourceOf is the type of what a [QuantizeOnce] quantizes.
func sourceOf(op *ir.Op) (ir.Type, error) {
	if text := op.Attrs.Text(attrType); text != "" {
		return ir.ParseType(text)
	}
	return op.In[0].Type, nil
}

// sources gives what a [QuantizeOnce] or an [AmaxOnce] computes, and the type of each source.
func sources(op *ir.Op) (*expr.Expr, ir.Type, error) {
	e, err := ExprOf(op)
	if err != nil {
		return nil, ir.Type{}, err
	}
	if n := len(e.In) + beside(op, len(e.Out)); len(op.In) != n {
		return nil, ir.Type{}, fmt.Errorf("takes %d arguments, got %d", n, len(op.In))
	}
	for i, o := range e.In {
		if v := op.In[i].Type; v.Elem != o.Elem {
			return nil, ir.Type{}, fmt.Errorf("argument %d is %s, not %s", i, v, o.Elem)
		}
	}
	source, err := sourceOf(op)
	return e, source, err
}

// inferQuantizeOnce gives for each source its own type, if it is kept, and the types of one
// quantize after the other.
func inferQuantizeOnce(g *ir.Graph, op *ir.Op) (types []ir.Type, err error) {
	e, source, err := sources(op)
	if err != nil {
		return nil, err
	}
	for part := range e.Out {
		list, err := inferPart(g, op, e, source, part)
		if err != nil {
			return nil, err
		}
		types = append(types, list...)
	}
	return types, nil
}

// waysOf gives the dimensions that a source of a [QuantizeOnce] is quantized along and across.
func waysOf(op *ir.Op, part int) [2][]string {
	ways := [2][]string{op.Attrs.List("along"), op.Attrs.List(attrAcross)}
	if slices.Contains(op.Attrs.List(attrColumns), strconv.Itoa(part)) {
		ways[0] = nil
	}
	return ways
}

// inferPart gives the types of what a [QuantizeOnce] makes of one source.
func inferPart(g *ir.Graph, op *ir.Op, e *expr.Expr, source ir.Type, part int) (types []ir.Type,
	err error) {
	if op.Attrs.Bool(attrKeep) {
		types = append(types, source)
	}
	for _, dims := range waysOf(op, part) {
		if len(dims) == 0 {
			continue
		}
		one := *op
		one.Attrs = op.Attrs.With("along", dims)
		in := []*ir.Value{{Type: source}}
		if beside(op, 1) > 0 {
			in = append(in, op.In[len(e.In)])
		}
		list, err := inferAs("quantize", g, &one, in...)
		if err != nil {
			return nil, err
		}
		types = append(types, list...)
	}
	if len(types) < 2 {
		return nil, fmt.Errorf("has no orientation")
	}
	return types, nil
}
