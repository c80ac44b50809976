package cpu

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// matmulKernels print products of plain matrices, as [kernels.Selector.Matmul] decides.
func matmulKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Matrix, Kinds: []string{"dot", "linear", "linear_dx", "linear_dw"},
		Applies: kernels.OnCPU("XLA:CPU turns wider products by copies"), Print: on(matrix),
	}, {
		Name: kernels.Matrix, Kinds: []string{"block_dot"}, Print: on(blockDot),
		Applies: kernels.OnCPU("the CPU multiplies bf16, in which the numbers are exact"),
	}}
}

// matrix is a product of plain matrices, as [kernels.Set.Product] says.
func matrix(w writer, op *ir.Op, in []val) []val {
	out := op.Out[0].Type
	return []val{w.matmul(w.CastOperand(op, in[0]), w.CastOperand(op, in[1]), out.Elem,
		ir.Names(out.Dims),
		op.Attrs.List("over")...)}
}

func blockDot(w writer, op *ir.Op, in []val) []val {
	return w.BlockDot(op, in, func(a, b val, order, over []string) val {
		return w.matmul(a, b, dtype.F32, order, over...)
	})
}

// A side is one argument of a product, with its dimensions in three groups.
type side struct {
	v                 val
	batch, free, over []ir.Dim
}

// newSide sorts the dimensions of an argument.
func newSide(v val, other ir.Type, over []string) *side {
	s := &side{v: v}
	for _, d := range v.Type.Dims {
		switch {
		case other.Index(d.Name) < 0:
			s.free = append(s.free, d)
		case slices.Contains(over, d.Name):
			s.over = append(s.over, d)
		default:
			s.batch = append(s.batch, d)
		}
	}
	return s
}

func count(dims []ir.Dim) int64 {
	return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
}

// flatten gives the argument as [batch, free, over] or [batch, over, free], whichever it is
// already; if it is neither it is put in order. It says whether what is summed over is last.
func (w writer) flatten(s *side, batch, over []ir.Dim) (v val, last bool) {
	v = s.v
	for _, last := range []bool{true, false} {
		order := slices.Concat(batch, s.free, over)
		if !last {
			order = slices.Concat(batch, over, s.free)
		}
		if slices.Equal(order, v.Type.Dims) {
			return w.grouped(v, last, count(batch), count(s.free), count(over)), last
		}
	}
	v = w.transposeCopy(v, ir.Names(slices.Concat(batch, s.free, over)))
	return w.grouped(v, true, count(batch), count(s.free), count(over)), true
}

// The names of the dimensions of a plain product.
const (
	dimBatch = "batch"
	dimSum   = "sum"
)

// grouped joins dimensions to at most three.
func (w writer) grouped(v val, last bool, batch, free, over int64) val {
	t := ir.Type{Elem: v.Type.Elem}
	if batch > 1 {
		t.Dims = append(t.Dims, ir.Dim{Name: dimBatch, Size: batch})
	}
	f, o := ir.Dim{Name: "free", Size: free}, ir.Dim{Name: dimSum, Size: over}
	if last {
		t.Dims = append(t.Dims, f, o)
	} else {
		t.Dims = append(t.Dims, o, f)
	}
	return w.Reshape(v, t)
}

// matmul multiplies and sums over the named dimensions, as a product of matrices. The result has
// its dimensions in the order that is asked for.
func (w writer) matmul(x, y val, to dtype.DType, order []string, over ...string) val {
	a, b := newSide(x, y.Type, over), newSide(y, x.Type, over)
	// The argument that stands first decides the order of what both have.
	p, aLast := w.flatten(a, a.batch, a.over)
	q, bLast := w.flatten(b, a.batch, a.over)
	straight := ir.Names(slices.Concat(a.batch, a.free, b.free))
	swapped := ir.Names(slices.Concat(a.batch, b.free, a.free))
	way := w.Target.Matmul(kernels.MatmulShape{Batch: count(a.batch), M: count(a.free),
		N: count(b.free),
		K: count(a.over), Elem: x.Type.Elem, ALast: aLast, BLast: bLast,
		NFirst: !slices.Equal(order, straight) && slices.Equal(order, swapped)})
	dims := slices.Concat(a.batch, a.free, b.free)
	if way.Swap {
		p, q = q, p
		aLast = bLast
		dims = slices.Concat(a.batch, b.free, a.free)
	}
	if way.Wide {
		p, q = w.Convert(p, dtype.F32), w.Convert(q, dtype.F32)
	}
	if way.Transpose && !aLast {
		n := len(p.Type.Dims)
		swap := ir.Names(p.Type.Dims)
		swap[n-1], swap[n-2] = swap[n-2], swap[n-1]
		p = w.transposeCopy(p, swap)
	}
	narrow := p.Type.Elem == dtype.BF16
	q.Type.Dims = slices.Clone(q.Type.Dims)
	for i := range q.Type.Dims {
		if q.Type.Dims[i].Name == "free" {
			q.Type.Dims[i].Name = "other"
		}
	}
	elem := to
	if way.Wide {
		elem = dtype.F32
	}
	v := w.Reshape(w.Dot(p, q, elem, dimSum), ir.Type{Dims: dims})
	v = w.Convert(v, to)
	if narrow {
		return w.transposeCopy(v, order)
	}
	return w.Transpose(v, order)
}

// transposeCopy puts dimensions into another order by a copy that XLA does not fold into the
// product before or after it: a transpose of an argument would send the product to the slow path,
// and one of a result fails when it runs ("Unsupported element type for DotThunk"). A dimension in
// two parts hides what it is.
func (w writer) transposeCopy(v val, order []string) val {
	if slices.Equal(ir.Names(v.Type.Dims), order) {
		return v
	}
	t := ir.Type{Elem: v.Type.Elem, Dims: inOrder(v.Type, order)}
	// The outermost dimension that moves and has parts is cut.
	for i, d := range v.Type.Dims {
		n := kernels.Split(d.Size)
		if order[i] == d.Name || n == 0 {
			continue
		}
		cut := ir.Type{Dims: slices.Concat(v.Type.Dims[:i],
			[]ir.Dim{{Name: d.Name, Size: n}, {Name: "part", Size: d.Size / n}}, v.Type.Dims[i+1:])}
		var long []string
		for _, name := range order {
			if long = append(long, name); name == d.Name {
				long = append(long, "part")
			}
		}
		return w.Reshape(w.Transpose(w.Reshape(v, cut), long), t)
	}
	return w.Transpose(v, order)
}

// inOrder lists the dimensions of a type in an order.
func inOrder(t ir.Type, order []string) []ir.Dim {
	return lists.Map(order, func(name string) ir.Dim { return t.Dims[t.Index(name)] })
}
