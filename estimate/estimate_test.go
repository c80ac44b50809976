package estimate

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/schedule"
)

var survey = flag.Bool("survey", false, "do not stop at the first pipeline that is off")

var testSchedules = []string{"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}

func estimator(t testing.TB, name, cluster, profile string) *Estimator {
	t.Helper()
	preset, err := model.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	cl, err := machine.ParseCluster(cluster)
	if err != nil {
		t.Fatal(err)
	}
	prof, err := price.Find(profile)
	if err != nil {
		t.Fatal(err)
	}
	e, err := New(preset.Config, cl, prof)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func mustPrice(t testing.TB, e *Estimator, p *plan.Plan) Estimate {
	t.Helper()
	est, err := e.Price(p)
	if err != nil {
		t.Fatal(err)
	}
	return est
}

// base is a plan that a test changes one thing of.
func base() *plan.Plan {
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch, p.Microbatches = "64xb200", 8192, 64, 8
	p.FSDP = plan.FSDP{Size: 8, Zero: 1, Gather: "step"}
	p.TP = plan.TP{Size: 4, Sequence: true}
	p.PP = plan.PP{Size: 2, Virtual: 1, Schedule: "1f1b"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	return p
}

// random draws a plan that fits its model.
func random(r *rapid.T) (string, *plan.Plan) {
	name := rapid.SampledFrom([]string{"llama3-8b", "llama3-70b", "qwen3-235b-a22b", "deepseek-v3",
		"gemma2-9b", "gpt-oss-120b"}).Draw(r, "model")
	p := base()
	pow := func(what string, most int64) int64 { return 1 << rapid.Int64Range(0, most).Draw(r, what) }
	p.DP, p.FSDP.Size, p.TP.Size, p.CP.Size = pow("dp", 2), pow("fsdp", 3), pow("tp", 2), pow("cp", 1)
	p.EP = pow("ep", 2)
	p.PP.Size = pow("pp", 3)
	p.TP.Sequence = rapid.Bool().Draw(r, "sequence")
	p.FSDP.Zero = rapid.IntRange(1, 3).Draw(r, "zero")
	p.FSDP.Gather = rapid.SampledFrom([]string{"layer", "microbatch", "step"}).Draw(r, "gather")
	p.CP.Kind = rapid.SampledFrom([]string{"ring", "gather"}).Draw(r, "kind")
	p.Microbatches = p.PP.Size * pow("micros", 3)
	p.Batch = p.Microbatches * p.DP * p.FSDP.Size * p.EP * pow("rows", 1)
	if p.PP.Size > 1 {
		p.PP.Schedule = rapid.SampledFrom([]string{"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}).
			Draw(r, "schedule")
		if p.PP.Schedule == "interleaved" || p.PP.Schedule == "zb-v" {
			p.PP.Virtual = 2
		}
	}
	for _, tag := range []ir.Tag{ir.Norm, ir.Attn, ir.MLP, ir.Experts} {
		if rapid.Bool().Draw(r, string(tag)) {
			p.Recompute = append(p.Recompute, tag)
		}
	}
	if rapid.Bool().Draw(r, "offload") {
		p.Offload = []string{"activations"}
	}
	return name, p
}

// estimators returns an estimator for each model that random draws.
func estimators(t *testing.T) map[string]*Estimator {
	t.Helper()
	made := map[string]*Estimator{}
	for _, name := range []string{"llama3-8b", "llama3-70b", "qwen3-235b-a22b", "deepseek-v3",
		"gemma2-9b", "gpt-oss-120b"} {
		made[name] = estimator(t, name, "1024xgb200", "deepwell")
	}
	return made
}

func TestPartsSumToTheWhole(t *testing.T) {
	made := estimators(t)
	rapid.Check(t, func(r *rapid.T) {
		name, p := random(r)
		est := mustPrice(t, made[name], p)
		if d := math.Abs(est.Parts.Sum()/est.Step - 1); !(d < 1e-9) {
			r.Errorf("parts sum to %v, the step takes %v: %+v", est.Parts.Sum(), est.Step, est.Parts)
		}
		if est.Memory.Sum() != est.Peak || est.Peak <= 0 {
			r.Errorf("causes sum to %d, the peak is %d", est.Memory.Sum(), est.Peak)
		}
		if !(est.Low < est.Step && est.Step < est.High) {
			r.Errorf("%v is not between %v and %v", est.Step, est.Low, est.High)
		}
		if est.Parts.Bubble < -1e-9*est.Step || est.Parts.Data < 0 || est.Parts.Launch < 0 {
			r.Errorf("a part is negative: %+v", est.Parts)
		}
		layers := int64(0)
		for _, s := range est.Stages {
			layers += s.Layers
			if s.Forward <= 0 || s.Input <= 0 || s.Weight < 0 {
				r.Errorf("a stage is %+v", s)
			}
		}
		for _, l := range est.Loads {
			if l.Residuals < 0 || l.Handed < 0 || slices.Min(l.Passing[:]) < 0 || slices.Min(l.Temp[:]) < 0 {
				r.Errorf("a stage holds %+v", l)
			}
		}
		for _, m := range est.Ranks {
			if m.Params <= 0 || m.Optimizer <= 0 || m.Grads <= 0 || m.Activations != 0 ||
				m.Sum() > est.Peak {
				r.Errorf("a rank ends with %+v, the peak is %d", m, est.Peak)
			}
		}
		if layers != made[name].config.Layers {
			r.Errorf("stages have %d layers", layers)
		}
	})
}

// A change that asks for more must not come out as less.
func TestDirections(t *testing.T) {
	e := estimator(t, "llama3-70b", "64xb200", "megatron")
	before := mustPrice(t, e, base())
	for _, tt := range []struct {
		name   string
		change func(p *plan.Plan)
		step   int // 1 slower, -1 faster, 0 whatever
		peak   int
	}{
		{"a longer row", func(p *plan.Plan) { p.Seq *= 2 }, 1, 1},
		{"more rows in a microbatch", func(p *plan.Plan) { p.Batch *= 2 }, 1, 1},
		{"more microbatches", func(p *plan.Plan) { p.Batch *= 2; p.Microbatches *= 2 }, 1, 0},
		{"recomputation", func(p *plan.Plan) { p.Recompute = []ir.Tag{ir.Attn, ir.MLP, ir.Norm} }, 1, -1},
		{"the MLP again", func(p *plan.Plan) { p.Recompute = []ir.Tag{ir.MLP} }, 1, -1},
		{"f32 gradients on the wire", func(p *plan.Plan) { p.Types.Collectives = dtype.F32 }, 1, 0},
		{"a whole sequence", func(p *plan.Plan) { p.TP.Sequence = false }, 0, 1},
		{"zero 2", func(p *plan.Plan) { p.FSDP.Zero = 2 }, 0, -1},
		{"zero 3", func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 8, Zero: 3, Gather: "layer"} }, 0, -1},
		{"gpipe", func(p *plan.Plan) { p.PP.Schedule = "gpipe" }, 0, 1},
		{"interleaved", func(p *plan.Plan) { p.PP.Schedule, p.PP.Virtual = "interleaved", 2 }, -1, 0},
		{"zb-h1", func(p *plan.Plan) { p.PP.Schedule = "zb-h1" }, -1, 0},
		{"offload", func(p *plan.Plan) { p.Offload = []string{"activations"} }, 0, -1},
	} {
		p := base()
		tt.change(p)
		after := mustPrice(t, e, p)
		sign := func(a, b float64) int {
			switch {
			case b > a:
				return 1
			case b < a:
				return -1
			}
			return 0
		}
		if s := sign(before.Step, after.Step); tt.step != 0 && s != tt.step {
			t.Errorf("%s: %.4f s, before %.4f", tt.name, after.Step, before.Step)
		}
		if s := sign(float64(before.Peak), float64(after.Peak)); tt.peak != 0 && s != tt.peak {
			t.Errorf("%s: %d bytes, before %d", tt.name, after.Peak, before.Peak)
		}
	}
}

// The closed forms of pipelines against the simulator of package schedule.
func TestMakespanIsThatOfTheSimulator(t *testing.T) {
	worst := map[string]float64{}
	e := &Estimator{orders: &orders{made: map[shape]*schedule.Order{}}}
	e.forget()
	rapid.Check(t, func(r *rapid.T) {
		name := rapid.SampledFrom(testSchedules).Draw(r, "schedule")
		l := &layout{pipe: rapid.Int64Range(2, 12).Draw(r, "pp"), virtual: 1}
		if name == "interleaved" {
			l.virtual = rapid.Int64Range(2, 4).Draw(r, "virtual")
		}
		if name == "zb-v" {
			l.virtual, l.vee = 2, true
		}
		l.micros = l.pipe * rapid.Int64Range(1, 6).Draw(r, "micros")
		layer := rapid.Float64Range(0.01, 0.1).Draw(r, "layer")
		head := rapid.Float64Range(0, 0.3).Draw(r, "head")
		send := rapid.Float64Range(0, 0.002).Draw(r, "send")
		input := rapid.Float64Range(1, 2.2).Draw(r, "input")
		weight := rapid.Float64Range(0.6, 1.1).Draw(r, "weight")
		n := int(l.pipe * l.virtual)
		layers := int64(n) * rapid.Int64Range(2, 8).Draw(r, "layers")
		layers += rapid.Int64Range(0, int64(n)-1).Draw(r, "rest")
		stages := make([]Stage, n)
		var costs schedule.Costs
		tick := func(s float64) int64 { return int64(s * 1e7) }
		for i := range stages {
			count := layers / int64(n)
			if int64(i) < layers%int64(n) {
				count++
			}
			f := layer * float64(count)
			if i == n-1 {
				f += layer * head
			}
			stages[i] = Stage{Forward: f, Input: f * input, Weight: f * weight, Send: send}
			costs.Forward = append(costs.Forward, tick(f))
			costs.Input = append(costs.Input, tick(f*input))
			costs.Weight = append(costs.Weight, tick(f*weight))
		}
		costs.Send = tick(send)
		s, err := schedule.New(name, schedule.Shape{Ranks: int(l.pipe), Virtual: int(l.virtual),
			Micros: int(l.micros)})
		if err != nil {
			r.Fatal(err)
		}
		line, err := s.Simulate(costs)
		if err != nil {
			r.Fatal(err)
		}
		got, err := e.makespan(name, l, stages)
		if err != nil {
			r.Fatal(err)
		}
		want := float64(line.Makespan) / 1e7
		off := math.Abs(got/want - 1)
		worst[name] = max(worst[name], off)
		if *survey && off > 0.015 {
			t.Logf("%s P%d V%d m%d layers %d head %.2f I %.2f W %.2f "+
				"send/stage %.3f: %+.2f %%", name, l.pipe, l.virtual, l.micros, layers, head, input, weight,
				send/stages[0].Both(), 100*(got/want-1))
		}
		if off > 0.01 && !*survey {
			r.Errorf("%s: %.4f s, the simulator says %.4f (%+.2f %%)", name, got, want, 100*(got/want-1))
		}
	})
	for name, off := range worst {
		t.Logf("%s: %.3f %% at most", name, 100*off)
	}
}

func TestPricesOfPlansThatDoNotFit(t *testing.T) {
	e := estimator(t, "llama3-70b", "64xb200", "deepwell")
	p := base()
	p.Batch = 63
	if _, err := e.Price(p); err == nil {
		t.Error("63 rows were dealt to 64 ranks")
	}
	p = base()
	p.PP.Schedule = "1f2b"
	if _, err := e.Price(p); err == nil {
		t.Error("an unknown schedule was priced")
	}
}

// Masters and moments on the host cross its link in every step: 12 bytes an element each way, which
// takes longer than an update in the memory of the device. On a CPU nothing is moved.
func TestOffloadedOptimizerTakesTime(t *testing.T) {
	e := estimator(t, "llama3.1-8b", "8xb200", "deepwell")
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch, p.FSDP = "8xb200", 4096, 8, plan.FSDP{Size: 8, Zero: 3, Gather: "layer"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	plain := mustPrice(t, e, p)
	p.Offload = []string{plan.OptimizerState}
	moved := mustPrice(t, e, p)
	link := e.prices.Offload(8.03e9 / 8 * 12)
	if got := moved.Parts.Optimizer; math.Abs(got/link-1) > 0.01 || got <= plain.Parts.Optimizer {
		t.Errorf("the optimizer takes %g s, %g s in the device's memory, its bytes %g s", got,
			plain.Parts.Optimizer, link)
	}
}

func BenchmarkPrice(b *testing.B) {
	e := estimator(b, "deepseek-v3", "1024xgb200", "deepwell")
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch, p.Microbatches = "1024xgb200", 4096, 16384, 64
	p.FSDP = plan.FSDP{Size: 8, Zero: 1, Gather: "step"}
	p.EP, p.PP = 16, plan.PP{Size: 8, Virtual: 1, Schedule: "1f1b"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := e.Price(p); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "plans/s")
}

func ExampleEstimator_Price() {
	preset, _ := model.Find("llama3-70b")
	cluster, _ := machine.ParseCluster("64xb200")
	profile, _ := price.Find("megatron")
	e, _ := New(preset.Config, cluster, profile)
	est, _ := e.Price(base())
	fmt.Printf("%.2f s (%.2f to %.2f), of which %.0f %% products; %d GiB\n", est.Step, est.Low,
		est.High, 100*est.Parts.Compute/est.Step, est.Peak>>30)
	// Output: 5.53 s (5.31 to 5.77), of which 61 % products; 106 GiB
}
