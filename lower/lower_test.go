package lower_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
)

// bound is what f32 may differ from float64 by, relative to the norm of a result: some hundred
// roundings of 6e-8.
const bound = 2e-5

func cpu(t *testing.T) *engine.Engine {
	t.Helper()
	return enginetest.Open(t, engine.Options{Devices: 1}).Engine
}

// engineWith is an engine and the kernels to lower with.
type engineWith struct {
	*engine.Engine
	kernels func() *kernels.Selector
}

func plain(e *engine.Engine) engineWith {
	return engineWith{Engine: e, kernels: func() *kernels.Selector { return nil }}
}

// run lowers a graph, compiles and runs it, and gives the results in float64.
func (e engineWith) run(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array) [][]float64 {
	t.Helper()
	text, err := lower.StableHLO(g, lower.Options{Kernels: e.kernels()})
	if err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	x, err := e.Compile(t.Context(), &program.FromText("probe", text, 1).Modules[0])
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, g, text)
	}
	defer x.Free()
	return e.execute(t, x, g, inputs)
}

// execute runs what was made of a graph.
func (e engineWith) execute(t *testing.T, x *engine.Executable, g *ir.Graph,
	inputs map[string][]*eval.Array) [][]float64 {
	t.Helper()
	var args []*engine.Array
	for i, v := range g.Inputs {
		a, err := e.Place(x.Module(), x.Module().Args[i], engine.Copied,
			func(int) ([]byte, error) { return encode(v.Type.Elem, inputs[v.Name][0].Data), nil })
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	r, err := x.Run(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	defer r.Free()
	if err := r.Wait(context.Background()); err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	out := make([][]float64, len(g.Results))
	for i, v := range g.Results {
		b, err := r.Results[i].Read(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = decode(v.Type.Elem, b)
	}
	return out
}

func encode(d dtype.DType, data []float64) []byte {
	var b []byte
	for _, v := range data {
		switch d {
		case dtype.S32:
			b = binary.LittleEndian.AppendUint32(b, uint32(int32(v)))
		case dtype.Pred:
			b = append(b, byte(v))
		case dtype.F64:
			b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
		default:
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
		}
	}
	return b
}

func decode(d dtype.DType, b []byte) []float64 {
	var list []float64
	for ; len(b) > 0; b = b[d.Bits()/8:] {
		switch d {
		case dtype.S32:
			list = append(list, float64(int32(binary.LittleEndian.Uint32(b))))
		case dtype.Pred:
			list = append(list, float64(b[0]))
		case dtype.F64:
			list = append(list, math.Float64frombits(binary.LittleEndian.Uint64(b)))
		default:
			list = append(list, float64(math.Float32frombits(binary.LittleEndian.Uint32(b))))
		}
	}
	return list
}

// compare holds the engine's results to the interpreter's.
func (e engineWith) compare(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array,
	bound float64) [][]*eval.Array {
	t.Helper()
	want, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	for i, got := range e.run(t, g, inputs) {
		square, norm := 0.0, 0.0
		for k, w := range want[i][0].Data {
			square += (got[k] - w) * (got[k] - w)
			norm += w * w
		}
		if math.IsNaN(square) || math.Sqrt(square) > bound*(1e-3+math.Sqrt(norm)) {
			t.Fatalf("result %d is off by %.2g of %.2g\n%v, want %v\n%s", i, math.Sqrt(square),
				math.Sqrt(norm), head(got), head(want[i][0].Data), g)
		}
	}
	return want
}

// head is the beginning of a list.
func head(list []float64) []float64 { return list[:min(len(list), 16)] }

// forwardAndBackward compares a graph and its gradient, as two programs.
func (e engineWith) forwardAndBackward(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array) {
	t.Helper()
	e.forwardAndBackwardWithin(t, g, inputs, bound)
}

func (e engineWith) forwardAndBackwardWithin(t *testing.T, g *ir.Graph,
	inputs map[string][]*eval.Array, bound float64) {
	t.Helper()
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	kept := e.compare(t, gr.Forward, inputs, bound)
	given := maps.Clone(inputs)
	for i, v := range gr.Forward.Results {
		given[v.Name] = kept[i]
	}
	one := eval.New(g.Results[0].Type)
	for i := range one.Data {
		one.Data[i] = 1
	}
	given[gr.Seeds[0]] = []*eval.Array{one}
	e.compare(t, gr.Backward, given, bound)
}

// probe builds the graph of a probe and inputs for it.
func probe(t *testing.T, p irtest.Probe, seed uint64) (*ir.Graph, map[string][]*eval.Array) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 11))
	b := ir.NewBuilder("probe")
	inputs := map[string][]*eval.Array{}
	add := func(name string, typ ir.Type, role ir.Role, next func() float64) *ir.Value {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = next()
		}
		inputs[name] = []*eval.Array{a}
		return b.Input(name, role, typ, "")
	}
	y := p.Build(r, b, irtest.Maker{
		In: func(name string, typ ir.Type) *ir.Value {
			return add(name, typ, ir.Param, func() float64 {
				v := float64(float32(r.NormFloat64()))
				if p.Positive {
					v = 1.25 + math.Abs(v)
				}
				return v
			})
		},
		IDs: func(name string, typ ir.Type, below int64) *ir.Value {
			return add(name, typ, ir.Data, func() float64 { return float64(r.Int64N(below)) })
		},
	})
	var over []string
	for _, d := range y.Type.Dims {
		over = append(over, d.Name)
	}
	g, err := b.Graph(b.Sum(b.Mul(y, y), over...))
	if err != nil {
		t.Fatal(err)
	}
	return g, inputs
}

