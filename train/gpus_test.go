package train

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

var gpusAll = flag.Bool("gpus.all", false, "train under every plan of the table on software GPUs, not eight")

// gpuSteps is how long runs on software GPUs are.
const gpuSteps = 5

// A gpuRun is a run of the table: a plan for some GPUs, in one type.
type gpuRun struct {
	plantest.Row
	gpus int
	bf16 bool
}

func (r gpuRun) String() string {
	if r.bf16 {
		return r.Name + " bf16"
	}
	return r.Name + " f32"
}

// gpuRuns are ten plans, three that offload and two of models with experts, each in f32 and in
// bf16: every axis alone on two GPUs, three axes on eight, every schedule once. Without -gpus.all
// it is eight of them.
func gpuRuns(t *testing.T) (list []gpuRun) {
	t.Helper()
	rows := append(plantest.Combine(3, append(plantest.Meshes(), plantest.Pipes()...)...),
		plantest.Offloads()...)
	rows = append(rows, plantest.Row{Name: "one", Apply: func(*plan.Plan) {}},
		plantest.Row{Name: "experts", Apply: func(*plan.Plan) {}},
		plantest.Row{Name: "ep experts", Apply: func(p *plan.Plan) { p.EP = 2 }})
	for _, one := range []struct {
		name string
		gpus int
		ci   string // the types of CI
	}{
		{"one", 1, "bf16"},
		{"one, offload activations optimizer", 1, "f32"},
		{"experts", 1, "f32"},
		{"ep experts", 2, "f32"},
		{"dp", 2, ""},
		{"zero3", 2, ""},
		{"sp", 2, ""},
		{"ring", 2, "bf16"},
		{"gpipe", 2, ""},
		{"zero1, offload optimizer", 2, "f32"},
		{"zero3 tp 1f1b", 8, "f32"},
		{"dp sp interleaved", 8, ""},
		{"zero2 balance zb-h1", 8, "bf16"},
		{"tp ring zb-v", 8, ""},
		{"zero3 overlap cp", 8, ""},
		{"zero2 1f1b, offload activations optimizer", 8, ""},
	} {
		at := slices.IndexFunc(rows, func(r plantest.Row) bool { return r.Name == one.name })
		if at < 0 {
			t.Fatalf("there is no plan %q", one.name)
		}
		for _, bf16 := range []bool{false, true} {
			run := gpuRun{rows[at], one.gpus, bf16}
			if *gpusAll || one.ci != "" && strings.HasSuffix(run.String(), " "+one.ci) {
				list = append(list, run)
			}
		}
	}
	return list
}

// parity is the model that a run trains: by turns Llama with SGD, and Qwen3, whose table is at both
// ends, with AdamW; of models with experts, Mixtral and DeepSeek-V3, likewise.
func (r gpuRun) parity(e *engine.Engine, arch string) *parity {
	p := parities(e)["llama"]
	switch {
	case r.Name == "experts":
		p = sparse(e)["mixtral"]
	case r.Name == "ep experts":
		p = sparse(e)["deepseek"]
	case strings.Contains(r.Name, "zero") || strings.Contains(r.Name, "tp"):
		p = parities(e)["qwen3"]
	}
	p.arch, p.steps, p.bf16 = arch, gpuSteps, r.bf16
	return p
}

// gpuHistories names the folder of what a child finds, and gpuPlans whether it tries all plans.
const gpuHistories, gpuPlans = "DEEPWELL_TEST_GPU_HISTORIES", "DEEPWELL_TEST_GPU_PLANS"

