package pipeline_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
	}
	goleak.VerifyTestMain(m)
}

// open shares compiled programs between tests and processes: many schedules have the same stages.
func open(ctx context.Context, devices int) (*engine.Engine, error) {
	return engine.Open(ctx, "cpu", engine.Options{Devices: devices, Cache: enginetest.Cache()})
}

func cpu(t testing.TB, devices int) *engine.Engine {
	t.Helper()
	e, err := open(context.Background(), devices)
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// layers is the depth of the model that the tests split: every number of stages divides it.
const layers = 8

// stageOf gives stage i of n of a small model, by hand: embedding, layers of two matmuls, and a loss.
// The table of the first and last stage, and the first matmul of all layers, keep their names, so
// that their gradients come from several stages. stageOf(0, 1) is the model itself.
func stageOf(i, n int) (*ir.Graph, pipeline.Boundary) {
	e, mlp, seq, vocab := irtest.D("embed", 8), irtest.D("mlp", 12), irtest.D(ir.Seq, 5), irtest.D("vocab", 7)
	b := ir.NewBuilder(fmt.Sprintf("stage%d", i))
	var bound pipeline.Boundary
	var x, table *ir.Value
	if i == 0 || i == n-1 {
		table = b.Input("table", ir.Param, irtest.F32(vocab, e), "")
	}
	if i == 0 {
		x = b.Embedding(b.Input("ids", ir.Data, irtest.S32(seq), ""), table)
	} else {
		x = b.Input("x", ir.Data, irtest.F32(seq, e), "")
		bound.Inputs = []string{"x"}
	}
	w1 := b.Input("w1", ir.Param, irtest.F32(e, mlp), "")
	for layer := i * layers / n; layer < (i+1)*layers/n; layer++ {
		w2 := b.Input(fmt.Sprintf("w2.%d", layer), ir.Param, irtest.F32(mlp, e), "")
		x = b.Add(x, b.Linear(b.Tanh(b.Linear(x, w1)), w2))
	}
	if i == n-1 {
		labels := b.Input("labels", ir.Data, irtest.S32(seq), "")
		x = b.Sum(b.CrossEntropy(b.Linear(x, table), labels, "vocab"), ir.Seq)
	} else {
		bound.Outputs = []string{x.Name}
	}
	g, err := b.Graph(x)
	if err != nil {
		panic(err)
	}
	return g, bound
}

// number gives values that every process makes the same: of a parameter, or of what a
// microbatch brings.
func number(name string, microbatch int, t dtype.DType, n int64) []float64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	r := rand.New(rand.NewPCG(h.Sum64(), uint64(microbatch)))
	list := make([]float64, n)
	for k := range list {
		list[k] = r.NormFloat64() * 0.4
		if t == dtype.S32 {
			list[k] = float64(r.IntN(7))
		}
	}
	return list
}

func encode(t dtype.DType, data []float64) []byte {
	b := engine.Aligned(4 * len(data))
	for i, v := range data {
		bits := math.Float32bits(float32(v))
		if t == dtype.S32 {
			bits = uint32(int32(v))
		}
		binary.LittleEndian.PutUint32(b[4*i:], bits)
	}
	return b
}

func decode(b []byte) []float64 {
	var list []float64
	for ; len(b) > 0; b = b[4:] {
		list = append(list, float64(math.Float32frombits(binary.LittleEndian.Uint32(b))))
	}
	return list
}

// feed is the data function of the tests.
func feed(e *engine.Engine) pipeline.Data {
	return func(_ context.Context, _, microbatch int, m *program.Module, spec program.Array) (*engine.Array, error) {
		return e.Place(m, spec, engine.Copied, func(int) ([]byte, error) {
			return encode(spec.Global.Type, number(spec.Name, microbatch, spec.Global.Type, spec.Global.Elements())), nil
		})
	}
}

// hosted makes the ranks that a process hosts: rank r on device device(r), with its programs and
// the parameters and accumulators in its state.
func hosted(ctx context.Context, e *engine.Engine, s *schedule.Schedule, ranks []int, split bool,
	device func(rank int) int) ([]pipeline.Rank, error) {
	var list []pipeline.Rank
	for _, r := range ranks {
		rank := pipeline.Rank{Number: r, State: &engine.State{}, Links: map[int]engine.Link{}}
		for i := range s.Stages() {
			if s.Rank(i) != r {
				continue
			}
			graph, bound := stageOf(i, s.Stages())
			gs, err := pipeline.Differentiate(graph, bound)
			if err != nil {
				return nil, err
			}
			devices := program.Devices{device(r)}
			st, err := compiled(ctx, e, gs, graph.Name, devices, split)
			if err != nil {
				return nil, err
			}
			rank.Stages = append(rank.Stages, st)
			if err := keep(e, rank.State, graph, gs, devices); err != nil {
				return nil, err
			}
		}
		list = append(list, rank)
	}
	return list, nil
}

