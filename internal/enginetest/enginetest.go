package enginetest

import (
	"cmp"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/safetensors"
)

// A T is what testing.T, testing.B and rapid.T share.
type T interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	Context() context.Context
}

// A Rig is an engine and how to compile for it.
type Rig struct {
	Engine *engine.Engine
	Flags  map[string]any // of the compiler
}

// Cache is where tests keep compiled programs from one run to the next, and find the programs of
// other packages; the engine bounds its size. Without it the tests compile for twenty minutes.
func Cache() string {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "" // no cache
	}
	return filepath.Join(dir, "deepwell-test")
}

// Addresses are addresses of this host that nobody listens at.
func Addresses(t testing.TB, n int) []string {
	t.Helper()
	list, err := link.FreeAddresses(n)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// Share lets a folder of caches have the compiled programs of all tests, and of tests before;
// whatever else it caches is its own.
func Share(dir string) error {
	if Cache() == "" {
		return nil
	}
	shared := filepath.Join(Cache(), "programs")
	if err := errors.Join(os.MkdirAll(shared, 0o755), os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	return os.Symlink(shared, filepath.Join(dir, "programs"))
}

// Caches is a folder of caches of a test's own, less the programs, which it shares.
func Caches(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := Share(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Open gives the CPU engine, which is closed with the test. Its cache is Cache unless the test
// names one.
func Open(t T, o engine.Options) *Rig {
	t.Helper()
	o.Cache = cmp.Or(o.Cache, Cache())
	e, err := engine.Open(context.Background(), "cpu", o)
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return &Rig{Engine: e}
}

// A Program is a graph that was compiled.
type Program struct {
	*engine.Executable
	rig   *Rig
	graph *ir.Graph
}

// Compile lowers and compiles a graph; the program is freed with the test. Its results are called
// what results says, or else as the graph says.
func (r *Rig) Compile(t T, g *ir.Graph, o lower.Options, results ...string) *Program {
	t.Helper()
	m, err := lower.Module(g.Name, g, o)
	if err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	m.Flags = r.Flags
	for i, name := range results {
		m.Results[i].Name = name
	}
	return &Program{Executable: Compile(t, r.Engine, m), rig: r, graph: g}
}

// Compile compiles a module; the executable is freed with the test.
func Compile(t T, e *engine.Engine, m *program.Module) *engine.Executable {
	t.Helper()
	x, err := e.Compile(t.Context(), m)
	if err != nil {
		t.Fatalf("%v\n%s", err, m.Text)
	}
	t.Cleanup(x.Free)
	return x
}

// Put places an argument: what each device has, or what all have.
func (p *Program) Put(t T, name string, shards ...[]float64) *engine.Array {
	t.Helper()
	args := p.Module().Args
	i := slices.IndexFunc(args, func(a program.Array) bool { return a.Name == name })
	if i < 0 {
		t.Fatalf("%s takes no %s", p.Module().Name, name)
	}
	a, err := p.rig.Engine.Place(p.Module(), args[i], engine.Copied, func(d int) ([]byte, error) {
		return args[i].Global.Type.Append(nil, shards[d%len(shards)]...), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// Run is eval.Run on the engine.
func (p *Program) Run(t T, inputs map[string][]*eval.Array) [][]*eval.Array {
	t.Helper()
	var args []*engine.Array
	for _, v := range p.graph.Inputs {
		var shards [][]float64
		for _, a := range inputs[v.Name] {
			shards = append(shards, a.Data)
		}
		a := p.Put(t, v.Name, shards...)
		defer a.Free()
		args = append(args, a)
	}
	run, err := p.Executable.Run(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, p.graph)
	}
	defer run.Free()
	out := make([][]*eval.Array, len(run.Results))
	for i, a := range run.Results {
		for d := range p.Module().Devices {
			out[i] = append(out[i], &eval.Array{Type: p.graph.Results[i].Type, Data: Read(t, a, d)})
		}
	}
	return out
}

// Step runs the program on a state and what is not in it, the same on all devices. It gives the
// first device's shard of the results that are not of the state.
func (p *Program) Step(t T, state *engine.State, data map[string][]float64) map[string][]float64 {
	t.Helper()
	var in []*engine.Array
	for name, list := range data {
		a := p.Put(t, name, list)
		defer a.Free()
		in = append(in, a)
	}
	run, err := p.Executable.Step(t.Context(), state, in...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	out := map[string][]float64{}
	for i, a := range run.Results {
		if name := p.Module().Results[i].Name; a != state.Get(name) {
			out[name] = Read(t, a, 0)
		}
	}
	return out
}

// GPUCompiler opens the compiler for NVIDIA GPUs, which is closed with the test.
func GPUCompiler(t T, withoutCuDNN bool) *engine.Compiler {
	t.Helper()
	c, err := engine.OpenCompiler(t.Context(), engine.Options{Cache: Cache(),
		WithoutCuDNN: withoutCuDNN})
	if err != nil {
		t.Fatalf("the tests need the CUDA compiler (deepwell engine install cuda13): %v", err)
	}
	t.Cleanup(c.Close)
	return c
}

// Report compiles a module for a cluster, such as 8xb200.
func Report(t T, c *engine.Compiler, m *program.Module, cluster string) *engine.Report {
	t.Helper()
	target, err := machine.ParseCluster(cluster)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Compile(t.Context(), m, target)
	if err != nil {
		t.Fatalf("%s: %v", cluster, err)
	}
	return r
}

// Read returns a device's shard of an array.
func Read(t T, a *engine.Array, device int) []float64 {
	t.Helper()
	return a.Local().Type.Values(Bytes(t, a, device))
}

// Bytes returns a device's shard of an array as it is in memory.
func Bytes(t T, a *engine.Array, device int) []byte {
	t.Helper()
	b, err := a.Read(context.Background(), device)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Tensors reads all numbers of a file of safetensors, which is what oracles write.
func Tensors(t T, path string) map[string][]float64 {
	t.Helper()
	set, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = set.Close() }()
	all := map[string][]float64{}
	for _, name := range set.Names() {
		x, err := set.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := x.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		all[name] = x.Shape().Type.Values(b)
	}
	return all
}

// Distance is the Frobenius norm of got - want relative to the norm of want.
func Distance(got, want []float64) float64 {
	var d, n float64
	for i := range want {
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	return math.Sqrt(d / n)
}

// Joint gives a graph's gradient, and loss and gradients as one graph.
func Joint(t T, g *ir.Graph) (*ir.Gradient, *ir.Graph) {
	t.Helper()
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	return gr, joint
}
