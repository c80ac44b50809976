package lower_test

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
)

// Every layout, lowered with its collectives and run on two devices, gives on each device what the
// interpreter gives; and the compiled program has the collectives that the graph has.
func TestLayoutsOnTwoDevices(t *testing.T) {
	e := enginetest.Open(t, engine.Options{Devices: irtest.LayoutDevices}).Engine
	r := rand.New(rand.NewPCG(2, 3))
	whole := map[string]*eval.Array{}
	for _, name := range []string{"w1", "w2", "x"} {
		whole[name] = eval.New(irtest.Wholes()[name])
		for i := range whole[name].Data {
			whole[name].Data[i] = float64(float32(r.NormFloat64()))
		}
	}
	for i := range irtest.Layouts {
		l := &irtest.Layouts[i]
		t.Run(l.Name, func(t *testing.T) {
			g, err := l.Graph()
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
			inputs := map[string][]*eval.Array{}
			for _, v := range joint.Inputs {
				inputs[v.Name] = irtest.Spread(whole[v.Name], v.Type)
			}
			runOnMesh(t, e, joint, inputs)
		})
	}
}

func runOnMesh(t *testing.T, e *engine.Engine, g *ir.Graph, inputs map[string][]*eval.Array) {
	t.Helper()
	want, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	text, err := lower.StableHLO(g, lower.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x, err := e.Compile(t.Context(), &program.FromText("step", text, irtest.LayoutDevices).Modules[0])
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	defer x.Free()
	var args []*engine.Array
	for i, v := range g.Inputs {
		a, err := e.Place(x.Module(), x.Module().Args[i], engine.Copied, func(d int) ([]byte, error) {
			return encode(v.Type.Elem, inputs[v.Name][d].Data), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	run, err := x.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	if err := run.Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	for i, v := range g.Results {
		for d := range irtest.LayoutDevices {
			b, err := run.Results[i].Read(t.Context(), d)
			if err != nil {
				t.Fatal(err)
			}
			for k, got := range decode(v.Type.Elem, b) {
				if w := want[i][d].Data[k]; math.Abs(got-w) > 1e-4*(1+math.Abs(w)) {
					t.Fatalf("device %d, result %d[%d] is %v, want %v", d, i, k, got, w)
				}
			}
		}
	}
	m, err := x.Optimized()
	if err != nil {
		t.Fatal(err)
	}
	var compiled, written []string
	for _, c := range m.Collectives() {
		compiled = append(compiled, strings.ReplaceAll(string(c.Kind), "-", "_"))
	}
	for _, op := range g.Ops {
		if op.Attrs.Text("axis") != "" && op.Kind != "shard_slice" {
			written = append(written, op.Kind)
		}
	}
	slices.Sort(compiled)
	slices.Sort(written)
	if !slices.Equal(compiled, written) {
		t.Errorf("the compiled program has %v, the graph %v", compiled, written)
	}
}
