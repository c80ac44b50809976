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
	"github.com/deepwell/deepwell/kernels/fused"
)

// head is a linear layer and its loss with the gradient, whose logits are in a type.
func head(t *testing.T, elem dtype.DType, loss func(b *ir.Builder, logits, labels,
	share *ir.Value) *ir.Value) *ir.Graph {
	t.Helper()
	b, d := ir.NewBuilder("head"), irtest.D
	rows := []ir.Dim{d("batch", 2), d("seq", 3)}
	x := b.Input("x", ir.Data, ir.Type{Elem: elem, Dims: append(slices.Clone(rows), d("embed", 8))}, "")
	w := b.Input("w", ir.Data, ir.Type{Elem: elem, Dims: []ir.Dim{d("vocab", 512), d("embed", 8)}}, "")
	labels := b.Input("labels", ir.Data, ir.Type{Elem: dtype.S32, Dims: rows}, "")
	share := b.Input("share", ir.Data, ir.Type{Elem: dtype.F32}, "")
	g, err := b.Graph(loss(b, b.Linear(x, w), labels, share))
	if err != nil {
		t.Fatal(err)
	}
	gr, err := ir.Grad(g, ir.GradPlan{Wrt: []string{"x", "w"}})
	if err != nil {
		t.Fatal(err)
	}
	if g, err = gr.Joint(); err != nil {
		t.Fatal(err)
	}
	return g
}

func meanLoss(b *ir.Builder, logits, labels, share *ir.Value) *ir.Value {
	return b.Mul(b.Sum(b.CrossEntropy(logits, labels, "vocab"), "batch", "seq"), share)
}

// A loss and its gradient become one operation, and the numbers are the same.
func TestLossInPlace(t *testing.T) {
	g := head(t, dtype.BF16, meanLoss)
	want := run(t, g)
	before := g.String()
	s := kernels.For("sm_100")
	if err := lossInPlace(s)(g); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "testdata/loss.txt", []byte("before\n"+before+"\nafter\n"+g.String()))
	for i, list := range run(t, g) {
		for k, x := range list[0].Data {
			if y := want[i][0].Data[k]; x != y && !(math.IsNaN(x) && math.IsNaN(y)) {
				t.Fatalf("result %s: element %d is %g, want %g", g.Results[i], k, x, y)
			}
		}
	}
}

// Where it does not apply, the plain form stays, with a reason.
func TestLossesThatAreNotInPlace(t *testing.T) {
	squared := func(b *ir.Builder, logits, labels, share *ir.Value) *ir.Value {
		l := b.CrossEntropy(logits, labels, "vocab")
		return b.Mul(b.Sum(b.Mul(l, l), "batch", "seq"), share)
	}
	capped := func(b *ir.Builder, logits, labels, share *ir.Value) *ir.Value {
		sum := b.Sum(b.Convert(logits, dtype.F32), "vocab", "batch", "seq")
		return b.Add(meanLoss(b, logits, labels, share), b.Mul(sum, share))
	}
	refused := kernels.For("sm_100").With(kernels.Options{Refused: []string{fused.Loss{}.Key()}})
	for _, c := range []struct {
		name, why string
		s         *kernels.Selector
		elem      dtype.DType
		loss      func(b *ir.Builder, logits, labels, share *ir.Value) *ir.Value
	}{
		{"its square", "comes after the loss", kernels.For("sm_100"), dtype.BF16, squared},
		{"logits that others read", "others read the logits", kernels.For("sm_100"), dtype.BF16, capped},
		{"float32", "not f32", kernels.For("sm_100"), dtype.F32, meanLoss},
		{"refused", "differs on a GPU", refused, dtype.BF16, meanLoss},
		{"Hopper", "", kernels.For("sm_90"), dtype.BF16, meanLoss},
	} {
		g := head(t, c.elem, c.loss)
		if err := lossInPlace(c.s)(g); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if n := count(g, func(op *ir.Op) bool { return op.Kind == LossInPlace }); n != 0 {
			t.Errorf("%s: %d losses in place", c.name, n)
		}
		if got := fmt.Sprint(c.s.Choices()); !strings.Contains(got, c.why) || (c.why == "") != (got == "[]") {
			t.Errorf("%s: %s", c.name, got)
		}
	}
}

// Devices that share a vocabulary keep the plain form.
func TestShardedLoss(t *testing.T) {
	if why, ok := kernels.For("sm_100").Losses(kernels.Loss{Rows: 8, Cols: 512, Elem: dtype.BF16,
		Labels: dtype.S32, Sharded: true}); ok || !strings.Contains(why, "share the vocabulary") {
		t.Errorf("%v, %s", ok, why)
	}
}
