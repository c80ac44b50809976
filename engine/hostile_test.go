package engine_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// module wraps a body into a program of one vector.
func module(body string) string {
	return "module @m {\nfunc.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n" + body + "\n}\n}\n"
}

const identity = "  return %x : tensor<4xf32>"

// A scene is what a row of the table below plays in.
type scene struct {
	t *testing.T
	e *engine.Engine
	s *program.Module    // adds x to w on 8 devices, w donated
	x *engine.Executable // s compiled
	w *engine.Array
	v *engine.Array
}

func newScene(t *testing.T, e *engine.Engine) *scene {
	t.Helper()
	m := addOne(devices)
	sc := &scene{t: t, e: e, s: m, x: enginetest.Compile(t, e, m),
		w: place(t, e, m, m.Args[0], func(int) []byte { return floats(1, 1, 1, 1) }),
		v: place(t, e, m, m.Args[1], func(int) []byte { return floats(2, 2, 2, 2) })}
	t.Cleanup(sc.w.Free)
	t.Cleanup(sc.v.Free)
	return sc
}

func (sc *scene) compile(text string, n int) error {
	x, err := sc.e.Compile(sc.t.Context(), &program.FromText("m", text, n).Modules[0])
	if err == nil {
		x.Free()
	}
	return err
}

// compileForGPUs compiles for the eight GPUs of a host.
func (sc *scene) compileForGPUs(text string, n int) error {
	c, err := engine.OpenCompiler(sc.t.Context(), engine.Options{WithoutCuDNN: true})
	if err != nil {
		return err
	}
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		return err
	}
	_, err = c.Compile(sc.t.Context(), &program.FromText("m", text, n).Modules[0], cluster)
	return err
}

func (sc *scene) flag(name string, value any) error {
	m := program.FromText("m", module(identity), 1).Modules[0]
	m.Flags = map[string]any{name: value}
	x, err := sc.e.Compile(sc.t.Context(), &m)
	if err == nil {
		x.Free()
	}
	return err
}

func (sc *scene) run(args ...*engine.Array) error {
	run, err := sc.x.Run(sc.t.Context(), args...)
	if err == nil {
		err = run.Wait(sc.t.Context())
		run.Free()
	}
	return err
}

// onDevices makes an array of the stage's second argument's size for other devices.
func (sc *scene) onDevices(d program.Devices, bytes int) (*engine.Array, error) {
	m := *sc.s
	m.Devices = d
	return sc.e.Place(&m, m.Args[1], engine.Copied,
		func(int) ([]byte, error) { return make([]byte, bytes), nil })
}