// Every operation and every gradient, lowered and run by XLA, agrees with the interpreter.
func TestOperationsAgreeWithTheInterpreter(t *testing.T) {
	e := plain(cpu(t))
	for _, p := range irtest.Probes {
		t.Run(p.Name, func(t *testing.T) {
			for seed := range uint64(2) {
				g, inputs := probe(t, p, seed)
				e.forwardAndBackward(t, g, inputs)
			}
		})
	}
}

// modelInputs are small weights, and ids of tokens.
func modelInputs(r *rand.Rand, g *ir.Graph) map[string][]*eval.Array {
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			if a.Data[i] = float64(float32(0.5 * r.NormFloat64())); v.Role == ir.Data {
				a.Data[i] = float64(r.IntN(5))
			}
		}
		inputs[v.Name] = []*eval.Array{a}
	}
	return inputs
}

// A whole small model with a repeat, and its gradient, agree with the interpreter.
func TestModelAgreesWithTheInterpreter(t *testing.T) {
	e := cpu(t)
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	inputs := modelInputs(rand.New(rand.NewPCG(9, 9)), g)
	plain(e).forwardAndBackward(t, g, inputs)
	on := engineWith{Engine: e, kernels: func() *kernels.Selector { return kernels.For("cpu") }}
	on.forwardAndBackward(t, g, inputs)
	if g, err = ir.Unroll(g); err != nil {
		t.Fatal(err)
	}
	for _, v := range g.Inputs { // layers are slices of the stacks
		if stack, layer, ok := strings.Cut(v.Name, "."); ok {
			a, n := eval.New(v.Type), 0
			_, _ = fmt.Sscan(layer, &n)
			copy(a.Data, inputs[stack][0].Data[n*len(a.Data):])
			inputs[v.Name] = []*eval.Array{a}
		}
	}
	on.compare(t, jointly(t, g), inputs, bound)
}

// The text does not grow with depth.
func TestDepthIsOneLoop(t *testing.T) {
	lines := func(layers int64) int {
		g, err := irtest.Tiny(layers)
		if err != nil {
			t.Fatal(err)
		}
		text, err := lower.StableHLO(g, lower.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(text, "\n")
	}
	if a, b := lines(4), lines(126); a != b {
		t.Errorf("4 layers are %d lines, 126 are %d", a, b)
	}
}
