package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

const config = `{"model_type": "llama", "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12,
"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
"tie_word_embeddings": false}`

// counting is data that can be learned: every token is the one before plus the document's number.
type counting struct{}

func (c counting) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	const seq, vocab = 12, 37
	b := &data.Batch{Sequences: rows, Seq: seq}
	first := at["count"]
	for row := range int64(rows) {
		n := first + row
		for i := range int64(seq) {
			segment, place := i/7, i%7
			token := func(i int64) int32 { return int32((n*11 + i*(1+n%3)) % vocab) }
			label := token(i + 1)
			if i%7 == 6 {
				label = data.Ignored
			} else {
				b.Count++
			}
			b.IDs, b.Labels = append(b.IDs, token(i)), append(b.Labels, label)
			b.Positions, b.Segments = append(b.Positions, int32(place)), append(b.Segments, int32(segment))
		}
	}
	b.Total = b.Count
	return b, data.Position{"count": first + int64(rows)}, nil
}

func (c counting) EvalSequences() int64 { return 5 }

func (c counting) Eval(ctx context.Context, first int64, rows, _, _ int) (*data.Batch, error) {
	b, _, err := c.Take(ctx, data.Position{"count": 1_000_000 + first}, rows, 0, 1)
	for i := range b.Labels { // rows behind the last one do not count, as a Loader has it
		if first+int64(i/b.Seq) >= c.EvalSequences() && b.Labels[i] != data.Ignored {
			b.Labels[i] = data.Ignored
			b.Count--
		}
	}
	return b, err
}

// log keeps events.
type log struct {
	mu   sync.Mutex // a run emits from several goroutines
	list []event.Event
}

func (l *log) Emit(e event.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, e)
}

// noAlarms fails the test if the run raised an alarm or rejected a step.
func (l *log) noAlarms(t *testing.T) {
	t.Helper()
	for _, e := range l.list {
		switch e := e.(type) {
		case event.Precision, event.Rejected:
			t.Errorf("%v", e)
		}
	}
}

func (l *log) losses() (list []float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.list {
		if s, ok := e.(event.Step); ok {
			list = append(list, float64(s.Loss))
		}
	}
	return list
}

// cache is where the tests and a second process find each other's compiled programs.
var cache = enginetest.Cache()

func TestMain(m *testing.M) {
	if scratch = os.Getenv(scratchEnv); os.Getenv(childEnv) != "" {
		child()
	}
	var err error
	if scratch, err = os.MkdirTemp("", "deepwell-train"); err == nil {
		err = os.Setenv(scratchEnv, scratch) // for children
	}
	if err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(scratch)
	os.Exit(code)
}

// scratch is a folder for runs that leave nothing but a lock, which a test and its children share.
var scratch string

const scratchEnv = "DEEPWELL_TEST_SCRATCH"

// A rig is what all runs of a test share.
type rig struct {
	t      *testing.T
	engine *engine.Engine
	config *model.Config
	plan   *plan.Plan     // nil is one device
	edit   func(*Options) // changes how runs begin, if it is set
}

func newRig(t *testing.T) *rig {
	t.Helper()
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 4, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	c, err := model.Parse([]byte(config))
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t: t, engine: e, config: c}
}

// start begins a run with a recipe, changed by the settings.
func (r *rig) start(out string, rows Dataset, events event.Sink, set ...string) *Trainer {
	r.t.Helper()
	const text = `
model = "config.json"
steps = 24
batch = 4
seq = 12
precision = "f32"
[optimizer]
lr = 1e-2
warmup = 4
[data]
sources = ["none"]
[eval]
data = "1%"
every = 10
[save]
every = 5
keep = 0
`
	set = append([]string{"out=" + out}, set...)
	rec, err := recipe.Parse([]byte(text), filepath.Join(out, "run.toml"), set, os.Getenv)
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := step.Build(step.Spec{Model: r.config, Recipe: rec, Arch: r.engine.Arch(), Plan: r.plan})
	if err != nil {
		r.t.Fatal(err)
	}
	clock := time.Unix(0, 0)
	o := Options{Engine: r.engine, Model: r.config, Recipe: rec,
		Programs: p, Data: rows, Eval: counting{}, Events: events,
		Now:  func() time.Time { clock = clock.Add(time.Second); return clock },
		Init: func(p *model.Param, dst []float32) error { return r.config.Init(p, 3, dst) }}
	if r.edit != nil {
		r.edit(&o)
	}
	tr, err := New(r.t.Context(), o)
	if err != nil {
		r.t.Fatal(err)
	}
	return tr
}

