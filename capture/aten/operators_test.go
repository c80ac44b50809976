package aten

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/safetensors"
)

// Operators give PyTorch's results and gradients, also at kinks, among equal elements, and for NaN
// and infinity. testdata/cases.py has the cases, one program of all.
func TestOperatorsAgreeWithPyTorch(t *testing.T) {
	const at = "../../aten/testdata/operators" // beside the fixtures of package pt2
	archive, err := pt2.Parse("operators", unpack(t, at+".pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := safetensors.Parse("operators", unpack(t, at+".safetensors.gz"))
	if err != nil {
		t.Fatal(err)
	}
	want := reference{set}
	f, err := NewFunction(archive)
	if err != nil {
		t.Fatal(err)
	}
	feed, sizes := map[string][]float64{}, [][]int64{}
	for i := range f.specs {
		shape, err := want.Shape(InputName(i))
		if err != nil {
			t.Fatal(err)
		}
		feed[InputName(i)] = want.floats(t, InputName(i))
		sizes = append(sizes, shape.Dims)
	}
	r, err := f.Read(sizes, nil)
	if err != nil {
		t.Fatal(err)
	}
	f.feed(t, r.Params, feed)
	gr, err := ir.Grad(r.Graph, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	out := evaluate(t, gr.Forward, feed)
	for i, v := range gr.Forward.Results {
		feed[v.Name] = out[i]
	}
	for i, name := range results(want.Names()) {
		o := r.Outputs[i]
		have, seed := out[o.Result], feed[gr.Seeds[o.Result]]
		if w := want.floats(t, name); !agree(have, w, 2e-6) {
			t.Errorf("%s is %v, not %v", name, have, w)
		}
		if seed == nil {
			seed = make([]float64, len(have))
		}
		for k := range seed { // a result may be returned twice
			seed[k] += float64(k%7-3) / 4
		}
		feed[gr.Seeds[o.Result]] = seed
	}
	grads := evaluate(t, gr.Backward, feed)
	for i, p := range r.Params {
		name := "grad." + p.Source
		if !slices.Contains(want.Names(), name) { // of masks and places alone
			continue
		}
		if w := want.floats(t, name); !agree(grads[i], w, 1e-5) {
			t.Errorf("%s is %v, not %v", name, grads[i], w)
		}
	}
}

// results are the names of outputs, in their order.
func results(names []string) []string {
	names = slices.DeleteFunc(slices.Clone(names), func(n string) bool {
		return !strings.HasPrefix(n, "out.")
	})
	slices.Sort(names)
	return names
}

// agree reports whether numbers are equal within a bound, NaN being equal to NaN.
func agree(have, want []float64, bound float64) bool {
	for i, w := range want {
		h := have[i]
		same := h == w || math.IsNaN(h) && math.IsNaN(w)
		if !same && !(math.Abs(h-w) <= bound*(1+math.Abs(w))) {
			return false
		}
	}
	return len(have) == len(want)
}
