package optim_test

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

// A small model with a repeat learns five tokens by heart on the engine: gradient and update are
// two programs, and the state stays on the device.
func TestSmallModelLearns(t *testing.T) {
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	var list []optim.Param
	for _, v := range gr.Wrt {
		list = append(list, optim.Param{Name: v.Name, Type: v.Type})
	}
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, ClipNorm: 1}
	update, err := o.Update(list)
	if err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 1})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	defer e.Close()
	grad := compile(t, e, joint)
	defer grad.Free()
	step := compile(t, e, update)
	defer step.Free()
	r := rand.New(rand.NewPCG(8, 8))
	state := map[string]*engine.Array{}
	put := func(x *engine.Executable, g *ir.Graph, name string, value func() float64) *engine.Array {
		for i, v := range g.Inputs {
			if v.Name != name {
				continue
			}
			a, err := e.Place(x.Stage(), x.Stage().Args[i], engine.Copied, func(int) ([]byte, error) {
				var b []byte
				for range v.Type.Shape().Elements() {
					switch n := value(); v.Type.Elem {
					case dtype.S32:
						b = binary.LittleEndian.AppendUint32(b, uint32(int32(n)))
					case dtype.Pred:
						b = append(b, byte(n))
					default:
						b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(n)))
					}
				}
				return b, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		t.Fatalf("no input %s", name)
		return nil
	}
	for _, v := range joint.Inputs {
		k := -1
		value := func() float64 { return 0.3 * r.NormFloat64() }
		if v.Role == ir.Data {
			value = func() float64 { k++; return float64(3 * k % 7) }
		}
		state[v.Name] = put(grad, joint, v.Name, value)
	}
	for _, p := range list {
		for _, moment := range []string{"m.", "v."} {
			state[moment+p.Name] = put(step, update, moment+p.Name, func() float64 { return 0 })
		}
	}
	args := func(g *ir.Graph, more map[string]*engine.Array) (in []*engine.Array) {
		for _, v := range g.Inputs {
			if a := more[v.Name]; a != nil {
				in = append(in, a)
			} else {
				in = append(in, state[v.Name])
			}
		}
		return in
	}
	var first, last float64
	for n := 1; n <= 120; n++ {
		run, err := grad.Run(args(joint, nil)...)
		if err != nil {
			t.Fatal(err)
		}
		b, err := run.Results[0].Read(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		last = float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
		if n == 1 {
			first = last
		}
		more := map[string]*engine.Array{}
		for name, value := range map[string]float64{optim.Commit: 1, optim.Rate: 0.02,
			optim.Fix1: 1 / (1 - math.Pow(o.Beta1, float64(n))), optim.Fix2: 1 / (1 - math.Pow(o.Beta2, float64(n)))} {
			more[name] = put(step, update, name, func() float64 { return value })
		}
		for i, p := range list {
			more["g."+p.Name] = run.Results[1+i]
		}
		done, err := step.Run(args(update, more)...)
		if err != nil {
			t.Fatal(err)
		}
		for i, p := range list {
			for k, name := range []string{p.Name, "m." + p.Name, "v." + p.Name} {
				state[name].Free()
				state[name] = done.Results[3*i+k]
			}
		}
		for _, a := range more {
			a.Free()
		}
	}
	t.Logf("the loss went from %.3f to %.3f", first, last)
	if last >= first/20 || math.IsNaN(last) {
		t.Errorf("the loss went from %v to %v", first, last)
	}
}

func compile(t *testing.T, e *engine.Engine, g *ir.Graph) *engine.Executable {
	t.Helper()
	text, err := lower.Module(g, lower.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x, err := e.Compile(t.Context(), &program.FromText(g.Name, text, 1).Stages[0])
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return x
}
