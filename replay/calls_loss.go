package replay

import (
	"math"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/kernels/fused"
)

// loss rewrites the call of a loss whose gradient takes the place of the logits: arguments are
// logits, labels and what the gradient is multiplied by; results are the loss, the log-sum-exp and
// the gradient.
func (w *writer) loss(s *site, l fused.Loss) []*value {
	results := s.shape.results()
	if len(s.values) != 3 || len(results) != 3 {
		w.refuse(diag.ReplayCall, "%s has %d operands and %d results", l, len(s.values), len(results))
	}
	for i, v := range s.from {
		if !v.shape.rowMajor() {
			w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
		}
	}
	rows, dims := []int64{int64(l.Rows)}, []int64{int64(l.Rows), int64(l.Cols)}
	x := w.convert(w.reshape(s.values[0], dims...), typeF32)
	labels := w.reshape(s.values[1], rows...)
	real := w.compare("GE", labels, w.fullInt(typeS32, rows, 0))
	none := w.full(typeF32, rows, 0)
	wide := func(v *value) *value { return w.broadcast(v, dims, 0) }
	top := w.reduce(x, "maximum", math.Inf(-1), 1)
	less := w.elementwise("subtract", x, wide(top))
	total := w.reduce(w.elementwise("exponential", less), "add", 0, 1)
	lse := w.elementwise("add", top, w.elementwise("log", total))
	is := w.compare("EQ", w.iota(typeS32, dims, 1), wide(labels))
	at := w.reduce(w.choose(is, x, w.full(typeF32, dims, 0)), "add", 0, 1)
	loss := w.choose(real, w.elementwise("subtract", lse, at), none)
	d := w.choose(real, w.convert(w.reshape(s.values[2], rows...), typeF32), none)
	p := w.elementwise("exponential", w.elementwise("subtract", x, wide(lse)))
	one := w.choose(is, w.full(typeF32, dims, 1), w.full(typeF32, dims, 0))
	grad := w.elementwise("multiply", w.elementwise("subtract", p, one), wide(d))
	out := []*value{loss, lse, grad}
	for i, v := range out {
		out[i] = w.reshape(w.convert(v, results[i].typ), results[i].dims...)
	}
	return out
}
