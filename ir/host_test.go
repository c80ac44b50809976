package ir_test

import (
	"maps"
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// hostText updates something that lies on the host, and waits with the next until it is back.
const hostText = `graph g {
  param %m : f32[n=4]
  param %v : f32[n=4]
  %m1 = to_device(%m) : f32[n=4]
  %m2 = scale(%m1) by=0.5 : f32[n=4]
  %m3 = to_host(%m2) : f32[n=4]
  %v1 = to_device(%v, %m3) : f32[n=4]
  %v2 = mul(%v1, %m2) : f32[n=4]
  %v3 = to_host(%v2) : f32[n=4]
  return %m3, %v3, %m2
}
`

func TestHosted(t *testing.T) {
	g, err := ir.Parse(hostText)
	if err != nil {
		t.Fatal(err)
	}
	if g.String() != hostText {
		t.Errorf("the text does not come back:\n%s", g)
	}
	hosted := g.Hosted()
	for name, want := range map[string]bool{"m": true, "v": true, "m1": false, "m3": true, "v3": true} {
		if hosted[g.Find(name)] != want {
			t.Errorf("%s lies on the host: %v", name, !want)
		}
	}
	for _, row := range []struct{ from, to, says string }{
		{"scale(%m1)", "scale(%m)", "lies on the host"},
		{"to_device(%v, %m3)", "to_device(%m2)", "gives it on the device"},
		{"to_device(%v, %m3)", "to_device(%v, %m1)", "gives it on the device"},
		{"to_host(%v2)", "to_host(%m3)", "lies on the host"},
		{"to_host(%v2)", "to_host(%v2, %m3)", "takes 1 arguments"},
	} {
		_, err := ir.Parse(strings.Replace(hostText, row.from, row.to, 1))
		if err == nil || !strings.Contains(err.Error(), row.says) {
			t.Errorf("%s instead of %s: %v", row.to, row.from, err)
		}
	}
}

// Offload changes where the residuals of repeats lie and nothing else: all of them are on the host,
// in every split of the gradient, and the gradient has the same bits.
func TestOffload(t *testing.T) {
	for _, recompute := range [][]ir.Tag{nil, {ir.Attn}, {ir.Norm, ir.Attn, ir.MLP}} {
		g := stageOf(t, 3)
		inputs := fill(g, 4)
		for i := range inputs["x"][0].Data {
			inputs["x"][0].Data[i] *= 0.1
		}
		wrt := []string{"x", "wq", "wk", "w1", "w2", "scale"}
		plain, err := ir.Grad(g, ir.GradPlan{Wrt: wrt, Recompute: recompute})
		if err != nil {
			t.Fatal(err)
		}
		moved, err := ir.Grad(g, ir.GradPlan{Wrt: wrt, Recompute: recompute, Offload: true})
		if err != nil {
			t.Fatal(err)
		}
		hosted := moved.Forward.Hosted()
		if len(moved.Forward.Results) != len(plain.Forward.Results) || hosted[moved.Forward.Results[0]] {
			t.Fatalf("offload changes what is kept:\n%s", moved.Forward)
		}
		for _, v := range moved.Forward.Results[1:] {
			if !hosted[v] {
				t.Errorf("recompute %v: %s is kept on the device", recompute, v)
			}
		}
		want, got := halves(t, g, plain, inputs), halves(t, g, moved, inputs)
		for i, list := range want {
			for k, x := range list[0].Data {
				if got[i][0].Data[k] != x && !math.IsNaN(x) {
					t.Fatalf("recompute %v: gradient %d[%d] is %v, want %v", recompute, i, k,
						got[i][0].Data[k], x)
				}
			}
		}
		// The second half fetches what it needs: it takes no more from the first than without offload.
		_, a, err := plain.Split()
		if err != nil {
			t.Fatal(err)
		}
		_, b, err := moved.Split()
		if err != nil {
			t.Fatal(err)
		}
		if x, y := onDevice(a), onDevice(b); y > x || y == x && recompute == nil {
			t.Errorf("recompute %v: the weights' gradient takes %d bytes on the device, %d without offload",
				recompute, y, x)
		}
	}
}

// halves runs a gradient as a forward pass and the two halves of a backward pass.
func halves(t *testing.T, g *ir.Graph, gr *ir.Gradient,
	inputs map[string][]*eval.Array) [][]*eval.Array {
	t.Helper()
	first, second, err := gr.Split()
	if err != nil {
		t.Fatal(err)
	}
	given := map[string][]*eval.Array{}
	maps.Copy(given, inputs)
	seed := eval.New(g.Results[0].Type)
	for i := range seed.Data {
		seed.Data[i] = float64(i%3) - 0.7
	}
	given[gr.Seeds[0]] = []*eval.Array{seed}
	var list [][]*eval.Array
	for i, part := range []*ir.Graph{gr.Forward, first, second} {
		again, err := ir.Parse(part.String())
		if err != nil || again.String() != part.String() {
			t.Fatalf("the text does not come back: %v\n%s", err, part)
		}
		out, err := eval.Run(part, given)
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range part.Results {
			given[v.Name] = out[k]
		}
		switch i {
		case 1:
			list = append(list, out[0]) // the rest is for the second
		case 2:
			list = append(list, out...)
		}
	}
	return list
}

// onDevice counts the bytes of residuals that a graph takes from the device's own memory.
func onDevice(g *ir.Graph) (n int64) {
	hosted := g.Hosted()
	for _, v := range g.Inputs {
		if v.Role == ir.Residual && !hosted[v] {
			n += v.Type.Shape().Bytes()
		}
	}
	return n
}
