package ir_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

var rows3 = ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "rows", Size: 3}}}

// A mistake is an error of the builder, and not a panic of whoever indexes the results.
func TestOpAfterAnError(t *testing.T) {
	for name, row := range map[string]struct {
		op   func(b *ir.Builder, x *ir.Value) *ir.Value
		want string
	}{
		"kind": {func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Op("typo", nil, x)[0] },
			`there is no operation "typo"`},
		"arguments": {func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Op("attention", nil, x)[1] },
			"got 1 arguments"},
		"body": {func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Op("repeat", nil, x)[2] },
			"0 rounds"},
		"attribute": {func(b *ir.Builder, x *ir.Value) *ir.Value {
			return b.Op("sum", map[string]any{"over": []ir.Dim{{Name: "rows", Size: 3}}}, x)[0]
		}, "attribute over is a []ir.Dim"},
		"nil": {func(b *ir.Builder, _ *ir.Value) *ir.Value { return b.Op("neg", nil, nil)[0] },
			"argument 0 is nil"},
	} {
		b := ir.NewBuilder("bad")
		v := row.op(b, b.Input("x", ir.Data, rows3, ""))
		if v == nil || len(v.Type.Dims) != 0 {
			t.Errorf("%s: a dead value is %v", name, v)
		}
		b.Mul(v, v) // does nothing
		if _, err := b.Graph(v); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: the error is %v, want %q", name, err, row.want)
		}
	}
}

// Attributes that a pass sets are verified too.
func TestVerifyRejectsAnAttributeOfAnotherType(t *testing.T) {
	b := ir.NewBuilder("g")
	g, err := b.Graph(b.Scale(b.Input("x", ir.Data, rows3, ""), 2))
	if err != nil {
		t.Fatal(err)
	}
	g.Ops[0].Attrs = g.Ops[0].Attrs.With("why", 'x')
	if err := g.Verify(); err == nil || !strings.Contains(err.Error(), "attribute why is a int32") {
		t.Errorf("the error is %v", err)
	}
}

// The table that a caller gets is a copy.
func TestOperationsIsACopy(t *testing.T) {
	delete(ir.Operations(), "add")
	if ir.Operations()["add"] == nil {
		t.Error("the table of the package was changed")
	}
}

// A VJP can build operations of the table that its own operation is from.
func TestVJPOfATableOperation(t *testing.T) {
	double := func(b *ir.Builder, op *ir.Op) []*ir.Value { return []*ir.Value{b.Scale(op.In[0], 2)} }
	infer := func(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) { return []ir.Type{op.In[0].Type}, nil }
	grad := &ir.Row{Kind: ir.Kind{Results: 1, Infer: infer}, Lower: double}
	own := &ir.Row{Kind: ir.Kind{Results: 1, Infer: infer}, Lower: double}
	own.Gradient = func(d *ir.Differ, _ *ir.Op, dy []*ir.Value) []*ir.Value {
		return d.Op("my.double_grad", nil, dy[0])
	}
	table := ir.Operations().With(ir.Table{"my.double": own, "my.double_grad": grad})
	b := table.Builder("g")
	x := b.Input("x", ir.Param, rows3, "")
	g, err := b.Graph(b.Sum(b.Op("my.double", nil, x)[0], "rows"))
	if err != nil {
		t.Fatal(err)
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(gr.Backward.String(), "my.double_grad(") {
		t.Errorf("the backward graph is\n%s", gr.Backward)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	out, err := eval.Run(joint, map[string][]*eval.Array{
		"x": {{Type: rows3, Data: []float64{1, 2, 3}}}})
	if err != nil || out[1][0].Data[2] != 2 {
		t.Errorf("gradient %v, %v", out, err)
	}
}
