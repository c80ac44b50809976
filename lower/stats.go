package lower

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// scaleStats gives the largest byte of each argument, then the sum of each, then how many are not
// zero. Numbers of all devices are joined in two collectives, however many arguments there are.
func scaleStats(w *writer, op *ir.Op, in []val) []val {
	one := ir.Dim{Name: "stat", Size: 1}
	var tops, sums, some []val
	for _, v := range in {
		x := w.convert(v, dtype.S32)
		for _, to := range []struct {
			list *[]val
			of   val
			how  string
		}{
			{&tops, x, "maximum"}, {&sums, x, "add"},
			{&some, w.elementwise("minimum", x, w.constant(x.t, 1)), "add"},
		} {
			r := w.reduce(to.of, to.how, 0, names(x.t)...)
			*to.list = append(*to.list, w.reshape(r, ir.Type{Elem: r.t.Elem, Dims: []ir.Dim{one}}))
		}
	}
	all := func(list []val, how string) val {
		v := list[0]
		if n := int64(len(list)); n > 1 {
			t := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: "stat", Size: n}}}
			v = w.concat("stat", t, list...)
		}
		if len(op.Axes()) == 0 {
			return v
		}
		return w.allReduce(v, how, op.Axes()...)
	}
	return []val{w.concat("stat", op.Out[0].Type, all(tops, "maximum"),
		all(append(sums, some...), "add"))}
}
