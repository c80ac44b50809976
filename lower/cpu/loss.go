package cpu

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// lossKernels print cross-entropy without the exponentials of all logits in memory.
func lossKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Chunked, Kinds: []string{"cross_entropy"}, Print: on(chunkedCrossEntropy),
		Applies: kernels.OnCPU("the exponentials of all scores would be as large as the scores"),
	}, {
		Name: kernels.Chunked, Kinds: []string{"cross_entropy_grad"}, Print: on(rowsCrossEntropyGrad),
		Applies: kernels.OnCPU("as a matrix it takes the place of the scores"),
	}}
}

// chunkedCrossEntropy sums exponentials in chunks of the vocabulary: XLA:CPU writes what it
// reduces, and the exponentials of all logits [rows, vocab] would take as much memory as the
// logits. Zero times the sum so far is added to the operand of the next chunk, which keeps XLA from
// computing all chunks at once. The label's logit is gathered by index: comparing every position
// takes longer than all the rest (31 against 9 ms for 2048 rows of 4096). A negative label gathers
// the first logit, and its loss is dropped.
func chunkedCrossEntropy(w writer, op *ir.Op, in []val) []val {
	x, labels := w.scoreRows(op, in)
	x = w.Convert(x, dtype.F32)
	rows, width := x.Type.Dims[0], x.Type.Dims[1]
	top := w.Reduce(x, "maximum", stablehlo.NegInf, width.Name)
	var total val // f32[rows]: the sum of exponentials so far
	for from, to := range kernels.Chunks(width.Size) {
		part, least := w.Slice(x, width.Name, from, to), top
		if total != nil { // the sum is at most the width of a row, so this is zero
			none := w.Elementwise("multiply", total, w.Constant(total.Type, 0))
			least = w.Elementwise("add", top, none)
		}
		e := w.Elementwise("exponential", w.Elementwise("subtract", part, w.BroadcastTo(least,
			part.Type)))
		sum := w.Reduce(e, "add", 0, width.Name)
		if total != nil {
			sum = w.Elementwise("add", total, sum)
		}
		total = sum
	}
	// Indices [rows, 2]: row number and label.
	one := ir.Type{Elem: labels.Type.Elem, Dims: []ir.Dim{rows, {Name: "place", Size: 1}}}
	two := ir.Type{Elem: labels.Type.Elem, Dims: []ir.Dim{rows, {Name: "place", Size: 2}}}
	places := w.Concat("place", two, w.Iota(one, rows.Name), w.Reshape(labels, one))
	t := ir.Type{Elem: x.Type.Elem, Dims: []ir.Dim{rows}}
	at := w.Apply(t, `"stablehlo.gather"(`, `) {dimension_numbers = #stablehlo.gather<`+
		`collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 1>, `+
		`slice_sizes = array<i64: 1, 1>}`, x, places)
	out := w.RowLoss(labels, top, total, at)
	return []val{w.Reshape(out[0], op.Out[0].Type), w.Reshape(out[1], op.Out[1].Type)}
}

// scoreRows views logits as [rows, vocab] and labels as [rows]: the layout that the GEMM before
// wrote and the GEMM after reads, so that the gradient can reuse the buffer.
func (w writer) scoreRows(op *ir.Op, in []val) (x, labels val) {
	dim := op.Attrs.Text("dim")
	x = w.Transpose(in[0], append(ir.Names(in[1].Type.Dims), dim))
	rows := ir.Dim{Name: "rows", Size: in[1].Type.Shape().Elements()}
	x = w.Reshape(x, ir.Type{Dims: []ir.Dim{rows, {Name: "width", Size: x.Type.Size(dim)}}})
	return x, w.Reshape(in[1], ir.Type{Dims: []ir.Dim{rows}})
}

// rowsCrossEntropyGrad computes (softmax − onehot) · d on [rows, vocab].
func rowsCrossEntropyGrad(w writer, op *ir.Op, in []val) []val {
	x, labels := w.scoreRows(op, in)
	row := ir.Type{Dims: labels.Type.Dims}
	rows := []val{x, labels, w.Reshape(in[2], row), w.Reshape(in[3], row)}
	wide := w.Convert(x, dtype.F32)
	label := func() val { return w.LabelMask(wide, labels, "width") }
	g := w.LogitsGrad(wide, label, rows, x.Type.Elem)
	order := append(ir.Names(in[1].Type.Dims), op.Attrs.Text("dim"))
	t := ir.Type{Elem: g.Type.Elem, Dims: inOrder(in[0].Type, order)}
	return []val{w.Transpose(w.Reshape(g, t), ir.Names(op.Out[0].Type.Dims))}
}
