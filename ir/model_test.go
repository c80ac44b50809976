package ir_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

func tiny(t *testing.T, layers int64) *ir.Graph {
	t.Helper()
	g, err := irtest.Tiny(layers)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// fill gives every input of a graph numbers; whole ones stay below 5.
func fill(g *ir.Graph, seed uint64) map[string][]*eval.Array {
	r := rand.New(rand.NewPCG(seed, 3))
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			if a.Data[i] = 0.6 * r.NormFloat64(); v.Role == ir.Data {
				a.Data[i] = float64(r.IntN(5))
			}
		}
		inputs[v.Name] = []*eval.Array{a}
	}
	return inputs
}

func TestGradientOfARepeat(t *testing.T) {
	for _, recompute := range [][]ir.Tag{nil, {ir.Attn}, {ir.MLP, ir.Norm}, {ir.Norm, ir.Attn, ir.MLP}} {
		g := tiny(t, 3)
		inputs := fill(g, 1)
		grads := gradients(t, g, inputs, recompute...)
		differences(t, g, inputs, grads, fmt.Sprintf("recompute %v", recompute))
	}
}

// What is recomputed is not saved.
func TestRecomputationKeepsLess(t *testing.T) {
	kept := func(tags ...ir.Tag) int64 {
		gr, err := ir.Grad(tiny(t, 3), ir.GradPlan{Recompute: tags})
		if err != nil {
			t.Fatal(err)
		}
		n := int64(0)
		for _, v := range gr.Forward.Results[1:] {
			n += v.Type.Shape().Bytes()
		}
		return n
	}
	all, attn, both := kept(), kept(ir.Attn), kept(ir.Attn, ir.MLP, ir.Norm)
	if both >= attn || attn >= all {
		t.Errorf("kept %d bytes, %d without attention, %d without all", all, attn, both)
	}
}

// 126 layers are as many lines as 3, and the text comes back.
func TestDepthIsFree(t *testing.T) {
	a, b := tiny(t, 3).String(), tiny(t, 126).String()
	if strings.Count(a, "\n") != strings.Count(b, "\n") {
		t.Error("the text grows with the number of layers")
	}
	gr, err := ir.Grad(tiny(t, 126), ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range []*ir.Graph{tiny(t, 126), gr.Forward, gr.Backward} {
		again, err := ir.Parse(g.String())
		if err != nil {
			t.Fatalf("%v\n%s", err, g)
		}
		if again.String() != g.String() {
			t.Errorf("the text does not come back:\n%s", g)
		}
	}
}

// The gradient of the data, then the gradient of the parameters, give what both together give; the
// first half computes no gradient of a parameter.
func TestSplitGradient(t *testing.T) {
	for _, recompute := range [][]ir.Tag{nil, {ir.Norm, ir.Attn, ir.MLP}} {
		g := stageOf(t, 3)
		inputs := fill(g, 4)
		for i := range inputs["x"][0].Data {
			inputs["x"][0].Data[i] *= 0.1
		}
		var wrt []string
		for _, v := range g.Inputs {
			if v.Name != "pos" {
				wrt = append(wrt, v.Name)
			}
		}
		gr, err := ir.Grad(g, ir.GradPlan{Wrt: wrt, Recompute: recompute})
		if err != nil {
			t.Fatal(err)
		}
		given := map[string][]*eval.Array{}
		maps.Copy(given, inputs)
		kept, err := eval.Run(gr.Forward, inputs)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range gr.Forward.Results {
			given[v.Name] = kept[i]
		}
		seed := eval.New(g.Results[0].Type)
		for i := range seed.Data {
			seed.Data[i] = float64(i%3) - 0.7
		}
		given[gr.Seeds[0]] = []*eval.Array{seed}
		want, err := eval.Run(gr.Backward, given)
		if err != nil {
			t.Fatal(err)
		}
		first, second, err := gr.Split()
		if err != nil {
			t.Fatalf("%v\n%s", err, gr.Backward)
		}
		for _, op := range allOps(first) {
			if op.Kind == "linear_dw" {
				t.Errorf("the first half computes the gradient of a weight")
			}
		}
		early, err := eval.Run(first, given)
		if err != nil {
			t.Fatalf("%v\n%s", err, first)
		}
		for i, v := range first.Results {
			given[v.Name] = early[i]
		}
		late, err := eval.Run(second, given)
		if err != nil {
			t.Fatalf("%v\n%s", err, second)
		}
		got := append(early[:1:1], late...)
		for i, v := range gr.Wrt {
			for k, w := range want[i][0].Data {
				if math.Abs(got[i][0].Data[k]-w) > 1e-12*(1+math.Abs(w)) {
					t.Fatalf("recompute %v: d/d%s[%d] is %v, want %v", recompute, v.Name, k, got[i][0].Data[k], w)
				}
			}
		}
	}
}

func allOps(g *ir.Graph) []*ir.Op {
	var list []*ir.Op
	for _, op := range g.Ops {
		list = append(list, op)
		if op.Body != nil {
			list = append(list, allOps(op.Body)...)
		}
	}
	return list
}

// stageOf is what a pipeline stage in the middle runs: layers alone, from activations to
// activations.
func stageOf(t *testing.T, layers int64) *ir.Graph {
	t.Helper()
	whole := tiny(t, layers)
	var block *ir.Graph
	var params []*ir.Value
	for _, op := range whole.Ops {
		if op.Kind == "repeat" {
			block, params = op.Body, op.In[1:]
		}
	}
	b := ir.NewBuilder("stage")
	x := b.Input("x", ir.Data, block.Inputs[0].Type, "")
	var in []*ir.Value
	for _, v := range params {
		in = append(in, b.Input(v.Name, v.Role, v.Type, v.Source))
	}
	y := b.Repeat(layers, block, []*ir.Value{x}, in[:4], in[4:])[0]
	g, err := b.Graph(y)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// One graph for the whole step gives what forward and backward give one after the other.
func TestJointStep(t *testing.T) {
	g := tiny(t, 3)
	inputs := fill(g, 6)
	want := gradients(t, g, inputs)
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	out, err := eval.Run(joint, inputs)
	if err != nil {
		t.Fatal(err)
	}
	if got, loss := out[0][0].Data[0], value(t, g, inputs); got != loss {
		t.Errorf("the loss is %v, want %v", got, loss)
	}
	for i := range want {
		for k, w := range want[i].Data {
			if out[1+i][0].Data[k] != w {
				t.Fatalf("gradient %d[%d] is %v, want %v", i, k, out[1+i][0].Data[k], w)
			}
		}
	}
}
