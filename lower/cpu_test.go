package lower_test

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

// roundedBound is what GEMMs with operands rounded to bf16 may differ from float64 by, relative
// to the norm of a result. Rounding is off by 2^-9 at most and 2^-10.5 on average, in both
// arguments; gradients of attention go through four such gemms one after the other.
const roundedBound = 1e-2

// jointly gives loss and gradients as one program, in which the gradient finds what the forward
// pass keeps.
func jointly(t *testing.T, g *ir.Graph) *ir.Graph {
	t.Helper()
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	return joint
}

// With the kernels of the CPU every operation and its gradient agree with the interpreter, in one
// program and, where the backward pass takes something over, in two.
func TestCPUKernelsAgreeWithTheInterpreter(t *testing.T) {
	e := cpu(t)
	on := engineWith{Engine: e, kernels: func() *kernels.Selector { return kernels.For("cpu") }}
	for _, p := range irtest.Probes {
		if !touched(p.Name) {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			for seed := range uint64(2) {
				g, inputs := probe(t, p, seed)
				on.compare(t, jointly(t, g), inputs, bound)
				if strings.HasPrefix(p.Name, "attention") { // which keeps something in between
					on.forwardAndBackward(t, g, inputs)
				}
			}
		})
	}
}

// touched tells whether the CPU has a kernel of its own for a probe's operations.
func touched(name string) bool {
	for _, word := range []string{"attention", "dot", "linear", "cross_entropy", "select"} {
		if strings.HasPrefix(name, word) {
			return true
		}
	}
	return false
}

// GEMMs in bf16 agree with f32 within their rounding, whichever operand must be transposed, and if
// none can be.
func TestRoundedGEMMsStayWithinTheirRounding(t *testing.T) {
	slowtest.Only(t)
	on := engineWith{Engine: cpu(t), kernels: func() *kernels.Selector { return kernels.For("cpu") }}
	d := irtest.D
	r := rand.New(rand.NewPCG(3, 4))
	for _, row := range []struct {
		name               string
		rows, in, out      int64
		transposed, single bool
	}{
		{"in, out", 48, 16, 64, false, false}, {"out, in", 48, 64, 16, true, false},
		{"wide", 16, 24, 400, false, false}, {"wide, out, in", 16, 24, 400, true, false},
		{"a prime number of rows", 37, 16, 32, false, false},
		{"one row", 1, 16, 32, false, false}, {"one column", 32, 16, 1, true, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := ir.NewBuilder("linear")
			x := b.Input("x", ir.Param, irtest.F32(d("batch", 2), d("seq", row.rows), d("embed", row.in)), "")
			wt := irtest.F32(d("embed", row.in), d("mlp", row.out))
			if row.transposed {
				wt = irtest.F32(d("mlp", row.out), d("embed", row.in))
			}
			y := b.LinearIn(x, b.Input("w", ir.Param, wt, ""), dtype.BF16)
			g, err := b.Graph(b.Sum(b.Mul(y, y), "batch", "seq", "mlp"))
			if err != nil {
				t.Fatal(err)
			}
			on.compare(t, jointly(t, g), randomInputs(r, g), roundedBound)
		})
	}
	for _, row := range []struct {
		name             string
		batch, seq       int64
		kv, share, width int64
		window           int64
		operands         dtype.DType
		bound            float64
	}{
		{"heads alone", 2, 32, 3, 1, 16, 0, dtype.BF16, roundedBound},
		{"shared keys", 2, 32, 2, 3, 16, 0, dtype.BF16, roundedBound},
		{"one sequence, one head", 1, 24, 1, 1, 8, 0, dtype.BF16, roundedBound},
		{"odd", 3, 7, 1, 2, 6, 0, dtype.BF16, roundedBound},
		{"two query blocks", 2, 128, 2, 1, 8, 0, dtype.BF16, roundedBound},
		{"three query blocks", 1, 192, 2, 2, 8, 0, dtype.Invalid, bound},
		{"query blocks and a window", 2, 256, 1, 1, 8, 50, dtype.Invalid, bound},
	} {
		t.Run(row.name, func(t *testing.T) {
			b := ir.NewBuilder("attention")
			rows := d("batch", row.batch)
			q := b.Input("q", ir.Param,
				irtest.F32(rows, d(ir.Seq, row.seq), d(ir.Heads, row.kv*row.share), d(ir.HeadDim, row.width)), "")
			kt := irtest.F32(rows, d(ir.Keys, row.seq), d(ir.KVHeads, row.kv), d(ir.HeadDim, row.width))
			y := b.Attend(q, b.Input("k", ir.Param, kt, ""), b.Input("v", ir.Param, kt, ""),
				ir.Attention{Scale: 0.3, Causal: true, Window: row.window, OperandType: row.operands})
			g, err := b.Graph(b.Sum(b.Mul(y, y), "batch", ir.Seq, ir.Heads, ir.HeadDim))
			if err != nil {
				t.Fatal(err)
			}
			on.compare(t, jointly(t, g), randomInputs(r, g), row.bound)
			on.forwardAndBackwardWithin(t, g, randomInputs(r, g), row.bound)
		})
	}
}

func randomInputs(r *rand.Rand, g *ir.Graph) map[string][]*eval.Array {
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			a.Data[i] = float64(float32(r.NormFloat64()))
		}
		inputs[v.Name] = []*eval.Array{a}
	}
	return inputs
}