// run trains to the end.
func (r *rig) run(out string, rows Dataset, set ...string) *log {
	r.t.Helper()
	l := &log{}
	tr := r.start(out, rows, l, set...)
	defer tr.Close()
	if err := tr.Run(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	return l
}

// tensors reads the newest checkpoint of a run, or one of its steps.
func (r *rig) tensors(dir string) map[string][]byte {
	r.t.Helper()
	c, err := ckpt.Latest(r.t.Context(), dir, event.Discard)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.read(c)
}

// tensorsOf reads the checkpoint of one step.
func (r *rig) tensorsOf(path string) map[string][]byte {
	r.t.Helper()
	c, err := ckpt.Open(path)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.read(c)
}

func (r *rig) read(c *ckpt.Checkpoint) map[string][]byte {
	r.t.Helper()
	defer func() { _ = c.Close() }()
	all := map[string][]byte{}
	for _, one := range c.Tensors() {
		all[one.Name] = make([]byte, one.Bytes())
		if err := c.ReadSlice(one.Name, one.Box(), all[one.Name]); err != nil {
			r.t.Fatal(err)
		}
	}
	return all
}

func (r *rig) same(a, b map[string][]byte) {
	r.t.Helper()
	if len(a) != len(b) || len(a) == 0 {
		r.t.Fatalf("%d and %d tensors", len(a), len(b))
	}
	for name, bytesOf := range a {
		if !bytes.Equal(bytesOf, b[name]) {
			r.t.Errorf("%s differs", name)
		}
	}
}

func checkpoints(out string) string { return filepath.Join(out, "checkpoints") }

// stopping is held-out rows whose reading asks the run to stop.
type stopping struct {
	counting
	rows  int64
	after int // parts
	stop  context.CancelFunc
	read  *int
}

func (s stopping) EvalSequences() int64 { return s.rows }

func (s stopping) Eval(ctx context.Context, first int64, rows, rank, ranks int) (*data.Batch,
	error) {
	if *s.read++; *s.read == s.after {
		s.stop()
	}
	return s.counting.Eval(ctx, first%4, rows, rank, ranks)
}

// A run that is asked to stop in a validation gives it up, saves, and makes it when it goes on; it
// ends as one that was left alone.
func TestStopInValidation(t *testing.T) {
	r := newRig(t)
	out, set := t.TempDir(), []string{"microbatch=2", "steps=6", "eval.every=4", "save.every=0"}
	ctx, cancel := context.WithCancel(t.Context())
	read, l := 0, &log{}
	r.edit = func(o *Options) { o.Eval = stopping{rows: 1000, after: 3, stop: cancel, read: &read} }
	tr := r.start(out, counting{}, l, set...)
	r.edit = nil
	err := tr.Run(ctx)
	tr.Close()
	e := diag.From(err)
	if e == nil || e.Code != diag.Canceled || e.Class() != diag.Terminated ||
		!strings.Contains(e.What, "stopped after step 4 of 6, saved") {
		t.Fatal(err)
	}
	if read != 3 {
		t.Errorf("%d parts of the validation were made after the stop", read-3)
	}
	if got := evals(l); len(got) != 0 {
		t.Errorf("a validation that was given up has a loss: %v", got)
	}
	l = r.run(out, counting{}, set...)
	whole := t.TempDir()
	if got, want := evals(l), evals(r.run(whole, counting{}, set...)); !slices.Equal(got, want) ||
		len(want) != 2 {
		t.Errorf("validations %v, of a run that was left alone %v", got, want)
	}
	r.same(r.tensors(checkpoints(out)), r.tensors(checkpoints(whole)))
}

func evals(l *log) (list []event.Eval) {
	for _, e := range l.list {
		if v, ok := e.(event.Eval); ok {
			list = append(list, v)
		}
	}
	return list
}

// A checkpoint of another run in the place of one's own is an error by name; a damaged one that is
// newer than what the run goes on from is replaced.
func TestOtherCheckpointInTheWay(t *testing.T) {
	r := newRig(t)
	set := []string{"steps=6", "save.every=2"}
	out, other := t.TempDir(), t.TempDir()
	r.run(other, counting{}, append(set, "optimizer.lr=1e-3")...)
	l := &log{}
	tr := r.start(out, counting{}, l, set...)
	from := filepath.Join(checkpoints(other), "step-00000004")
	if err := errors.Join(os.MkdirAll(checkpoints(out), 0o755),
		os.Rename(from, filepath.Join(checkpoints(out), "step-00000004"))); err != nil {
		t.Fatal(err)
	}
	err := tr.Run(t.Context())
	tr.Close()
	if e := diag.From(err); e == nil || e.Code != diag.CheckpointExists || e.Where == "" {
		t.Fatal(err)
	}
	// Now it is damaged, and the run goes on from step 2.
	bad := filepath.Join(checkpoints(out), "step-00000004", "manifest.json")
	if err := os.Truncate(bad, 10); err != nil {
		t.Fatal(err)
	}
	r.run(out, counting{}, set...)
	whole := t.TempDir()
	r.run(whole, counting{}, set...)
	r.same(r.tensors(checkpoints(out)), r.tensors(checkpoints(whole)))
}

// A model learns to count, in either precision and with either optimizer, whole or in parts.
func TestLearns(t *testing.T) {
	r := newRig(t)
	for _, set := range [][]string{
		{}, {"microbatch=2"}, {"precision=bf16"}, {"optimizer.name=muon", "recompute=full"},
		{"optimizer.moments=bf16"},
	} {
		t.Run(fmt.Sprint(set), func(t *testing.T) {
			if len(set) > 0 && set[0] != "precision=bf16" {
				slowtest.Only(t)
			}
			r := &rig{t: t, engine: r.engine, config: r.config}
			l := r.run(t.TempDir(), counting{}, append(set, "steps=60")...)
			losses := l.losses()
			if first, last := losses[0], losses[len(losses)-1]; len(losses) != 60 || last > first-1 {
				t.Errorf("%d steps, the loss goes from %.3f to %.3f", len(losses), first, last)
			}
			evals := 0
			for _, e := range l.list {
				if v, ok := e.(event.Eval); ok {
					evals++
					if v.Tokens != 5*11 || !(v.Loss > 0 && v.Loss < 5) { // 11 labels in each of 5 rows
						t.Errorf("validation %+v", v)
					}
				}
			}
			if evals != 6 {
				t.Errorf("%d validations", evals)
			}
		})
	}
}

// A step in parts is the step as a whole, but for the order of sums.
func TestPartsAreTheWhole(t *testing.T) {
	r := newRig(t)
	whole := r.run(t.TempDir(), counting{}).losses()
	parts := r.run(t.TempDir(), counting{}, "microbatch=1").losses()
	for i, want := range whole {
		if d := math.Abs(parts[i]-want) / want; d > 1e-4 {
			t.Errorf("step %d: loss %v in parts, %v as a whole", i+1, parts[i], want)
		}
	}
}

// A run on several devices is the run on one, but for the order of sums; its checkpoints are of the
// same form, so a run may move from any number of devices to any other.
func TestPlansTrainAlike(t *testing.T) {
	r := newRig(t)
	alone := t.TempDir()
	const flat = "optimizer.schedule=constant" // else the rate depends on the number of steps
	want := r.run(alone, counting{}, flat, "steps=12").losses()
	for _, row := range []struct {
		name string
		plan func(*plan.Plan)
	}{
		{"dp 2", func(p *plan.Plan) { p.DP = 2 }},
		{"fsdp 2, tp 2", func(p *plan.Plan) { p.FSDP.Size, p.TP.Size, p.TP.Sequence = 2, 2, true }},
		{"cp 2, fsdp 2", func(p *plan.Plan) { p.CP.Size, p.FSDP.Size = 2, 2 }},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.name != "fsdp 2, tp 2" {
				slowtest.Only(t)
			}
			p := plan.Default()
			p.Seq, p.Batch = 12, 4
			row.plan(p)
			p.Cluster = fmt.Sprintf("%dxcpu", p.Devices())
			spread := &rig{t: t, engine: r.engine, config: r.config, plan: p}
			out := t.TempDir()
			got := spread.run(out, counting{}, flat, "steps=8").losses()
			// The rest of the run on one device.
			rest := &rig{t: t, engine: r.engine, config: r.config}
			got = append(got, rest.run(out, counting{}, flat, "steps=12").losses()...)
			if len(got) != len(want) {
				t.Fatalf("%d steps, not %d", len(got), len(want))
			}
			for i := range want {
				if d := math.Abs(got[i]-want[i]) / want[i]; d > 1e-4 {
					t.Errorf("step %d: loss %v on %s, %v on one device", i+1, got[i], row.name, want[i])
				}
			}
		})
	}
}

