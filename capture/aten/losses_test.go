package aten

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/parity"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

// A lesson is a dataset of one batch.
type lesson struct{ *data.Batch }

func (l lesson) Take(_ context.Context, at data.Position, _, _, _ int) (*data.Batch, data.Position,
	error) {
	b := *l.Batch
	return &b, at, nil
}

// Documents implements [train.DocumentCounter].
func (lesson) Documents() int64 { return 1 }

// batch is the fixture's, with labels where the logits stand.
func (r reference) batch(t *testing.T, m *Model) lesson {
	t.Helper()
	feed, shape := r.feed(t, m)
	b := &data.Batch{Sequences: int(shape.Batch), Seq: int(shape.Seq)}
	for i, id := range feed["ids"] {
		b.IDs = append(b.IDs, int32(id))
		b.Positions = append(b.Positions, int32(i%b.Seq))
		b.Segments = append(b.Segments, 0)
		label := int32(feed["labels"][i])
		if label < 0 {
			label = data.Ignored
		} else {
			b.Count++
		}
		b.Labels = append(b.Labels, label)
	}
	b.Total = b.Count
	return lesson{b}
}

// losses are what eager PyTorch trains in 50 steps of AdamW (testdata/make.py --losses).
func losses(t *testing.T) map[string][]float64 {
	t.Helper()
	text, err := os.ReadFile("../pt2/testdata/losses.json")
	if err != nil {
		t.Fatal(err)
	}
	var list map[string][]float64
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	return list
}

// recipeOf is the training of losses.
func recipeOf(t *testing.T) *recipe.Recipe {
	r := recipe.Default()
	r.Out, r.Steps, r.Batch, r.Seq, r.Precision = t.TempDir(), 50, 2, 6, dtype.F32
	o := &r.Optimizer
	o.LR, o.Warmup, o.Schedule, o.Beta1, o.Beta2 = 1e-3, 1, "constant", 0.9, 0.95
	o.WeightDecay, o.MaxGradNorm = 0.1, 0
	r.Guard.Spike = 0
	return r
}

// trained trains, and gives the losses.
func trained(t *testing.T, o train.Options) (list []float64) {
	t.Helper()
	tr, err := train.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for {
		s, err := tr.Step(t.Context())
		if errors.Is(err, io.EOF) {
			return list
		} else if err != nil {
			t.Fatal(err)
		}
		list = append(list, s.Loss)
	}
}

// apart is the largest difference of two lists of losses, relative to the second.
func apart(have, want []float64) float64 {
	if len(have) != len(want) {
		return math.Inf(1)
	}
	worst := 0.0
	for i := range want {
		worst = math.Max(worst, math.Abs(have[i]-want[i])/math.Abs(want[i]))
	}
	return worst
}

// openCPU opens the CPU engine with some devices.
func openCPU(t *testing.T, devices int) *engine.Engine {
	t.Helper()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: devices,
		Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

// 50 steps of training are PyTorch's, for every model.
func TestFiftySteps(t *testing.T) {
	e := openCPU(t, 1)
	want := losses(t)
	for _, f := range fixtures {
		t.Run(f.name, func(t *testing.T) {
			switch f.name {
			case "llama", "tied", "gpt_oss":
			default:
				slowtest.Only(t) // a compilation each
			}
			m, ref := load(t, f.name)
			var got []float64
			switch f.name {
			case "vit", "dropout":
				got = byHand(t, m, ref)
			default:
				got = trained(t, train.Options{Engine: e, Model: m, Recipe: recipeOf(t), Data: ref.batch(t, m)})
			}
			d := apart(got, want[f.name])
			t.Logf("%-12s loss %.4f to %.4f, %.1e from PyTorch", f.name, got[0], got[len(got)-1], d)
			if !(d < 1e-4) {
				t.Errorf("%s does not train as in PyTorch: %v\nwant %v", f.name, got, want[f.name])
			}
		})
	}
}

// byHand trains a model of images, or one that takes masks, which no dataset of tokens feeds: the
// interpreter computes gradients, and AdamW is written out. Masks are the same in every step.
func byHand(t *testing.T, m *Model, ref reference) (list []float64) {
	t.Helper()
	feed, shape := ref.feed(t, m)
	g, err := m.Graph(shape)
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := grad.Joint()
	if err != nil {
		t.Fatal(err)
	}
	const lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.95, 1e-8, 0.1
	first, second := map[string][]float64{}, map[string][]float64{}
	for step := 1.0; step <= 50; step++ {
		out := evaluate(t, joint, feed)
		list = append(list, out[0][0])
		for i, p := range m.Params() {
			w := feed[p.Name]
			if first[p.Name] == nil {
				first[p.Name], second[p.Name] = make([]float64, len(w)), make([]float64, len(w))
			}
			for k, d := range out[1+i] {
				m, v := &first[p.Name][k], &second[p.Name][k]
				*m, *v = beta1**m+(1-beta1)*d, beta2**v+(1-beta2)*d*d
				if !p.Vector() {
					w[k] *= 1 - lr*decay
				}
				w[k] -= lr * *m / (1 - math.Pow(beta1, step)) /
					(math.Sqrt(*v/(1-math.Pow(beta2, step))) + eps)
			}
		}
	}
	return list
}

// spreads are plans for eight devices.
var spreads = []struct {
	model string
	plan  plan.Plan
}{
	{"llama", plan.Plan{FSDP: plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}, TP: plan.TP{Size: 2},
		CP: plan.CP{Size: 2, Kind: "gather"}}},
	{"gpt2", plan.Plan{DP: 2, FSDP: plan.FSDP{Size: 2, Zero: 2, Gather: "step"},
		TP: plan.TP{Size: 2, Sequence: true}}},
	{"nanogpt", plan.Plan{FSDP: plan.FSDP{Size: 2, Zero: 1, Gather: "step"}, TP: plan.TP{Size: 2},
		PP: plan.PP{Size: 2, Schedule: "1f1b"}}},
	{"qwen3_moe", plan.Plan{DP: 2, FSDP: plan.FSDP{Size: 4, Zero: 3, Gather: "layer"}}},
	{"mixtral", plan.Plan{FSDP: plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}, EP: 4}},
	{"phi3", plan.Plan{DP: 4, TP: plan.TP{Size: 2}}},
}

