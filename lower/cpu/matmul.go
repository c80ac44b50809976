package cpu

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// matmulKernels print products as GEMMs of plain matrices, as [kernels.Selector.Matmul] decides:
// dimensions that stay together are merged, since XLA:CPU transposes wider products by copies.
func matmulKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Matrix, Kinds: []string{"dot", "linear", "linear_dx", "linear_dw"},
		Applies: kernels.OnCPU("XLA:CPU turns wider products by copies"), Print: on(matrix),
	}, {
		Name: kernels.Matrix, Kinds: []string{"block_dot"}, Print: on(blockDot),
		Applies: kernels.OnCPU("the CPU multiplies bf16, in which the numbers are exact"),
	}}
}

// matrix prints dot, linear and its gradients.
func matrix(w writer, op *ir.Op, in []val) []val {
	out := op.Out[0].Type
	return []val{w.matmul(w.CastOperand(op, in[0]), w.CastOperand(op, in[1]), out.Elem,
		ir.Names(out.Dims),
		op.Attrs.List("over")...)}
}

// blockDot multiplies quantized operands as bf16, which is exact.
func blockDot(w writer, op *ir.Op, in []val) []val {
	return w.BlockDot(op, in, func(a, b val, order, over []string) val {
		return w.matmul(a, b, dtype.F32, order, over...)
	})
}

// An operand is one argument of a product, its dimensions in three groups: batch (in both arguments
// and the result), free (in this one and the result) and over (summed).
type operand struct {
	v                 val
	batch, free, over []ir.Dim
}

// newOperand sorts the dimensions of v by whether the other argument has them.
func newOperand(v val, other ir.Type, over []string) *operand {
	s := &operand{v: v}
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

// elements is the number of elements of some dimensions.
func elements(dims []ir.Dim) int64 {
	return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
}

// flatten merges an operand to [batch, free, over] or [batch, over, free], whichever matches its
// layout; if neither does it is transposed to the first. last tells whether the summed dimension is
// last.
func (w writer) flatten(s *operand, batch, over []ir.Dim) (v val, last bool) {
	v = s.v
	for _, last := range []bool{true, false} {
		order := slices.Concat(batch, s.free, over)
		if !last {
			order = slices.Concat(batch, over, s.free)
		}
		if slices.Equal(order, v.Type.Dims) {
			return w.grouped(v, last, elements(batch), elements(s.free), elements(over)), last
		}
	}
	v = w.transposeCopy(v, ir.Names(slices.Concat(batch, s.free, over)))
	return w.grouped(v, true, elements(batch), elements(s.free), elements(over)), true
}

// The names of the dimensions of a plain product.
const (
	dimBatch = "batch"
	dimSum   = "sum"
)

// grouped merges dimensions to at most three; a batch of one is left out.
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

// matmul multiplies and sums over the named dimensions as one GEMM per batch. The result has its
// dimensions in the given order.
func (w writer) matmul(x, y val, to dtype.DType, order []string, over ...string) val {
	a, b := newOperand(x, y.Type, over), newOperand(y, x.Type, over)
	// The first argument decides the order of the batch and summed dimensions.
	p, aLast := w.flatten(a, a.batch, a.over)
	q, bLast := w.flatten(b, a.batch, a.over)
	straight := ir.Names(slices.Concat(a.batch, a.free, b.free))
	swapped := ir.Names(slices.Concat(a.batch, b.free, a.free))
	way := w.Target.Matmul(kernels.MatmulShape{Batch: elements(a.batch), M: elements(a.free),
		N: elements(b.free),
		K: elements(a.over), Elem: x.Type.Elem, ALast: aLast, BLast: bLast,
		NFirst: !slices.Equal(order, straight) && slices.Equal(order, swapped)})
	// The result is [batch, M, N], or [batch, N, M] if the operands are swapped.
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
	bf16 := p.Type.Elem == dtype.BF16
	// Dot matches dimensions by name: the free dimensions of both sides must differ.
	q = &stablehlo.Value{Name: q.Name, Type: q.Type}
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
	if bf16 {
		return w.transposeCopy(v, order)
	}
	return w.Transpose(v, order)
}

// transposeCopy transposes by a copy that XLA does not fold into a neighbouring product: a
// transposed operand would send the product to the slow path, and a transposed result fails when it
// runs ("Unsupported element type for DotThunk"). Splitting one of the moved dimensions hides that
// it is a transpose.
func (w writer) transposeCopy(v val, order []string) val {
	if slices.Equal(ir.Names(v.Type.Dims), order) {
		return v
	}
	t := ir.Type{Elem: v.Type.Elem, Dims: inOrder(v.Type, order)}
	// The outermost dimension that moves and has divisors is split.
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
