package lower

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// matrix is a product of plain matrices, as [kernels.Set.Product] says.
func matrix(w *writer, op *ir.Op, in []val) []val {
	out := op.Out[0].Type
	return []val{w.matmul(w.narrow(op, in[0]), w.narrow(op, in[1]), out.Elem, ir.Names(out.Dims),
		op.Attrs.List("over")...)}
}

// chunkedCrossEntropy never holds the exponentials of all scores. XLA:CPU writes what it sums, so a
// chunk of each row is summed at a time, and zero times the sum before it is added to what a chunk
// needs, which keeps XLA from computing them all at once. The score of a label is fetched from its
// place: a comparison with every place of the row takes longer than all the rest (31 against 9 ms
// for 2048 rows of 4096). A negative label fetches the first score, and its loss is dropped.
func chunkedCrossEntropy(w *writer, op *ir.Op, in []val) []val {
	x, labels := w.scoreRows(op, in)
	x = w.convert(x, dtype.F32)
	rows, width := x.t.Dims[0], x.t.Dims[1]
	top := w.reduce(x, "maximum", lowest, width.Name)
	var total val
	for from, to := range kernels.Chunks(width.Size) {
		part, least := w.slice(x, width.Name, from, to), top
		if total.name != "" { // the sum is at most the width of a row, so this is zero
			none := w.elementwise("multiply", total, w.constant(total.t, 0))
			least = w.elementwise("add", top, none)
		}
		e := w.elementwise("exponential", w.elementwise("subtract", part, w.as(least, part.t)))
		sum := w.reduce(e, "add", 0, width.Name)
		if total.name != "" {
			sum = w.elementwise("add", total, sum)
		}
		total = sum
	}
	one := ir.Type{Elem: labels.t.Elem, Dims: []ir.Dim{rows, {Name: "place", Size: 1}}}
	two := ir.Type{Elem: labels.t.Elem, Dims: []ir.Dim{rows, {Name: "place", Size: 2}}}
	places := w.concat("place", two, w.iota(one, rows.Name), w.reshape(labels, one))
	t := ir.Type{Elem: x.t.Elem, Dims: []ir.Dim{rows}}
	at := w.apply(t, `"stablehlo.gather"(`, `) {dimension_numbers = #stablehlo.gather<`+
		`collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 1>, `+
		`slice_sizes = array<i64: 1, 1>}`, x, places)
	out := w.lossOf(labels, top, total, at)
	return []val{w.reshape(out[0], op.Out[0].Type), w.reshape(out[1], op.Out[1].Type)}
}

// scoreRows gives scores as a matrix, a row for each label, and the labels as a list. As a matrix
// they are what the product before wrote and the product after reads, so that their gradient can
// take their place in memory.
func (w *writer) scoreRows(op *ir.Op, in []val) (x, labels val) {
	dim := op.Attrs.Text("dim")
	x = w.transpose(in[0], append(ir.Names(in[1].t.Dims), dim))
	rows := ir.Dim{Name: "rows", Size: in[1].t.Shape().Elements()}
	x = w.reshape(x, ir.Type{Dims: []ir.Dim{rows, {Name: "width", Size: x.t.Size(dim)}}})
	return x, w.reshape(in[1], ir.Type{Dims: []ir.Dim{rows}})
}

func rowsCrossEntropyGrad(w *writer, op *ir.Op, in []val) []val {
	x, labels := w.scoreRows(op, in)
	row := ir.Type{Dims: labels.t.Dims}
	rows := []val{x, labels, w.reshape(in[2], row), w.reshape(in[3], row)}
	wide := w.convert(x, dtype.F32)
	label := func() val { return w.picked(wide, labels, "width") }
	g := w.scoreGrad(wide, label, rows, x.t.Elem)
	order := append(ir.Names(in[1].t.Dims), op.Attrs.Text("dim"))
	t := ir.Type{Elem: g.t.Elem, Dims: inOrder(in[0].t, order)}
	return []val{w.transpose(w.reshape(g, t), ir.Names(op.Out[0].Type.Dims))}
}

// foldedSum sums all of a large value by parts that lie side by side: XLA:CPU then sums whole
// vectors as it reads, and does not write what it sums first (1.7 against 11.7 ms for 8M elements).
func foldedSum(w *writer, op *ir.Op, in []val) []val {
	v := in[0]
	n := v.t.Shape().Elements()
	for n > kernels.FoldAbove && n%kernels.Fold == 0 {
		n /= kernels.Fold
		parts := []ir.Dim{{Name: "fold", Size: kernels.Fold}, {Name: "rest", Size: n}}
		v = w.reshape(v, ir.Type{Dims: parts})
		v = w.barrier(w.reduce(v, "add", 0, "fold")) // or XLA joins the sums again
	}
	return []val{w.reduce(v, "add", 0, ir.Names(v.t.Dims)...)}
}