// Under a plan for eight devices a captured model has the losses that it has on one.
func TestEightDevices(t *testing.T) {
	e := openCPU(t, 8)
	for _, row := range spreads {
		t.Run(row.model, func(t *testing.T) {
			if row.model != "llama" {
				slowtest.Only(t) // a compilation each
			}
			m, _ := load(t, row.model)
			r := recipeOf(t)
			r.Steps, r.Batch, r.Seq = 10, 8, 8
			o := train.Options{Engine: e, Model: m, Recipe: r, Data: chance{}}
			want := trained(t, o)
			p := plan.Default()
			p.Cluster, p.Seq, p.Batch = "8xcpu", 8, 8
			p.DP, p.FSDP, p.TP, p.CP, p.PP, p.EP = max(row.plan.DP, 1), row.plan.FSDP, row.plan.TP,
				row.plan.CP, row.plan.PP, max(row.plan.EP, 1)
			if p.PP.Size > 1 {
				p.Microbatches = 2
			}
			again := *r
			again.Out, again.Microbatch = t.TempDir(), int(p.MicrobatchSequences())
			o.Plan, o.Recipe = p, &again
			got := trained(t, o)
			d := apart(got, want)
			t.Logf("%-10s %s: loss %.4f to %.4f, %.1e from one device", row.model, p.Label(), got[0],
				got[len(got)-1], d)
			if !(d < 1e-5) {
				t.Errorf("%s: %v\non one device %v", row.model, got, want)
			}
		})
	}
}

// On the software GPU two captured models are trained as in PyTorch, by the programs that a real one
// would run.
func TestSoftwareGPU(t *testing.T) {
	slowtest.Only(t) // kernels are interpreted
	if !softgpu.Child(t, softgpu.Options{Memory: 256 << 20}) {
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	want := losses(t)
	for _, name := range []string{"llama", "gpt2"} {
		t.Run(name, func(t *testing.T) {
			m, ref := load(t, name)
			got := trained(t, train.Options{Engine: e, Model: m, Recipe: recipeOf(t),
				Data: ref.batch(t, m)})
			d := apart(got, want[name])
			t.Logf("%-6s loss %.4f to %.4f, %.1e from PyTorch", name, got[0], got[len(got)-1], d)
			if !(d < 1e-4) {
				t.Errorf("%s: %v\nin PyTorch %v", name, got, want[name])
			}
		})
	}
}

// The program of a step has the same operations whatever the depth, so that its compile time does
// not grow (bench/depth measures it).
func TestDepth(t *testing.T) {
	lines := func(name string) int {
		archive, err := pt2.Parse(name, unpack(t, name+".pt2.gz"))
		if err != nil {
			t.Fatal(err)
		}
		m, err := New(archive)
		if err != nil {
			t.Fatal(err)
		}
		r := recipeOf(t)
		r.Precision, r.Microbatch = dtype.BF16, r.Batch
		p, err := step.Build(step.Spec{Model: m, Recipe: r, Arch: "sm_100"})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(p.Find(step.Gradient, 0).Module.Text, "\n")
	}
	shallow, deep := lines("deep4"), lines("deep64")
	t.Logf("4 layers have %d lines, 64 layers %d", shallow, deep)
	if shallow != deep {
		t.Errorf("the program of 4 layers has %d lines, of 64 layers %d", shallow, deep)
	}
}

// A captured model is trained in MXFP8, and its loss stays within the bound of MXFP8 against BF16.
func TestQuantized(t *testing.T) {
	slowtest.Only(t) // a minute
	e := openCPU(t, 1)
	archive, err := pt2.Parse("words", unpack(t, "words.pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := New(archive)
	if err != nil {
		t.Fatal(err)
	}
	policy, err := precision.Default(m, string(dtype.MXFP8))
	if err != nil {
		t.Fatal(err)
	}
	if share := policy.Share(m)[dtype.MXFP8]; !(share > 0.3) {
		t.Fatalf("%.0f %% of the work is in MXFP8", 100*share)
	}
	run := func(format string) []float64 {
		r := recipeOf(t)
		r.Batch, r.Seq, r.Precision, r.GEMMs = 4, 32, dtype.BF16, format
		return trained(t, train.Options{Engine: e, Model: m, Recipe: r, Data: chance{seq: 32}})
	}
	want, got := run(""), run(string(dtype.MXFP8))
	d := 100 * (got[49] - want[49]) / want[49]
	bound := parity.Bound(m, policy, false)
	t.Logf("loss %.4f to %.4f in BF16, %.4f in MXFP8: %.3f %%, within %.2f %%", want[0], want[49],
		got[49], d, bound)
	if !(d <= bound) || got[49] == want[49] {
		t.Errorf("MXFP8 gives %v\nBF16 %v", got, want)
	}
}
