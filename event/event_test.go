package event

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func fixed() time.Time { return time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC) }

// samples has one event of every kind; TestEveryKindIsSampled holds it complete.
var samples = []Event{
	Phase{"compile", "read program"},
	Progress{"download xla-cpu-pjrt", 5 << 20, 63 << 20, "B"},
	Note{"peak excludes cuDNN workspace"},
	Warning{"DW2204", "the compile cache is not writable", "set DEEPWELL_CACHE"},
	Installed{"cpu", 259284552, "0123456789abcdef"},
	Compiled{"step", "b200", 8, 0.59, false, ""},
	Checked{"collectives", true, "8 devices, 5 kinds", ""},
	Step{Step: 1240, Steps: 50000, Loss: 2.317, GradNorm: 0.41, Rate: 3e-4, Tokens: 5 << 20, TokensPerSecond: 4010,
		Seconds: 16.2, MemoryBytes: 134 << 30, MFU: 0.41, ETASeconds: 9*86400 + 4*3600},
	Eval{1200, 65536, 2.341},
	Precision{1241, "fall", 3, "down", "fprop", "nvfp4", "mxfp8", "x amax", 41, 6, 24,
		"layer 3 down fprop: nvfp4 falls to mxfp8"},
	Experts{1240, []ExpertLoad{{Layer: 3, Tokens: []int64{700, 300}, Busiest: 1.4, Idlest: 0.6, Entropy: 0.6}}},
	RouterCollapsed{1240, 3, 3.2, 0.01},
	Rejected{1241, "the gradient is not finite", "run/replay/1241", 9.5, Figure(math.Inf(1))},
	Saved{1000, "run/step-1000", 3 << 30, 12.34},
	Resumed{1000, "run/step-1000"},
	Memory{PlannedBytes: 140 << 30, InUseBytes: 67 << 30, PeakBytes: 139 << 30, PoolBytes: 169 << 30},
	Profiled{Path: "run/trace.json"},
	Weights{From: FromFiles, Path: "./shard", Tensors: 26, DType: "bf16", Bytes: 723200, Seed: 3},
	Stalled{41, "step", 61, 60, "the engine, program update", "run/stall.txt"},
	KernelDiffers{Kernel: "mxfp8: bf16 -> 0", Spec: "mxfp8 1x64x128 along: bf16 -> 0", Apart: 1,
		Limit: 0.002},
	Busy{"compiling gradient"},
	Run{Model: "qwen3-0.6b", Parameters: 12_600_000, Data: []string{"text/**/*.go"}, DataTokens: 2_281_268,
		DataSequences: 17_822, Steps: 500, Seq: 128, Batch: 8, Microbatch: 8, Epochs: 0.2244, Precision: "bf16",
		Plan: "fsdp 2 zero 3, tp 2", Devices: 4, Device: "CPU", Folder: "run"},
	Finished{Step: 500, Steps: 500, Loss: 4.483, Eval: &sampleEval, Tokens: 512_000, Seconds: 817,
		Next: []string{"deepwell export run -o DIR"}},
}

var sampleEval = Figure(4.398)

func TestEveryKindIsSampled(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range samples {
		seen[Kind(e)] = true
		if got, want := kinds[Kind(e)], reflect.TypeOf(e); got != want {
			t.Errorf("kind %s makes %v, want %v", Kind(e), got, want)
		}
	}
	if len(seen) != len(kinds) {
		t.Errorf("%d of %d kinds are sampled", len(seen), len(kinds))
	}
}

func TestJSONRoundTrip(t *testing.T) {
	var b bytes.Buffer
	sink := NewJSON(&b, fixed)
	for _, e := range samples {
		sink.Emit(e)
	}
	b.WriteString(`{"v":1,"t":"2026-11-15T12:00:00Z","kind":"trunc`) // as a kill leaves it
	var got []Event
	for rec, err := range Read(&b) {
		if err != nil {
			t.Fatal(err)
		}
		if !rec.Time.Equal(fixed()) {
			t.Errorf("time %v", rec.Time)
		}
		got = append(got, rec.Event)
	}
	if diff := cmp.Diff(samples, got); diff != "" {
		t.Error(diff)
	}
}

type ownEvent struct{}

func (ownEvent) Line() string { return "own" }

