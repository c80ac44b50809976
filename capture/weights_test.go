package capture

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

// families lists the folders of tiny models that transformers made.
func families(t testing.TB) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(fixtures, "*", "config.json"))
	if err != nil || len(list) == 0 {
		t.Fatal("no fixtures", err)
	}
	for i, path := range list {
		list[i] = filepath.Dir(path)
	}
	return list
}

// tensor reads a tensor of f32 as it stands.
func tensor(t *testing.T, m *Model, name string) []float32 {
	t.Helper()
	x, err := m.weights.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	b, err := x.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	all := make([]float32, x.Shape().Elements())
	x.Shape().Type.Decode(all, b)
	return all
}

// Read gives what Take of the whole tensors gives, whatever the size of blocks, stacked and not.
func TestRead(t *testing.T) {
	for _, dir := range families(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			t.Parallel()
			m := mustOpen(t, dir, Options{})
			if err := m.Check(); err != nil {
				t.Fatal(err)
			}
			if c := m.Contents(); len(c.Leftover)+len(c.Unused) > 0 || c.Types["f32"] != c.Tensors || c.Files != 1 {
				t.Errorf("%+v", c)
			}
			for _, p := range m.Config.Params() {
				want := make([]float32, p.Size())
				for k, name := range p.Tensors() {
					if err := model.Take(&p, k, want, tensor(t, m, name)); err != nil {
						t.Fatal(err)
					}
				}
				got := make([]float32, p.Size())
				for _, size := range []int64{1, 50, 333, blockElements} {
					clear(got)
					if err := m.read(&p, got, size); err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(got, want) {
						t.Fatalf("%s in chunks of %d differs", p.Name, size)
					}
				}
				at := int64(0)
				for _, layer := range p.Layers() {
					n := layer.Size()
					if err := m.Read(&layer, got[:n]); err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(got[:n], want[at:at+n]) {
						t.Fatalf("%s differs", layer.Name)
					}
					at += n
				}
			}
			p := m.Config.Params()[0]
			wantError(t, m.Read(&p, make([]float32, 3)), diag.BufferMismatch)
		})
	}
}

// A change is what a test does to a tensor of a fixture: rename, drop ("" as name), or convert.
type change func(name string, shape dtype.Shape, data []byte) (string, dtype.Shape, []byte)