// A side is one argument of a product, with its dimensions in three groups.
type side struct {
	v                 val
	batch, free, over []ir.Dim
}

// newSide sorts the dimensions of an argument.
func newSide(v val, other ir.Type, over []string) *side {
	s := &side{v: v}
	for _, d := range v.t.Dims {
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
func (w *writer) flatten(s *side, batch, over []ir.Dim) (v val, last bool) {
	v = s.v
	for _, last := range []bool{true, false} {
		order := slices.Concat(batch, s.free, over)
		if !last {
			order = slices.Concat(batch, over, s.free)
		}
		if slices.Equal(order, v.t.Dims) {
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
func (w *writer) grouped(v val, last bool, batch, free, over int64) val {
	t := ir.Type{Elem: v.t.Elem}
	if batch > 1 {
		t.Dims = append(t.Dims, ir.Dim{Name: dimBatch, Size: batch})
	}
	f, o := ir.Dim{Name: "free", Size: free}, ir.Dim{Name: dimSum, Size: over}
	if last {
		t.Dims = append(t.Dims, f, o)
	} else {
		t.Dims = append(t.Dims, o, f)
	}
	return w.reshape(v, t)
}

// matmul multiplies and sums over the named dimensions, as a product of matrices. The result has
// its dimensions in the order that is asked for.
func (w *writer) matmul(x, y val, to dtype.DType, order []string, over ...string) val {
	a, b := newSide(x, y.t, over), newSide(y, x.t, over)
	// The argument that stands first decides the order of what both have.
	p, aLast := w.flatten(a, a.batch, a.over)
	q, bLast := w.flatten(b, a.batch, a.over)
	straight := ir.Names(slices.Concat(a.batch, a.free, b.free))
	swapped := ir.Names(slices.Concat(a.batch, b.free, a.free))
	way := w.kernels.Matmul(kernels.MatmulShape{Batch: count(a.batch), M: count(a.free),
		N: count(b.free),
		K: count(a.over), Elem: x.t.Elem, ALast: aLast, BLast: bLast,
		NFirst: !slices.Equal(order, straight) && slices.Equal(order, swapped)})
	dims := slices.Concat(a.batch, a.free, b.free)
	if way.Swap {
		p, q = q, p
		aLast = bLast
		dims = slices.Concat(a.batch, b.free, a.free)
	}
	if way.Wide {
		p, q = w.convert(p, dtype.F32), w.convert(q, dtype.F32)
	}
	if way.Transpose && !aLast {
		n := len(p.t.Dims)
		swap := ir.Names(p.t.Dims)
		swap[n-1], swap[n-2] = swap[n-2], swap[n-1]
		p = w.transposeCopy(p, swap)
	}
	narrow := p.t.Elem == dtype.BF16
	q.t.Dims = slices.Clone(q.t.Dims)
	for i := range q.t.Dims {
		if q.t.Dims[i].Name == "free" {
			q.t.Dims[i].Name = "other"
		}
	}
	elem := to
	if way.Wide {
		elem = dtype.F32
	}
	v := w.reshape(w.dot(p, q, elem, dimSum), ir.Type{Dims: dims})
	v = w.convert(v, to)
	if narrow {
		return w.transposeCopy(v, order)
	}
	return w.transpose(v, order)
}

// transposeCopy puts dimensions into another order by a copy that XLA does not fold into the
// product before or after it: a transpose of an argument would send the product to the slow path,
// and one of a result fails when it runs ("Unsupported element type for DotThunk"). A dimension in
// two parts hides what it is.
func (w *writer) transposeCopy(v val, order []string) val {
	if slices.Equal(ir.Names(v.t.Dims), order) {
		return v
	}
	t := ir.Type{Elem: v.t.Elem, Dims: inOrder(v.t, order)}
	// The outermost dimension that moves and has parts is cut.
	for i, d := range v.t.Dims {
		n := kernels.Split(d.Size)
		if order[i] == d.Name || n == 0 {
			continue
		}
		cut := ir.Type{Dims: slices.Concat(v.t.Dims[:i],
			[]ir.Dim{{Name: d.Name, Size: n}, {Name: "part", Size: d.Size / n}}, v.t.Dims[i+1:])}
		var long []string
		for _, name := range order {
			if long = append(long, name); name == d.Name {
				long = append(long, "part")
			}
		}
		return w.reshape(w.transpose(w.reshape(v, cut), long), t)
	}
	return w.transpose(v, order)
}

// inOrder lists the dimensions of a type in an order.
func inOrder(t ir.Type, order []string) []ir.Dim {
	return lists.Map(order, func(name string) ir.Dim { return t.Dims[t.Index(name)] })
}
