package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// A plug blocks one part of a step until it is pulled. Its clock runs at a twentieth of the pace
// before: a host that is busy with other tests makes no stall of a step.
type plug struct {
	counting
	step   int
	part   string // "data" or the name of a span
	pulled chan struct{}

	mu       sync.Mutex
	last, at time.Time // on the wall, and by the plug's clock
	blocks   bool
}

func (p *plug) now() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	wall := time.Now()
	passed := wall.Sub(p.last)
	if p.last = wall; !p.blocks {
		passed /= 20
	}
	p.at = p.at.Add(passed)
	return p.at
}

func (p *plug) block() {
	p.now()
	p.mu.Lock()
	p.blocks = true
	p.mu.Unlock()
	<-p.pulled
}

func (p *plug) Take(ctx context.Context, at data.Position, rows, rank, ranks int) (*data.Batch,
	data.Position, error) {
	if p.part == "data" && at["count"] >= int64(p.step*rows) {
		p.block()
	}
	return p.counting.Take(ctx, at, rows, rank, ranks)
}

func (p *plug) Begin(step int, name string) func() {
	if step == p.step && name == p.part {
		p.block()
	}
	return func() {}
}

// safeLog keeps events of several goroutines.
type safeLog struct {
	mu sync.Mutex
	log
}

func (l *safeLog) Emit(e event.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.log.Emit(e)
}

const watchedRecipe = `
model = "config.json"
steps = 100
batch = 4
seq = 12
precision = "f32"
[optimizer]
lr = 1e-3
warmup = 4
[data]
sources = ["none"]
[eval]
data = "1%"
every = 25
[save]
every = 25
keep = 1
`

func guarded(t *testing.T, r *rig, rows Dataset, o Options,
	set ...string) *Trainer {
	t.Helper()
	out := t.TempDir()
	rec, err := recipe.Parse([]byte(watchedRecipe), filepath.Join(out, "run.toml"),
		append(set, "out="+out), os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	o.Programs, err = step.Build(step.Spec{Model: r.config, Recipe: rec, Arch: "cpu"})
	if err != nil {
		t.Fatal(err)
	}
	o.Engine, o.Model, o.Recipe, o.Data, o.Eval, o.Now = r.engine, r.config, rec, rows, counting{}, time.Now
	o.Init = func(p *model.Param, dst []float32) error { return r.config.Init(p, 3, dst) }
	tr, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tr.Close)
	return tr
}

// A step that hangs ends the run with status 5: the error names the phase and what it waits for,
// goroutines are dumped into the run's folder, and where nothing can be canceled OnStall is called.
func TestStalledStepEndsTheRun(t *testing.T) {
	r := newRig(t)
	for part, want := range map[string]string{"data": "data", "update": "the engine, program update",
		"save": "the engine, program save"} {
		t.Run(part, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			p := &plug{step: 50, part: part, pulled: make(chan struct{}), last: time.Now()}
			if part == "save" {
				p.step = 51 // the one after the step that was saved
			}
			events := &safeLog{}
			called := make(chan error, 1)
			tr := guarded(t, r, p, Options{Spans: p, Events: events, LeastStall: 100 * time.Millisecond,
				OnStall: func(err error) {
					close(p.pulled) // a command ends the process here
					called <- err
				}})
			tr.timeStalls(p.now)
			err := tr.Run(t.Context())
			e := diag.From(err)
			if e.Code != diag.RunStalled || e.Class() != diag.Stalled {
				t.Fatalf("%v", err)
			}
			if got := <-called; !errors.Is(got, err) {
				t.Errorf("OnStall got %v", got)
			}
			host, _ := os.Hostname()
			if !strings.Contains(e.Cause, want) || e.Where != host || !strings.Contains(e.What, "of step 5") {
				t.Errorf("the error says too little: %s", e.Format())
			}
			dumps, _ := filepath.Glob(filepath.Join(filepath.Dir(tr.Result().Checkpoints), "stall-*.txt"))
			if len(dumps) != 1 {
				t.Fatalf("dumps %v", dumps)
			}
			text, err := os.ReadFile(dumps[0])
			if err != nil || !strings.Contains(string(text), "watchdog_test.go") {
				t.Errorf("the dump does not have the goroutine that hangs (%v)", err)
			}
			found := false
			for _, one := range events.list {
				s, ok := one.(event.Stalled)
				found = found || ok && s.Dump != "" && s.Step >= 50
			}
			if !found {
				t.Error("no event of the stall")
			}
		})
	}
}

// bursts is data of which some batches take ten times as long as the rest, and some much longer.
type bursts struct{ counting }

func (b bursts) Take(ctx context.Context, at data.Position, rows, rank, ranks int) (*data.Batch,
	data.Position, error) {
	if step := at["count"] / int64(rows); step%40 < 5 {
		time.Sleep(20 * time.Millisecond)
	}
	return b.counting.Take(ctx, at, rows, rank, ranks)
}

// A run with bursts of load and saves raises no alarm; the limit is 3 s instead of a minute.
func TestBurstsAreNoStalls(t *testing.T) {
	r := newRig(t)
	events := &safeLog{}
	tr := guarded(t, r, bursts{}, Options{Events: events, LeastStall: 3 * time.Second},
		"steps=200")
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, e := range events.list {
		if s, ok := e.(event.Stalled); ok {
			t.Errorf("a false alarm: %+v", s)
		}
	}
}