// A pointer is written as what it points to; a type that has no kind is refused, and never written
// with an empty one.
func TestKindsOfPointersAndStrangers(t *testing.T) {
	step := Step{Step: 3}
	plain, err := encode(step, fixed())
	if pointer, err2 := encode(&step, fixed()); err != nil || err2 != nil || pointer != plain {
		t.Errorf("%s and %s: %v %v", plain, pointer, err, err2)
	}
	if Kind(&step) != "step" || Kind(&Unknown{Name: "new"}) != "new" {
		t.Errorf("%q and %q", Kind(&step), Kind(&Unknown{Name: "new"}))
	}
	for _, e := range []Event{nil, ownEvent{}, &ownEvent{}, (*Step)(nil)} {
		if text, err := encode(e, fixed()); err == nil || Kind(e) != "" {
			t.Errorf("%T: %q, kind %q", e, text, Kind(e))
		}
	}
}

func TestOldFileStillReads(t *testing.T) {
	f, err := os.Open("testdata/v1.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var kindsSeen []string
	for rec, err := range Read(f) {
		if err != nil {
			t.Fatal(err)
		}
		kindsSeen = append(kindsSeen, Kind(rec.Event))
	}
	if want := []string{"phase", "compiled", "from-the-future", "step", "eval", "rejected", "saved", "resumed",
		"profiled"}; !cmp.Equal(kindsSeen, want) {
		t.Errorf("kinds %v, want %v", kindsSeen, want)
	}
}

func TestReadRefusesGarbageInTheMiddle(t *testing.T) {
	for _, in := range []string{"x\n{}\n", `{"v":9,"kind":"note"}` + "\n", `{"v":1}` + "\n"} {
		failed := false
		for _, err := range Read(strings.NewReader(in)) {
			failed = failed || err != nil
		}
		if !failed {
			t.Errorf("%q was read", in)
		}
	}
}

func TestLiveKeepsOneLine(t *testing.T) {
	var b bytes.Buffer
	now := fixed()
	l := NewLive(&b, func() int { return 40 }, func() time.Time { now = now.Add(time.Second); return now })
	l.Emit(Progress{"download", 50, 100, "B"})
	l.Emit(Note{"hello"})
	l.Emit(Progress{"download", 100, 100, "B"})
	l.Close()
	got := b.String()
	if strings.Count(got, "\n") != 1 || !strings.Contains(got, "hello\n") {
		t.Errorf("terminal got %q", got)
	}
	if !strings.HasSuffix(got, "\r") {
		t.Errorf("Close left the line: %q", got)
	}
}

func TestPlainLeavesProgressOut(t *testing.T) {
	var b bytes.Buffer
	s := NewPlain(&b)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, e := range samples {
				s.Emit(e)
			}
		})
	}
	wg.Wait()
	want := 0 // an event may have several lines
	for _, e := range samples {
		if line := e.Line(); line != "" {
			want += 8 * (1 + strings.Count(line, "\n"))
		}
	}
	if got := strings.Count(b.String(), "\n"); got != want {
		t.Errorf("%d lines, want %d", got, want)
	}
}

func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	for _, e := range samples {
		NewJSON(&b, fixed).Emit(e)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, err := range Read(bytes.NewReader(in)) {
			if err != nil {
				return
			}
		}
	})
}

// A disk that fills and is freed leaves a gap that is reported, and no line that cannot be read.
func TestFileMendsATornLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.jsonl")
	f, err := Open(path, func() time.Time { return time.Unix(0, 0) })
	if err != nil {
		t.Fatal(err)
	}
	f.Emit(Saved{Step: 1})
	// What a full disk does: a part of a line is there, and the write says so.
	if _, err := f.f.WriteString(`{"v":1,"kind"`); err != nil {
		t.Fatal(err)
	}
	f.torn, f.err = 3, syscall.ENOSPC
	f.Emit(Saved{Step: 9})
	if err := f.Close(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for rec, err := range Read(bytes.NewReader(text)) {
		if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
		kinds = append(kinds, Kind(rec.Event))
	}
	if got := strings.Join(kinds, " "); got != "saved warning saved" || !strings.Contains(string(text), "3 events could not be written here") {
		t.Errorf("%s in\n%s", got, text)
	}
}