// smallStep is the gradient of a small GPT as the CPU runs it, with many more words than the rest
// is wide: what is [tokens, vocabulary] stands out.
func smallStep(t *testing.T, gemms dtype.DType) (*ir.Graph, *model.Config, model.Shape) {
	t.Helper()
	c := &model.Config{Arch: "gpt2", Vocab: 16384, Hidden: 64, Layers: 2, Heads: 4, KVHeads: 4,
		HeadDim: 16, MLP: 128, Context: 64, Norm: model.Norm{Eps: 1e-5}, Activation: model.GELU,
		Learned: true, AttnScale: 0.25, Tied: true}
	shape := model.Shape{Batch: 8, Seq: 64, Elem: dtype.F32, MatmulType: gemms}
	g, err := c.Graph(shape)
	if err != nil {
		t.Fatal(err)
	}
	if g, err = ir.Unroll(g); err != nil {
		t.Fatal(err)
	}
	return jointly(t, g), c, shape
}

func compileCPU(t *testing.T, e *engine.Engine, g *ir.Graph) (
	*engine.Executable, *kernels.Selector) {
	t.Helper()
	set := kernels.For("cpu")
	text, err := lower.StableHLO(g, lower.Options{Kernels: set})
	if err != nil {
		t.Fatal(err)
	}
	x, err := e.Compile(t.Context(), &program.FromText(g.Name, text, 1).Modules[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.Free)
	return x, set
}

// No bf16 product is left to the path that widens it first: in the compiled step every dot outside
// a fusion of YNNPACK's takes bf16, which only YNNPACK computes, and the step runs.
func TestEveryRoundedProductIsYNNPACKs(t *testing.T) {
	e := cpu(t)
	g, _, _ := smallStep(t, dtype.BF16)
	set := kernels.For("cpu")
	text, err := lower.StableHLO(g, lower.Options{Kernels: set})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range set.Choices() {
		if c.Kind == "product" && c.Kernel == "f32" {
			t.Errorf("a product of the step is made in f32: %s", c.Why)
		}
	}
	dir := t.TempDir()
	stage := &program.FromText("step", text, 1).Modules[0]
	stage.Flags = map[string]any{"xla_dump_to": dir, "xla_dump_hlo_as_text": true}
	x, err := e.Compile(t.Context(), stage)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	files, err := filepath.Glob(filepath.Join(dir, "*cpu_after_optimizations.txt"))
	if err != nil || len(files) != 1 {
		t.Fatalf("the compiler wrote %v, %v", files, err)
	}
	compiled, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	gemms, widened := dots(string(compiled))
	if gemms < 20 || len(widened) > 0 {
		t.Errorf("%d gemms, of these not in bf16: %v", gemms, widened)
	}
	plain(e).execute(t, x, g, randomInputs(rand.New(rand.NewPCG(1, 2)), g))
}

// dots counts the GEMMs of a compiled program and lists those whose arguments are not bf16.
func dots(text string) (count int, wide []string) {
	instruction := regexp.MustCompile(`^\s*(?:ROOT )?%([\w.-]+) = (\w+)\[[\d,]*\]\S* ([\w-]+)\(([^)]*)\)`)
	elem := map[string]string{}
	for line := range strings.Lines(text) {
		m := instruction.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if elem[m[1]] = m[2]; m[3] != "dot" {
			continue
		}
		count++
		for arg := range strings.SplitSeq(m[4], ", ") {
			if name := strings.TrimPrefix(arg, "%"); elem[name] != "bf16" {
				wide = append(wide, strings.TrimSpace(line))
			}
		}
	}
	return count, wide
}

// The step never holds [tokens, vocabulary] twice in f32.
func TestLogitsAreHeldOnce(t *testing.T) {
	e := cpu(t)
	for _, gemms := range []dtype.DType{dtype.Invalid, dtype.BF16} {
		g, c, s := smallStep(t, gemms)
		x, _ := compileCPU(t, e, g)
		memory, err := x.Memory()
		if err != nil {
			t.Fatal(err)
		}
		logits := s.Batch * s.Seq * c.Vocab * 4
		t.Logf("gemms %v: temp %d, logits %d", gemms, memory.Temp, logits)
		if memory.Temp >= 2*logits {
			t.Errorf("the step needs %d bytes, [tokens, vocabulary] is %d", memory.Temp, logits)
		}
	}
}

// An update reads back what it stores: every state is replaced in place, without a copy, and a step
// that is rejected changes nothing.
func TestUpdateCopiesNoState(t *testing.T) {
	e := cpu(t)
	p := optim.Param{Name: "w", Type: irtest.F32(irtest.D("a", 512), irtest.D("b", 128)), Decay: true}
	g, err := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}.Update([]optim.Param{p})
	if err != nil {
		t.Fatal(err)
	}
	x, _ := compileCPU(t, e, g)
	memory, err := x.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if state := p.Type.Shape().Bytes(); memory.Temp >= state {
		t.Errorf("the update needs %d bytes beside its arguments; a copy of a state is %d", memory.Temp, state)
	}
	on := engineWith{Engine: e, kernels: func() *kernels.Selector { return kernels.For("cpu") }}
	r := rand.New(rand.NewPCG(5, 6))
	for _, commit := range []float64{0, 1} {
		on.compare(t, g, updateInputs(r, g, []optim.Param{p}, commit), bound)
	}
}

// updateInputs are random weights, gradients and moments, and the numbers of a step.
func updateInputs(r *rand.Rand, g *ir.Graph, params []optim.Param, commit float64,
) map[string][]*eval.Array {
	inputs := randomInputs(r, g)
	for _, p := range params {
		second := inputs["v."+p.Name][0].Data
		for i, v := range second {
			second[i] = math.Abs(v)
		}
	}
	for name, v := range map[string]float64{optim.Commit: commit, optim.MaxNorm: 1e30,
		optim.LR: 0.1, optim.BiasCorrection1: 1.5, optim.BiasCorrection2: 1.5} {
		inputs[name][0].Data[0] = v
	}
	return inputs
}
