package lower_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// hardTanh adds an operation to the table that neither ir, nor eval, nor lower knows: with a
// gradient of its own, or the one that follows from what it is.
func hardTanh(gradient bool) ir.Table {
	clip := func(b *ir.Builder, x *ir.Value) *ir.Value { // relu(x+1) - relu(x-1) - 1
		return b.Shift(b.Sub(b.Relu(b.Shift(x, 1)), b.Relu(b.Shift(x, -1))), -1)
	}
	row := &ir.Row{Lower: func(b *ir.Builder, op *ir.Op) []*ir.Value {
		return []*ir.Value{clip(b, op.In[0])}
	}}
	row.Results = 1
	row.Infer = func(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
		return []ir.Type{op.In[0].Type}, nil
	}
	row.Work = func(*ir.Graph, *ir.Op) ir.Work { return ir.Work{Class: ir.Streaming, Bytes: 7} }
	if gradient {
		row.Gradient = func(d *ir.Differ, op *ir.Op, dy []*ir.Value) []*ir.Value {
			y := d.Use(op.Out[0])
			inside := d.Compare("lt", d.Mul(y, y), d.Fill(y.Type, 1))
			return []*ir.Value{d.Select(inside, dy[0], d.Fill(y.Type, 0))}
		}
	}
	return ir.Operations().With(ir.Table{"aten.hardtanh": row})
}

// An operation of another package's table goes the whole way: text, gradient, interpreter, a loop's
// body, rewriting, work, program.
func TestATableWithAnotherOperation(t *testing.T) {
	if _, ok := ir.Operations()["aten.hardtanh"]; ok {
		t.Fatal("the table of ir was changed")
	}
	typ := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "rows", Size: 5}}}
	x := []float64{-3, -0.6, 0.2, 0.75, 2}
	for _, own := range []bool{false, true} {
		table := hardTanh(own)
		body := table.Builder("body")
		h := body.Input("h", ir.Data, typ, "")
		one, err := body.Graph(body.Op("aten.hardtanh", nil, body.Scale(h, 2))[0])
		if err != nil {
			t.Fatal(err)
		}
		b := table.Builder("outer")
		in := b.Input("x", ir.Param, typ, "")
		y := b.Repeat(2, one, []*ir.Value{b.Op("aten.hardtanh", nil, in)[0]}, nil, nil)[0]
		g, err := b.Graph(b.Sum(y, "rows"))
		if err != nil {
			t.Fatal(err)
		}
		if again, err := table.Parse(g.String()); err != nil || again.String() != g.String() {
			t.Errorf("the text does not come back: %v", err)
		}
		if _, err := ir.Parse(g.String()); err == nil {
			t.Error("the table of ir reads an operation that it does not have")
		}
		if w := g.Work(g.Ops[0]); w.Bytes != 7 {
			t.Errorf("its work is %+v", w)
		}
		if g, err = ir.Rewrite(g, nil); err != nil {
			t.Fatal(err)
		}
		gr, err := ir.Grad(g, ir.GradPlan{})
		if err != nil {
			t.Fatal(err)
		}
		joint, err := gr.Joint()
		if err != nil {
			t.Fatal(err)
		}
		out, err := eval.Run(joint, map[string][]*eval.Array{"x": {{Type: typ, Data: x}}})
		if err != nil {
			t.Fatal(err)
		}
		want := []float64{0, 0, 4, 0, 0} // of x, doubled twice where nothing is clipped
		for i, d := range out[1][0].Data {
			if d != want[i] {
				t.Errorf("own gradient %v: d/dx at %v is %v, not %v", own, x[i], d, want[i])
			}
		}
		text, err := lower.StableHLO(joint, lower.Options{Kernels: kernels.For("cpu")})
		if err != nil || !strings.Contains(text, "stablehlo.maximum") {
			t.Errorf("the program: %v\n%s", err, text)
		}
	}
}
