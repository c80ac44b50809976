package lower

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// scaleStats gives the largest byte of each argument, then the sum of each, then how many are not
// zero.
func scaleStats(w *writer, op *ir.Op, in []val) []val {
	var tops, sums, some []val
	for _, v := range in {
		x := w.convert(v, dtype.S32)
		each := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: "stat", Size: x.t.Told()}}}
		over := names(x.t)
		if each.Dims[0].Size > 1 {
			over = over[1:]
		}
		for _, to := range []struct {
			list *[]val
			of   val
			how  string
		}{
			{&tops, x, "maximum"}, {&sums, x, "add"},
			{&some, w.elementwise("minimum", x, w.constant(x.t, 1)), "add"},
		} {
			*to.list = append(*to.list, w.reshape(w.reduce(to.of, to.how, 0, over...), each))
		}
	}
	return []val{w.concat("stat", op.Out[0].Type, slices.Concat(tops, sums, some)...)}
}

// joinStats takes two collectives, however many products report.
func joinStats(w *writer, op *ir.Op, in []val) []val {
	top, sum := in[0], in[0]
	if len(op.Axes()) > 0 {
		top = w.allReduce(in[0], "maximum", op.Axes()...)
		sum = w.allReduce(in[0], "add", op.Axes()...)
	}
	return []val{w.concat("stat", op.Out[0].Type, top, sum)}
}
