package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
)

func TestLines(t *testing.T) {
	for _, c := range []struct {
		e    Event
		want string
	}{
		{samples[7], "step  1,240/50,000  loss  2.317  lr 3.0e-04  grad norm 0.410    4,010 tok/s  MFU 41 %   134 GiB  eta 9d4h"},
		{Step{Step: 3, Steps: 10, Loss: 10.8, GradNorm: 12.34}, "step  3/10  loss 10.800  grad norm  12.3"},
		{Eval{1200, 65536, 2.341}, "step 1,200  eval 2.341 on 65,536 tokens"},
		{Rejected{7, "the loss is not finite", "", Figure(math.NaN()), 4e9}, "step 7  rejected: the loss is not finite  loss NaN  grad norm 4e+09"},
		{Saved{1000, "run/step-1000", 3 << 30, 12.34}, "step 1,000  saved run/step-1000  3.0 GiB in 12.3 s"},
		{Resumed{1000, "run/step-1000"}, "step 1,000  resumed from run/step-1000"},
		{Weights{From: FromFiles, Path: "./shard", Tensors: 1026, DType: "bf16"}, "weights: ./shard, 1,026 tensors bf16"},
		{Weights{From: FromRandom, Seed: 7}, "weights: random, seed 7"},
		{Weights{From: FromCheckpoint, Path: "run/checkpoints", Step: 500}, "weights: run/checkpoints, step 500"},
		{samples[21], "model     qwen3-0.6b · 12.6M parameters\n" +
			"data      text/**/*.go · 2.28M tokens in 17,822 sequences\n" +
			"batch     8 × 128 tokens = 1,024 a step · 500 steps · 22 % of the data\n" +
			"runs in   bf16 · fsdp 2 zero 3, tp 2 · 4 × CPU\n" +
			"folder    run"},
		{samples[22], "done: 500 steps in 13m37s · loss 4.483 · eval 4.398 · 626 tok/s\n" +
			"next: deepwell export run -o DIR"},
		{Finished{Step: 30, Steps: 500, Loss: 6, Seconds: 30}, "paused after step 30 of 500 in 30.0 s · loss 6.000"},
		{Profiled{Path: "run/trace.json"}, "profile run/trace.json  open it at ui.perfetto.dev"},
	} {
		if got := c.e.Line(); got != c.want {
			t.Errorf("got  %q\nwant %q", got, c.want)
		}
	}
}

// The live line is rewritten in place: figures of every size stand in the same columns.
func TestStepDoesNotJump(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		any := func(name string, low, high float64) float64 {
			return math.Pow(10, rapid.Float64Range(low, high).Draw(t, name))
		}
		s := Step{Step: rapid.IntRange(0, 50000).Draw(t, "step"), Steps: 50000, Loss: Figure(any("loss", -2, 1.9)),
			GradNorm: Figure(any("norm", -9, 12)), TokensPerSecond: any("speed", 0, 5.9), MFU: any("mfu", -2, -0.01),
			Rate:        any("rate", -9, 1),
			MemoryBytes: int64(any("memory", 0, 14)), ETASeconds: any("eta", 0, 12)}
		got, _, _ := strings.Cut(s.text(course{eval: &Eval{Loss: Figure(any("eval", -2, 1.9))}}, math.MaxInt), "  eta")
		want, _, _ := strings.Cut(samples[7].(Step).text(course{eval: &Eval{Loss: 2}}, math.MaxInt), "  eta")
		if len(got) != len(want) {
			t.Fatalf("%q is not as long as %q", got, want)
		}
	})
}

func TestSmallTerminalKeepsWhatMatters(t *testing.T) {
	s, run := samples[7].(Step), course{eval: &Eval{Loss: 2.341}, losses: 2, average: 2.5}
	s.Rate = 3e-4
	for width, want := range map[int]string{
		150: "step  1,240/50,000  loss  2.317  avg  2.500  eval  2.341  lr 3.0e-04  grad norm 0.410    4,010 tok/s  MFU 41 %   134 GiB  eta 9d4h",
		120: "step  1,240/50,000  loss  2.317  avg  2.500  eval  2.341  grad norm 0.410    4,010 tok/s  MFU 41 %  eta 9d4h",
		80:  "step  1,240/50,000  loss  2.317  eval  2.341    4,010 tok/s  eta 9d4h",
		40:  "step  1,240/50,000  loss  2.317  eta 9d4h",
	} {
		if got := s.text(run, width); got != want {
			t.Errorf("%d columns: %q, want %q", width, got, want)
		}
	}
}

func TestRemaining(t *testing.T) {
	for seconds, want := range map[float64]string{0.4: "0s", 45: "45s", 750: "12m30s", 3600*3 + 720: "3h12m",
		86399.9: "1d0h", 9*86400 + 4*3600: "9d4h", 1e300: "36500d0h"} {
		if got := remaining(seconds); got != want {
			t.Errorf("%g s is %q, want %q", seconds, got, want)
		}
	}
}

