package rewrite

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// normed is a block in bfloat16, with its gradient.
func (c block) normed(t *testing.T) *ir.Graph {
	t.Helper()
	return c.joint(t, "")
}

// normBound is for results in bfloat16 whose sums of gradients are no longer rounded each.
const normBound = 5e-3

// Norms and their gradients become kernels of rows, and the interpreter sees the same numbers: but
// for what rounding to bfloat16 between sums did.
func TestNormsOfRows(t *testing.T) {
	var text strings.Builder
	for _, c := range blocks() {
		g := c.normed(t)
		want, before := run(t, g), size(g)
		s := kernels.For("sm_100")
		for _, pass := range []func(*ir.Graph) error{normRows(s), normGradients(s)} {
			if err := pass(g); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		fmt.Fprintf(&text, "%s: %d operations, then %d\n", c.name, before, size(g))
		each(g, func(op *ir.Op) {
			if op.Kind == NormRows || op.Kind == NormGrad {
				n, why := NormOf(op)
				fmt.Fprintf(&text, "\t%s of %d: %s; %s\n", op.Kind, len(op.In), n, why)
			}
		})
		for _, choice := range s.Choices() {
			fmt.Fprintf(&text, "\t%s stays %s: %s\n", choice.Kind, choice.Kernel, choice.Why)
		}
		for i, list := range run(t, g) {
			var off, all float64
			for k, x := range list[0].Data {
				y := want[i][0].Data[k]
				off, all = off+(x-y)*(x-y), all+y*y
			}
			if off > normBound*normBound*all {
				t.Errorf("%s: result %s is off by %.2g", c.name, g.Results[i], math.Sqrt(off/all))
			}
		}
	}
	golden.Compare(t, "testdata/norms.txt", []byte(text.String()))
}

// A kernel of rows is not taken where rows are too long, what is normalized is no bfloat16, the
// kernel was refused, or another target runs the program.
func TestNormsThatStay(t *testing.T) {
	graph := func(elem dtype.DType, cols int64, wrt ...string) *ir.Graph {
		b, d := ir.NewBuilder("norm"), irtest.D
		x := b.Input("x", ir.Data, ir.Type{Elem: elem, Dims: []ir.Dim{d("seq", 4096), d("embed", cols)}}, "")
		w := b.Input("w", ir.Data, ir.Type{Elem: elem, Dims: []ir.Dim{d("embed", cols)}}, "")
		y := b.Convert(rms(b, b.Add(x, b.Scale(x, 2)), w), dtype.F32)
		g, err := b.Graph(b.Sum(b.Mul(y, y), "seq", "embed"))
		if err != nil {
			t.Fatal(err)
		}
		grad, err := ir.Grad(g, ir.GradPlan{Wrt: wrt})
		if err != nil {
			t.Fatal(err)
		}
		if g, err = grad.Joint(); err != nil {
			t.Fatal(err)
		}
		return g
	}
	for _, c := range []struct {
		s           *kernels.Selector
		elem        dtype.DType
		cols        int64
		rows, grads int
	}{
		{kernels.For("sm_100"), dtype.BF16, 256, 1, 1},
		{kernels.For("sm_120"), dtype.BF16, 8192, 1, 1},
		{kernels.For("sm_100"), dtype.BF16, 8200, 1, 0},
		{kernels.For("sm_100"), dtype.BF16, 16392, 0, 0},
		{kernels.For("sm_100"), dtype.F32, 256, 0, 0},
		{kernels.For("sm_90"), dtype.BF16, 256, 0, 0},
		{kernels.For("sm_100").With(kernels.Options{Without: true}), dtype.BF16, 256, 0, 0},
		{kernels.For("sm_100").With(kernels.Options{Refused: []string{"rms_norm"}}), dtype.BF16, 256, 0, 1},
		{kernels.For("sm_100").With(kernels.Options{Refused: []string{"rms_norm_grad"}}), dtype.BF16,
			256, 1, 0},
	} {
		g, err := Apply(graph(c.elem, c.cols, "x", "w"), c.s, nil)
		if err != nil {
			t.Fatal(err)
		}
		rows := count(g, func(op *ir.Op) bool { return op.Kind == NormRows })
		grads := count(g, func(op *ir.Op) bool { return op.Kind == NormGrad })
		if rows != c.rows || grads != c.grads {
			t.Errorf("%s, %s[%d]: %d norms and %d gradients; %v", c.s.Arch(), c.elem, c.cols, rows, grads,
				c.s.Choices())
		}
	}
}

// Weights that are frozen have no gradient: the kernel is taken, and that result of it is not read.
func TestNormsOfFrozenWeights(t *testing.T) {
	grads := func(g *ir.Graph) int {
		if err := normGradients(kernels.For("sm_100"))(g); err != nil {
			t.Fatal(err)
		}
		return count(g, func(op *ir.Op) bool { return op.Kind == NormGrad })
	}
	for _, c := range blocks() {
		g, want := c.normed(t), grads(c.normed(t)) // none of layer norms
		// Gradients of norms' weights are no results.
		g.Results = slices.DeleteFunc(g.Results, func(v *ir.Value) bool {
			return len(v.Type.Dims) == 1 && v.Type.Dims[0].Name == "embed"
		})
		for left := len(g.Ops) + 1; len(g.Ops) < left; { // and nothing computes them
			left = len(g.Ops)
			by := readers(g)
			g.Ops = slices.DeleteFunc(g.Ops, func(op *ir.Op) bool {
				return sole(by, op, func(*ir.Op) bool { return false })
			})
		}
		if n := grads(g); n != want {
			t.Errorf("%s: %d gradients of rows, of %d with trained weights", c.name, n, want)
		}
		run(t, g)
	}
}
