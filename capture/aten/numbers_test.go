package aten

import (
	"fmt"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/safetensors"
)

// Types are promoted, masks counted, powers and limits taken, and a row of padding left untrained as
// PyTorch does it. testdata/promoted.py has the cases.
func TestNumbersAgreeWithPyTorch(t *testing.T) {
	const at = "../../aten/testdata/numbers" // beside the fixtures of package pt2
	archive, err := pt2.Parse("numbers", unpack(t, at+".pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := safetensors.Parse("numbers", unpack(t, at+".safetensors.gz"))
	if err != nil {
		t.Fatal(err)
	}
	want := reference{set}
	f, err := NewFunction(archive)
	if err != nil {
		t.Fatal(err)
	}
	r, err := f.Read([][]int64{{2, 4}, {2, 4}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	feed := map[string][]float64{InputName(0): want.floats(t, "x"), InputName(1): want.floats(t, "i")}
	f.feed(t, r.Params, feed)
	gr, err := ir.Grad(r.Graph, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	out := evaluate(t, gr.Forward, feed)
	for i, v := range gr.Forward.Results {
		feed[v.Name] = out[i]
	}
	for i, o := range r.Outputs {
		name := fmt.Sprintf("out%02d", i)
		same := slices.Equal(out[o.Result], want.floats(t, name)) // infinity has no distance
		if d := distance(out[o.Result], want.floats(t, name)); !same && !(d < 1e-6) {
			t.Errorf("%s is %v, not %v", name, out[o.Result], want.floats(t, name))
		}
	}
	feed[gr.Seeds[r.Outputs[0].Result]] = []float64{1}
	grad := evaluate(t, gr.Backward, feed)[0]
	if d := distance(grad, want.floats(t, "grad")); !(d < 1e-6) {
		t.Errorf("the gradient is %v, not %v", grad, want.floats(t, "grad"))
	}
}
