package ir_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// A graph without its loops gives the same value, bit for bit, and the gradient of every layer is
// the layer of the stack's gradient.
func TestUnrolledEqualsRepeated(t *testing.T) {
	const layers = 3
	g := tiny(t, layers)
	flat, err := ir.Unroll(g)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(flat.String(), "repeat") {
		t.Fatalf("a loop is left:\n%s", flat)
	}
	inputs := fill(g, 4)
	split := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := inputs[v.Name][0]
		if len(v.Type.Dims) == 0 || v.Type.Dims[0].Name != ir.Layer {
			split[v.Name] = []*eval.Array{a}
			continue
		}
		n := len(a.Data) / layers
		for i := range layers {
			one := eval.New(ir.Type{Elem: v.Type.Elem, Dims: v.Type.Dims[1:]})
			copy(one.Data, a.Data[i*n:])
			split[ir.LayerName(v.Name, i)] = []*eval.Array{one}
		}
	}
	if got, want := value(t, flat, split), value(t, g, inputs); got != want {
		t.Errorf("the value is %v, with loops %v", got, want)
	}
	want := map[string][]float64{}
	for i, a := range gradients(t, g, inputs) {
		v := g.Params()[i]
		if v.Type.Dims[0].Name != ir.Layer {
			want[v.Name] = a.Data
			continue
		}
		n := len(a.Data) / layers
		for k := range layers {
			want[ir.LayerName(v.Name, k)] = a.Data[k*n : (k+1)*n]
		}
	}
	for i, a := range gradients(t, flat, split) {
		name := flat.Params()[i].Name
		for k, x := range a.Data {
			// A shared parameter's gradient is summed over the layers in another order.
			if d := x - want[name][k]; d > 1e-12 || d < -1e-12 {
				t.Errorf("d/d%s[%d] is %v, with loops %v", name, k, x, want[name][k])
			}
		}
	}
}

// What cannot be unrolled is refused with its reason.
func TestUnrollRefuses(t *testing.T) {
	gr, err := ir.Grad(tiny(t, 2), ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ir.Unroll(gr.Forward); err == nil || !strings.Contains(err.Error(), "stack") {
		t.Errorf("a repeat that stacks up residuals: %v", err)
	}
}