// Five steps of any plan on software GPUs give the CPU engine's numbers: losses, the gradient of each
// parameter at the first step, parameters after the last.
func TestGPUsTrainAsCPUDevices(t *testing.T) {
	slowtest.Only(t)
	*gpusAll = *gpusAll || os.Getenv(gpuPlans) == "all"
	runs := gpuRuns(t)
	if softgpu.InChild(t) {
		trainOnGPUs(t, runs)
		return
	}
	dir := t.TempDir()
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 8, Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, gpus := range []int{1, 2, 8} {
		began := time.Now()
		args := []string{gpuHistories + "=" + dir}
		if *gpusAll {
			args = append(args, gpuPlans+"=all")
		}
		out, status := softgpu.Run(t, softgpu.Options{GPUs: gpus, Memory: 64 << 20, Env: args})
		if status != 0 {
			t.Errorf("%d GPUs: status %d\n%s", gpus, status, out)
		}
		t.Logf("%d GPUs: %.0f s", gpus, time.Since(began).Seconds())
	}
	seen := map[string]bool{}
	for i, run := range runs {
		if *gpusAll {
			for word := range strings.FieldsSeq(run.Name) {
				seen[word] = true
			}
		}
		text, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			t.Errorf("%s: %v", run, err)
			continue
		}
		var got history
		if err := json.Unmarshal(text, &got); err != nil {
			t.Fatal(err)
		}
		p := run.parity(e, "")
		want, err := p.run(t.Context(), p.plan(run.Row), Options{Locked: true})
		if err != nil {
			t.Errorf("%s, on CPU devices: %v", run, err)
			continue
		}
		compareGPUs(t, run, p, &got, want)
	}
	for _, name := range schedule.Names() {
		if *gpusAll && !seen[name] {
			t.Errorf("no plan has the schedule %s", name)
		}
	}
}

// trainOnGPUs makes the runs for as many GPUs as this process sees.
func trainOnGPUs(t *testing.T, runs []gpuRun) {
	t.Helper()
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for i, run := range runs {
		if run.gpus != len(e.Devices()) {
			continue
		}
		began := time.Now()
		p := run.parity(e, "sm_100")
		h, err := p.run(t.Context(), p.plan(run.Row), Options{Locked: true})
		if err != nil {
			t.Errorf("%s: %v", run, err)
			continue
		}
		text, err := json.Marshal(h)
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Getenv(gpuHistories), fmt.Sprint(i)), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %.1f s", run, time.Since(began).Seconds())
	}
}

// lateBound is the bound of losses after the steps that lossBound is for. AdamW moves elements by
// the whole rate whatever their gradient, so that runs of their own differ more from step to step;
// for the same reason parameters have twice the bound of three steps.
const lateBound = 1e-5

// The bounds of bf16, of which a CPU rounds the operands of GEMMs alone: as package spmd has them
// for losses, and as quantized GEMMs have them for gradients, of which a wrong one is off by 1.
const (
	bf16Loss = 0.02
	bf16Late = 0.05
	bf16Grad = quantizedGrad
)

// compareGPUs holds GPUs to CPU devices. Both have the plan's order of sums between devices; within
// one they add in orders of their own, as f32 on one device and on many do.
func compareGPUs(t *testing.T, run gpuRun, p *parity, got, want *history) {
	t.Helper()
	loss, late := 0.0, 0.0 // of the suite's three steps, and of those behind them
	for k, w := range append([]float64{want.Eval}, want.Losses...) {
		g := append([]float64{got.Eval}, got.Losses...)[k]
		if d := math.Abs(g-w) / math.Abs(w); k <= paritySteps {
			loss = math.Max(loss, d)
		} else {
			late = math.Max(late, d)
		}
	}
	grad, where := frobenius(got.Grads, want.Grads)
	bounds, a, b := [4]float64{lossBound, lateBound, gradBound, paramBound}, got.Params, want.Params
	if _, adam := p.optimizer.(optim.AdamW); adam {
		bounds[3], a, b = 2*adamBound, moved(a, p.before), moved(b, p.before)
	}
	param, which := frobenius(a, b)
	t.Logf("%-48s %d GPUs: losses differ by %.1e and %.1e, gradients by %.1e (%s), parameters by %.1e (%s)",
		run, run.gpus, loss, late, grad, where, param, which)
	if run.bf16 {
		bounds = [4]float64{bf16Loss, bf16Late, bf16Grad, math.Inf(1)}
	}
	for i, x := range []float64{loss, late, grad, param} {
		if !(x <= bounds[i]) {
			t.Errorf("%s: %s differ by %.2g, more than %.2g", run,
				[]string{"losses", "late losses", "gradients", "parameters"}[i], x, bounds[i])
		}
	}
}

// Bounds of five steps in bf16 with kernels of our own. Losses may be half a unit in the last place
// of bfloat16, 2^-10, from those without them. The first gradients may be as far from float32 as
// the gradients without them, and half of that more, since both round equally many times, not alike: a
// kernel rounds a sum of gradients once, XLA after each term; and they may be apart as two that are
// wrong by chance. A gradient that lacks the residual's is off by 0.6.
const ownLoss, ownGrad = 1e-3, 1.5

