package lower_test

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/optim"
)

// late are the programs that run under random delays.
var late = []string{"softmax", "layer_norm", "embedding", "attention, causal", "cross_entropy",
	"scatter", "to_host and to_device", "bf16 linear of 37 rows, mlp first", "model", "update"}

// softGPU gives the CUDA engine on the software GPUs that this process sees, lowering for a B200.
func softGPU(t *testing.T) engineWith {
	t.Helper()
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return engineWith{Engine: e,
		kernels: func() *kernels.Selector { return kernels.For("sm_100") }}
}

// A gpuProgram is a graph that the software GPU runs, and how far it may be from float64.
type gpuProgram struct {
	name   string
	graph  *ir.Graph
	inputs map[string][]*eval.Array
	bound  float64
}

// gpuPrograms are the programs that the software GPU runs: every operation with its gradient,
// GEMMs and attention that round to bf16, a model with its gradient, and the model's update.
func gpuPrograms(t *testing.T) (list []gpuProgram) {
	t.Helper()
	for _, p := range irtest.Probes {
		g, inputs := probe(t, p, 0)
		list = append(list, gpuProgram{p.Name, jointly(t, g), inputs, bound})
	}
	list = append(list, roundedPrograms(t)...)
	r := rand.New(rand.NewPCG(7, 8))
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	list = append(list, gpuProgram{"model", jointly(t, g), modelInputs(r, g), bound})
	for commit, name := range []string{"rejected update", "update"} {
		u, inputs := tinyUpdate(t, r, g, float64(commit))
		list = append(list, gpuProgram{name, u, inputs, bound})
	}
	return list
}

// roundedPrograms round operands to bf16: linears whose weights lie either way, of whole tiles and
// not, and attention.
func roundedPrograms(t *testing.T) (list []gpuProgram) {
	t.Helper()
	d, r := irtest.D, rand.New(rand.NewPCG(3, 4))
	add := func(name string, b *ir.Builder, y *ir.Value) {
		g, err := b.Graph(b.Sum(b.Mul(y, y), ir.Names(y.Type.Dims)...))
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, gpuProgram{name, jointly(t, g), randomInputs(r, g), roundedBound})
	}
	for _, size := range [][3]int64{{48, 16, 64}, {37, 19, 5}, {1, 16, 32}} {
		rows, in, out := d("rows", size[0]), d("embed", size[1]), d("mlp", size[2])
		for _, wt := range []ir.Type{irtest.F32(in, out), irtest.F32(out, in)} {
			b := ir.NewBuilder("linear")
			x, w := b.Input("x", ir.Param, irtest.F32(rows, in), ""), b.Input("w", ir.Param, wt, "")
			add(fmt.Sprintf("bf16 linear of %d rows, %s first", size[0], wt.Dims[0].Name), b,
				b.LinearIn(x, w, dtype.BF16))
		}
	}
	for _, how := range []ir.Attention{{}, {Causal: true}, {Causal: true, Window: 5},
		{Causal: true, SoftCap: 2}} {
		how.Scale, how.OperandType = 0.3, dtype.BF16
		b := ir.NewBuilder("attention")
		q := b.Input("q", ir.Param,
			irtest.F32(d("batch", 2), d(ir.Seq, 12), d(ir.Heads, 4), d(ir.HeadDim, 8)), "")
		kt := irtest.F32(d("batch", 2), d(ir.Keys, 12), d(ir.KVHeads, 2), d(ir.HeadDim, 8))
		add(fmt.Sprintf("bf16 attention, causal %v, window %d, soft cap %g", how.Causal, how.Window,
			how.SoftCap), b,
			b.Attend(q, b.Input("k", ir.Param, kt, ""), b.Input("v", ir.Param, kt, ""), how))
	}
	return list
}

// tinyUpdate is AdamW's update of all weights of a model, which commits or changes nothing.
func tinyUpdate(t *testing.T, r *rand.Rand, model *ir.Graph, commit float64) (*ir.Graph,
	map[string][]*eval.Array) {
	t.Helper()
	var params []optim.Param
	for _, v := range model.Inputs {
		if v.Role == ir.Param {
			params = append(params, optim.Param{Name: v.Name, Type: v.Type, Decay: len(params)%2 == 0})
		}
	}
	g, err := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}.Update(params)
	if err != nil {
		t.Fatal(err)
	}
	return g, updateInputs(r, g, params, commit)
}

// What XLA:GPU makes of every operation and its gradient for sm_100 agrees, on the software GPU,
// with the interpreter in float64. Attention is plain: cuDNN is not played.
func TestOperationsOnTheSoftwareGPU(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{Memory: 64 << 20, Delay: 1, DelayMicroseconds: 50}) {
		return
	}
	e := softGPU(t)
	list := gpuPrograms(t)
	if len(list) < 60 {
		t.Errorf("%d programs", len(list))
	}
	for _, p := range list {
		t.Run(p.name, func(t *testing.T) { e.compare(t, p.graph, p.inputs, p.bound) })
	}
	if !slowtest.Enabled {
		return
	}
	for _, p := range irtest.Probes { // with other shapes, and as two programs
		t.Run(p.Name+", forward and backward", func(t *testing.T) {
			g, inputs := probe(t, p, 1)
			e.forwardAndBackward(t, g, inputs)
		})
	}
}

// digests runs the programs of late, each without waiting for the one before, and gives the hash
// of each one's results.
func digests(t *testing.T, e engineWith) (list []string) {
	t.Helper()
	rig := &enginetest.Rig{Engine: e.Engine}
	programs := gpuPrograms(t)
	var runs []*engine.Run
	for _, name := range late {
		i := slices.IndexFunc(programs, func(p gpuProgram) bool { return p.name == name })
		if i < 0 {
			t.Fatalf("there is no program %s", name)
		}
		p := programs[i]
		x := rig.Compile(t, p.graph, lower.Options{Kernels: e.kernels()})
		var args []*engine.Array
		for _, v := range p.graph.Inputs {
			a := x.Put(t, v.Name, p.inputs[v.Name][0].Data)
			defer a.Free()
			args = append(args, a)
		}
		run, err := x.Executable.Run(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		defer run.Free()
		runs = append(runs, run)
	}
	for _, run := range runs {
		h := sha256.New()
		for _, a := range run.Results {
			h.Write(enginetest.Bytes(t, a, 0))
		}
		list = append(list, fmt.Sprintf("%x", h.Sum(nil)[:8]))
	}
	return list
}

var digestsLine = regexp.MustCompile(`digests: (.*)`)

// Ten programs give the same bits however late streams are; with -tags long, 20 times.
func TestProgramsGiveTheSameBitsWhateverIsLate(t *testing.T) {
	if softgpu.InChild(t) {
		fmt.Println("digests:", digests(t, softGPU(t)))
		return
	}
	seeds := uint64(2)
	if slowtest.Enabled {
		seeds = 20
	}
	first := ""
	for seed := range seeds + 1 { // 0 is without delays
		out, status := softgpu.Run(t, softgpu.Options{Memory: 64 << 20, Delay: seed})
		line := digestsLine.FindStringSubmatch(out)
		if status != 0 || line == nil {
			t.Fatalf("seed %d: status %d\n%s", seed, status, out)
		}
		if first == "" {
			first = line[1]
		}
		if line[1] != first {
			t.Errorf("seed %d: programs %q give %s, and without delays %s", seed, late, line[1], first)
		}
	}
}
