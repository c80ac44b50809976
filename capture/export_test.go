package capture

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// oracle is how testdata/make.py asks for exports: each folder NAME/in of the one that is named is
// written to NAME/f32, NAME/bf16 and NAME/f16.
var oracle = flag.String("oracle", "", "folder of models that transformers saved, to export")

func dims(sizes ...int64) []ir.Dim {
	var list []ir.Dim
	for i, n := range sizes {
		list = append(list, ir.Dim{Name: string(rune('a' + i)), Size: n})
	}
	return list
}

// What is exported is, tensor by tensor, what was read; and it is read back to the same.
func TestExport(t *testing.T) {
	for _, dir := range families(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			t.Parallel()
			m := mustOpen(t, dir, Options{})
			out := filepath.Join(t.TempDir(), "out")
			files, err := Export(out, m.Config, ExportOptions{MaxBytes: 30000}, m.Read)
			if err != nil {
				t.Fatal(err)
			}
			if len(files) < 2 {
				t.Errorf("%d files", len(files))
			}
			back := mustOpen(t, out, Options{})
			if err := back.Check(); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(back.tensors, m.tensors) {
				t.Errorf("tensors %q, not %q", back.tensors, m.tensors)
			}
			for _, name := range m.tensors {
				if !slices.Equal(tensor(t, back, name), tensor(t, m, name)) {
					t.Errorf("%s differs", name)
				}
			}
		})
	}
}

// bf16 and f16 are the nearest; what f16 cannot hold is refused.
func TestExportTypes(t *testing.T) {
	m := mustOpen(t, filepath.Join(fixtures, "gpt2"), Options{})
	want := readAll(t, m)
	for _, e := range []dtype.DType{dtype.BF16, dtype.F16} {
		out := filepath.Join(t.TempDir(), "out")
		if _, err := Export(out, m.Config, ExportOptions{Type: e}, m.Read); err != nil {
			t.Fatal(err)
		}
		back := mustOpen(t, out, Options{})
		if c := back.Contents(); c.Types[e.String()] != c.Tensors {
			t.Errorf("%v", c.Types)
		}
		for name, x := range readAll(t, back) {
			for i, f := range x {
				h := dtype.F32FromBF16(dtype.BF16FromF32(want[name][i]))
				if e == dtype.F16 {
					h = dtype.F32FromF16(dtype.F16FromF32(want[name][i]))
				}
				if f != h {
					t.Fatalf("%s: element %d is %v, not %v", name, i, f, h)
				}
			}
		}
	}
	large := func(p *model.Param, dst []float32) error {
		if p.Name == "block.up.1" {
			dst[3] = 70000
		}
		return nil
	}
	_, err := Export(filepath.Join(t.TempDir(), "out"), m.Config, ExportOptions{Type: dtype.F16}, large)
	wantError(t, err, diag.WeightType, "transformer.h.1.mlp.c_fc.weight is 70000", "f32 or bf16")
	_, err = Export(filepath.Join(t.TempDir(), "out"), m.Config, ExportOptions{Type: dtype.F8E5M2}, large)
	wantError(t, err, diag.WeightType, "f8e5m2")
}

func TestExportCopiesCompanions(t *testing.T) {
	m := mustOpen(t, filepath.Join(fixtures, "gpt2"), Options{})
	from, out := t.TempDir(), filepath.Join(t.TempDir(), "a", "b")
	for _, name := range []string{"tokenizer.json", "merges.txt", "generation_config.json", "README.md"} {
		if err := os.WriteFile(filepath.Join(from, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Export(out, m.Config, ExportOptions{Files: from}, m.Read); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(out)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got, want := strings.Join(names, " "), "config.json generation_config.json merges.txt model.safetensors tokenizer.json"; got != want {
		t.Errorf("the folder holds %s, not %s", got, want)
	}
	_, err = Export(out, m.Config, ExportOptions{}, m.Read)
	wantError(t, err, diag.BadUsage, "name a new folder")

	// A tokenizer that is a link to something else is not copied into what may be published.
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, filepath.Join(from, "vocab.json")); err != nil {
		t.Fatal(err)
	}
	out = filepath.Join(t.TempDir(), "out")
	if _, err := Export(out, m.Config, ExportOptions{Files: from}, m.Read); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(out, "vocab.json")); err == nil {
		t.Error("a file outside the folder is copied")
	}
}

// A reader that fails leaves a folder that nobody takes for a model.
func TestExportFails(t *testing.T) {
	m := mustOpen(t, filepath.Join(fixtures, "gpt2"), Options{})
	out := filepath.Join(t.TempDir(), "out")
	stop := errors.New("stop")
	_, err := Export(out, m.Config, ExportOptions{}, func(p *model.Param, dst []float32) error {
		if p.Name == "block.down.2" {
			return stop
		}
		return m.Read(p, dst)
	})
	if !errors.Is(err, stop) {
		t.Error(err)
	}
	refused(t, out, Options{}, diag.BadInput, "has no config.json")
	unknown := mustOpen(t, "grok1-314b", Options{})
	_, err = Export(t.TempDir(), unknown.Config, ExportOptions{}, m.Read)
	wantError(t, err, diag.NotSupported)
}

// TestOracle does the Go half of testdata/make.py, which checks what is written.
func TestOracle(t *testing.T) {
	if *oracle == "" {
		t.Skip("testdata/make.py runs this with -oracle")
	}
	folders, err := filepath.Glob(filepath.Join(*oracle, "*", "in"))
	if err != nil || len(folders) == 0 {
		t.Fatal("no models", err)
	}
	for _, dir := range folders {
		m := mustOpen(t, dir, Options{})
		if err := m.Check(); err != nil {
			t.Fatal(err)
		}
		for _, e := range []dtype.DType{dtype.F32, dtype.BF16, dtype.F16} {
			out := filepath.Join(filepath.Dir(dir), e.String())
			if _, err := Export(out, m.Config, ExportOptions{Type: e, MaxBytes: 40000, Files: dir}, m.Read); err != nil {
				t.Fatal(err)
			}
		}
	}
}
