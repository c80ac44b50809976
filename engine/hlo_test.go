package engine_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/hlotest"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
)

// addHLO is what addOne says, or its difference, as a serialized HLO module; the first argument is
// donated.
func addHLO(opcode string) []byte {
	type msg = hlotest.Msg
	shape := hlotest.Array(hlotest.F32, 4).Bytes(5, msg(nil).Packed(1, 0)) // and its layout
	signature := msg(nil).Bytes(1, shape).Bytes(1, shape).Bytes(2, hlotest.Tuple(shape)).
		Text(3, "w").Text(3, "x")
	param := func(id int64) msg { return hlotest.Inst(id, "parameter", shape).Int(9, id-1) }
	entry := hlotest.Comp(1, "entry", 4, param(1), param(2), hlotest.Inst(3, opcode, shape, 1, 2),
		hlotest.Inst(4, "tuple", hlotest.Tuple(shape), 3)).Bytes(4, signature)
	alias := msg(nil).Packed(1, 0).Int(4, 1) // result 0 may take the memory of parameter 0
	return hlotest.Module("add", 1, entry).Text(2, "entry").Bytes(4, signature).
		Bytes(8, msg(nil).Bytes(1, alias))
}

// A serialized HLO module runs like the text, on all devices, and neither is taken for the other,
// loaded or cached.
func TestHLORunsAndIsNotTakenForText(t *testing.T) {
	dir := t.TempDir()
	for turn := range 2 {
		said := &heard{}
		e := cpu(t, func(o *engine.Options) { o.Cache, o.Events = dir, said })
		m := addOne(devices)
		compile := func(code []byte) *engine.Executable {
			x, err := e.CompileHLO(t.Context(), m, code)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(x.Free)
			return x
		}
		text, err := e.Compile(t.Context(), m)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(text.Free)
		add, subtract := compile(addHLO("add")), compile(addHLO("subtract"))
		for _, row := range []struct {
			x    *engine.Executable
			want []float32
		}{{text, []float32{11, 22, 33, 44}}, {add, []float32{11, 22, 33, 44}},
			{subtract, []float32{9, 18, 27, 36}}} {
			w := place(t, e, m, m.Args[0], func(int) []byte { return floats(10, 20, 30, 40) })
			x := place(t, e, m, m.Args[1], func(int) []byte { return floats(1, 2, 3, 4) })
			r, err := row.x.Run(t.Context(), w, x)
			if err != nil {
				t.Fatal(err)
			}
			for i := range devices {
				if got := read(t, r.Results[0], i); !slices.Equal(got, row.want) {
					t.Errorf("turn %d, device %d: %v, want %v", turn, i, got, row.want)
				}
			}
			if w.Live() {
				t.Error("the donated array is still live")
			}
			r.Free()
			x.Free()
		}
		for _, one := range said.compiled {
			if len(said.compiled) != 3 || one.Cached != (turn == 1) {
				t.Errorf("turn %d: %+v", turn, said.compiled)
			}
		}
		if turn == 1 && len(said.warnings) > 0 {
			t.Error(said.warnings)
		}
	}
}

// HLO that cannot be parsed, that is described wrongly or that comes too late is an error.
func TestHLOThatDoesNotCompile(t *testing.T) {
	e, m := cpu(t), addOne(devices)
	odd := *m
	odd.Args = m.Args[:1]
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for name, row := range map[string]struct {
		ctx  context.Context
		code []byte
		odd  bool
		want diag.Code
	}{
		"empty":     {t.Context(), nil, false, diag.ProgramText},
		"junk":      {t.Context(), []byte("module @m {}"), false, diag.CompileFailed},
		"arguments": {t.Context(), addHLO("add"), true, diag.ProgramInvalid},
		"stopped":   {stopped, addHLO("add"), false, diag.Canceled},
	} {
		module := m
		if row.odd {
			module = &odd
		}
		_, err := e.CompileHLO(row.ctx, module, row.code)
		if d, ok := errors.AsType[*diag.Error](err); !ok || d.Code != row.want {
			t.Errorf("%s: %v, want %s", name, err, row.want)
		}
	}
}

// The compiler gives the program that its report describes, from the cache as well.
func TestOptimizedProgramOfTheCompiler(t *testing.T) {
	c, err := engine.OpenCompiler(t.Context(), engine.Options{Cache: t.TempDir()})
	if err != nil {
		t.Fatalf("the tests need the CUDA compiler (deepwell engine install cuda13): %v", err)
	}
	defer c.Close()
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		t.Fatal(err)
	}
	var first []byte
	for range 2 {
		_, format, code, err := c.Optimized(t.Context(), selftest.MXFP8(8), cluster)
		if err != nil {
			t.Fatal(err)
		}
		m, err := hlo.Read(format, code)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.CustomCalls()) == 0 || len(m.Collectives()) == 0 {
			t.Errorf("%d calls, %d collectives", len(m.CustomCalls()), len(m.Collectives()))
		}
		if first == nil {
			first = code
		}
		if !bytes.Equal(first, code) {
			t.Error("the cache gave another program")
		}
	}
}
