package softgpu_test

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

// primes is a dataset in which the next token follows from the one before.
type primes struct{}

func (primes) Take(_ context.Context, at data.Position, sequences, _, _ int) (*data.Batch,
	data.Position, error) {
	var list [][]int32
	first := at["primes"]
	for i := range sequences {
		ids := []int32{int32((first + int64(i)) % 31)}
		for len(ids) < 17 {
			ids = append(ids, (ids[len(ids)-1]*7+3)%31)
		}
		list = append(list, ids)
	}
	b, err := data.NewBatch(list)
	return b, data.Position{"primes": first + int64(sequences)}, err
}

// trained trains two steps on eight devices, FSDP over four and tensor parallel over two, and gives
// the loss and the norm of the gradient of each.
func trained(t *testing.T, e *engine.Engine, arch string) (values []float64) {
	t.Helper()
	c := &model.Config{Arch: "llama", Vocab: 31, Hidden: 32, Layers: 2, Heads: 4, KVHeads: 2,
		HeadDim: 8, MLP: 48, Context: 32, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 100}, Rotary: 8, AttnScale: 0.35, BOS: -1}
	row := plantest.Row{Apply: func(p *plan.Plan) {
		p.FSDP = plan.FSDP{Size: 4, Zero: 3, Gather: "layer"}
		p.TP = plan.TP{Size: 2}
	}}
	how := row.Plan(plantest.Size{Batch: 8, Micros: 1, Seq: 16})
	r := recipe.Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq, r.Precision = 2, 8, 8, 16, dtype.F32
	r.Out, r.Optimizer.LR, r.Recompute = t.TempDir(), 1e-2, how.Recompute
	w, err := step.Build(step.Spec{Model: c, Recipe: r, Arch: arch, Plan: how})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := train.New(t.Context(), train.Options{Engine: e, Model: c, Recipe: r, Programs: w,
		Data: primes{}})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for range r.Steps {
		s, err := tr.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		values = append(values, s.Loss, s.GradNorm)
	}
	return values
}

var trainedLine = regexp.MustCompile(`trained: (.*)`)

// Two steps on eight software GPUs give the numbers of eight CPU devices, and the same bits however
// late the streams are: an order that is not kept would show. A prototype without some rules of
// testdata/rules.c gave another norm of the gradient in one of five runs.
func TestTrainingGivesTheSameBitsWhateverIsLate(t *testing.T) {
	if softgpu.InChild(t) {
		e := open(t, engine.Options{Cache: enginetest.Cache()})
		fmt.Printf("trained: %x\n", trained(t, e, "sm_100"))
		return
	}
	want := trained(t, enginetest.Open(t, engine.Options{Devices: 8}).Engine, "cpu")
	t.Logf("CPU: %v", want)
	rows := []softgpu.Options{
		{},
		{Delay: 3, SlowGPU: 5, SlowMicroseconds: 1000},
		{Delay: 1},
		{Delay: 2, DelayMicroseconds: 2000},
		{Delay: 4, Flags: map[string]string{"xla_gpu_enable_command_buffer": ""}},
	}
	if !slowtest.Enabled {
		rows = rows[:2]
	}
	var first string
	for _, o := range rows {
		o.GPUs, o.Memory = 8, 64<<20
		out, status := softgpu.Run(t, o)
		line := trainedLine.FindStringSubmatch(out)
		if status != 0 || line == nil {
			t.Fatalf("%+v: status %d\n%s", o, status, out)
		}
		if first == "" {
			first = line[1]
			compareTrained(t, want, first)
		}
		if line[1] != first {
			t.Errorf("%+v: %s, and without delays %s", o, line[1], first)
		}
	}
}

// compareTrained compares what a child prints with the numbers of the CPU.
func compareTrained(t *testing.T, want []float64, text string) {
	t.Helper()
	got := make([]float64, len(want))
	for i, word := range strings.Fields(strings.Trim(text, "[]")) {
		if _, err := fmt.Sscanf(word, "%g", &got[i]); err != nil || i >= len(want) {
			t.Fatalf("%q: %v", text, err)
		}
	}
	t.Logf("GPU: %v", got)
	for i := range want {
		if !(math.Abs(got[i]-want[i]) <= 1e-4*math.Abs(want[i])) {
			t.Errorf("number %d: %v on the GPU, %v on the CPU", i, got[i], want[i])
		}
	}
}
