package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/program"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const devices = 8

// cpu opens the real CPU engine with 8 devices, without a cache unless a test gives one.
func cpu(t testing.TB, o ...func(*engine.Options)) *engine.Engine {
	t.Helper()
	options := engine.Options{Devices: devices}
	for _, set := range o {
		set(&options)
	}
	e, err := engine.Open(t.Context(), "cpu", options)
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	return e
}

func f32(dims ...int64) dtype.Shape { return dtype.Shape{Type: dtype.F32, Dims: dims} }

func floats(values ...float32) []byte {
	b := engine.Aligned(4 * len(values))
	dtype.F32.Encode(b, values)
	return b
}

func read(t testing.TB, a *engine.Array, i int) []float32 {
	t.Helper()
	b := enginetest.Bytes(t, a, i)
	v := make([]float32, len(b)/4)
	dtype.F32.Decode(v, b)
	return v
}

// addOne is a step that adds a vector to a resident one, in place.
func addOne(n int) *program.Module {
	spec := func(name string) program.Array {
		return program.Array{Name: name, Global: f32(int64(4 * n)), Split: [][]string{{"dp"}}}
	}
	w := spec("w")
	w.Into = "w"
	return &program.Module{Name: "add", Devices: program.Range(0, n), Mesh: []program.Axis{{Name: "dp", Size: n}},
		Args: []program.Array{w, spec("x")}, Results: []program.Array{spec("w")},
		Text: fmt.Sprintf(`module @add attributes {mhlo.num_replicas = %d : i32} {
func.func @main(%%w: tensor<4xf32> {tf.aliasing_output = 0 : i32}, %%x: tensor<4xf32>) -> tensor<4xf32> {
  %%r = stablehlo.add %%w, %%x : tensor<4xf32>
  return %%r : tensor<4xf32>
}}`, n)}
}