// altered copies a fixture with every tensor changed, and with more tensors beside them.
func altered(t *testing.T, family string, do change, more ...safetensors.Item) string {
	t.Helper()
	from := filepath.Join(fixtures, family)
	dir := filepath.Join(t.TempDir(), family)
	copyFile(t, filepath.Join(dir, "config.json"), filepath.Join(from, "config.json"))
	set, err := safetensors.Open(filepath.Join(from, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = set.Close() }()
	items := more
	for _, name := range set.Names() {
		x, err := set.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		view, err := x.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		name, shape, data := do(name, x.Shape(), slices.Clone(view))
		if name != "" {
			items = append(items, safetensors.Item{Name: name, Shape: shape, Data: safetensors.FromBytes(data)})
		}
	}
	if _, err := safetensors.WriteFolder(dir, items, safetensors.Options{MaxBytes: 30000}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func same(name string, shape dtype.Shape, data []byte) (string, dtype.Shape, []byte) {
	return name, shape, data
}

func item(name string, t dtype.DType, dims ...int64) safetensors.Item {
	s := dtype.Shape{Type: t, Dims: dims}
	return safetensors.Item{Name: name, Shape: s, Data: safetensors.FromBytes(make([]byte, s.Bytes()))}
}

// readAll reads every parameter.
func readAll(t *testing.T, m *Model) map[string][]float32 {
	t.Helper()
	all := map[string][]float32{}
	for _, p := range m.Config.Params() {
		all[p.Name] = make([]float32, p.Size())
		if err := m.Read(&p, all[p.Name]); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func sameWeights(t *testing.T, a, b map[string][]float32) {
	t.Helper()
	for name, x := range a {
		if !slices.Equal(x, b[name]) {
			t.Errorf("%s differs", name)
		}
	}
}

// Names that begin otherwise, as on the Hub and in models extracted from others, are the same tensors.
func TestSpellings(t *testing.T) {
	trim := func(prefix, put string) change {
		return func(name string, shape dtype.Shape, data []byte) (string, dtype.Shape, []byte) {
			if rest, ok := strings.CutPrefix(name, prefix); ok {
				return put + rest, shape, data
			}
			if put == "language_model.model." {
				return "language_model." + name, shape, data
			}
			return name, shape, data
		}
	}
	for name, c := range map[string]struct {
		family string
		do     change
	}{
		"gpt2 of the Hub":         {"gpt2", trim("transformer.", "")},
		"without an output layer": {"qwen3", trim("model.", "")},
		"extracted, older":        {"llama3", trim("model.", "language_model.model.")},
		"extracted, newer":        {"llama3", trim("model.", "model.language_model.")},
	} {
		t.Run(name, func(t *testing.T) {
			m := mustOpen(t, altered(t, c.family, c.do), Options{})
			if err := m.Check(); err != nil {
				t.Fatal(err)
			}
			if c := m.Contents(); len(c.Leftover) > 0 || c.Files < 2 {
				t.Errorf("%+v", c)
			}
			sameWeights(t, readAll(t, mustOpen(t, filepath.Join(fixtures, c.family), Options{})), readAll(t, m))
		})
	}
}

func TestLeftovers(t *testing.T) {
	m := mustOpen(t, altered(t, "gpt2", same, item("transformer.h.0.attn.bias", dtype.U8, 1, 1, 4, 4),
		item("transformer.h.0.attn.masked_bias", dtype.F32), item("lm_head.weight", dtype.F32, 67, 24),
		item("vision.patch.weight", dtype.BF16, 2, 3)), Options{})
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	c := m.Contents()
	if want := []string{"lm_head.weight", "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"}; !slices.Equal(c.Unused, want) {
		t.Errorf("unused: %q", c.Unused)
	}
	if !slices.Equal(c.Leftover, []string{"vision.patch.weight"}) {
		t.Errorf("left over: %q", c.Leftover)
	}
	m = mustOpen(t, altered(t, "llama3", same,
		item("model.layers.0.self_attn.rotary_emb.inv_freq", dtype.F32, 4)), Options{})
	if err := m.Check(); err != nil || len(m.Contents().Unused) != 1 {
		t.Error(err, m.Contents())
	}
	// A bias that the configuration does not know makes it another model.
	m = mustOpen(t, altered(t, "llama3", same, item("model.layers.1.self_attn.q_proj.bias", dtype.F32, 32)), Options{})
	wantError(t, m.Check(), diag.WeightMismatch, "q_proj.bias", "config.json")
}

func TestCheckRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		do    change
		code  diag.Code
		words []string
	}{
		"a missing tensor": {func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
			if name == "model.norm.weight" {
				name = ""
			}
			return name, s, b
		}, diag.WeightMismatch, []string{"1 of 30 tensors", "model.norm.weight"}},
		"another shape": {func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
			if name == "model.embed_tokens.weight" {
				s.Dims = []int64{s.Dims[1], s.Dims[0]}
			}
			return name, s, b
		}, diag.WeightMismatch, []string{"model.embed_tokens.weight is f32[24,", "the configuration says", " 24]"}},
		"FP8": {func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
			if name == "model.layers.2.mlp.up_proj.weight" {
				s.Type, b = dtype.F8E4M3FN, b[:len(b)/4]
			}
			return name, s, b
		}, diag.WeightType, []string{"up_proj.weight is f8e4m3fn", "bf16"}},
		"integers": {func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
			if name == "model.norm.weight" {
				s.Type = dtype.S32
			}
			return name, s, b
		}, diag.WeightType, []string{"model.norm.weight is s32"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := mustOpen(t, altered(t, "llama3", c.do), Options{})
			wantError(t, m.Check(), c.code, c.words...)
			failed := false
			for _, p := range m.Config.Params() {
				failed = m.Read(&p, make([]float32, p.Size())) != nil || failed
			}
			if !failed {
				t.Error("it is read all the same")
			}
		})
	}
}