// hostile is misuse of every kind. Each row must end in its code, with its words in the message,
// within the bound, and leave an engine that still works. What can be done to an installation is
// a table of its own in package plugin.
var hostile = []struct {
	name  string
	code  diag.Code
	words string
	do    func(*scene) error
}{
	{"empty program", diag.ProgramInvalid, "no text", func(sc *scene) error { return sc.compile("", 1) }},
	{"binary junk", diag.ProgramText, "line 1", func(sc *scene) error { return sc.compile("\x7fELF\x00\x01 junk", 1) }},
	{"unknown op", diag.ProgramText, "line 3", func(sc *scene) error {
		return sc.compile(module("  %r = stablehlo.ad %x, %x : tensor<4xf32>\n  return %r : tensor<4xf32>"), 1)
	}},
	{"undefined value", diag.ProgramText, "line 3", func(sc *scene) error {
		return sc.compile(module("  return %y : tensor<4xf32>"), 1)
	}},
	{"types that differ", diag.ProgramText, "line 4", func(sc *scene) error {
		return sc.compile(module("  %c = stablehlo.constant dense<1> : tensor<4xi32>\n"+
			"  %r = stablehlo.add %x, %c : tensor<4xf32>\n  return %r : tensor<4xf32>"), 1)
	}},
	{"truncated text", diag.ProgramText, "line", func(sc *scene) error {
		return sc.compile(strings.TrimSuffix(module(identity), "}\n}\n"), 1)
	}},
	{"no main", diag.ProgramText, "`main` function", func(sc *scene) error {
		return sc.compile("module @m {func.func @other(%x: tensor<4xf32>) -> tensor<4xf32> {"+identity+"}}", 1)
	}},
	{"two results of one", diag.ProgramText, "line 3", func(sc *scene) error {
		return sc.compile(module("  return %x, %x : tensor<4xf32>, tensor<4xf32>"), 1)
	}},
	{"unknown custom call", diag.CompileFailed, "nobody.home", func(sc *scene) error {
		return sc.compile(module("  %r = stablehlo.custom_call @nobody.home(%x) {api_version = 4 : i32} : "+
			"(tensor<4xf32>) -> tensor<4xf32>\n  return %r : tensor<4xf32>"), 1)
	}},
	{"replica group of a device too many", diag.ProgramText, "line 3", func(sc *scene) error {
		return sc.compile(module(`  %r = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, `+
			"replica_groups = dense<[[0,9]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<8xf32>\n"+
			"  %s = stablehlo.slice %r [0:4] : (tensor<8xf32>) -> tensor<4xf32>\n  return %s : tensor<4xf32>"), 2)
	}},
	{"unknown option", diag.CompileOption, "xla_no_such", func(sc *scene) error { return sc.flag("xla_no_such", true) }},
	{"option of the wrong kind", diag.CompileOption, "[]int", func(sc *scene) error {
		return sc.flag("xla_cpu_enable_fast_math", []int{1})
	}},
	{"option that is not a bool", diag.CompileOption, "perhaps", func(sc *scene) error {
		return sc.flag("xla_cpu_enable_fast_math", "perhaps")
	}},
	{"device that is not there", diag.DeviceMismatch, "device 99", func(sc *scene) error {
		s := program.FromText("m", module(identity), 1).Modules[0]
		s.Devices = program.Devices{99}
		_, err := sc.e.Compile(sc.t.Context(), &s)
		return err
	}},
	{"device twice", diag.ProgramInvalid, "twice", func(sc *scene) error {
		s := program.FromText("m", module(identity), 2).Modules[0]
		s.Devices = program.Devices{1, 1}
		_, err := sc.e.Compile(sc.t.Context(), &s)
		return err
	}},
	{"too few arguments", diag.ArgumentCount, "2 arguments", func(sc *scene) error { return sc.run(sc.w) }},
	{"too many arguments", diag.ArgumentCount, "2 arguments", func(sc *scene) error { return sc.run(sc.w, sc.v, sc.v) }},
	{"no argument at all", diag.ArgumentCount, "", func(sc *scene) error { return sc.run(nil, nil) }},
	{"an array of fewer devices", diag.ArgumentCount, "8 devices", func(sc *scene) error {
		s := *sc.s
		s.Devices, s.Mesh = program.Range(0, 4), []program.Axis{{Name: "dp", Size: 4}}
		a, err := sc.e.Place(&s, s.Args[1], engine.Copied,
			func(int) ([]byte, error) { return make([]byte, 32), nil })
		if err != nil {
			return err
		}
		defer a.Free()
		return sc.run(sc.w, a)
	}},
	{"an array of the wrong shape", diag.BufferMismatch, "the program takes f32[4]", func(sc *scene) error {
		s := *sc.s
		spec := program.Array{Name: "x", Global: f32(5 * devices), Split: [][]string{{"dp"}}}
		a, err := sc.e.Place(&s, spec, engine.Copied,
			func(int) ([]byte, error) { return make([]byte, 20), nil })
		if err != nil {
			return err
		}
		defer a.Free()
		return sc.run(sc.w, a)
	}},
	{"shards on the wrong devices", diag.DeviceMismatch, "is on device", func(sc *scene) error {
		a, err := sc.onDevices(program.Devices{7, 6, 5, 4, 3, 2, 1, 0}, 16)
		if err != nil {
			return err
		}
		defer a.Free()
		return sc.run(sc.w, a)
	}},
	{"an array of another engine", diag.DeviceMismatch, "another client", func(sc *scene) error {
		other := cpu(sc.t)
		a := place(sc.t, other, sc.s, sc.s.Args[1], func(int) []byte { return floats(1, 2, 3, 4) })
		defer a.Free()
		return sc.run(sc.w, a)
	}},
	{"a freed array", diag.BufferGone, "freed", func(sc *scene) error { sc.v.Free(); return sc.run(sc.w, sc.v) }},
	{"a freed array is read", diag.BufferGone, "freed", func(sc *scene) error {
		sc.v.Free()
		sc.v.Free() // twice does nothing
		_, err := sc.v.Read(sc.t.Context(), 0)
		return err
	}},
	{"a donated array is read", diag.BufferGone, "donated", func(sc *scene) error {
		if err := sc.run(sc.w, sc.v); err != nil {
			return err
		}
		_, err := sc.w.Read(sc.t.Context(), 0)
		return err
	}},
	{"a donated array is used again", diag.BufferGone, "donated", func(sc *scene) error {
		if err := sc.run(sc.w, sc.v); err != nil {
			return err
		}
		return sc.run(sc.w, sc.v)
	}},
	{"a donated array is moved", diag.BufferGone, "donated", func(sc *scene) error {
		if err := sc.run(sc.w, sc.v); err != nil {
			return err
		}
		_, err := sc.e.Copy(sc.w, program.Range(0, devices))
		return err
	}},
	{"one array given and donated at once", diag.BufferGone, "donated", func(sc *scene) error { return sc.run(sc.w, sc.w) }},
	{"a freed executable", diag.BufferGone, "freed", func(sc *scene) error {
		sc.x.Free()
		sc.x.Free()
		return sc.run(sc.w, sc.v)
	}},
	{"a freed executable is examined", diag.BufferGone, "freed", func(sc *scene) error {
		sc.x.Free()
		_, err := sc.x.Optimized()
		return err
	}},
	{"too few bytes", diag.BufferMismatch, "16 bytes; 15", func(sc *scene) error {
		_, err := sc.onDevices(program.Range(0, devices), 15)
		return err
	}},
	{"a shard that is not there", diag.ArgumentCount, "8 shards", func(sc *scene) error {
		_, err := sc.v.Read(sc.t.Context(), devices)
		return err
	}},
	{"a host buffer of the wrong size", diag.BufferMismatch, "16 bytes; 3", func(sc *scene) error {
		return sc.v.ReadInto(sc.t.Context(), 0, make([]byte, 3))
	}},
	{"a memory that is not there", diag.DeviceMismatch, "hbm", func(sc *scene) error {
		_, err := sc.e.Place(sc.s, program.Array{Name: "x", Global: f32(4), Memory: "hbm"}, engine.Copied,
			func(int) ([]byte, error) { return make([]byte, 16), nil })
		return err
	}},
	{"data that cannot be had", diag.FileError, "disk", func(sc *scene) error {
		_, err := sc.e.Place(sc.s, sc.s.Args[1], engine.Copied, func(i int) ([]byte, error) {
			if i == 3 {
				return nil, diag.New(diag.FileError, "the disk is gone")
			}
			return make([]byte, 16), nil
		})
		return err
	}},
	{"a name that the state does not keep", diag.ArgumentCount, "neither an input nor in the state", func(sc *scene) error {
		_, err := sc.x.Step(sc.t.Context(), &engine.State{}, sc.v)
		return err
	}},
	{"a canceled compile", diag.Canceled, "", func(sc *scene) error {
		ctx, cancel := context.WithCancel(sc.t.Context())
		cancel()
		_, err := sc.e.Compile(ctx, sc.s)
		return err
	}},
	{"a closed engine compiles", diag.BufferGone, "closed", func(sc *scene) error {
		e := cpu(sc.t)
		e.Close()
		e.Close()
		_, err := e.Compile(sc.t.Context(), sc.s)
		return err
	}},
	{"a closed engine runs", diag.BufferGone, "closed", func(sc *scene) error {
		e := cpu(sc.t)
		x, err := e.Compile(sc.t.Context(), sc.s)
		if err != nil {
			return err
		}
		w := place(sc.t, e, sc.s, sc.s.Args[0], func(int) []byte { return floats(1, 1, 1, 1) })
		e.Close()
		defer x.Free()
		defer w.Free()
		_, err = x.Run(sc.t.Context(), w, w)
		return err
	}},
	{"a closed engine is read from", diag.BufferGone, "closed", func(sc *scene) error {
		e := cpu(sc.t)
		w := place(sc.t, e, sc.s, sc.s.Args[0], func(int) []byte { return floats(1, 1, 1, 1) })
		defer w.Free()
		e.Close()
		_, err := w.Read(sc.t.Context(), 0)
		return err
	}},
	{"a closed engine takes data", diag.BufferGone, "closed", func(sc *scene) error {
		e := cpu(sc.t)
		e.Close()
		_, err := e.Place(sc.s, sc.s.Args[1], engine.Copied,
			func(int) ([]byte, error) { return make([]byte, 16), nil })
		return err
	}},
	{"more CPU devices than threads can be had", diag.BadUsage, "256", func(sc *scene) error {
		_, err := engine.Open(sc.t.Context(), "cpu", engine.Options{Devices: 100_000})
		return err
	}},
	{"a function registered twice", diag.HandlerFailed, "already registered", func(sc *scene) error {
		noop := func(*engine.Call) error { return nil }
		_ = sc.e.Register("hostile.twice", noop)
		return sc.e.Register("hostile.twice", noop)
	}},
	{"a result of a type that Deepwell lacks", diag.NotSupported, "lacks", func(sc *scene) error {
		return sc.compile("module @m {\nfunc.func @main(%x: tensor<4xf32>) -> tensor<4xf8E4M3> {\n"+
			"  %r = stablehlo.convert %x : (tensor<4xf32>) -> tensor<4xf8E4M3>\n"+
			"  return %r : tensor<4xf8E4M3>\n}\n}\n", 1)
	}},
	{"a result that no memory holds", diag.OutOfMemory, "memory", func(sc *scene) error {
		x, err := sc.e.Compile(sc.t.Context(), &program.FromText("m", "module @m {\nfunc.func @main(%x: tensor<f32>) "+
			"-> tensor<17592186044416xf32> {\n  %r = stablehlo.broadcast_in_dim %x, dims = [] : "+
			"(tensor<f32>) -> tensor<17592186044416xf32>\n  return %r : tensor<17592186044416xf32>\n}\n}\n", 1).Modules[0])
		if err != nil {
			return err
		}
		defer x.Free()
		a := place(sc.t, sc.e, x.Module(), x.Module().Args[0], func(int) []byte { return floats(1) })
		defer a.Free()
		run, err := x.Run(sc.t.Context(), a)
		if err != nil {
			return err
		}
		defer run.Free()
		return run.Wait(sc.t.Context())
	}},
	{"a stage without devices", diag.ProgramInvalid, "no devices", func(sc *scene) error {
		_, err := sc.e.Place(&program.Module{Name: "s"}, program.Array{Name: "x", Global: f32(4)}, engine.Copied,
			func(int) ([]byte, error) { return make([]byte, 16), nil })
		return err
	}},
	{"a source that does not exist", diag.BufferMismatch, "99", func(sc *scene) error {
		_, err := sc.e.Place(sc.s, sc.s.Args[1], engine.Source(99),
			func(int) ([]byte, error) { return make([]byte, 16), nil })
		return err
	}},
	{"an input that the module does not take", diag.ArgumentCount, "has no argument z", func(sc *scene) error {
		spec := sc.s.Args[1]
		spec.Name = "z"
		z, err := sc.e.Place(sc.s, spec, engine.Copied, func(int) ([]byte, error) { return make([]byte, 16), nil })
		if err != nil {
			return err
		}
		defer z.Free()
		_, err = sc.x.Step(sc.t.Context(), &engine.State{}, sc.v, z)
		return err
	}},
	{"a nil input of a step", diag.ArgumentCount, "neither an input nor in the state", func(sc *scene) error {
		_, err := sc.x.Step(sc.t.Context(), &engine.State{}, nil)
		return err
	}},
	{"an engine that is not installed", diag.EngineMissing, "engine install cpu", func(sc *scene) error {
		_, err := engine.Open(sc.t.Context(), "cpu", engine.Options{Dir: sc.t.TempDir()})
		return err
	}},
	{"an engine that does not exist", diag.EngineUnknown, "cuda13", func(sc *scene) error {
		_, err := engine.Open(sc.t.Context(), "cuda12", engine.Options{})
		return err
	}},
	{"a plugin of another version", diag.EngineAPI, "speaks PJRT 1.2", func(sc *scene) error {
		so := filepath.Join(sc.t.TempDir(), "other.so")
		source := filepath.Join("..", "internal", "pjrt", "testdata", "fakeplugin.c")
		out, err := exec.Command("cc", "-shared", "-fPIC", "-DMAJOR=1", "-DMINOR=2", "-o", so, source).CombinedOutput()
		if err != nil {
			sc.t.Skipf("no C compiler: %v %s", err, out)
		}
		_, err = pjrt.Load(so)
		return err
	}},
	{"a plugin that is text", diag.EngineLoad, "cannot load", func(sc *scene) error {
		so := filepath.Join(sc.t.TempDir(), "text.so")
		if err := os.WriteFile(so, []byte("#!/bin/sh\n"), 0o755); err != nil {
			return err
		}
		_, err := pjrt.Load(so)
		return err
	}},
	{"more devices than the target has", diag.DeviceMismatch, "16 devices", func(sc *scene) error {
		return sc.compileForGPUs(module(identity), 16)
	}},
	{"bad text for a GPU", diag.ProgramText, "line 3", func(sc *scene) error {
		return sc.compileForGPUs(module("  return %y : tensor<4xf32>"), 8)
	}},
}

