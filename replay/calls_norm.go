package replay

import (
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/kernels/rownorm"
)

// A normCall is the call of a norm of rows or of its gradient.
type normCall struct {
	*ownKernel
	rownorm.Norm
	dims []int64
}

// rowNorm rewrites the call of a norm of rows by what it says it computes. The weight's gradient is
// all in the first of its parts.
func (w *writer) rowNorm(s *site, spec string) []*value {
	n, err := rownorm.Parse(spec)
	operands := n.Operands()
	if n.Rounds > 0 {
		operands += 1 + len(n.Into) + len(n.Saved) + len(n.Kept)
	}
	if err != nil || len(s.values) != operands {
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s: %v", spec, err)
	}
	for i, v := range s.from {
		if !v.shape.rowMajor() {
			w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
		}
	}
	k := &normCall{&ownKernel{w, s, n.Stacks, n.Operands()}, n, []int64{int64(n.Rows), int64(n.Cols)}}
	var out []*value
	if n.Grads > 0 {
		out = k.gradient()
	} else {
		out = k.norm()
	}
	kept := slices.Clone(out)
	out = k.stacked(out)
	for i, result := range n.Kept {
		stack := k.operands + 1 + len(n.Into) + len(n.Saved) + i
		out = append(out, k.updated(stack, kept[result]))
	}
	results := s.shape.results()
	if len(out) != len(results) {
		w.refuse(diag.ReplayCall, "%s has %d results", spec, len(results))
	}
	for i, v := range out {
		out[i] = w.reshape(v, results[i].dims...)
	}
	return out
}

// matrix is an operand in float32.
func (k *normCall) matrix(i int) *value {
	x := k.values[i]
	if slices.Contains(k.ownKernel.From, i) {
		x = k.part(x, k.dims...)
	}
	return k.convert(k.reshape(x, k.dims...), typeF32)
}

// weight is a norm's weight, for each element.
func (k *normCall) weight(i int) *value {
	x := k.convert(k.reshape(k.values[i], k.dims[1]), typeF32)
	if k.Shift != 0 {
		x = k.elementwise("add", x, k.full(typeF32, k.dims[1:], k.Shift))
	}
	return k.broadcast(x, k.dims, 1)
}

// mean is the mean of rows.
func (k *normCall) mean(x *value) *value {
	sum := k.reduce(x, "add", 0, 1)
	return k.elementwise("multiply", sum, k.full(typeF32, k.dims[:1], 1/float64(k.Cols)))
}

// inverse is 1/√(mean(x²) + ε) of rows.
func (k *normCall) inverse(x *value) *value {
	mean := k.mean(k.elementwise("multiply", x, x))
	return k.elementwise("rsqrt", k.elementwise("add", mean, k.full(typeF32, k.dims[:1], k.Eps)))
}

func (k *normCall) norm() (out []*value) {
	s := k.matrix(0)
	if k.Added {
		sum := k.convert(k.elementwise("add", s, k.matrix(1)), typeBF16)
		out, s = append(out, sum), k.convert(sum, typeF32)
	}
	r := k.inverse(s)
	if k.Normed || k.Codes {
		y := k.elementwise("multiply", s, k.broadcast(r, k.dims, 0))
		y = k.elementwise("multiply", y, k.weight(k.Operands()-1))
		if y = k.convert(y, typeBF16); k.Codes {
			out = append(out, k.mxfp8(y)...)
		} else {
			out = append(out, y)
		}
	}
	if k.Stats {
		out = append(out, r)
	}
	return out
}

func (k *normCall) gradient() []*value {
	x, dy := k.matrix(0), k.matrix(2)
	for i := 3; i < 2+k.Grads; i++ {
		dy = k.elementwise("add", dy, k.matrix(i))
	}
	r := k.broadcast(k.inverse(x), k.dims, 0)
	h, g := k.elementwise("multiply", x, r), k.elementwise("multiply", dy, k.weight(1))
	mean := k.broadcast(k.mean(k.elementwise("multiply", g, h)), k.dims, 0)
	dx := k.elementwise("subtract", g, k.elementwise("multiply", h, mean))
	dx = k.elementwise("multiply", dx, r)
	if k.Residual {
		dx = k.elementwise("add", dx, k.matrix(2+k.Grads))
	}
	parts := []int64{int64(k.Parts()), k.dims[1]}
	dw := k.broadcast(k.reduce(k.elementwise("multiply", dy, h), "add", 0, 0), parts, 1)
	first := k.compare("EQ", k.iota(typeS32, parts, 0), k.fullInt(typeS32, parts, 0))
	dw = k.choose(first, dw, k.full(typeF32, parts, 0))
	return []*value{k.convert(dx, typeBF16), dw}
}