// A run that was stopped at any step and resumed ends with the same bits.
func TestResumeIsExact(t *testing.T) {
	r := newRig(t)
	whole, cut := t.TempDir(), t.TempDir()
	r.run(whole, counting{})
	for tries := 0; ; tries++ {
		l := &log{}
		ctx, cancel := context.WithCancel(t.Context())
		tr := r.start(cut, counting{}, stopper{l, 7, cancel})
		err := tr.Run(ctx)
		cancel()
		tr.Close()
		if err == nil {
			break
		}
		if diag.From(err).Code != diag.Canceled || tries > 5 {
			t.Fatal(err)
		}
	}
	r.same(r.tensors(checkpoints(whole)), r.tensors(checkpoints(cut)))
}

// A stopper ends a run after some steps.
type stopper struct {
	*log
	after  int
	cancel func()
}

func (s stopper) Emit(e event.Event) {
	s.log.Emit(e)
	if len(s.losses()) == s.after {
		s.cancel()
	}
}

// A poisoned batch does not count: the state has the same bits before and after, the step can be
// replayed, and the run goes on.
func TestPoisonIsRejected(t *testing.T) {
	r := newRig(t)
	out := t.TempDir()
	r.run(filepath.Join(out, "clean"), counting{}, "steps=5")
	l := &log{}
	tr := r.start(filepath.Join(out, "poisoned"), counting{}, l, "steps=7", "save.every=1")
	defer tr.Close()
	tr.poison(6)
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	rejected := l.rejected()
	if len(rejected) != 1 || rejected[0].Step != 6 || rejected[0].Replay == "" {
		t.Fatalf("%+v", rejected)
	}
	if len(l.losses()) != 6 {
		t.Errorf("the run has %d steps that count", len(l.losses()))
	}
	before := r.tensors(checkpoints(filepath.Join(out, "clean")))
	replay := filepath.FromSlash(rejected[0].Replay)
	r.same(before, r.tensors(replay))
	r.same(before, r.tensorsOf(filepath.Join(checkpoints(filepath.Join(out, "poisoned")), "step-00000006")))

	tr.poison(-1) // a replay does not count as a step
	got, err := tr.Rerun(t.Context(), replay)
	if err != nil {
		t.Fatal(err)
	}
	if got.Step != 6 || !math.IsNaN(float64(got.Loss)) || got.Params[0].Bad == 0 {
		t.Errorf("the replay gives %+v", got)
	}
	tr.poison(0)
	if got, err = tr.Rerun(t.Context(), replay); err != nil || math.IsNaN(float64(got.Loss)) || got.Params[0].Bad > 0 {
		t.Errorf("without poison the replay gives %+v, %v", got, err)
	}
}

