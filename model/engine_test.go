package model_test

import (
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
)

// The bounds on the engine: issue 4's, and in bf16 the bounds that follow from
// PyTorch's own.
const (
	engineLossBound = 1e-5
	// curveBound holds for the loss of every step. Both sides round to f32 in another order, and a
	// step of AdamW makes the sign of a gradient matter more than its size; 4e-7 was seen.
	curveBound = 1e-5
	// roughBound is how much larger our error in bf16 may be than PyTorch's, each against the truth:
	// of the logits, and the RMS over the gradients of all tensors.
	// Both sides round equally many times and as far, but not the same sums, so the errors are two draws from
	// one hat, and 0.7 to 1.1 was seen. More would say that something is rounded here that is not
	// there: norms and sums made in bf16 gave up to 1.6.
	roughBound = 1.25
)

// families are those that issue 4 names; their fixtures have curves and errors in bf16.
var families = []string{"gemma2", "gpt2", "llama3", "mistral", "phi3", "qwen3"}

// A lab runs graphs on one engine.
type lab struct{ *enginetest.Rig }

func newLab(t *testing.T) lab { return lab{enginetest.Open(t, engine.Options{Devices: 1})} }

// quick spends little on the machine code of programs that run a few times: it halves the time of
// the tests. One family does without, so that what is compiled for real is tested too.
func (l lab) quick(name string) lab {
	if name == "llama3" {
		return l
	}
	return lab{&enginetest.Rig{Engine: l.Engine,
		Flags: map[string]any{"xla_backend_optimization_level": 0}}}
}

// cpu lowers for the CPU, results into the place of arguments.
func cpu() lower.Options {
	return lower.Options{Kernels: kernels.For("cpu")}
}

// joint is the loss, the gradients and the logits as a program; the gradient of w is called g.w.
func (l lab) joint(t *testing.T, f *fixture, s model.Shape) (*ir.Graph, *enginetest.Program) {
	t.Helper()
	g, err := f.c.Graph(s)
	if err != nil {
		t.Fatal(err)
	}
	gr, joint := enginetest.Joint(t, g)
	names := []string{"loss"}
	for _, v := range g.Results[1:] { // loads of experts
		names = append(names, v.Name)
	}
	for _, v := range gr.Wrt {
		names = append(names, "g."+v.Name)
	}
	for _, op := range joint.Ops {
		if op.Kind == "cross_entropy" { // what it judges is a result too, which saves a program
			joint.Results = append(joint.Results, op.In[0])
		}
	}
	return g, l.Compile(t, joint, cpu(), append(names, "logits")...)
}

// logits runs the scores of the fixture's batch.
func (l lab) logits(t *testing.T, f *fixture, s model.Shape) []float64 {
	t.Helper()
	g, err := f.c.Logits(s)
	if err != nil {
		t.Fatal(err)
	}
	return l.Compile(t, g, cpu()).Run(t, f.load(t, g))[0][0].Data
}

// The whole way on the real engine: config.json and weights in, the graph lowered to StableHLO and
// run by XLA in f32, logits, loss and gradients out. They equal transformers', and so does the
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
			if others && !slowtest.Enabled { // their gradients are held to it in f64
				if d := enginetest.Distance(l.logits(t, f, shape), f.want["logits"]); !(d <= logitBound) {
					t.Errorf("logits are off by %.2g", d)
				}
				return
			}
			g, grad := l.joint(t, f, shape)
			out := grad.Run(t, f.load(t, g))
			loss, worst, where := enginetest.Distance(out[0][0].Data, f.want["loss"]), 0.0, ""
			logits := enginetest.Distance(out[len(out)-1][0].Data, f.want["logits"])
			for name, got := range f.exported(t, out[len(g.Results):]) {
				if d := enginetest.Distance(got, f.want["grad."+name]); !(d <= worst) {
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
func (l lab) curve(t *testing.T, f *fixture, g *ir.Graph, grad *enginetest.Program) (step int,
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
	update := l.Compile(t, ug, cpu())
	var state engine.State
	defer state.Free()
	inputs := f.load(t, g)
	for _, p := range params {
		state.Put(update.Put(t, p.Name, inputs[p.Name][0].Data))
		for _, s := range o.State(p) {
			state.Put(update.Put(t, s.Name, make([]float64, s.Type.Shape().Elements())))
		}
	}
	state.Put(grad.Put(t, model.InputPositions, inputs[model.InputPositions][0].Data))
	rows := len(f.want["ids"])
	for i, want := range f.want["curve.loss"] {
		data := map[string][]float64{}
		for _, name := range []string{model.InputIDs, model.InputLabels} {
			data[name] = f.want["curve."+name][i*rows : (i+1)*rows]
		}
		data[model.InputShare] = []float64{share(data[model.InputLabels])}
		out := grad.Step(t, &state, data)
		if d := enginetest.Distance(out["loss"], []float64{want}); !(d <= worst) {
			step, worst = i, d
		}
		delete(out, "loss")
		delete(out, "logits")
		out[optim.Commit], out[optim.MaxNorm] = []float64{1}, []float64{math.Inf(1)}
		out[optim.LR] = []float64{f.want["curve.rate"][i]}
		for name, v := range o.Scalars(i + 1) {
			out[name] = []float64{v}
		}
		update.Step(t, &state, out)
	}
	return step, worst
}

// In bf16, logits and gradients are about as near to the truth as transformers' in bf16:
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
				slowtest.Only(t)
			}
			t.Parallel()
			f := readFixture(t, filepath.Join("testdata", name))
			check := func(what string, ours, theirs float64) {
				t.Logf("%s: off by %.2g, transformers by %.2g", what, ours, theirs)
				if !(ours <= roughBound*theirs) {
					t.Errorf("%s: off by %.2g, transformers by %.2g", what, ours, theirs)
				}
			}
			for prefix, shape := range map[string]model.Shape{
				"bf16":     {Batch: 2, Seq: 11, Elem: dtype.BF16},
				"autocast": {Batch: 2, Seq: 11, Elem: dtype.F32, MatmulType: dtype.BF16},
			} {
				g, x := l.joint(t, f, shape)
				out := x.Run(t, f.load(t, g))
				check(prefix+" logits", enginetest.Distance(out[len(out)-1][0].Data, f.want["logits"]),
					f.want[prefix+".error.logits"][0])
				var ours, theirs []float64
				for name, got := range f.exported(t, out[len(g.Results):]) {
					ours = append(ours, enginetest.Distance(got, f.want["grad."+name]))
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
