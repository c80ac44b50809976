package engine_test

import (
	"errors"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/program"
)

// compiledEvents counts programs that were compiled and that were not.
type compiledEvents struct{ fresh, cached int }

func (c *compiledEvents) Emit(e event.Event) {
	if one, ok := e.(event.Compiled); ok && one.Cached {
		c.cached++
	} else if ok {
		c.fresh++
	}
}

// Executables of one program share what the compiler made, without a cache on disk; each ends on
// its own, and the program is compiled again only when all have ended.
func TestVariantsShareTheirPrograms(t *testing.T) {
	var count compiledEvents
	e := cpu(t, func(o *engine.Options) { o.Events = &count })
	compile := func() *engine.Executable {
		x, err := e.Compile(t.Context(), addOne(2))
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	runs := func(x *engine.Executable) error {
		m := x.Module()
		w := place(t, e, m, m.Args[0], func(int) []byte { return floats(1, 2, 3, 4) })
		v := place(t, e, m, m.Args[1], func(int) []byte { return floats(1, 1, 1, 1) })
		defer w.Free()
		defer v.Free()
		run, err := x.Run(t.Context(), w, v)
		if err != nil {
			return err
		}
		defer run.Free()
		return run.Wait(t.Context())
	}
	first, second := compile(), compile()
	first.Free()
	first.Free() // twice does nothing
	if err := runs(first); diag.From(err) == nil || diag.From(err).Code != diag.BufferGone {
		t.Errorf("a freed executable runs: %v", err)
	}
	if err := runs(second); err != nil {
		t.Errorf("the other does not run: %v", err)
	}
	second.Free()
	third := compile()
	defer third.Free()
	if err := runs(third); err != nil {
		t.Error(err)
	}
	if count.fresh != 2 || count.cached != 1 {
		t.Errorf("%d were compiled, %d shared", count.fresh, count.cached)
	}
}

// Only GPUs have memory that can be imported.
func TestHostMemoryIsNotImported(t *testing.T) {
	e := cpu(t, func(*engine.Options) {})
	if _, _, err := e.Import(0, make([]byte, 64)); !errors.Is(err, diag.NotSupported) {
		t.Errorf("imported: %v", err)
	}
	if err := e.Release(64); !errors.Is(err, diag.BadInput) {
		t.Errorf("released: %v", err)
	}
	m := &program.Module{Name: "view", Devices: program.Range(0, 1)}
	x := program.Array{Name: "x", Global: dtype.Shape{Type: dtype.F32, Dims: []int64{2}}}
	if _, err := e.View(m, x, 64); !errors.Is(err, diag.BadInput) {
		t.Errorf("a view: %v", err)
	}
}
