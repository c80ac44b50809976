package optim_test

import (
	"maps"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/optim"
)

// A small model with a repeat learns five tokens by heart on the engine: gradient and update are
// two programs, and the state stays on the device.
func TestSmallModelLearns(t *testing.T) {
	t.Parallel()
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	gr, joint := enginetest.Joint(t, g)
	var list []optim.Param
	results := []string{"loss"}
	for _, v := range gr.Wrt {
		list = append(list, optim.Param{Name: v.Name, Type: v.Type})
		results = append(results, "g."+v.Name)
	}
	r := enginetest.Open(t, engine.Options{Devices: 1})
	grad := r.Compile(t, joint, lower.Options{Kernels: kernels.For("cpu")}, results...)
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, ClipNorm: 1}
	update, err := o.Update(list)
	if err != nil {
		t.Fatal(err)
	}
	first, last := learn(t, grad, r.Compile(t, update, donated()), o, joint, list)
	t.Logf("the loss went from %.3f to %.3f", first, last)
	if last >= first/20 || math.IsNaN(last) {
		t.Errorf("the loss went from %v to %v", first, last)
	}
}

// learn takes 120 steps and gives the first loss and the last.
func learn(t *testing.T, grad, step *enginetest.Program, o optim.Optimizer, joint *ir.Graph,
	list []optim.Param) (first, last float64) {
	t.Helper()
	r := rand.New(rand.NewPCG(8, 8))
	var state engine.State
	defer state.Free()
	for _, v := range joint.Inputs {
		var values []float64
		for k := range v.Type.Shape().Elements() {
			if v.Role == ir.Data {
				values = append(values, float64(3*k%7))
			} else {
				values = append(values, 0.3*r.NormFloat64())
			}
		}
		state.Put(grad.Put(t, v.Name, values))
	}
	for _, p := range list {
		for _, s := range o.State(p) {
			state.Put(step.Put(t, s.Name, make([]float64, s.Type.Shape().Elements())))
		}
	}
	for n := 1; n <= 120; n++ {
		out := grad.Step(t, &state, nil)
		last = out["loss"][0]
		if n == 1 {
			first = last
		}
		delete(out, "loss")
		maps.Copy(out, scalars(o, n, 0.02))
		if done := step.Step(t, &state, out); done[optim.OK][0] != 1 {
			t.Fatalf("step %d was rejected", n)
		}
	}
	return first, last
}