func run(steps int, seconds float64) []Event {
	var events []Event
	for i := range steps {
		events = append(events, Step{Step: i + 1, Steps: steps, Loss: 2, Seconds: seconds})
		if i == steps/2 {
			events = append(events, Eval{i + 1, 10, 1.5})
		}
	}
	return events
}

func TestPlainShowsStepsNowAndThen(t *testing.T) {
	for _, c := range []struct {
		steps   int
		seconds float64
		lines   int // of steps
	}{{1, 1, 1}, {10, 0.01, 10}, {1000, 0.001, 21}, {50_000, 0.05, 261}, {100, 16, 100}} {
		var b bytes.Buffer
		s := NewPlain(&b)
		for _, e := range run(c.steps, c.seconds) {
			s.Emit(e)
		}
		text := b.String()
		if got := strings.Count(text, "\n") - strings.Count(text, " on "); got != c.lines {
			t.Errorf("%d steps of %g s: %d lines, want %d", c.steps, c.seconds, got, c.lines)
		}
		if c.steps > 1 && !strings.Contains(text[strings.LastIndex(text, "step"):], "eval  1.500") {
			t.Errorf("the last line does not tell the validation: %q", text)
		}
	}
}

func TestLiveStep(t *testing.T) {
	var b bytes.Buffer
	now := fixed()
	l := NewLive(&b, func() int { return 100 }, func() time.Time { now = now.Add(60 * time.Millisecond); return now })
	for _, e := range run(100, 1) {
		l.Emit(e)
	}
	l.Emit(Saved{100, "run/step-100", 1, 1})
	l.Close()
	l.Close()
	got := b.String()
	if n := strings.Count(got, "\rstep"); n != 40+20 { // every second one is too early; wiping
		t.Errorf("%d drawings in %q", n, got)
	}
	// What stays: the first step, one in five, a validation, and what was saved.
	if n := strings.Count(got, "\n"); n != 1+20+1+1 {
		t.Errorf("%d lines in %q", n, got)
	}
	for _, line := range []string{"step   1/100  loss  2.000  grad norm 0.000\n", "\rstep 51  eval 1.500 on 10 tokens\n",
		"step 100/100  loss  2.000  avg  2.000  eval  1.500  grad norm 0.000\n"} {
		if !strings.Contains(got, line) {
			t.Errorf("%q is not in %q", line, got)
		}
	}
}

// What takes long is shown with its seconds, until something else is said.
func TestLiveShowsWhatGoesOn(t *testing.T) {
	var b bytes.Buffer
	now := fixed()
	l := NewLive(&b, func() int { return 100 }, func() time.Time { return now })
	wait := func(seconds int, want string) {
		t.Helper()
		for range 4 * seconds {
			now = now.Add(time.Second / 4)
			l.Tick()
		}
		if got := b.String(); got != want {
			t.Errorf("after %d s: %q, want %q", seconds, got, want)
		}
		b.Reset()
	}
	wait(2, "")
	l.Emit(Busy{"compiling gradient"})
	wait(3, "\rcompiling gradient  1s\rcompiling gradient  2s  \rcompiling gradient  3s  ")
	l.Emit(Note{"a remark"})
	wait(2, "\r                        \ra remark\n\rcompiling gradient  4s\rcompiling gradient  5s  ")
	l.Emit(Saved{1, "run", 1, 1})
	wait(2, "\r                        \rstep 1  saved run  1 B in 1.0 s\n")
	l.Emit(Busy{"saving"})
	l.Emit(Step{Step: 1, Steps: 2})
	wait(2, "step 1/2  loss  0.000  grad norm 0.000\n")
	l.Close()
}

func TestFiguresThatAreNotFinite(t *testing.T) {
	for _, e := range []Event{
		Step{Step: 1, Loss: Figure(math.Inf(-1)), GradNorm: Figure(math.NaN()), Rate: 1},
		Eval{1, 3, Figure(math.Inf(1))},
		Rejected{1, "why", "", Figure(math.NaN()), Figure(math.Inf(1))},
		Step{Step: 2, Loss: 1e-300, GradNorm: 0.1},
	} {
		line, err := encode(e, fixed())
		if err != nil || !json.Valid([]byte(line)) {
			t.Fatalf("%v: %q", err, line)
		}
		rec, err := decode([]byte(line))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(e, rec.Event, cmp.Comparer(func(f, g Figure) bool {
			a, b := float64(f), float64(g)
			return math.Float64bits(a) == math.Float64bits(b) || math.IsNaN(a) && math.IsNaN(b)
		})); diff != "" {
			t.Error(diff)
		}
	}
}

func TestFileSurvivesAKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.jsonl")
	write := func(events ...Event) {
		f, err := Open(path, fixed)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			f.Emit(e)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	write(run(4, 1)...)
	full, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := bytes.LastIndexByte(full[:len(full)-1], '\n') + 1
	for cut := last; cut < len(full); cut++ {
		if err := os.WriteFile(path, full[:cut], 0o644); err != nil {
			t.Fatal(err)
		}
		write(Resumed{2, "run/step-2"}, Step{Step: 3, Steps: 4, Loss: 1})
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(got, full[:last]) || bytes.Count(got, []byte("\n")) != bytes.Count(full, []byte("\n"))+1 {
			t.Fatalf("truncated at %d: %s", cut, got)
		}
		steps, evals, err := Curve(bytes.NewReader(got))
		if err != nil {
			t.Fatal(err)
		}
		if len(steps) != 3 || steps[2].Loss != 1 || len(evals) != 0 {
			t.Fatalf("steps %v, validations %v", steps, evals)
		}
	}
	long := []byte(strings.Repeat("x", 10_000)) // a torn line longer than one block of the search
	if err := os.WriteFile(path, append(bytes.Clone(full), long...), 0o644); err != nil {
		t.Fatal(err)
	}
	write()
	if got, _ := os.ReadFile(path); !bytes.Equal(got, full) {
		t.Error("a long torn line was not taken away")
	}
}

// Events are never written through a link, and a backup by hard links stays as it is.
func TestFileIsNoLink(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	now := func() time.Time { return time.Unix(0, 0) }
	for _, name := range []string{"mine", "events"} {
		if err := os.WriteFile(at(name), []byte("{}\ncut"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(at("mine"), at("link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(at("events"), at("backup")); err != nil {
		t.Fatal(err)
	}
	_, err := Open(at("link"), now)
	if e := diag.From(err); e == nil || e.Code != diag.NotPlain {
		t.Error(err)
	}
	f, err := Open(at("events"), now)
	if err != nil {
		t.Fatal(err)
	}
	// A second writer, which there must not be, spoils no line of the first.
	second, err := Open(at("events"), now)
	if err != nil {
		t.Fatal(err)
	}
	f.Emit(Warning{Text: "one"})
	second.Emit(Warning{Text: "two"})
	f.Emit(Warning{Text: "three"})
	if err := errors.Join(f.Close(), second.Close()); err != nil {
		t.Fatal(err)
	}
	for name, lines := range map[string]int{"mine": 1, "backup": 1, "events": 4} {
		text, err := os.ReadFile(at(name))
		if got := strings.Count(string(text), "\n"); err != nil || got != lines {
			t.Errorf("%s has %d lines, %v: %s", name, got, err, text)
		}
	}
}

func TestFileTellsItsErrors(t *testing.T) {
	f, err := Open(filepath.Join(t.TempDir(), "e"), fixed)
	if err != nil {
		t.Fatal(err)
	}
	f.f.Close()
	f.Emit(Note{"lost"})
	if f.Close() == nil {
		t.Error("a lost event is not reported")
	}
	if _, err := Open(filepath.Join(t.TempDir(), "no", "such"), fixed); err == nil {
		t.Error("a folder that is not there was opened")
	}
}

// The curve of a run that was killed and resumed equals the curve of an uninterrupted run.
func TestCurve(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b bytes.Buffer
		sink := NewJSON(&b, fixed)
		const steps = 20
		for at := 0; at < steps; {
			if at > 0 || rapid.Bool().Draw(t, "reported") {
				sink.Emit(Resumed{Step: at})
			}
			until := rapid.IntRange(at+1, steps).Draw(t, "until")
			for i := at; i < until; i++ {
				sink.Emit(Step{Step: i + 1, Steps: steps, Loss: Figure(i)})
				if (i+1)%4 == 0 {
					sink.Emit(Eval{Step: i + 1, Loss: Figure(i)})
				}
			}
			if at = until; at < steps {
				at = rapid.IntRange(0, until).Draw(t, "saved")
			}
		}
		got, evals, err := Curve(&b)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != steps || len(evals) != steps/4 {
			t.Fatalf("%d steps, %d validations", len(got), len(evals))
		}
		for i, s := range got {
			if s.Step != i+1 {
				t.Fatalf("step %d stands at %d", s.Step, i)
			}
		}
	})
}

func TestTee(t *testing.T) {
	var a, b bytes.Buffer
	Tee(NewPlain(&a), Discard, NewPlain(&b)).Emit(Note{"x"})
	if a.String() != "x\n" || b.String() != "x\n" {
		t.Errorf("got %q and %q", a.String(), b.String())
	}
}

// A window that shrinks while a run goes on gets shorter lines, and no blanks that wrap.
func TestLiveFollowsTheWindow(t *testing.T) {
	var b strings.Builder
	width, now := 100, time.Unix(0, 0)
	l := NewLive(&b, func() int { return width }, func() time.Time { now = now.Add(time.Second); return now })
	l.Emit(Step{Step: 1, Steps: 100, Loss: 8.4, GradNorm: 8.6, TokensPerSecond: 1333, MemoryBytes: 400 << 20, ETASeconds: 300})
	b.Reset()
	width = 50
	l.Emit(Step{Step: 2, Steps: 100, Loss: 8.3, GradNorm: 8.6, TokensPerSecond: 1333, MemoryBytes: 400 << 20, ETASeconds: 300})
	l.Close()
	for _, line := range strings.FieldsFunc(b.String(), func(r rune) bool { return r == '\r' || r == '\n' }) {
		if n := len([]rune(line)); n >= 50 {
			t.Errorf("%d columns in a window of 50: %q", n, line)
		}
	}
}