// hostileBound is far above the slowest row, which loads a plugin, and far below a hang.
const hostileBound = 30 * time.Second

func TestHostileUse(t *testing.T) {
	e := cpu(t)
	for _, row := range hostile {
		t.Run(row.name, func(t *testing.T) {
			sc := newScene(t, e)
			start := time.Now()
			err := row.do(sc)
			if took := time.Since(start); took > hostileBound {
				t.Errorf("it took %v", took)
			}
			if !errors.Is(err, row.code) {
				t.Errorf("got %v, want %s", err, row.code)
			} else if !strings.Contains(err.Error(), row.words) {
				t.Errorf("got %v, which does not say %q", err, row.words)
			}
		})
	}
	if n := len(hostile); n < 30 {
		t.Errorf("the table has %d rows, want 30", n)
	}
	// After all that the engine still computes.
	sc := newScene(t, e)
	run, err := sc.x.Run(sc.t.Context(), sc.w, sc.v)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	if got := read(t, run.Results[0], 7)[3]; got != 3 {
		t.Errorf("1 + 2 = %v", got)
	}
}

// Many goroutines use, free and donate the same arrays: every outcome is a result or an error.
func TestConcurrentMisuse(t *testing.T) {
	e := cpu(t)
	m := addOne(devices)
	x := enginetest.Compile(t, e, m)
	for range 20 {
		w := place(t, e, m, m.Args[0], func(int) []byte { return floats(1, 1, 1, 1) })
		v := place(t, e, m, m.Args[1], func(int) []byte { return floats(2, 2, 2, 2) })
		var wg sync.WaitGroup
		var mu sync.Mutex
		won := 0
		for g := range 6 {
			wg.Go(func() {
				if g == 5 {
					v.Free()
					return
				}
				run, err := x.Run(t.Context(), w, v)
				if err != nil {
					return
				}
				mu.Lock()
				won++
				mu.Unlock()
				if err := run.Wait(context.Background()); err != nil {
					t.Error(err)
				}
				run.Free()
			})
		}
		wg.Wait()
		if won > 1 {
			t.Errorf("%d runs consumed one array", won)
		}
		w.Free()
	}
}
