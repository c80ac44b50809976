package train

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

func bounds(bytes int64) []machine.MemoryLimit {
	return []machine.MemoryLimit{{Bytes: bytes, Where: "a made-up host"}, {Bytes: 1 << 60, Where: "another"}}
}

// least finds the smallest room that a run is content with.
func least(t *testing.T, fits func(bytes int64) error) int64 {
	t.Helper()
	low, high := int64(0), int64(1)<<40
	for low < high {
		middle := (low + high) / 2
		switch err := fits(middle); {
		case err == nil:
			high = middle
		case errors.Is(err, diag.HostMemory) && diag.From(err).Class() == diag.NoFit:
			low = middle + 1
		default:
			t.Fatal(err)
		}
	}
	return low
}

// A model of 8 billion parameters is refused in a small host, by what its state needs, without the
// engine and without filling anything.
func TestModelLargerThanTheHostIsRefusedBeforeCompiling(t *testing.T) {
	p, err := model.Find("llama3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	r := recipe.Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq = 2, 1, 1, 64
	programs, err := step.Build(step.Spec{Model: p.Config, Recipe: r, Arch: "cpu"})
	if err != nil {
		t.Fatal(err)
	}
	err = FitsHost(programs, bounds(22<<30), r, nil, nil)
	e := diag.From(err)
	if err == nil || e.Code != diag.HostMemory || e.Class() != diag.NoFit {
		t.Fatal(err)
	}
	for where, text := range map[string]string{e.What: "needs at least ", e.Where: "a made-up host",
		e.Cause: "parameters and optimizer state 89.7 GiB", e.Fix: `optimizer.moments = "bf16"`} {
		if !strings.Contains(where, text) {
			t.Errorf("%q does not say %q", where, text)
		}
	}
	if strings.Contains(e.Fix, "seq") {
		t.Errorf("a smaller seq does not save state: %s", e.Fix)
	}
	// Masters and two moments in f32, copies and gradients of at least bf16.
	n := p.Config.Count().Total
	if low := least(t, func(b int64) error {
		return FitsHost(programs, bounds(b), r, nil, nil)
	}); low < 16*n ||
		low > 20*n {
		t.Errorf("it wants %d bytes for %d parameters", low, n)
	}
	if err := FitsHost(programs, nil, r, nil, nil); err != nil {
		t.Errorf("nothing is known of the host: %v", err)
	}
}

// What the compiler says comes on top, and a run that fits is left alone.
func TestCompiledProgramsAreHeldToTheHost(t *testing.T) {
	rig := newRig(t)
	tr := rig.start(t.TempDir(), counting{}, event.Discard)
	defer tr.Close()
	before := least(t, func(b int64) error {
		return FitsHost(tr.Programs(), bounds(b), tr.opts.Recipe, nil, nil)
	})
	after := least(t, func(b int64) error {
		return FitsHost(tr.Programs(), bounds(b), tr.opts.Recipe, nil, func(m *program.Module) step.Needs {
			return step.Needs{Temp: 1 << 30}
		})
	})
	if after < 1<<30 || before > 1<<20 || before < 1<<10 {
		t.Errorf("%d bytes before compiling, %d after", before, after)
	}
	o := tr.opts
	o.Locked = true // by tr
	o.Memory = func() []machine.MemoryLimit { return bounds(before) }
	if _, err := New(t.Context(), o); !errors.Is(err, diag.HostMemory) {
		t.Errorf("temporary memory was not counted: %v", err)
	}
	live := rig.engine.LiveBytes()[0]
	o.Memory = func() []machine.MemoryLimit { return bounds(64) }
	if _, err := New(t.Context(), o); !errors.Is(err, diag.HostMemory) {
		t.Errorf("a state in 64 bytes: %v", err)
	}
	if now := rig.engine.LiveBytes()[0]; now > live {
		t.Errorf("a refused run has filled %d bytes", now-live)
	}
	o.Memory = func() []machine.MemoryLimit { return bounds(1 << 30) }
	again, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

// A process counts what it hosts; the one that writes checkpoints, the state of all others at a
// save.
func TestMemoryIsThatOfTheProcess(t *testing.T) {
	p, err := model.Find("llama3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	c := *p.Config
	c.Layers = 8
	how := plantest.Row{Name: "1f1b", Apply: func(p *plan.Plan) {
		p.PP = plan.PP{Size: 4, Schedule: "1f1b"}
	}}.Plan(plantest.Size{Batch: 4, Micros: 4, Seq: 64})
	r := step.RecipeOf(how)
	r.Steps = 2
	programs, err := step.Build(step.Spec{Model: &c, Recipe: r, Arch: "cpu", Plan: how})
	if err != nil {
		t.Fatal(err)
	}
	need := func(processes *Processes) int64 {
		return least(t, func(b int64) error {
			return FitsHost(programs, bounds(b), r, processes, nil)
		})
	}
	whole, sum := need(nil), int64(0)
	four := make([]string, 4)
	for self := range four {
		n := need(&Processes{Self: self, Addresses: four})
		t.Logf("process %d of 4 needs %d of %d", self, n, whole)
		if self > 0 {
			sum += n
		}
		if self > 0 && n > whole/2 || self == 0 && n < whole/2 {
			t.Errorf("process %d of 4 needs %d of %d", self, n, whole)
		}
	}
	if sum > whole {
		t.Errorf("three of four processes need %d, all in one %d", sum, whole)
	}
}

// On GPUs the host has to hold XLA's tables of their memory: 8 bytes for each 256, 5.2 GiB for a GPU
// of 178 GB with a pool of 95 %.
func TestTablesOfGPUsCountOnTheHost(t *testing.T) {
	c := parities(nil)["llama"].config
	r, p := recipe.Default(), plan.Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq, r.Precision = 2, 2, 2, 8, p.Types.Params
	p.Seq, p.Batch, p.Microbatches, p.DP, p.Cluster = 8, 2, 1, 2, "2xb200"
	programs, err := step.Build(step.Spec{Model: c, Recipe: r, Arch: "sm_100", Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	const pool = 178 << 30 / 100 * 95
	needs := least(t, func(bytes int64) error {
		return FitsGPU(programs, pool, bounds(bytes), r, nil, nil)
	})
	if tables := int64(2 * pool / 32); needs < tables || needs > tables+(1<<20) {
		t.Errorf("two GPUs need %s of the host, and their tables %s", event.Size(needs), event.Size(tables))
	}
	err = FitsGPU(programs, pool, bounds(8<<30), r, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "XLA's tables of the GPUs' memory 10.6 GiB") {
		t.Error(err)
	}
}
