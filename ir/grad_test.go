package ir_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// Tolerance of a central difference in float64 with a step of 1e-5: the truncation is about 1e-10
// of the third derivative, the cancellation about 1e-11 of the value.
const differenceBound = 1e-6

// Every operation's gradient is held to central differences of the interpreter, over random shapes.
func TestGradientsAgainstDifferences(t *testing.T) {
	for _, p := range irtest.Probes {
		t.Run(p.Name, func(t *testing.T) {
			for seed := range uint64(20) {
				checkGradient(t, p, seed)
			}
		})
	}
}

func checkGradient(t *testing.T, p irtest.Probe, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 7))
	b := ir.NewBuilder("probe")
	inputs := map[string][]*eval.Array{}
	in := func(name string, typ ir.Type) *ir.Value {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = r.NormFloat64()
			if p.Positive {
				a.Data[i] = 1.3 + 0.5*math.Abs(a.Data[i])
			}
		}
		inputs[name] = []*eval.Array{a}
		return b.Input(name, ir.Param, typ, "")
	}
	ids := func(name string, typ ir.Type, below int64) *ir.Value {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = float64(r.Int64N(below))
		}
		inputs[name] = []*eval.Array{a}
		return b.Input(name, ir.Data, typ, "")
	}
	y := p.Build(r, b, irtest.Maker{In: in, IDs: ids})
	// A weighted sum of the result, so that every element's gradient differs.
	weights := b.Input("weights", ir.Data, y.Type, "")
	g, err := b.Graph(b.Sum(b.Mul(y, weights), names(y.Type)...))
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	wa := eval.New(weights.Type)
	for i := range wa.Data {
		wa.Data[i] = r.NormFloat64()
	}
	inputs["weights"] = []*eval.Array{wa}
	if again, err := ir.Parse(g.String()); err != nil || again.String() != g.String() {
		t.Fatalf("seed %d: the text does not come back: %v\n%s", seed, err, g)
	}
	differences(t, g, inputs, gradients(t, g, inputs), fmt.Sprintf("seed %d\n%s", seed, g))
}

// differences holds gradients to what the value does when an element moves.
func differences(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array, grads []*eval.Array,
	what string) {
	t.Helper()
	for i, v := range g.Params() {
		data := inputs[v.Name][0].Data
		for k := range data {
			const h = 1e-5
			old := data[k]
			data[k] = old + h
			up := value(t, g, inputs)
			data[k] = old - h
			down := value(t, g, inputs)
			data[k] = old
			want := (up - down) / (2 * h)
			if got := grads[i].Data[k]; math.Abs(got-want) > differenceBound*(1+math.Abs(want)) {
				t.Fatalf("d/d%s[%d] is %v, the difference says %v: %s", v.Name, k, got, want, what)
			}
		}
	}
}

func names(t ir.Type) []string {
	var list []string
	for _, d := range t.Dims {
		list = append(list, d.Name)
	}
	return list
}

func value(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array) float64 {
	t.Helper()
	out, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	return out[0][0].Data[0]
}

// gradients runs forward, hands the residuals over by name, and runs backward.
func gradients(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array, recompute ...ir.Tag) []*eval.Array {
	t.Helper()
	gr, err := ir.Grad(g, ir.GradPlan{Recompute: recompute})
	if err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	kept, err := eval.Run(gr.Forward, inputs)
	if err != nil {
		t.Fatal(err)
	}
	given := map[string][]*eval.Array{}
	maps.Copy(given, inputs)
	for i, v := range gr.Forward.Results {
		given[v.Name] = kept[i]
	}
	for k, v := range g.Results {
		one := eval.New(v.Type)
		for i := range one.Data {
			one.Data[i] = 1
		}
		given[gr.Seeds[k]] = []*eval.Array{one}
	}
	out, err := eval.Run(gr.Backward, given)
	if err != nil {
		t.Fatalf("%v\n%s", err, gr.Backward)
	}
	list := make([]*eval.Array, len(out))
	for i := range out {
		list[i] = out[i][0]
	}
	return list
}
