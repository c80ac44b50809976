package model_test

import (
	"encoding/binary"
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/long"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

// The bounds on the engine: those of issue 4, and for numbers in bf16 those that follow from
// PyTorch's own.
const (
	engineLossBound = 1e-5
	// curveBound holds for the loss of every step. Both sides round to f32 in another order, and a step
	// of AdamW makes the sign of a gradient matter more than its size; 4e-7 was seen.
	curveBound = 1e-5
	// roughBound is how much larger our error in bf16 may be than PyTorch's, each against the truth:
	// that of the logits, and the root of the mean square of those of the gradients of all tensors.
	// Both sides round as often and as far, but not the same sums, so the errors are two draws from one
	// hat, and 0.7 to 1.1 was seen. More would say that something is rounded here that is not there:
	// norms and sums made in bf16 gave up to 1.6.
	roughBound = 1.25
)

// families are those that issue 4 names; their fixtures have curves and errors in bf16.
var families = []string{"gemma2", "gpt2", "llama3", "mistral", "phi3", "qwen3"}

// A lab compiles and runs graphs on one engine.
type lab struct {
	e     *engine.Engine
	flags map[string]any
}

func newLab(t *testing.T) *lab {
	t.Helper()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 1})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return &lab{e: e}
}

// quick spends little on the machine code of programs that run a few times: it halves the time of
// the tests. One family does without, so that what is compiled for real is tested too.
func (l *lab) quick(name string) *lab {
	if name == "llama3" {
		return l
	}
	return &lab{l.e, map[string]any{"xla_backend_optimization_level": 0}}
}

// compile compiles a graph whose results are called what results says, or else as the graph says.
func (l *lab) compile(t *testing.T, g *ir.Graph, into map[string]string,
	results ...string) *engine.Executable {
	t.Helper()
	s, err := lower.Stage(g.Name, g, lower.Options{Donate: into, Kernels: kernels.For("cpu")})
	if err != nil {
		t.Fatal(err)
	}
	s.Flags = l.flags
	for i, name := range results {
		s.Results[i].Name = name
	}
	x, err := l.e.Compile(t.Context(), s)
	if err != nil {
		t.Fatalf("%v\n%s", err, s.Text)
	}
	t.Cleanup(x.Free)
	return x
}