// The same on ranks of a pipeline whose model computes with copies: a step with a NaN leaves
// every bit, and the run goes on.
func TestPoisonIsRejectedByAllRanks(t *testing.T) {
	slowtest.Only(t)
	r := newRig(t)
	c := *r.config
	c.Layers, c.Tied = 2, true
	p := plan.Default()
	p.Seq, p.Batch, p.Microbatches, p.Cluster = 12, 4, 2, "4xcpu"
	p.FSDP = plan.FSDP{Size: 2, Zero: 1, Gather: "step"}
	p.PP = plan.PP{Size: 2, Schedule: "1f1b"}
	r = &rig{t: t, engine: r.engine, config: &c, plan: p}
	const flat = "optimizer.schedule=constant"
	out := t.TempDir()
	r.run(filepath.Join(out, "clean"), counting{}, "steps=3", "microbatch=2", flat, "optimizer.warmup=0")
	l := &log{}
	tr := r.start(filepath.Join(out, "poisoned"), counting{}, l, "steps=5", "save.every=1", "microbatch=2", flat,
		"optimizer.warmup=0")
	defer tr.Close()
	tr.poison(4)
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if rejected := l.rejected(); len(rejected) != 1 || rejected[0].Step != 4 {
		t.Fatalf("%+v", rejected)
	}
	if len(l.losses()) != 4 {
		t.Errorf("the run has %d steps that count", len(l.losses()))
	}
	r.same(r.tensors(checkpoints(filepath.Join(out, "clean"))),
		r.tensorsOf(filepath.Join(checkpoints(filepath.Join(out, "poisoned")), "step-00000004")))
}

// A batch whose loss leaps up does not count either, and a run that only leaps stops.
func TestSpikesAreRejected(t *testing.T) {
	r := newRig(t)
	l := &log{}
	tr := r.start(t.TempDir(), garbled{from: 40}, l, "steps=60", "guard.spike=1.5", "save.every=0")
	defer tr.Close()
	err := tr.Run(t.Context())
	if e := diag.From(err); err == nil || e.Code != diag.TrainingLost || e.Class() != diag.Numerics {
		t.Fatalf("the run ends with %v", err)
	}
	rejected := l.rejected()
	if len(rejected) != 8 || rejected[0].Step != 41 || rejected[1].Replay != "" {
		t.Errorf("%+v", rejected)
	}
}

func (l *log) rejected() (list []event.Rejected) {
	for _, e := range l.list {
		if r, ok := e.(event.Rejected); ok {
			list = append(list, r)
		}
	}
	return list
}

// garbled is data that makes no sense from one batch on.
type garbled struct {
	counting
	from int64
}

func (g garbled) Take(ctx context.Context, at data.Position, rows, rank, ranks int) (*data.Batch,
	data.Position, error) {
	b, after, err := g.counting.Take(ctx, at, rows, rank, ranks)
	if at["count"]/int64(rows) >= g.from {
		for i := range b.Labels {
			if b.Labels[i] >= 0 {
				b.Labels[i] = int32((i*i*7 + i*13 + 5) % 37)
			}
		}
	}
	return b, after, err
}
