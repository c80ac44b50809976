package deepwell

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// saved writes the weights of a tiny model as a run would: masters and moments, layer by layer.
func saved(t *testing.T, m *capture.Model, run string, step int64) {
	t.Helper()
	config, err := m.Config.Write()
	if err != nil {
		t.Fatal(err)
	}
	state := &ckpt.Memory{}
	for _, p := range m.Config.Params() {
		for _, one := range p.Layers() {
			data := make([]float32, one.Size())
			if err := m.Read(&one, data); err != nil {
				t.Fatal(err)
			}
			for _, prefix := range []string{"", "m.", "v."} {
				tensor := ckpt.Tensor{Name: prefix + one.Name, DType: dtype.F32}
				for _, d := range one.Dims {
					tensor.Shape = append(tensor.Shape, d.Size)
				}
				buf, err := state.Add(tensor)
				if err != nil {
					t.Fatal(err)
				}
				dtype.F32.Encode(buf, data)
			}
		}
	}
	if err := ckpt.Save(t.Context(), filepath.Join(run, "checkpoints"), step, ckpt.Meta{Model: config}, state, ckpt.Options{}); err != nil {
		t.Fatal(err)
	}
}

// A checkpoint of every family is exported to the tensors that it was filled from, whether the run,
// its checkpoints or the step is named.
func TestExportCheckpoint(t *testing.T) {
	for _, family := range []string{"llama3", "gpt2", "phi3", "gemma3", "mixtral", "gpt_oss", "deepseek_v3"} {
		t.Run(family, func(t *testing.T) {
			m, err := capture.Open(filepath.Join("model", "testdata", family), capture.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			run := filepath.Join(t.TempDir(), "run")
			saved(t, m, run, 5)
			if err := os.WriteFile(filepath.Join(run, "tokenizer.json"), []byte("{}"), 0o644); err != nil {
				t.Fatal(err)
			}
			for i, source := range []string{run, filepath.Join(run, "checkpoints"), filepath.Join(run, "checkpoints", "step-00000005")} {
				out := filepath.Join(t.TempDir(), "out")
				env := &Env{}
				done, err := env.Export(t.Context(), ExportJob{Source: source, Output: out, Type: dtype.F32})
				if err != nil {
					t.Fatal(err)
				}
				if done.Step != 5 || done.Name != "run" || done.Files != 1 {
					t.Errorf("%+v", done)
				}
				if _, err := os.Stat(filepath.Join(out, "tokenizer.json")); err != nil {
					t.Error(err)
				}
				if i > 0 {
					continue
				}
				back, err := capture.Open(out, capture.Options{})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = back.Close() }()
				if err := back.Check(); err != nil {
					t.Fatal(err)
				}
				for _, p := range m.Config.Params() {
					a, b := make([]float32, p.Size()), make([]float32, p.Size())
					if err := m.Read(&p, a); err != nil {
						t.Fatal(err)
					}
					if err := back.Read(&p, b); err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(a, b) {
						t.Errorf("%s differs", p.Name)
					}
				}
			}
		})
	}
}

func TestExportRefuses(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	m, err := capture.Open(filepath.Join("model", "testdata", "llama3"), capture.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	saved(t, m, run, 1)
	step := filepath.Join(run, "checkpoints", "step-00000001")
	parts, err := filepath.Glob(filepath.Join(step, "*.safetensors"))
	if err != nil || len(parts) == 0 {
		t.Fatal(parts, err)
	}
	text, err := os.ReadFile(parts[0])
	if err != nil {
		t.Fatal(err)
	}
	text[len(text)-1] ^= 1
	if err := os.WriteFile(parts[0], text, 0o644); err != nil {
		t.Fatal(err)
	}
	env := &Env{}
	for source, code := range map[string]diag.Code{
		run: diag.CheckpointDamaged, step: diag.CheckpointDamaged, "gpt2": diag.ModelMissing, t.TempDir(): diag.BadInput,
	} {
		_, err := env.Export(t.Context(), ExportJob{Source: source, Output: filepath.Join(t.TempDir(), "out"), Type: dtype.F32})
		if err == nil || diag.From(err).Code != code {
			t.Errorf("%s: %v, not %s", source, err, code)
		}
	}
}
