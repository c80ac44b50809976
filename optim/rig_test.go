package optim_test

import (
	"context"
	"encoding/binary"
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
)

func open(t *testing.T) *engine.Engine {
	t.Helper()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 1})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// A rig is a graph on the engine whose state is donated, as training runs it.
type rig struct {
	e     *engine.Engine
	x     *engine.Executable
	stage *program.Stage
}

// newRig compiles a graph whose results are called what results says, or else as the graph says.
func newRig(t *testing.T, e *engine.Engine, g *ir.Graph, into map[string]string,
	results ...string) *rig {
	t.Helper()
	s, err := lower.Stage(g.Name, g, lower.Options{Donate: into, Kernels: kernels.For("cpu")})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range results {
		s.Results[i].Name = name
	}
	x, err := e.Compile(t.Context(), s)
	if err != nil {
		t.Fatalf("%v\n%s", err, s.Text)
	}
	t.Cleanup(x.Free)
	return &rig{e, x, s}
}

// fataler is what testing.T and rapid.T share.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// put places bytes as an argument.
func (r *rig) put(t fataler, name string, data []byte) *engine.Array {
	t.Helper()
	for _, spec := range r.stage.Args {
		if spec.Name != name {
			continue
		}
		a, err := r.e.Place(r.stage, spec, engine.Copied, func(int) ([]byte, error) { return data, nil })
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	t.Fatalf("no argument is called %s", name)
	return nil
}

// step runs the stage on the state with the given arguments, and gives the other results by name.
func (r *rig) step(t fataler, state *engine.State, args map[string][]byte) map[string][]byte {
	t.Helper()
	var in []*engine.Array
	for name, data := range args {
		in = append(in, r.put(t, name, data))
	}
	run, err := r.x.Step(state, in...)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for i, a := range run.Results {
		if a != state.Get(r.stage.Results[i].Name) {
			out[r.stage.Results[i].Name] = read(t, a)
		}
	}
	run.Free()
	for _, a := range in {
		a.Free()
	}
	return out
}

func read(t fataler, a *engine.Array) []byte {
	t.Helper()
	b, err := a.Read(context.Background(), 0)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// bytesOf writes numbers as elements of a type.
func bytesOf(d dtype.DType, list ...float64) (b []byte) {
	for _, v := range list {
		switch bits := math.Float32bits(float32(v)); d {
		case dtype.Pred:
			b = append(b, byte(v))
		case dtype.S32:
			b = binary.LittleEndian.AppendUint32(b, uint32(int32(v)))
		case dtype.BF16:
			b = binary.LittleEndian.AppendUint16(b, uint16(bits>>16))
		default:
			b = binary.LittleEndian.AppendUint32(b, bits)
		}
	}
	return b
}

// floats reads f32.
func floats(b []byte) []float64 {
	list := make([]float64, len(b)/4)
	for i := range list {
		list[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return list
}

// distance is the Frobenius norm of a - b relative to that of b.
func distance(a, b []float64) float64 {
	var d, n float64
	for i := range b {
		d += (a[i] - b[i]) * (a[i] - b[i])
		n += b[i] * b[i]
	}
	return math.Sqrt(d / n)
}
