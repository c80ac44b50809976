package engine_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/selftest"
)

// heard keeps what an engine says.
type heard struct {
	compiled []event.Compiled
	warnings []event.Warning
}

func (h *heard) Emit(e event.Event) {
	switch e := e.(type) {
	case event.Compiled:
		h.compiled = append(h.compiled, e)
	case event.Warning:
		h.warnings = append(h.warnings, e)
	}
}

// A program that was compiled for GPUs is not compiled again, by another compiler either; its
// report is the same. What is asked for otherwise, and an entry that is damaged, is compiled.
func TestCompilesForGPUsAreCached(t *testing.T) {
	dir, said := t.TempDir(), &heard{}
	report := func(cluster string, withoutCuDNN bool) *engine.Report {
		c, err := engine.OpenCompiler(t.Context(), engine.Options{Cache: dir, Events: said,
			WithoutCuDNN: withoutCuDNN})
		if err != nil {
			t.Fatalf("the tests need the CUDA compiler (deepwell engine install cuda13): %v", err)
		}
		defer c.Close()
		return enginetest.Report(t, c, selftest.MXFP8(8), cluster)
	}
	last := func(cached bool, warnings int, why string) {
		t.Helper()
		if e := said.compiled[len(said.compiled)-1]; e.Cached != cached || len(said.warnings) != warnings {
			t.Errorf("%s: cached is %v, %v", why, e.Cached, said.warnings)
		}
	}
	first := report("8xb200", false)
	last(false, 0, "the first")
	again := report("8xb200", false)
	if first.Cached || !again.Cached || !strings.Contains(again.String(), " s · from the cache\n") {
		t.Errorf("cached is %v and then %v:\n%s", first.Cached, again.Cached, again)
	}
	again.Cached = false
	if !reflect.DeepEqual(first, again) {
		t.Errorf("the report is %+v, it was %+v", again, first)
	}
	last(true, 0, "the same")
	report("8xb200", true)
	last(false, 0, "without cuDNN")
	report("8xrtx6000pro", false)
	last(false, 0, "another GPU")
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		return os.Truncate(path, 1000)
	})
	if err != nil {
		t.Fatal(err)
	}
	if again := report("8xb200", false); again.Memory != first.Memory {
		t.Errorf("memory is %v, it was %v", again.Memory, first.Memory)
	}
	last(false, 1, "damaged")
}

// XLA writes the files it is asked for each time, not only when the cache is empty.
func TestDumpsAreWrittenEachTime(t *testing.T) {
	dir, dumps := t.TempDir(), filepath.Join(t.TempDir(), "dumps")
	written := func(target string) {
		t.Helper()
		if list, err := os.ReadDir(dumps); err != nil || len(list) == 0 {
			t.Errorf("%s: %d files were written: %v", target, len(list), err)
		}
		if err := os.RemoveAll(dumps); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		m := addOne(devices)
		m.Flags = map[string]any{"xla_dump_to": dumps}
		e := cpu(t, func(o *engine.Options) { o.Cache = dir })
		enginetest.Compile(t, e, m)
		written("cpu")
		enginetest.Compile(t, e, m) // which the engine has loaded
		written("cpu again")
		c, err := engine.OpenCompiler(t.Context(), engine.Options{Cache: dir, WithoutCuDNN: true})
		if err != nil {
			t.Fatal(err)
		}
		m = selftest.MXFP8(8)
		m.Flags = map[string]any{"xla_dump_to": dumps}
		enginetest.Report(t, c, m, "8xb200")
		c.Close()
		written("b200")
	}
}

// A folder for dumps that cannot be written is an error: XLA compiles and says nothing.
func TestDumpsThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	s := addOne(devices)
	s.Flags = map[string]any{"xla_dump_to": filepath.Join(file, "dumps")}
	_, err := cpu(t).Compile(t.Context(), s)
	if e := diag.From(err); !errors.Is(err, diag.FileError) || e.Fix == "" || !strings.Contains(e.Where, "xla_dump_to") {
		t.Errorf("got %v", err)
	}
}