// An index without its files is a model by names.
func TestNamesOnly(t *testing.T) {
	dir := altered(t, "llama3", same)
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	for _, f := range files[1:] {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	m := mustOpen(t, dir, Options{})
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	c := m.Contents()
	if m.HasWeights() || len(m.Missing) != len(files)-1 || c.Tensors != 30 || c.Bytes == 0 || c.Files != 0 {
		t.Errorf("%+v %+v", m.Missing, c)
	}
	p := m.Config.Params()[0]
	wantError(t, m.Read(&p, make([]float32, p.Size())), diag.WeightsIncomplete,
		"shards are missing", m.Missing[0], "finish the download")
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	if m = mustOpen(t, dir, Options{}); len(m.Missing) != len(files) {
		t.Error(m.Missing)
	}
}

// What looks like weights and cannot be read is never taken for a model without weights; what only
// lies beside a configuration is.
func TestLack(t *testing.T) {
	for file, words := range map[string]string{
		"pytorch_model.bin": "is a pickle", "model.pt": "is a pickle", "consolidated.00.pth": "is a pickle",
		"pytorch_model.bin.index.json":               "is a pickle",
		"pytorch_model-00001-of-00002.bin":           "is a pickle",
		"tiny.Q4_K_M.gguf":                           "for inference",
		"flax_model.msgpack":                         "not read",
		"tf_model.h5":                                "not read",
		"last.ckpt":                                  "not read",
		"model.safetensors.incomplete":               "has not ended",
		"model-00001-of-00002.safetensors.part":      "has not ended",
		".cache/huggingface/download/x.y.incomplete": "has not ended",
		"model-00002-of-00003.safetensors":           `2 of 3 shards are missing: "model-00001-of-00003.safetensors"`,
	} {
		dir := t.TempDir()
		copyFile(t, filepath.Join(dir, "config.json"), filepath.Join(fixtures, "llama3", "config.json"))
		copyFile(t, filepath.Join(dir, file), filepath.Join(fixtures, "llama3", "model.safetensors"))
		m := mustOpen(t, dir, Options{})
		if m.HasWeights() {
			t.Errorf("%s is read", file)
		}
		wantError(t, m.Lack(), diag.WeightsIncomplete, words)
		wantError(t, m.Check(), diag.WeightsIncomplete, words)
	}
	for _, file := range []string{"training_args.bin", "train.bin", "optimizer.pt", "rng_state_0.pth",
		"tokenizer.json", "README.md", "model.png"} {
		dir := t.TempDir()
		copyFile(t, filepath.Join(dir, "config.json"), filepath.Join(fixtures, "llama3", "config.json"))
		copyFile(t, filepath.Join(dir, file), filepath.Join(fixtures, "llama3", "config.json"))
		if m := mustOpen(t, dir, Options{}); m.HasWeights() || m.Lack() != nil {
			t.Errorf("%s: %v", file, m.Lack())
		}
	}
}

// A repository of the Hub has weights; where they are not in the cache, they are meant.
func TestLackOfHub(t *testing.T) {
	cache := t.TempDir()
	repo := hub(t, cache)
	o := env(map[string]string{"HF_HUB_CACHE": cache})
	if err := os.Remove(filepath.Join(repo, "snapshots", "abc123", "model.safetensors")); err != nil {
		t.Fatal(err)
	}
	m := mustOpen(t, "hf:acme/rocket", o)
	wantError(t, m.Lack(), diag.ModelMissing, "not in the Hugging Face cache", "hf download acme/rocket")
}

// Truncated files are refused when they are opened; those that become shorter later, when
// they are read.
func TestTruncated(t *testing.T) {
	dir := altered(t, "llama3", same)
	files, _ := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	m := mustOpen(t, dir, Options{})
	if err := os.Truncate(files[0], 5000); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, p := range m.Config.Params() {
		if err := m.Read(&p, make([]float32, p.Size())); err != nil {
			wantError(t, err, diag.FileError, "shorter")
			failed++
		}
	}
	if failed == 0 {
		t.Error("a truncated file is read")
	}
	refused(t, dir, Options{}, diag.BadInput, files[0])
	if err := os.Truncate(files[0], 4); err != nil {
		t.Fatal(err)
	}
	refused(t, dir, Options{}, diag.BadInput, "too few")
}

// Every element type gives the numbers that it holds.
func TestElementTypes(t *testing.T) {
	want := readAll(t, mustOpen(t, filepath.Join(fixtures, "phi3"), Options{}))
	for _, e := range []dtype.DType{dtype.BF16, dtype.F16, dtype.F64} {
		t.Run(e.String(), func(t *testing.T) {
			m := mustOpen(t, altered(t, "phi3", func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
				out := e.Append(nil, s.Type.Values(b)...)
				s.Type = e
				return name, s, out
			}), Options{})
			// Half a unit of the last place, relative, and for F16 half of its smallest number.
			bound := map[dtype.DType]float64{dtype.BF16: 0x1p-8, dtype.F16: 0x1p-11, dtype.F64: 0}[e]
			least := map[dtype.DType]float64{dtype.F16: 0x1p-25}[e]
			for name, x := range readAll(t, m) {
				for i := range x {
					if far := math.Abs(float64(x[i] - want[name][i])); far > bound*math.Abs(float64(want[name][i]))+least {
						t.Fatalf("%s: element %d is %v, not %v", name, i, x[i], want[name][i])
					}
				}
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	const n = 4096
	dir := b.TempDir()
	text, err := os.ReadFile(filepath.Join(fixtures, "llama3", "config.json"))
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644); err != nil {
		b.Fatal(err)
	}
	for _, e := range []dtype.DType{dtype.BF16, dtype.F32} {
		s := dtype.Shape{Type: e, Dims: []int64{n, n}}
		_ = os.Remove(filepath.Join(dir, "model.safetensors"))
		if _, err := safetensors.WriteFile(filepath.Join(dir, "model.safetensors"), []safetensors.Item{{Name: "w", Shape: s,
			Data: func(w io.Writer) error { _, err := io.Copy(w, bytes.NewReader(make([]byte, s.Bytes()))); return err }}}, nil); err != nil {
			b.Fatal(err)
		}
		m, err := Open(dir, Options{})
		if err != nil {
			b.Fatal(err)
		}
		for _, transposed := range []bool{false, true} {
			p := model.Param{Name: "w", Source: "w", Shape: []int64{n, n}, To: n, Transposed: transposed,
				Dims: dims(n, n)}
			dst := make([]float32, n*n)
			b.Run(fmt.Sprintf("%s/transposed=%v", e, transposed), func(b *testing.B) {
				b.SetBytes(s.Bytes())
				for b.Loop() {
					if err := m.Read(&p, dst); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		_ = m.Close()
	}
}

// The blocks of every preset add up to its parameters, and everything can be printed.
func TestSummary(t *testing.T) {
	for _, preset := range model.Presets() {
		if preset.Config == nil {
			continue
		}
		m := mustOpen(t, "preset:"+preset.Name, Options{})
		s := m.Summary(0)
		sum, share := int64(0), 0.0
		for _, b := range s.Blocks {
			sum, share = sum+b.Parameters, share+b.Share
		}
		if sum != s.Parameters || math.Abs(share-1) > 1e-12 || s.Training != 3*s.Forward {
			t.Errorf("%s: blocks add up to %d of %d, shares to %v", s.Name, sum, s.Parameters, share)
		}
		var text strings.Builder
		if err := s.WriteText(&text); err != nil || !strings.HasPrefix(text.String(), preset.Name+" · ") {
			t.Errorf("%s: %v %q", preset.Name, err, text.String())
		}
	}
}

// Numbers that are not finite are found by whoever reads them, and counted by name.
func TestNotFinite(t *testing.T) {
	bad := map[string]int64{"model.norm.weight": 1, "model.layers.1.mlp.up_proj.weight": 3}
	dir := altered(t, "llama3", func(name string, s dtype.Shape, b []byte) (string, dtype.Shape, []byte) {
		for i := range bad[name] {
			copy(b[40*i:], []byte{0, 0, 0x80, 0xff})
		}
		return name, s, b
	})
	m := mustOpen(t, dir, Options{})
	list, err := m.NotFinite(t.Context())
	if err != nil || len(list) != len(bad) {
		t.Fatal(list, err)
	}
	for _, d := range list {
		if bad[d.Tensor] != d.Elements {
			t.Errorf("%+v", d)
		}
	}
	failed := 0
	for _, p := range m.Config.Params() {
		if err := m.Read(&p, make([]float32, p.Size())); err != nil {
			wantError(t, err, diag.WeightNotFinite, "up_proj.weight holds 3 numbers that are not finite",
				"4 numbers of 2 tensors")
			failed++
		}
	}
	if failed != 2 {
		t.Errorf("%d parameters are refused", failed)
	}
}

// Weights with scales, as DeepSeek-V3 and gpt-oss are published, are read as transformers does: the
// same bits, whole, by blocks of any size, and layer by layer.
func TestScaledWeights(t *testing.T) {
	for _, name := range []string{"fp8", "mxfp4"} {
		dir := filepath.Join("testdata", name)
		m := mustOpen(t, dir, Options{})
		if err := m.Check(); err != nil {
			t.Fatal(err)
		}
		if c := m.Contents(); len(c.Unused)+len(c.Leftover) > 0 {
			t.Errorf("%s: unused %q, left over %q", name, c.Unused, c.Leftover)
		}
		if n := len(m.Contents().MTP); (n == 2) != (name == "fp8") {
			t.Errorf("%s: %d tensors of MTP layers", name, n)
		}
		want, err := safetensors.Open(filepath.Join(dir, "expected.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = want.Close() })
		tensors := map[string][]float32{}
		for _, p := range m.Config.Params() {
			whole := make([]float32, p.Size())
			if err := m.Read(&p, whole); err != nil {
				t.Fatal(err)
			}
			for _, size := range []int64{1, 50, 333} {
				again := make([]float32, p.Size())
				if err := m.read(&p, again, size); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(again, whole) {
					t.Errorf("%s: %s differs by %d elements at a time", name, p.Name, size)
				}
			}
			for i, one := range p.Layers() {
				layer := make([]float32, one.Size())
				if err := m.Read(&one, layer); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(layer, whole[int64(i)*one.Size():][:one.Size()]) {
					t.Errorf("%s: %s differs from its layer of the stack", name, one.Name)
				}
			}
			for k, tensor := range p.Tensors() {
				if tensors[tensor] == nil {
					tensors[tensor] = make([]float32, dtype.Shape{Dims: p.Shape}.Elements())
				}
				if err := model.Put(&p, k, tensors[tensor], whole); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, tensor := range want.Names() {
			x, err := want.Tensor(tensor)
			if err != nil {
				t.Fatal(err)
			}
			bytes, err := x.Bytes()
			if err != nil {
				t.Fatal(err)
			}
			numbers := make([]float32, x.Shape().Elements())
			x.Shape().Type.Decode(numbers, bytes)
			if !slices.Equal(tensors[tensor], numbers) {
				t.Errorf("%s: %s differs", name, tensor)
			}
		}
		sameExport(t, m)
		if len(tensors) != len(want.Names()) {
			t.Errorf("%s: %d tensors, not %d", name, len(tensors), len(want.Names()))
		}
	}
}

// sameExport exports a model, whose config.json is then one of plain weights, and reads it back.
func sameExport(t *testing.T, m *Model) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "out")
	source, _ := m.Source()
	if _, err := Export(out, m.Config, ExportOptions{Config: source}, m.Read); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(out, configName))
	if err != nil || strings.Contains(string(text), "quantization_config") ||
		strings.Contains(string(text), `"num_nextn_predict_layers": 1`) {
		t.Errorf("%v: %s", err, text)
	}
	back := mustOpen(t, out, Options{})
	if err := back.Check(); err != nil {
		t.Fatal(err)
	}
	for _, p := range m.Config.Params() {
		want, got := make([]float32, p.Size()), make([]float32, p.Size())
		if err := errors.Join(m.Read(&p, want), back.Read(&p, got)); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s differs after an export", p.Name)
		}
	}
}

// A NaN among scaled weights, or a scale that is one, is found and named.
func TestScaledWeightsNotFinite(t *testing.T) {
	for name, c := range map[string]struct {
		tensor, named string
		code          byte
	}{
		"fp8":   {"model.layers.1.mlp.experts.1.up_proj.weight", "model.layers.1.mlp.experts.1.up_proj.weight", 0x7f},
		"mxfp4": {"model.layers.1.mlp.experts.down_proj_scales", "model.layers.1.mlp.experts.down_proj_blocks", 0xff},
	} {
		dir := t.TempDir()
		for _, file := range []string{"config.json", "model.safetensors"} {
			text, err := os.ReadFile(filepath.Join("testdata", name, file))
			if err != nil {
				t.Fatal(err)
			}
			if file == "model.safetensors" {
				var header map[string]struct {
					At []int64 `json:"data_offsets"`
				}
				n := int64(binary.LittleEndian.Uint64(text))
				_ = json.Unmarshal(text[8:8+n], &header)
				text[8+n+header[c.tensor].At[0]] = c.code
			}
			if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		m := mustOpen(t, dir, Options{})
		bad, err := m.NotFinite(t.Context())
		if err != nil || len(bad) != 1 || bad[0].Tensor != c.named {
			t.Errorf("%s: %v, %v", name, bad, err)
		}
		for _, p := range m.Config.Params() {
			err := m.Read(&p, make([]float32, p.Size()))
			if hit := slices.Contains(p.Tensors(), strings.TrimSuffix(c.named, "_blocks")); hit != (err != nil) {
				t.Errorf("%s: reading %s gives %v", name, p.Name, err)
			}
		}
	}
}

// Some experts of a layer are read as they stand among all of them, in every form of checkpoints.
func TestReadSomeExperts(t *testing.T) {
	for _, dir := range append(families(t), "testdata/fp8", "testdata/mxfp4") {
		m := mustOpen(t, dir, Options{})
		for _, p := range m.Config.Params() {
			for _, one := range p.Layers() {
				if !one.HasExperts() {
					continue
				}
				n := m.Config.MoE.Experts
				whole := make([]float32, one.Size())
				some := one.SliceExperts(1, n)
				got := make([]float32, some.Size())
				if err := errors.Join(m.Read(&one, whole), m.read(&some, got, 77)); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, whole[one.Size()/n:]) {
					t.Errorf("%s: the experts of %s but the first differ", dir, one.Name)
				}
			}
		}
	}
}
