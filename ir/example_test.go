package ir_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// hardTanh is the row of an operation that clips its argument to [-1, 1].
func hardTanh() *ir.Row {
	row := &ir.Row{}
	row.Results = 1
	row.Infer = func(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
		if len(op.In) != 1 {
			return nil, fmt.Errorf("takes one argument, got %d", len(op.In))
		}
		t := op.In[0].Type
		if t.Elem.Kind() != dtype.Float {
			return nil, fmt.Errorf("takes floats, got %s", t)
		}
		_, err := ir.KeepPlacement(t) // shards are fine, partial sums are not
		return []ir.Type{t}, err
	}
	// What it means: relu(x+1) - relu(x-1) - 1.
	row.Lower = func(b *ir.Builder, op *ir.Op) []*ir.Value {
		x := op.In[0]
		return []*ir.Value{b.Shift(b.Sub(b.Relu(b.Shift(x, 1)), b.Relu(b.Shift(x, -1))), -1)}
	}
	// The gradient passes where nothing was clipped. Forward values are read by d.Use. Without a VJP
	// of its own the operation would have the gradient of what Lower builds.
	row.Gradient = func(d *ir.Differ, op *ir.Op, dy []*ir.Value) []*ir.Value {
		y := d.Use(op.Out[0])
		inside := d.Compare("lt", d.Mul(y, y), d.Fill(y.Type, 1))
		return []*ir.Value{d.Select(inside, dy[0], d.Fill(y.Type, 0))}
	}
	return row
}

// An operation of another package: its shape rule, its meaning, and its gradient.
func ExampleTable_With() {
	table := ir.Operations().With(ir.Table{"my.hardtanh": hardTanh()})

	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "rows", Size: 3}}}
	b := table.Builder("clip")
	x := b.Input("x", ir.Param, t, "")
	y := b.Op("my.hardtanh", nil, b.Scale(x, 2))[0]
	g, err := b.Graph(b.Sum(y, "rows"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(strings.TrimSpace(g.String()))

	gradient, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		log.Fatal(err)
	}
	step, err := gradient.Joint()
	if err != nil {
		log.Fatal(err)
	}
	out, err := eval.Run(step, map[string][]*eval.Array{
		"x": {{Type: t, Data: []float64{-3, 0.25, 2}}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("sum", out[0][0].Data, "gradient", out[1][0].Data)
	// Output:
	// graph clip {
	//   param %x : f32[rows=3]
	//   %scale_1 = scale(%x) by=2.0 : f32[rows=3]
	//   %my.hardtanh_1 = my.hardtanh(%scale_1) : f32[rows=3]
	//   %sum_1 = sum(%my.hardtanh_1) over=["rows"] : f32[]
	//   return %sum_1
	// }
	// sum [0.5] gradient [0 2 0]
}