// Five steps in bf16 with the kernels of our own that the software GPU runs give what the programs
// without them do.
func TestOwnKernelsTrainAsXLAs(t *testing.T) {
	slowtest.Only(t)
	if !softgpu.Child(t, softgpu.Options{GPUs: 1, Memory: 64 << 20}) {
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for _, name := range []string{"llama", "qwen3"} {
		train := func(bf16, without bool) *history {
			p := parities(e)[name]
			p.arch, p.steps, p.bf16, p.without = "sm_100", gpuSteps, bf16, without
			h, err := p.run(t.Context(), p.plan(plantest.Row{Name: "one", Apply: func(*plan.Plan) {}}),
				Options{Locked: true})
			if err != nil {
				t.Fatal(err)
			}
			norms := map[string]bool{}
			for _, text := range p.specs {
				if n, err := rownorm.Parse(text); err == nil {
					norms[n.Key()] = true
				}
			}
			if len(h.Losses) != gpuSteps || without == (len(norms) == 2) || without && len(p.specs) > 0 {
				t.Errorf("%s, without %v: %d steps with the kernels %v", name, without, len(h.Losses), p.specs)
			}
			return h
		}
		exact, own, plain := train(false, true), train(true, false), train(true, true)
		a, b := apartFrom(exact, own), apartFrom(exact, plain)
		both := apartFrom(plain, own)
		t.Logf("%s: losses and gradients are %.1e and %.1e from float32, without own kernels %.1e and "+
			"%.1e; apart %.1e and %.1e", name, a[0], a[1], b[0], b[1], both[0], both[1])
		if !(both[0] <= ownLoss) || !(a[1] <= ownGrad*b[1]) ||
			!(both[1] <= ownGrad*math.Hypot(a[1], b[1])) {
			t.Errorf("%s: losses are %.2g apart, gradients %.2g; from float32 %.2g, without own kernels %.2g",
				name, both[0], both[1], a[1], b[1])
		}
	}
}

// apartFrom is how far the losses of runs, and all gradients of the first step, are apart.
func apartFrom(want, got *history) (apart [2]float64) {
	var off, all float64
	add := func(g, w []float64) {
		for i, v := range w {
			off, all = off+(g[i]-v)*(g[i]-v), all+v*v
		}
	}
	add(append([]float64{got.Eval}, got.Losses...), append([]float64{want.Eval}, want.Losses...))
	apart[0] = math.Sqrt(off / all)
	off, all = 0, 0
	for name, w := range want.Grads {
		add(got.Grads[name], w)
	}
	apart[1] = math.Sqrt(off / all)
	return apart
}

// numbersThatAreNotFinite trains with a loss that is NaN in the second step, and infinite in the
// third although its gradient is finite; nothing that is written of the run may break.
func numbersThatAreNotFinite(t *testing.T, e *engine.Engine) {
	t.Helper()
	r := newRig(t)
	r.engine = e
	out, l := t.TempDir(), &log{}
	tr := r.start(out, counting{}, l, "steps=4", "save.every=1")
	defer tr.Close()
	tr.poison(2)
	gradients := tr.hooks.gradients
	tr.hooks.gradients = func(ctx context.Context, b *data.Batch) (float64, error) {
		loss, err := gradients(ctx, b)
		if tr.step == 2 {
			loss = math.Inf(1)
		}
		return loss, err
	}
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	rejected := l.rejected()
	if len(rejected) != 2 || len(l.losses()) != 2 {
		t.Fatalf("%d steps count; rejected: %+v", len(l.losses()), rejected)
	}
	r.same(r.tensorsOf(filepath.Join(checkpoints(out), "step-00000001")),
		r.tensorsOf(filepath.Join(checkpoints(out), "step-00000003")))
	for _, one := range l.list {
		if _, err := json.Marshal(one); err != nil {
			t.Errorf("%s: %v", event.Kind(one), err)
		}
	}
	tr.hooks.gradients = gradients
	tr.poison(-1)
	again, err := tr.Rerun(t.Context(), filepath.FromSlash(rejected[0].Replay))
	if err != nil {
		t.Fatal(err)
	}
	last := tr.Result()
	last.Eval = math.NaN() // of a validation
	for _, v := range []any{again, last, &last} {
		text, err := json.Marshal(v)
		if err != nil || !strings.Contains(string(text), `"NaN"`) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// On CPU devices and on GPUs a step with a loss that is not finite leaves checkpoints, events and
// results that can be read.
func TestNumbersThatAreNotFinite(t *testing.T) {
	numbersThatAreNotFinite(t, newRig(t).engine)
}

// What a trainer does on a GPU beside training: numbers that are not finite, and updates in place.
func TestOneGPU(t *testing.T) {
	slowtest.Only(t)
	if !softgpu.Child(t, softgpu.Options{Memory: 256 << 20}) {
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	t.Run("not finite", func(t *testing.T) { numbersThatAreNotFinite(t, e) })
	t.Run("in place", func(t *testing.T) { updatesInPlace(t, e) })
	t.Run("placed ahead", func(t *testing.T) { inputsArePlacedAhead(t, e) })
}

// inputsArePlacedAhead holds the read of a step's loss up until the inputs of the next step are on
// the devices: they need not know it. Two microbatches a step are queued before the first loss is
// read, and what was placed ahead is freed with its step.
func inputsArePlacedAhead(t *testing.T, e *engine.Engine) {
	t.Helper()
	r := newRig(t)
	r.engine = e
	l := &log{}
	tr := r.start(t.TempDir(), counting{}, l, "steps=4", "microbatch=2", "save.every=0", "eval.every=0")
	defer tr.Close()
	ahead := 0
	tr.hooks.beforeLoss = func() {
		if tr.next == nil {
			return // there is no next step
		}
		select {
		case <-tr.next.done:
		case <-time.After(time.Minute):
			t.Error("the next batch is not placed")
		}
		if s := tr.next.staged; s == nil || len(s.arrays) < 3 {
			t.Errorf("of the next batch %+v is placed", s)
			return
		}
		ahead++
	}
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	plain := r.run(t.TempDir(), counting{}, "steps=4", "save.every=0", "eval.every=0")
	if len(l.losses()) != 4 || ahead != 3 {
		t.Errorf("%d steps, %d of them with inputs placed ahead", len(l.losses()), ahead)
	}
	for i, loss := range plain.losses() { // of one microbatch a step, which is the same mean
		if d := math.Abs(loss - l.losses()[i]); !(d <= 1e-5*loss) {
			t.Errorf("step %d: loss %v, and %v with one microbatch", i+1, l.losses()[i], loss)
		}
	}
}

// Also on CPU devices.
func TestInputsArePlacedAhead(t *testing.T) { inputsArePlacedAhead(t, newRig(t).engine) }

// updatesInPlace trains a model whose state is most of its memory: XLA's peak has room for the
// state and gradients, and not for a second state; after a step as much is in use as before it.
func updatesInPlace(t *testing.T, e *engine.Engine) {
	t.Helper()
	r := newRig(t)
	r.engine = e
	c := *r.config
	c.Hidden, c.HeadDim, c.Heads, c.KVHeads, c.MLP, c.Layers = 512, 64, 8, 8, 2048, 1
	r.config = &c
	l := &log{}
	before, _, _ := e.Pool()
	tr := r.start(t.TempDir(), counting{}, l, "steps=2", "optimizer.warmup=0",
		"save.every=0", "batch=1", "eval.every=0")
	defer tr.Close()
	filled, _, _ := e.Pool()
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	inUse, peak, pool := e.Pool()
	params := int64(0)
	for _, p := range c.Params() {
		params += p.Size()
	}
	t.Logf("%d parameters; %d bytes before, %d filled, %d after two steps, %d at the peak; pool %d", params,
		before, filled, inUse, peak, pool)
	state := 12 * params // parameters and two moments in f32
	if filled-before < state || filled-before > state+state/20 || inUse-filled > state/20 {
		t.Errorf("the state of %d bytes takes %d, and %d after two steps", state, filled-before, inUse-before)
	}
	const workspace = 42 << 20                 // of the gradients: cuBLAS takes 32 MiB
	if peak-before > state+state/3+workspace { // gradients are a third of the state
		t.Errorf("XLA's peak is %d bytes with a state of %d", peak-before, state)
	}
	for _, one := range l.list {
		if m, ok := one.(event.Memory); ok {
			t.Log(m.Line())
			if m.PeakBytes != peak || m.PoolBytes != pool || m.PlannedBytes < (peak-before)*95/100 ||
				m.PlannedBytes > peak*105/100 {
				t.Errorf("%+v", m)
			}
			return
		}
	}
	t.Error("the run tells nothing of its memory")
}