// compiled compiles the programs of a stage: with split the two halves of the gradient,
// else the joint one.
func compiled(ctx context.Context, e *engine.Engine, gs *pipeline.Graphs, name string,
	devices program.Devices, split bool) (*pipeline.Stage, error) {
	st := gs.Stage(nil, nil, nil, nil)
	for _, x := range []struct {
		kind  string
		graph *ir.Graph
		into  **engine.Executable
		want  bool
	}{
		{"forward", gs.Forward, &st.Forward, true}, {"backward", gs.Backward, &st.Backward, !split},
		{"input", gs.Dgrad, &st.Dgrad, split}, {"weight", gs.Wgrad, &st.Wgrad, split},
	} {
		if !x.want || x.graph == nil {
			continue
		}
		text, err := lower.Module(name+"."+x.kind, x.graph, lower.Options{Kernels: kernels.For("cpu")})
		if err != nil {
			return nil, err
		}
		text.Devices = devices
		if *x.into, err = e.Compile(ctx, text); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// keep puts what a stage's programs share into the state.
func keep(e *engine.Engine, state *engine.State, g *ir.Graph, gs *pipeline.Graphs, devices program.Devices) error {
	on := &program.Module{Name: g.Name, Devices: devices}
	put := func(name string, t ir.Type, data []float64) error {
		if state.Get(name) != nil {
			return nil
		}
		a, err := e.Place(on, program.Array{Name: name, Global: t.Shape()}, engine.Copied,
			func(int) ([]byte, error) { return encode(dtype.F32, data), nil })
		if err == nil {
			state.Put(a)
		}
		return err
	}
	for i, v := range g.Params() {
		n := v.Type.Shape().Elements()
		if err := put(v.Name, v.Type, number(v.Name, 0, dtype.F32, n)); err != nil {
			return err
		}
		if err := put(gs.Accumulators[i], v.Type, make([]float64, n)); err != nil {
			return err
		}
	}
	for _, name := range gs.Ones {
		if err := put(name, ir.Type{Elem: dtype.F32}, []float64{1}); err != nil {
			return err
		}
	}
	return nil
}

func free(ranks []pipeline.Rank) {
	for _, r := range ranks {
		for _, l := range r.Links {
			l.Close()
		}
		for _, s := range r.Stages {
			s.Free()
		}
		r.State.Free()
	}
}

// gathered reads gradients and losses out of a process: by parameter, added up over ranks.
func gathered(ctx context.Context, ranks []pipeline.Rank, out *pipeline.Outcome) (map[string][]float64, error) {
	all := map[string][]float64{}
	add := func(name string, a *engine.Array) error {
		b, err := a.Read(ctx, 0)
		if err != nil {
			return err
		}
		for i, v := range decode(b) {
			if len(all[name]) <= i {
				all[name] = append(all[name], 0)
			}
			all[name][i] += v
		}
		return nil
	}
	for _, r := range ranks {
		for _, name := range r.State.Names() {
			if len(name) < 2 || name[:2] != "g." {
				continue
			}
			if err := add(name[2:], r.State.Get(name)); err != nil {
				return nil, err
			}
		}
	}
	for _, r := range out.Results {
		if err := add("loss", r.Array); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// reference is loss and gradients of the uncut model, microbatch by microbatch, in f32 as well.
func reference(t *testing.T, e *engine.Engine, microbatches int) map[string][]float64 {
	t.Helper()
	g, _ := stageOf(0, 1)
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	m, err := lower.Module("whole", joint, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		t.Fatal(err)
	}
	x, err := e.Compile(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	sums := map[string][]float64{}
	for microbatch := range microbatches {
		var args []*engine.Array
		for i, spec := range m.Args {
			n := spec.Global.Elements()
			at := microbatch
			if joint.Inputs[i].Role == ir.Param {
				at = 0
			}
			data := number(spec.Name, at, spec.Global.Type, n)
			a, err := e.Place(m, spec, engine.Copied, func(int) ([]byte, error) { return encode(spec.Global.Type, data), nil })
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
		for i, a := range run.Results {
			name := "loss"
			if i > 0 {
				name = gr.Wrt[i-1].Name
			}
			b, err := a.Read(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			for k, v := range decode(b) {
				if len(sums[name]) <= k {
					sums[name] = append(sums[name], 0)
				}
				sums[name][k] += v
			}
		}
		run.Free()
	}
	return sums
}

// gradientBound is what a pipeline's gradients may differ by from the uncut model's, in the norm of
// each tensor: both are f32, and add the same terms in another order.
const gradientBound = 1e-6

// compare holds what stages gave to the reference.
func compare(t *testing.T, got, want map[string][]float64) {
	t.Helper()
	for name, w := range want {
		g := got[name]
		if len(g) != len(w) {
			t.Errorf("%s has %d elements, want %d", name, len(g), len(w))
			continue
		}
		var diff, norm float64
		for i := range w {
			diff += (g[i] - w[i]) * (g[i] - w[i])
			norm += w[i] * w[i]
		}
		if !(math.Sqrt(diff/norm) <= gradientBound) {
			t.Errorf("%s differs by %.2g", name, math.Sqrt(diff/norm))
		}
	}
}
