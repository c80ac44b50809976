package ir_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/lower"
)

type (
	lowering = func(b *ir.Builder, op *ir.Op) []*ir.Value
	vjp      = func(d *ir.Differ, op *ir.Op, dy []*ir.Value) []*ir.Value
)

// Nonsense from the row of a custom operation is an error that names the operation. It was a panic,
// or a gradient of another shape than its parameter.
func TestNonsenseFromCustomOperations(t *testing.T) {
	infer := func(types ...ir.Type) func(*ir.Graph, *ir.Op) ([]ir.Type, error) {
		return func(*ir.Graph, *ir.Op) ([]ir.Type, error) { return types, nil }
	}
	huge := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "rows", Size: 1 << 40}, {Name: "b", Size: 1 << 40}}}
	for name, row := range map[string]struct {
		change func(r *ir.Row)
		says   string
	}{
		"sound":     {func(*ir.Row) {}, ""},
		"no infer":  {func(r *ir.Row) { r.Infer = nil }, "has no shape rule"},
		"two types": {func(r *ir.Row) { r.Infer = infer(rows3, rows3) }, "2 types for 1 results"},
		"huge":      {func(r *ir.Row) { r.Infer = infer(huge) }, "more than 2^56 elements"},
		"no lower":  {func(r *ir.Row) { r.Lower = nil }, "the interpreter does not know"},
		"lower none": {lowers(func(*ir.Builder, *ir.Op) []*ir.Value { return nil }),
			"0 values for 1 results"},
		"lower nil": {lowers(func(*ir.Builder, *ir.Op) []*ir.Value { return []*ir.Value{nil} }),
			"nil for result 0"},
		"lower two": {lowers(func(b *ir.Builder, op *ir.Op) []*ir.Value {
			return []*ir.Value{b.Neg(op.In[0]), b.Neg(op.In[0])}
		}), "2 values for 1 results"},
		"lower itself": {lowers(func(_ *ir.Builder, op *ir.Op) []*ir.Value { return op.Out }), "own result"},
		"lower type": {lowers(func(b *ir.Builder, op *ir.Op) []*ir.Value {
			return []*ir.Value{b.Convert(op.In[0], dtype.BF16)}
		}), "bf16[rows=3] for result 0, which Infer says is f32[rows=3]"},
		"no gradients": {gradient(func(*ir.Differ, *ir.Op, []*ir.Value) []*ir.Value { return nil }),
			"0 values for 1 arguments"},
		"two gradients": {gradient(func(_ *ir.Differ, _ *ir.Op, dy []*ir.Value) []*ir.Value {
			return []*ir.Value{dy[0], dy[0]}
		}), "2 values for 1 arguments"},
		"gradient's type": {gradient(func(d *ir.Differ, _ *ir.Op, dy []*ir.Value) []*ir.Value {
			return []*ir.Value{d.Convert(dy[0], dtype.BF16)}
		}), "is bf16[rows=3] for argument 0"},
		"gradient's shape": {gradient(func(d *ir.Differ, _ *ir.Op, dy []*ir.Value) []*ir.Value {
			return []*ir.Value{d.Sum(dy[0], "rows")}
		}), "is f32[] for argument 0"},
		"nothing flows": {gradient(func(*ir.Differ, *ir.Op, []*ir.Value) []*ir.Value {
			return []*ir.Value{nil}
		}), ""},
	} {
		r := &ir.Row{Kind: ir.Kind{Results: 1, Infer: infer(rows3)}}
		r.Lower = func(b *ir.Builder, op *ir.Op) []*ir.Value { return []*ir.Value{b.Scale(op.In[0], 2)} }
		row.change(r)
		err := runCustom(r)
		switch {
		case row.says == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case row.says != "" && (err == nil || !strings.Contains(err.Error(), row.says) ||
			!strings.Contains(err.Error(), "my.x") || !errors.Is(err, diag.GraphInvalid)):
			t.Errorf("%s: %v, not %q", name, err, row.says)
		}
	}
}

func lowers(f lowering) func(*ir.Row) { return func(r *ir.Row) { r.Lower = f } }
func gradient(f vjp) func(*ir.Row)    { return func(r *ir.Row) { r.Gradient = f } }

// runCustom builds, runs, lowers and differentiates a graph of one custom operation.
func runCustom(row *ir.Row) error {
	b := ir.Operations().With(ir.Table{"my.x": row}).Builder("g")
	x := b.Input("x", ir.Param, rows3, "")
	g, err := b.Graph(b.Sum(b.Op("my.x", nil, x)[0], "rows"))
	if err != nil {
		return err
	}
	in := map[string][]*eval.Array{"x": {{Type: rows3, Data: []float64{-3, 0.25, 2}}}}
	_, err = eval.Run(g, in)
	if _, lowered := lower.StableHLO(g, lower.Options{}); err == nil {
		err = lowered
	}
	if _, grad := ir.Grad(g, ir.GradPlan{}); err == nil {
		err = grad
	}
	return err
}

// What the interpreter is given wrong has a code.
func TestEvalRefuses(t *testing.T) {
	b := ir.NewBuilder("g")
	g, err := b.Graph(b.Neg(b.Input("x", ir.Data, rows3, "")))
	if err != nil {
		t.Fatal(err)
	}
	for name, list := range map[string][]*eval.Array{
		"none": nil, "nil": {nil}, "short": {{Type: rows3, Data: []float64{1}}},
	} {
		if _, err := eval.Run(g, map[string][]*eval.Array{"x": list}); !errors.Is(err, diag.BadInput) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