// place puts numbers on the device as an argument of a program.
func (l *lab) place(t *testing.T, x *engine.Executable, name string, data []float64) *engine.Array {
	t.Helper()
	i := slices.IndexFunc(x.Stage().Args, func(a program.Array) bool {
		return a.Name == name
	})
	if i < 0 {
		t.Fatalf("%s takes no %s", x.Stage().Name, name)
	}
	spec := x.Stage().Args[i]
	a, err := l.e.Place(x.Stage(), spec, engine.Copied, func(int) ([]byte, error) {
		return encode(spec.Global.Type, data), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// run runs a program on numbers and gives its results.
func (l *lab) run(t *testing.T, x *engine.Executable, inputs map[string][]*eval.Array) [][]float64 {
	t.Helper()
	var args []*engine.Array
	for _, spec := range x.Stage().Args {
		a := l.place(t, x, spec.Name, inputs[spec.Name][0].Data)
		defer a.Free()
		args = append(args, a)
	}
	run, err := x.Run(args...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	out := make([][]float64, len(run.Results))
	for i, a := range run.Results {
		out[i] = fetch(t, a)
	}
	return out
}

// fetch reads an array as numbers.
func fetch(t *testing.T, a *engine.Array) []float64 {
	t.Helper()
	b, err := a.Read(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]float64, a.Local().Elements())
	for i := range data {
		if a.Local().Type == dtype.BF16 {
			bits := uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16
			data[i] = float64(math.Float32frombits(bits))
		} else {
			data[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
		}
	}
	return data
}

// encode writes numbers as elements of a type, rounded to the nearest.
func encode(d dtype.DType, data []float64) (b []byte) {
	for _, v := range data {
		switch bits := math.Float32bits(float32(v)); d {
		case dtype.S32:
			b = binary.LittleEndian.AppendUint32(b, uint32(int32(v)))
		case dtype.Pred:
			b = append(b, byte(v))
		case dtype.BF16:
			b = binary.LittleEndian.AppendUint16(b, uint16((bits+0x7fff+bits>>16&1)>>16))
		default:
			b = binary.LittleEndian.AppendUint32(b, bits)
		}
	}
	return b
}

// A fixtureOf is what a folder of testdata has.
type fixtureOf struct {
	c             *model.Config
	weights, want map[string][]float64
}

func readFixture(t *testing.T, dir string) fixtureOf {
	t.Helper()
	return fixtureOf{parseFile(t, filepath.Join(dir, "config.json")),
		tensors(t, filepath.Join(dir, "model.safetensors")),
		tensors(t, filepath.Join(dir, "expected.safetensors"))}
}

// joint is the loss, the gradients and the logits as a program; the gradient of w is called g.w.
func (l *lab) joint(t *testing.T, f fixtureOf, s model.Shape) (*ir.Graph, *engine.Executable) {
	t.Helper()
	g, err := f.c.Graph(s)
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
	names := []string{"loss"}
	for _, v := range gr.Wrt {
		names = append(names, "g."+v.Name)
	}
	for _, op := range joint.Ops {
		if op.Kind == "cross_entropy" { // what it judges is a result too, which saves a program
			joint.Results = append(joint.Results, op.In[0])
		}
	}
	return g, l.compile(t, joint, nil, append(names, "logits")...)
}

// logits runs the scores of the fixture's batch.
func (l *lab) logits(t *testing.T, f fixtureOf, s model.Shape) []float64 {
	t.Helper()
	g, err := f.c.Logits(s)
	if err != nil {
		t.Fatal(err)
	}
	return l.run(t, l.compile(t, g, nil), load(t, f.c, g, f.weights, f.want))[0]
}

// exported gives gradients by the names of the tensors of a checkpoint.
func exported(t *testing.T, f fixtureOf, grads [][]float64) map[string][]float64 {
	t.Helper()
	all := map[string][]float64{}
	for i, p := range f.c.Params() {
		for k, name := range p.Tensors() {
			if all[name] == nil {
				all[name] = make([]float64, len(f.weights[name]))
			}
			if err := model.Put(&p, k, all[name], grads[i]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// The whole way on the real engine: config.json and weights in, the graph lowered to StableHLO and
// run by XLA in f32, logits, loss and gradients out. They are those of transformers, and so is the
// loss of 20 steps of AdamW.
func TestEngineAgainstTransformers(t *testing.T) {
	l := newLab(t)
	shape := model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32}
	for _, dir := range fixtures(t) {
		name := filepath.Base(dir)
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name != "llama3" {
				t.Skip("one family is enough for -short")
			}
			t.Parallel()
			l, f := l.quick(name), readFixture(t, dir)
			others := !slices.Contains(families, name)
			if others && !long.Enabled { // their gradients are held to it in f64
				if d := distance(l.logits(t, f, shape), f.want["logits"]); !(d <= logitBound) {
					t.Errorf("logits are off by %.2g", d)
				}
				return
			}
			g, grad := l.joint(t, f, shape)
			out := l.run(t, grad, load(t, f.c, g, f.weights, f.want))
			loss, worst, where := distance(out[0], f.want["loss"]), 0.0, ""
			logits := distance(out[len(out)-1], f.want["logits"])
			for name, got := range exported(t, f, out[1:]) {
				if d := distance(got, f.want["grad."+name]); !(d <= worst) {
					worst, where = d, name
				}
			}
			t.Logf("logits %.1e, loss %.1e, gradients at most %.1e (%s)", logits, loss, worst, where)
			if !(logits <= logitBound) || !(loss <= engineLossBound) || !(worst <= gradBound) {
				t.Errorf("logits are off by %.2g, the loss by %.2g, the gradient of %s by %.2g", logits,
					loss, where, worst)
			}
			if others {
				return // the issue asks for curves of the families
			}
			step, d := l.curve(t, f, g, grad)
			t.Logf("over 20 steps the loss is off by at most %.1e, in step %d", d, step)
			if !(d <= curveBound) {
				t.Errorf("the loss of step %d is off by %.2g", step, d)
			}
		})
	}
}

// curve trains as the fixture's torch.optim.AdamW did, and gives the step whose loss is farthest
// off.
func (l *lab) curve(t *testing.T, f fixtureOf, g *ir.Graph, grad *engine.Executable) (step int,
	worst float64) {
	t.Helper()
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}
	var params []optim.Param
	for _, p := range f.c.Params() {
		t := ir.Type{Elem: dtype.F32, Dims: p.Dims}
		params = append(params, optim.Param{Name: p.Name, Type: t, Tag: p.Tag, Decay: len(p.Shape) > 1})
	}
	ug, err := o.Update(params)
	if err != nil {
		t.Fatal(err)
	}
	update := l.compile(t, ug, optim.Donations(ug))
	var state engine.State
	defer state.Free()
	inputs := load(t, f.c, g, f.weights, f.want)
	for _, p := range params {
		state.Put(l.place(t, update, p.Name, inputs[p.Name][0].Data))
		for _, s := range o.State(p) {
			state.Put(l.place(t, update, s.Name, make([]float64, s.Type.Shape().Elements())))
		}
	}
	state.Put(l.place(t, grad, model.InputPositions, inputs[model.InputPositions][0].Data))
	rows := len(f.want["ids"])
	for i, want := range f.want["curve.loss"] {
		data := map[string][]float64{}
		for _, name := range []string{model.InputIDs, model.InputLabels} {
			data[name] = f.want["curve."+name][i*rows : (i+1)*rows]
		}
		data[model.InputShare] = []float64{share(data[model.InputLabels])}
		out := l.step(t, grad, &state, data, nil)
		data = map[string][]float64{optim.Commit: {1}, optim.Limit: {math.Inf(1)},
			optim.Rate: {f.want["curve.rate"][i]}}
		for name, v := range o.Scalars(i + 1) {
			data[name] = []float64{v}
		}
		done := l.step(t, update, &state, data, out.Results[1:1+len(params)])
		if d := distance(fetch(t, out.Results[0]), []float64{want}); !(d <= worst) {
			step, worst = i, d
		}
		out.Free()
		done.Free()
	}
	return step, worst
}

// step runs a program on the state, numbers and arrays.
func (l *lab) step(t *testing.T, x *engine.Executable, state *engine.State,
	data map[string][]float64, more []*engine.Array) *engine.Run {
	t.Helper()
	in := slices.Clone(more)
	for name, list := range data {
		a := l.place(t, x, name, list)
		defer a.Free()
		in = append(in, a)
	}
	run, err := x.Step(state, in...)
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	return run
}

// In bf16, logits and gradients are about as near to the truth as those of transformers in bf16:
// once with everything in bf16, once with f32 and the arguments of products alone in bf16, which
// is what torch.autocast does.
func TestBF16AgainstTransformers(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles for ten seconds of a core")
	}
	l := newLab(t).quick("")
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			if name != "llama3" {
				long.Only(t)
			}
			t.Parallel()
			f := readFixture(t, filepath.Join("testdata", name))
			check := func(what string, ours, theirs float64) {
				t.Logf("%s: off by %.2g, those of transformers by %.2g", what, ours, theirs)
				if !(ours <= roughBound*theirs) {
					t.Errorf("%s: off by %.2g, those of transformers by %.2g", what, ours, theirs)
				}
			}
			for prefix, shape := range map[string]model.Shape{
				"bf16":     {Batch: 2, Seq: 11, Elem: dtype.BF16},
				"autocast": {Batch: 2, Seq: 11, Elem: dtype.F32, Products: dtype.BF16},
			} {
				g, x := l.joint(t, f, shape)
				out := l.run(t, x, load(t, f.c, g, f.weights, f.want))
				check(prefix+" logits", distance(out[len(out)-1], f.want["logits"]),
					f.want[prefix+".error.logits"][0])
				var ours, theirs []float64
				for name, got := range exported(t, f, out[1:]) {
					ours = append(ours, distance(got, f.want["grad."+name]))
					theirs = append(theirs, f.want[prefix+".error.grad."+name][0])
				}
				check(prefix+" gradients", rootMeanSquare(ours), rootMeanSquare(theirs))
			}
		})
	}
}

func rootMeanSquare(list []float64) float64 {
	sum := 0.0
	for _, v := range list {
		sum += v * v
	}
	return math.Sqrt(sum / float64(len(list)))
}
