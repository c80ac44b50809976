package capture

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/safetensors"
)

// unpacked writes a fixture of package pt2 to a file.
func unpacked(t *testing.T, name string) string {
	t.Helper()
	f, err := os.Open(filepath.Join("pt2", "testdata", name+".pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name+".pt2")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// An export of a program that nobody trained has its state_dict: every parameter, tied ones under
// each name, and every persistent buffer, byte by byte.
func TestProgramsAreExported(t *testing.T) {
	for _, name := range []string{"words", "tied", "tied_old", "alibi", "llama", "gpt2", "gptneox", "phi3",
		"bert", "vit", "mixtral", "deepseek_v3", "gpt_oss"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := mustOpen(t, unpacked(t, name), Options{})
			if err := m.Check(); err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(t.TempDir(), "out")
			if _, err := m.Program.Export(out, ExportOptions{}, m.Read); err != nil {
				t.Fatal(err)
			}
			set, err := safetensors.Open(out)
			if err != nil {
				t.Fatal(err)
			}
			defer set.Close()
			var want []string
			for _, in := range m.Program.archive.Program.Inputs {
				if in.Kind != pt2.Parameter && (in.Kind != pt2.Buffer || !in.Persistent) {
					continue
				}
				want = append(want, in.Name)
				compareStored(t, m.Program.archive, set, in.Name)
			}
			slices.Sort(want)
			if got := set.Names(); !slices.Equal(got, want) {
				t.Errorf("the export has %v, want %v", got, want)
			}
		})
	}
}

// compareStored compares a tensor of an export with the archive's.
func compareStored(t *testing.T, a *pt2.Archive, set *safetensors.Set, name string) {
	t.Helper()
	stored, err := a.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	tensor, err := set.Tensor(name)
	if err != nil {
		t.Error(err)
		return
	}
	want, err := stored.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	got, err := tensor.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	if !tensor.Shape().Equal(stored.Shape()) || !bytes.Equal(got, want) {
		t.Errorf("%s is %v, and not what the archive has, %v", name, tensor.Shape(), stored.Shape())
	}
}

// A program is known by what it holds, whatever its file is called.
func TestProgramsAreKnown(t *testing.T) {
	m := mustOpen(t, unpacked(t, "words"), Options{})
	run := t.TempDir()
	if err := m.KeepSource(run); err != nil {
		t.Fatal(err)
	}
	text, err := m.Program.Write()
	if err != nil {
		t.Fatal(err)
	}
	kept, err := ProgramOf(text, run)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	if err := errors.Join(kept.Began(run), m.Program.Began(run)); err != nil || kept.Digest != m.Program.Digest {
		t.Errorf("%v: digests %s and %s", err, kept.Digest, m.Program.Digest)
	}
	other := mustOpen(t, unpacked(t, "tied"), Options{})
	if err := other.Program.Began(run); !errors.Is(err, diag.RecipeChanged) {
		t.Errorf("another program: %v", err)
	}
	if err := other.KeepSource(run); err != nil {
		t.Fatal(err)
	}
	if _, err := ProgramOf(text, run); !errors.Is(err, diag.RecipeChanged) {
		t.Errorf("another program in the run's folder: %v", err)
	}
	if _, err := ProgramOf(text, t.TempDir()); !errors.Is(err, diag.ModelMissing) {
		t.Errorf("no program in the run's folder: %v", err)
	}
	if p, err := ProgramOf([]byte(`{"model_type": "llama"}`), run); p != nil || err != nil {
		t.Errorf("a configuration: %v, %v", p, err)
	}
}

// Weights that are not finite are found, by name.
func TestProgramsWithNaN(t *testing.T) {
	path := unpacked(t, "words")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	m := mustOpen(t, path, Options{})
	w, err := m.Program.archive.Tensor("h.0.attn.qkv.weight")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := w.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, raw)
	copy(data[at:], []byte{0, 0, 0xc0, 0x7f})
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	again := mustOpen(t, path, Options{})
	err = readParams(again)
	if err == nil || !strings.Contains(err.Error(), "CRC") && !errors.Is(err, diag.WeightNotFinite) {
		t.Errorf("a weight that was changed: %v", err)
	}
}

func readParams(m *Model) error {
	for _, p := range m.Trained().Params() {
		if err := m.Read(&p, make([]float32, p.Size())); err != nil {
			return err
		}
	}
	return nil
}
