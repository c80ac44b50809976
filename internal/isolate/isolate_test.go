package isolate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// parentOf makes the test binary a parent whose child is the script that the variable names.
const parentOf = "DEEPWELL_TEST_CHILD"

// TestMain is the child that compiles, and the parent that is killed.
func TestMain(m *testing.M) {
	Main()
	Work(workVerb, work)
	if script := os.Getenv(parentOf); script != "" {
		_, err := Open(context.Background(), Options{Child: script})
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// script makes an executable shell script.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "child")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func open(t *testing.T, child, cluster string, o Options) *Compiler {
	t.Helper()
	var err error
	if o.Cluster, err = machine.ParseCluster(cluster); err != nil {
		t.Fatal(err)
	}
	o.Child = child
	c, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// text wraps the type of an array into a program that gives it back.
func text(array string) string {
	return fmt.Sprintf("module @m {\nfunc.func @main(%%x: %[1]s) -> %[1]s {\n"+
		"  %%y = stablehlo.add %%x, %%x : %[1]s\n  return %%y : %[1]s\n}\n}\n", array)
}

// overflows ends XLA by an exception that nothing catches.
const overflows = "tensor<9223372036854775807x2xf32>"

func module(name, text string) *program.Module {
	m := program.FromText(name, text, 1).Modules[0]
	return &m
}

// A child reports what the compiler in this process does, to the byte, and tells the same events
// and errors.
func TestChildReportsTheSame(t *testing.T) {
	flagged := selftest.MXFP8(8)
	flagged.Flags = map[string]any{"xla_gpu_enable_triton_gemm": true, "xla_gpu_autotune_level": 0,
		"xla_gpu_all_reduce_combine_threshold_bytes": int64(1 << 20)}
	odd := module("odd", text("tensor<4xf32>"))
	odd.Flags = map[string]any{"xla_cpu_enable_fast_math": []int{1}}
	cpu := []*program.Module{module("plain", text("tensor<64x64xf32>")),
		module("unknown", "module @m {\nfunc.func @main() {\n  stablehlo.ad\n}\n}\n"), odd,
		module("after", text("tensor<8xf32>"))}
	for cluster, modules := range map[string][]*program.Module{
		"8xb200": {flagged, module("bad", "module {")},
		"8xcpu":  cpu,
	} {
		var here, there outcome
		for child, out := range map[string]*outcome{"": &here, Self: &there} {
			heard := &event.Recorder{}
			c := open(t, child, cluster, Options{Events: heard})
			for _, m := range modules {
				out.add(c.Compile(t.Context(), m))
			}
			for _, e := range heard.Events() {
				done, ok := e.(event.Compiled)
				done.Seconds = 0
				out.lines = append(out.lines, fmt.Sprint(ok, done))
			}
		}
		if diff := cmp.Diff(here.lines, there.lines); diff != "" {
			t.Errorf("%s: %s", cluster, diff)
		}
		if len(here.lines) <= len(modules) {
			t.Errorf("%s: %d modules and their events gave %q", cluster, len(modules), here.lines)
		}
	}
}

// An outcome is what compiles gave, without what differs from run to run.
type outcome struct{ lines []string }

func (o *outcome) add(r *engine.Report, err error) {
	if err != nil {
		o.lines = append(o.lines, diag.From(err).Format())
		return
	}
	r.Seconds = 0
	if r.ExecutableBytes = min(r.ExecutableBytes, 1); r.ExecutableBytes > 0 {
		r.Notes = append(r.Notes, "has a size") // a cuDNN plan's differs from compile to compile
	}
	js, err := json.Marshal(r)
	o.lines = append(o.lines, fmt.Sprint(string(js), r, err))
}

// A crash names its module, is one error, and leaves the parent alive; the dump of the child is not
// shown to anyone.
func TestCrashIsOneError(t *testing.T) {
	var log bytes.Buffer
	c := open(t, Self, "8xcpu", Options{Log: &log})
	if _, err := c.Compile(t.Context(), module("one", text("tensor<4xf32>"))); err != nil {
		t.Fatal(err)
	}
	_, err := c.Compile(t.Context(), module("two", text(overflows)))
	e := diag.From(err)
	if e.Code != diag.CompilerCrashed || e.What != "the compiler crashed (SIGABRT) on module two" ||
		e.Where != "module two" || !strings.Contains(e.Cause, "overflow in static extent product") {
		t.Errorf("%s", e.Format())
	}
	if _, again := c.Compile(t.Context(), module("three", text("tensor<4xf32>"))); !errors.Is(again, err) {
		t.Errorf("a dead child gave %v", again)
	}
	if log.Len() > 0 {
		t.Errorf("the child's words were passed on:\n%s", log.String())
	}
}

// Children that do not do what they should end in one coded error each.
func TestStrangeChildren(t *testing.T) {
	for _, row := range []struct {
		name, child string
		code        diag.Code
		words       string
	}{
		{"none", "/nonexistent/deepwell", diag.EngineLoad, "ulimit"},
		{"a folder", t.TempDir(), diag.EngineLoad, "permission denied"},
		{"silent", script(t, "exit 0"), diag.CompilerCrashed, "(status 0)"},
		{"fails", script(t, "echo 'no such library' >&2; exit 7"), diag.CompilerCrashed, "no such library"},
		{"junk", script(t, "echo '<html>' >&3"), diag.CompilerCrashed, "while it was opened"},
		{"killed", script(t, "kill -9 $$"), diag.CompilerCrashed, "memory"},
		{"signal", script(t, "kill -SEGV $$"), diag.CompilerCrashed, "(SIGSEGV)"},
		{"panics", script(t, "echo 'panic: oh no' >&2; exit 2"), diag.CompilerCrashed, "panic: oh no"},
		{"later version", script(t, `read hello; echo '{"error":{"code":"DW2007","what":"x","fix":"y"}}' >&3`),
			diag.EngineAPI, "fix    y"},
	} {
		t.Run(row.name, func(t *testing.T) {
			var log bytes.Buffer
			_, err := Open(t.Context(), Options{Child: row.child, Log: &log})
			e := diag.From(err)
			if e == nil || e.Code != row.code || !strings.Contains(e.Format(), row.words) {
				t.Errorf("want %s with %q, got %v", row.code, row.words, err)
			}
		})
	}
}

// hangs is a child that hangs, and has a child of its own, both of which write their numbers down.
func hangs(t *testing.T) (child, pids string) {
	pids = filepath.Join(t.TempDir(), "pids")
	return script(t, "sleep 1000 & echo $$ $! > "+pids+".new; mv "+pids+".new "+pids+"; wait"), pids
}

// wait waits for the numbers.
func waitFor(t *testing.T, pids string) []int {
	t.Helper()
	for range 3000 {
		if text, err := os.ReadFile(pids); err == nil {
			var list []int
			for word := range strings.FieldsSeq(string(text)) {
				pid, err := strconv.Atoi(word)
				if err != nil {
					t.Fatal(err)
				}
				list = append(list, pid)
			}
			return list
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the child has not begun")
	return nil
}

// buried waits until a process is gone; a zombie is, of a container whose first process buries
// none.
func buried(t *testing.T, pid int) {
	t.Helper()
	for range 3000 {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(state), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("process %d is still there", pid)
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

// Canceling ends the child and what it has started.
func TestCancelEndsTheChild(t *testing.T) {
	child, pids := hangs(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error)
	go func() {
		_, err := Open(ctx, Options{Child: child})
		ended <- err
	}()
	list := waitFor(t, pids)
	cancel()
	if err := <-ended; !errors.Is(err, diag.Canceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	for _, pid := range list {
		buried(t, pid)
	}
}

// A parent that is killed takes the child with it.
func TestParentTakesTheChildAlong(t *testing.T) {
	child, pids := hangs(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), parentOf+"="+child)
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	list := waitFor(t, pids)
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	buried(t, list[0])
	_ = syscall.Kill(list[1], syscall.SIGKILL) // sleep, which no signal was asked for
}

// The end of its input ends a child, also while it compiles.
func TestEndOfInputEndsTheChild(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	in, requests, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	child := &exec.Cmd{Path: Self, Args: []string{os.Args[0], verb}, Stdin: in, ExtraFiles: []*os.File{w}}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = in.Close(), w.Close()
	if err := writeLine(requests, greeting{Version: wireVersion, Cluster: "1xcpu"}); err != nil {
		t.Fatal(err)
	}
	if a, err := listen(bufio.NewReader(r), event.Discard); err != nil || !a.Ready {
		t.Fatalf("%+v, %v", a, err)
	}
	slow := module("slow", selftest.MXFP8(1).Text)
	o, err := newOrder(slow)
	if err != nil {
		t.Fatal(err)
	}
	if err := send(requests, o, slow.Text); err != nil {
		t.Fatal(err)
	}
	if err := requests.Close(); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
}

// Errors keep code, words and class on their way.
func TestErrorsSurviveTheWire(t *testing.T) {
	want := diag.New(diag.TooLarge, "a %s", "b\n\"c\"").At("d").Because("e").Try("f")
	js, err := json.Marshal(answer{Error: want})
	if err != nil {
		t.Fatal(err)
	}
	var got answer
	if err := json.Unmarshal(js, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got.Error, cmpopts.IgnoreUnexported(diag.Error{})); diff != "" || got.Error.Class() != diag.NoFit {
		t.Error(diff)
	}
}

// Flags keep their types on their way: XLA tells 1 from 1.0.
func TestFlagsSurviveTheWire(t *testing.T) {
	m := module("m", "module {}\n")
	m.Flags = map[string]any{"a": true, "b": int64(1), "c": 1.0, "d": "1", "e": math.Inf(1), "f": int64(-1 << 62)}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	o, err := newOrder(m)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = send(w, o, m.Text) }()
	got, err := receive(bufio.NewReader(r))
	if diff := cmp.Diff(m, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

// The journal passes a log on, stops where a crash begins, and picks what says most.
func TestJournal(t *testing.T) {
	for _, row := range []struct{ name, wrote, shown, signal, reason string }{
		{"nothing", "", "", "", ""},
		{"a log", "E0000 a.cc:1] slow\nW0000 b\n", "E0000 a.cc:1] slow\nW0000 b\n", "", "W0000 b"},
		{"no end of line", "half", "half\n", "", "half"},
		{"C++", "E0000 x\nterminate called after throwing an instance of 'a'\n  what():  too deep\n" +
			"SIGABRT: abort\nPC=0x1\n", "E0000 x\n", "SIGABRT", "too deep"},
		{"Abseil", "WARNING: All log messages before absl::InitializeLog() is called\n" +
			"F0000 00:00:1.5   22728 parse.cc:234] Unknown flag\n*** Check failure stack trace: ***\n", "",
			"", "Unknown flag"},
		{"a fault", "SIGSEGV: segmentation violation\nPC=0x1\n\ngoroutine 1:\n", "", "SIGSEGV", ""},
		{"Go", "runtime: failed to create new OS thread\nfatal error: newosproc\n", "", "",
			"runtime: failed to create new OS thread"},
		{"a long line", strings.Repeat("x", 3*maxLine) + "\n", strings.Repeat("x", maxLine) + "\n", "",
			strings.Repeat("x", maxLine)},
	} {
		t.Run(row.name, func(t *testing.T) {
			var shown bytes.Buffer
			j := &journal{out: &shown}
			for i := range row.wrote { // byte by byte
				_, _ = j.Write([]byte(row.wrote[i : i+1]))
			}
			j.end()
			if shown.String() != row.shown || j.signal != row.signal || j.reason() != row.reason {
				t.Errorf("shown %q, signal %q, reason %q", shown.String(), j.signal, j.reason())
			}
		})
	}
	j := &journal{out: &bytes.Buffer{}}
	for range 10_000 {
		_, _ = j.Write([]byte("panic: " + strings.Repeat("x", 100) + "\n"))
	}
	if len(j.kept) > maxKept/100 {
		t.Errorf("%d lines were kept", len(j.kept))
	}
}