func place(t testing.TB, e *engine.Engine, m *program.Module, spec program.Array, fill func(i int) []byte) *engine.Array {
	t.Helper()
	a, err := e.Place(m, spec, engine.Copied, func(i int) ([]byte, error) { return fill(i), nil })
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// counter gives addOne on all devices with zeros in its state, and ones to add.
func counter(t *testing.T) (*engine.Executable, *engine.State, *engine.Array) {
	t.Helper()
	e, m := cpu(t), addOne(devices)
	state := &engine.State{}
	t.Cleanup(state.Free)
	state.Put(place(t, e, m, m.Args[0], func(int) []byte { return floats(0, 0, 0, 0) }))
	ones := place(t, e, m, m.Args[1], func(int) []byte { return floats(1, 1, 1, 1) })
	t.Cleanup(ones.Free)
	return enginetest.Compile(t, e, m), state, ones
}

func TestStateStaysOnTheDevices(t *testing.T) {
	e := cpu(t)
	m := addOne(devices)
	x := enginetest.Compile(t, e, m)
	var state engine.State
	defer state.Free()
	state.Put(place(t, e, m, m.Args[0], func(i int) []byte { return floats(float32(i), 0, 0, 0) }))
	input := place(t, e, m, m.Args[1], func(int) []byte { return floats(1, 2, 3, 4) })
	defer input.Free()
	first := state.Get("w")
	for range 10 {
		if _, err := x.Step(t.Context(), &state, input); err != nil {
			t.Fatal(err)
		}
	}
	if first.Live() {
		t.Error("a donated array is still live")
	}
	for i := range devices {
		if got, want := fmt.Sprint(read(t, state.Get("w"), i)), fmt.Sprint([]float32{float32(i) + 10, 20, 30, 40}); got != want {
			t.Errorf("device %d has %s, want %s", i, got, want)
		}
	}
	if names := fmt.Sprint(state.Names()); names != "[w]" {
		t.Errorf("the state keeps %s", names)
	}
}

func TestArraysMoveBetweenDevices(t *testing.T) {
	e := cpu(t)
	m := &program.Module{Name: "s", Devices: program.Range(0, 2), Text: "-"}
	spec := program.Array{Name: "x", Global: f32(2)}
	a := place(t, e, m, spec, func(i int) []byte { return floats(float32(i), 7) })
	defer a.Free()
	b, err := e.Copy(a, program.Devices{6, 5})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	if got := fmt.Sprint(read(t, b, 0), read(t, b, 1)); got != "[0 7] [1 7]" {
		t.Errorf("the copy has %s", got)
	}
	if !a.Live() {
		t.Error("the copy took the original away")
	}
}

func TestHostMemoryKinds(t *testing.T) {
	e := cpu(t)
	m := &program.Module{Name: "s", Devices: program.Range(0, 1), Text: "-"}
	for _, kind := range e.Devices()[0].Memories {
		spec := program.Array{Name: "x", Global: f32(2), Memory: kind}
		a := place(t, e, m, spec, func(int) []byte { return floats(3, 4) })
		if got := fmt.Sprint(read(t, a, 0)); got != "[3 4]" {
			t.Errorf("memory %s: %s", kind, got)
		}
		a.Free()
	}
}

// Every element type goes to a device and comes back as it was, FP4 two to a byte.
func TestEveryElementTypeRoundTrips(t *testing.T) {
	e := cpu(t)
	m := &program.Module{Name: "s", Devices: program.Range(0, 1), Text: "-"}
	for _, d := range dtype.All() {
		spec := program.Array{Name: "x", Global: dtype.Shape{Type: d, Dims: []int64{3, 5}}}
		want := make([]byte, spec.Global.Bytes())
		for i := range want {
			want[i] = byte(31*i + 7)
			if d == dtype.Pred {
				want[i] &= 1
			}
		}
		if d.Bits() == 4 {
			want[len(want)-1] &= 0xf // 15 elements: the last half byte is padding
		}
		a := place(t, e, m, spec, func(int) []byte { return want })
		if got, err := a.Read(t.Context(), 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s came back as %x, want %x (%v)", d, got, want, err)
		}
		a.Free()
	}
}

func TestZeroCopyUsesTheMemoryInPlace(t *testing.T) {
	e := cpu(t)
	m := &program.Module{Name: "s", Devices: program.Range(0, 1), Text: "-"}
	spec := program.Array{Name: "x", Global: f32(1 << 20)}
	data := engine.Aligned(int(spec.Global.Bytes()))
	a, err := e.Place(m, spec, engine.Lent, func(int) ([]byte, error) { return data, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer a.Free()
	data[0] = 42 // breaks the promise on purpose: a copy would not see it
	got, err := a.Read(t.Context(), 0)
	if err != nil || got[0] != 42 {
		t.Errorf("the buffer is a copy: %d, %v", got[0], err)
	}
}

func TestHighWaterCountsBuffersAndTemp(t *testing.T) {
	e := cpu(t)
	module := &program.Module{Name: "s", Devices: program.Range(0, 1), Text: "-"}
	before := e.LiveBytes()[0]
	e.ResetHighWater()
	spec := program.Array{Name: "x", Global: f32(1000)}
	var arrays []*engine.Array
	for range 3 {
		arrays = append(arrays, place(t, e, module, spec, func(int) []byte { return make([]byte, 4000) }))
	}
	for _, a := range arrays {
		a.Free()
	}
	if live, peak := e.LiveBytes()[0]-before, e.HighWater()[0]-before; live != 0 || peak != 12000 {
		t.Errorf("live %d, high water %d; want 0 and 12000", live, peak)
	}
	// A donated step: argument and result share memory, so only the other argument adds.
	add := addOne(1)
	x := enginetest.Compile(t, e, add)
	m, err := x.Memory()
	if err != nil {
		t.Fatal(err)
	}
	w := place(t, e, add, add.Args[0], func(int) []byte { return floats(1, 2, 3, 4) })
	in := place(t, e, add, add.Args[1], func(int) []byte { return floats(1, 2, 3, 4) })
	e.ResetHighWater()
	run, err := x.Run(t.Context(), w, in)
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := e.HighWater()[0]-before, 32+m.Temp; got != want {
		t.Errorf("high water %d, want %d (two vectors of 16 and temp %d)", got, want, m.Temp)
	}
	run.Free()
	in.Free()
	if live := e.LiveBytes()[0] - before; live != 0 {
		t.Errorf("%d bytes are live after everything was freed", live)
	}
}

// Programs that were compiled under variables that change them are not taken without, nor the other
// way round.
func TestCompileCacheKnowsTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	for _, row := range []struct {
		environ []string
		cached  bool
	}{
		{[]string{"DEEPWELL_ALLOW_ENV=XLA_FLAGS", "XLA_FLAGS=--xla_cpu_enable_fast_math=true"}, false},
		{[]string{"HOME=/"}, false}, // finds nothing of the first
		{[]string{"NCCL_ALGO=Ring"}, true},
		{[]string{"NVIDIA_TF32_OVERRIDE=1"}, false},
		{[]string{"NVIDIA_TF32_OVERRIDE=1"}, true},
		{[]string{"DEEPWELL_ALLOW_ENV=XLA_FLAGS", "XLA_FLAGS=--xla_dump_to=x"}, false},
		{[]string{"DEEPWELL_ALLOW_ENV=XLA_FLAGS", "XLA_FLAGS=--xla_dump_to=x"}, false}, // no file is lost
	} {
		events := &event.Recorder{}
		e := cpu(t, func(o *engine.Options) { o.Cache, o.Events, o.Environ = dir, events, row.environ })
		x, err := e.Compile(t.Context(), addOne(devices))
		if err != nil {
			t.Fatal(err)
		}
		x.Free()
		for _, ev := range events.Events() {
			if ev, ok := ev.(event.Compiled); ok && ev.Cached != row.cached {
				t.Errorf("%q: cached %v", row.environ, ev.Cached)
			}
		}
	}
	_, err := engine.Open(t.Context(), "cpu", engine.Options{Environ: []string{"XLA_FLAGS=--x"}})
	if err == nil || diag.From(err).Code != diag.EnvRefused {
		t.Errorf("XLA_FLAGS: %v", err)
	}
}

func TestCompileCache(t *testing.T) {
	dir := t.TempDir()
	var reports []*engine.Report
	compile := func(name string) (cached bool, warnings int) {
		t.Helper()
		events := &event.Recorder{}
		e := cpu(t, func(o *engine.Options) { o.Cache, o.Events = dir, events })
		m := addOne(devices)
		x, err := e.Compile(t.Context(), m)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer x.Free()
		r, err := x.Report()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		reports = append(reports, r)
		w := place(t, e, m, m.Args[0], func(int) []byte { return floats(1, 1, 1, 1) })
		in := place(t, e, m, m.Args[1], func(int) []byte { return floats(2, 2, 2, 2) })
		defer in.Free()
		run, err := x.Run(t.Context(), w, in)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer run.Free()
		if got := fmt.Sprint(read(t, run.Results[0], 7)); got != "[3 3 3 3]" {
			t.Errorf("%s: got %s", name, got)
		}
		for _, ev := range events.Events() {
			switch ev := ev.(type) {
			case event.Compiled:
				cached = ev.Cached
			case event.Warning:
				warnings++
			}
		}
		return cached, warnings
	}
	entries := func() []string {
		list, err := filepath.Glob(filepath.Join(dir, "*", "*", "*"))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	if cached, warnings := compile("first"); cached || warnings != 0 || len(entries()) != 1 {
		t.Errorf("first compile: cached %v, %d warnings, entries %v", cached, warnings, entries())
	}
	if cached, warnings := compile("second"); !cached || warnings != 0 {
		t.Errorf("second compile: cached %v, %d warnings", cached, warnings)
	}
	first, second := reports[0], *reports[1]
	if first.Cached || !second.Cached || first.Seconds <= 0 {
		t.Errorf("cached is %v and then %v, %v s", first.Cached, second.Cached, first.Seconds)
	}
	if second.Cached = false; !reflect.DeepEqual(first, &second) {
		t.Errorf("the report is %+v, it was %+v", second, first)
	}
	if err := os.WriteFile(entries()[0], []byte("garbage"), 0o644); err != nil {
		t.Fatal(err)
	}
	if cached, warnings := compile("damaged"); cached || warnings != 1 {
		t.Errorf("damaged cache: cached %v, %d warnings", cached, warnings)
	}
	// A folder that cannot be made stands for a read-only one: root may write everywhere.
	dir = filepath.Join(dir, "file")
	if err := os.WriteFile(dir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if cached, warnings := compile("unwritable"); cached || warnings == 0 {
		t.Errorf("unwritable cache: cached %v, %d warnings", cached, warnings)
	}
}

func TestStageIsHeldToItsText(t *testing.T) {
	e := cpu(t)
	for name, change := range map[string]func(*program.Module){
		"argument missing": func(m *program.Module) { m.Args = m.Args[:1] },
		"result shape":     func(m *program.Module) { m.Args[0].Into = ""; m.Results[0].Global = f32(8 * devices) },
		"not donated":      func(m *program.Module) { m.Args[0].Into = "" },
	} {
		m := addOne(devices)
		change(m)
		if _, err := e.Compile(t.Context(), m); !errors.Is(err, diag.ProgramInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Runs that nobody waits for gave their events and their part of the ledger back never.
func TestRunsThatNobodyWaitsFor(t *testing.T) {
	e := cpu(t)
	x := enginetest.Compile(t, e, &program.FromText("m", sumOverAll, devices).Modules[0])
	arg := place(t, e, x.Module(), x.Module().Args[0], func(int) []byte { return make([]byte, 512) })
	defer arg.Free()
	before := fmt.Sprint(e.LiveBytes())
	var last *engine.Run
	for range 500 {
		run, err := x.Run(t.Context(), arg)
		if err != nil {
			t.Fatal(err)
		}
		run.Free()
		last = run
	}
	if err := last.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		if fmt.Sprint(e.LiveBytes()) == before {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Errorf("live bytes were %s and are %v", before, e.LiveBytes())
}

// A deadline holds even while somebody else waits for the same run.
func TestDeadlineHoldsBesideAnotherWaiter(t *testing.T) {
	e := cpu(t)
	// Eight GEMMs of 6.75 GFLOP: far longer than the deadline on any machine here.
	var body strings.Builder
	for i := range 8 {
		fmt.Fprintf(&body, "%%v%d = stablehlo.dot_general %%v%d, %%v0, contracting_dims = [1] x [0] : "+
			"(tensor<1500x1500xf32>, tensor<1500x1500xf32>) -> tensor<1500x1500xf32>\n", i+1, i)
	}
	text := "module @m {func.func @main(%v0: tensor<1500x1500xf32>) -> tensor<1500x1500xf32> {\n" +
		body.String() + "return %v8 : tensor<1500x1500xf32>}}"
	x := enginetest.Compile(t, e, &program.FromText("m", text, 1).Modules[0])
	a := place(t, e, x.Module(), x.Module().Args[0], func(int) []byte { return make([]byte, 1500*1500*4) })
	defer a.Free()
	run, err := x.Run(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := run.Wait(context.Background()); err != nil {
			t.Error(err)
		}
	})
	time.Sleep(5 * time.Millisecond) // the other waiter is in C by now
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := run.Wait(ctx); !errors.Is(err, diag.Canceled) {
		t.Errorf("the deadline did not hold: %v", err)
	}
	wg.Wait()
}

// What a step put into the state must survive the run's Free.
func TestFreeingARunLeavesTheStateAlone(t *testing.T) {
	x, state, input := counter(t)
	for range 3 {
		run, err := x.Step(t.Context(), state, input)
		if err != nil {
			t.Fatal(err)
		}
		run.Free()
	}
	if got := read(t, state.Get("w"), 0)[0]; got != 3 {
		t.Errorf("the state has %v, want 3", got)
	}
}

const sumOverAll = `module @m attributes {mhlo.num_replicas = 8 : i32} {
func.func @main(%x: tensor<128xf32>) -> tensor<128xf32> {
  %s = "stablehlo.all_reduce"(%x) ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
  }) {replica_groups = dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>} : (tensor<128xf32>) -> tensor<128xf32>
  %k = stablehlo.constant dense<0.125> : tensor<128xf32>
  %y = stablehlo.multiply %s, %k : tensor<128xf32>
  return %y : tensor<128xf32>
}}`

// Runs with collectives that are queued behind each other took each other's threads: XLA ended the
// process after 40 s, with the seventh run. Now each begins when the one before is done.
func TestManyQueuedCollectives(t *testing.T) {
	e := cpu(t)
	x := enginetest.Compile(t, e, &program.FromText("m", sumOverAll, devices).Modules[0])
	arg := place(t, e, x.Module(), x.Module().Args[0], func(i int) []byte {
		return append(floats(float32(i)), make([]byte, 508)...)
	})
	defer arg.Free()
	var wg sync.WaitGroup
	for range 3 { // several goroutines at once, as pipeline stages are
		wg.Go(func() {
			at := arg
			var runs []*engine.Run
			for range 200 {
				run, err := x.Run(t.Context(), at)
				if err != nil {
					t.Error(err)
					return
				}
				runs = append(runs, run)
				at = run.Results[0]
			}
			for _, run := range runs {
				if err := run.Wait(context.Background()); err != nil {
					t.Error(err)
				}
			}
			if got := read(t, at, 5)[0]; got != 3.5 {
				t.Errorf("the mean of 0 to 7 is %v", got)
			}
			for _, run := range runs {
				run.Free()
			}
		})
	}
	wg.Wait()
}

// Large host data is copied into memory that is used again. It may not be used again while an
// array, or a result that took its place, still lives there.
func TestStagedMemoryIsNotSharedByLiveArrays(t *testing.T) {
	e := cpu(t)
	const n = 1 << 20
	spec := program.Array{Name: "w", Global: f32(n), Into: "w"}
	result := program.Array{Name: "w", Global: f32(n)}
	m := &program.Module{Name: "double", Devices: program.Range(0, 1), Args: []program.Array{spec},
		Results: []program.Array{result}, Text: `module @m {
func.func @main(%w: tensor<1048576xf32> {tf.aliasing_output = 0 : i32}) -> tensor<1048576xf32> {
  %r = stablehlo.add %w, %w : tensor<1048576xf32>
  return %r : tensor<1048576xf32>
}}`}
	x := enginetest.Compile(t, e, m)
	data := make([]byte, 4*n)
	fill := func(v float32) []byte {
		dtype.F32.Encode(data, slices.Repeat([]float32{v}, n))
		return data
	}
	for round := range 10 {
		w := place(t, e, m, spec, func(int) []byte { return fill(float32(round + 1)) })
		fill(-1) // the source may change at once
		run, err := x.Run(t.Context(), w)
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		other := place(t, e, m, spec, func(int) []byte { return fill(99) })
		got := read(t, run.Results[0], 0)
		if got[0] != 2*float32(round+1) || got[n-1] != got[0] {
			t.Fatalf("round %d: %v and %v", round, got[0], got[n-1])
		}
		other.Free()
		run.Free()
	}
}

// A run that is still going when its executable and arguments are freed must finish all the same.
func TestFreeWhileRunning(t *testing.T) {
	e := cpu(t)
	text := `module @m {func.func @main(%x: tensor<512x512xf32>) -> tensor<512x512xf32> {
  %a = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  %b = stablehlo.dot_general %a, %x, contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32>
  return %b : tensor<512x512xf32>}}`
	m := &program.FromText("m", text, 1).Modules[0]
	for range 20 {
		x, err := e.Compile(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		a := place(t, e, x.Module(), x.Module().Args[0], func(int) []byte { return make([]byte, 512*512*4) })
		run, err := x.Run(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}
		a.Free()
		x.Free()
		if err := run.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		run.Free()
	}
}

func TestCanceledWaitReturns(t *testing.T) {
	e := cpu(t)
	text := `module @m {func.func @main(%x: tensor<1500x1500xf32>) -> tensor<1500x1500xf32> {
  %a = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<1500x1500xf32>, tensor<1500x1500xf32>) -> tensor<1500x1500xf32>
  return %a : tensor<1500x1500xf32>}}`
	x := enginetest.Compile(t, e, &program.FromText("m", text, 1).Modules[0])
	a := place(t, e, x.Module(), x.Module().Args[0], func(int) []byte { return make([]byte, 1500*1500*4) })
	defer a.Free()
	run, err := x.Run(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := run.Wait(ctx); !errors.Is(err, diag.Canceled) {
		t.Errorf("canceled wait: %v", err)
	}
	if err := run.Wait(context.Background()); err != nil {
		t.Errorf("waiting again: %v", err)
	}
}

// A run whose context ends before it starts consumes nothing, also while the devices are busy.
func TestCanceledRunConsumesNothing(t *testing.T) {
	x, state, input := counter(t)
	before := state.Get("w")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := x.Step(gone, state, input); !errors.Is(err, diag.Canceled) || !before.Live() {
		t.Errorf("%v; the donated array is live: %v", err, before.Live())
	}
	if _, err := x.Step(t.Context(), state, input); err != nil || before.Live() {
		t.Errorf("%v; the donated array is live: %v", err, before.Live())
	}
	e := cpu(t)
	open := make(chan struct{})
	if err := e.Register("test.gate", func(*engine.Call) error { <-open; return nil }); err != nil {
		t.Fatal(err)
	}
	gate := enginetest.Compile(t, e, &program.FromText("m", `module @m attributes {mhlo.num_replicas = 2 : i32} {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %r = stablehlo.custom_call @test.gate(%x) {api_version = 4 : i32} : (tensor<4xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>}}`, 2).Modules[0])
	a := place(t, e, gate.Module(), gate.Module().Args[0], func(int) []byte { return floats(1, 2, 3, 4) })
	defer a.Free()
	first, err := gate.Run(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Free()
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := gate.Run(soon, a); !errors.Is(err, diag.Canceled) {
		t.Errorf("a run behind one that does not end: %v", err)
	}
	close(open)
	second, err := gate.Run(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Free()
	for _, r := range []*engine.Run{first, second} {
		if err := r.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// 20,000 executions on 8 devices may not grow the process: neither memory nor goroutines.
func TestSoak(t *testing.T) {
	x, state, input := counter(t)
	step := func(n int) {
		for range n {
			run, err := x.Step(t.Context(), state, input)
			if err != nil {
				t.Fatal(err)
			}
			if err := run.Wait(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
	step(2000) // the allocator's and the pools' steady state
	before := residentBytes(t)
	step(20_000)
	grown := residentBytes(t) - before
	t.Logf("resident memory grew by %s over 20,000 executions", event.Size(grown))
	if grown > 20<<20 {
		t.Errorf("resident memory grew by %s", event.Size(grown))
	}
	if got := read(t, state.Get("w"), 3)[0]; got != 22_000 {
		t.Errorf("the sum is %v, want 22000", got)
	}
}

func residentBytes(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

func TestGoFunctionsInsidePrograms(t *testing.T) {
	e := cpu(t)
	if _, err := selftest.Handler(t.Context(), e, devices, 1000); err != nil {
		t.Fatal(err)
	}
	before, calls := residentBytes(t), 10_000
	if slowtest.Enabled {
		calls = 100_000
	}
	n, err := selftest.Handler(t.Context(), e, devices, calls)
	if err != nil {
		t.Fatal(err)
	}
	grown := residentBytes(t) - before
	t.Logf("%d calls of a Go function on %d devices, resident memory grew by %s", n, devices, event.Size(grown))
	if grown > 20<<20 {
		t.Errorf("resident memory grew by %s", event.Size(grown))
	}
}

func TestHandlerErrorsAndPanicsFailTheRun(t *testing.T) {
	e := cpu(t)
	for name, h := range map[string]func(*engine.Call) error{
		"test.error": func(*engine.Call) error { return errors.New("no thanks") },
		"test.panic": func(*engine.Call) error { panic("at the disco") },
	} {
		if err := e.Register(name, h); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf(`module @m {func.func @main(%%x: tensor<4xf32>) -> tensor<4xf32> {
  %%r = stablehlo.custom_call @%s(%%x) {api_version = 4 : i32} : (tensor<4xf32>) -> tensor<4xf32>
  return %%r : tensor<4xf32>}}`, name)
		x, err := e.Compile(t.Context(), &program.FromText("m", text, 1).Modules[0])
		if err != nil {
			t.Fatal(err)
		}
		a := place(t, e, x.Module(), x.Module().Args[0], func(int) []byte { return floats(1, 2, 3, 4) })
		run, err := x.Run(t.Context(), a)
		if err == nil {
			err = run.Wait(t.Context())
			run.Free()
		}
		if !errors.Is(err, diag.HandlerFailed) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		a.Free()
		x.Free()
	}
}

// A mesh over two processes is filled by both, each its own devices: what belongs to the other is
// neither asked for nor placed, and an array reports the devices of its shards.
func TestPlaceSkipsDevicesOfOtherProcesses(t *testing.T) {
	e := cpu(t)
	e.Elsewhere(0, 1, 4, 5)
	m := &program.Module{Name: "s", Devices: program.Devices{2, 0, 3, 1}, Text: "-", Mesh: addOne(4).Mesh}
	spec := program.Array{Name: "x", Global: f32(2)}
	var asked []int
	a, err := e.Place(m, spec, engine.Copied, func(i int) ([]byte, error) {
		asked = append(asked, i)
		return floats(float32(i), 7), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Free()
	if !slices.Equal(asked, []int{0, 2}) || !slices.Equal(a.Devices(), program.Devices{2, 3}) {
		t.Errorf("shards %v were filled, on devices %v", asked, a.Devices())
	}
	for part, i := range []float32{0, 2} {
		if got := read(t, a, part); !slices.Equal(got, []float32{i, 7}) {
			t.Errorf("shard %d is %v", part, got)
		}
	}
	m.Devices = program.Devices{2, 99, 3, 1}
	_, err = e.Place(m, spec, engine.Copied, func(int) ([]byte, error) { return floats(1, 2), nil })
	if diag.From(err).Code != diag.DeviceMismatch {
		t.Errorf("a device of no process: %v", err)
	}
}
