package quantize

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/safetensors"
)

// jobs are the jobs of testdata/make.py.
var jobs = map[string]struct {
	model string
	Options
}{
	"mxfp8":            {"llama", Options{To: dtype.MXFP8}},
	"nvfp4":            {"llama", Options{To: dtype.NVFP4}},
	"nvfp4-a":          {"llama", Options{To: dtype.NVFP4, InputAmax: 16}},
	"mixed":            {"llama", Options{To: dtype.NVFP4, Policy: mixed}},
	"mxfp8-modelopt":   {"llama", Options{To: dtype.MXFP8, Layout: ModelOpt}},
	"nvfp4-modelopt":   {"llama", Options{To: dtype.NVFP4, Layout: ModelOpt}},
	"nvfp4-a-modelopt": {"llama", Options{To: dtype.NVFP4, Layout: ModelOpt, InputAmax: 16}},
	"gptoss":           {"gptoss", Options{To: dtype.NVFP4}},
	"gptoss-modelopt":  {"gptoss", Options{To: dtype.NVFP4, Layout: ModelOpt}},
}

// mixed is testdata/policy.json.
func mixed(module string, _, _ int64) (dtype.Format, string) {
	switch {
	case strings.HasSuffix(module, ".down_proj"):
		return dtype.MXFP8, ""
	case strings.Contains(module, ".1.self_attn."):
		return None, "the last"
	}
	return dtype.NVFP4, ""
}

// What is written has the committed bytes, and stands for the numbers that compressed-tensors
// decompressed from them.
func TestFilesAreThoseThatTheOraclesRead(t *testing.T) {
	var expected map[string]json.RawMessage
	read(t, "testdata/expected.json", &expected)
	for name, job := range jobs {
		t.Run(name, func(t *testing.T) {
			var want struct {
				File    string
				Weights map[string]string
			}
			if err := json.Unmarshal(expected[name], &want); err != nil {
				t.Fatal(err)
			}
			out := t.TempDir()
			quantize(t, filepath.Join("testdata", job.model), out, job.Options)
			file, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			if sum := sha256.Sum256(file); hex.EncodeToString(sum[:]) != want.File {
				t.Error("the file has other bytes than the oracles saw")
			}
			set, err := safetensors.Parse(name, file)
			if err != nil {
				t.Fatal(err)
			}
			for module, digest := range want.Weights {
				var bytes []byte
				for _, v := range numbers(t, set, module, job.Layout) {
					bytes = binary.LittleEndian.AppendUint16(bytes, dtype.BF16FromF32(v))
				}
				if sum := sha256.Sum256(bytes); hex.EncodeToString(sum[:]) != digest {
					t.Errorf("%s stands for other numbers", module)
				}
			}
		})
	}
}

// numbers reads a quantized weight as its family's loaders do.
func numbers(t *testing.T, set *safetensors.Set, module string, l Layout) []float32 {
	get := func(name string) ([]byte, dtype.Shape, bool) {
		tensor, err := set.Tensor(module + name)
		if err != nil {
			return nil, dtype.Shape{}, false
		}
		b, err := tensor.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		return b, tensor.Shape(), true
	}
	f32 := func(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }
	scales, shape, ok := get(".weight_scale")
	if !ok { // stacked experts of modelopt: columns before rows
		q, shape, _ := get("")
		scales, _, _ := get("_weight_scale")
		global, _, _ := get("_weight_scale_2")
		var all []float32
		n := int(shape.Dims[0])
		rows, half := int(shape.Dims[2]), int(shape.Dims[1])
		for e := range n {
			a, b := make([]byte, len(q)/n), make([]byte, len(scales)/n)
			must(t, block.Transpose(a, q[e*len(a):][:len(a)], half, rows))
			must(t, block.Transpose(b, scales[e*len(b):][:len(b)], half/8, rows))
			x := make([]float32, 2*len(a))
			must(t, block.FromNVFP4(x, a, b, f32(global)))
			all = append(all, x...)
		}
		return all
	}
	if shape.Type == dtype.U8 {
		q, _, _ := get(".weight")
		x := make([]float32, len(q))
		must(t, block.FromMXFP8(x, q, scales))
		return x
	}
	if l == ModelOpt {
		q, _, _ := get(".weight")
		global, _, _ := get(".weight_scale_2")
		x := make([]float32, 2*len(q))
		must(t, block.FromNVFP4(x, q, scales, f32(global)))
		return x
	}
	q, _, _ := get(".weight_packed")
	global, _, _ := get(".weight_global_scale")
	x := make([]float32, 2*len(q))
	for i := range x { // this family divides the scale first
		x[i] = dtype.F32FromE2M1(q[i/2]>>(4*(i%2))) * (dtype.F32FromE4M3(scales[i/16]) / f32(global))
	}
	return x
}

// Experts in MXFP4 lose nothing.
func TestMXFP4LosesNothing(t *testing.T) {
	for _, l := range []Layout{CompressedTensors, ModelOpt} {
		r := quantize(t, "testdata/gptoss", t.TempDir(), Options{To: dtype.NVFP4, Layout: l})
		converted := 0
		for _, row := range r.Tensors {
			if row.Format == dtype.NVFP4 {
				converted++
			}
			if row.Noise != 0 || row.Underflow != 0 {
				t.Errorf("%s has noise %v", row.Name, row.Noise)
			}
		}
		if converted != 2 {
			t.Errorf("%d matrices were converted", converted)
		}
	}
}

// A scale more than 2¹⁷ below the largest is rounded, and the report says so.
func TestMXFP4OutOfRangeIsRounded(t *testing.T) {
	q := slices.Repeat([]byte{0x77}, 32) // sixes
	scale := make([]byte, 4)
	s, err := rescale(q, scale, []byte{127, 127 - 21}, 127)
	if err != nil || s.noise == 0 || q[0] != 0x77 || q[16] != 0x11 || scale[2] != smallest {
		t.Errorf("%x, %x, %+v, %v", q, scale, s, err) // 6·2⁻⁴ is nearest to 0.5, code 1
	}
	s, err = rescale(q[:16], scale[:2], []byte{127}, 127)
	if err != nil || s.noise != 0 || s.amax != 6 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := rescale(q[:16], scale[:2], []byte{255}, 255); err == nil {
		t.Error("a NaN scale was accepted")
	}
}

// Siblings share a scale in both families, and blocks of nothing have the families' scales.
func TestScales(t *testing.T) {
	for _, l := range []Layout{CompressedTensors, ModelOpt} {
		out := t.TempDir()
		quantize(t, "testdata/llama", out, Options{To: dtype.NVFP4, Layout: l})
		set, err := safetensors.Open(out)
		if err != nil {
			t.Fatal(err)
		}
		name, empty := ".weight_global_scale", byte(0x20)
		if l == ModelOpt {
			name, empty = ".weight_scale_2", 0x38
		}
		get := func(name string) string {
			tensor, err := set.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, tensor.Size())
			if _, err := tensor.ReadAt(b, 0); err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		for _, m := range []string{"0.self_attn.", "1.self_attn."} {
			q := get("model.layers." + m + "q_proj" + name)
			if q != get("model.layers."+m+"k_proj"+name) || q != get("model.layers."+m+"v_proj"+name) {
				t.Errorf("%v: q, k and v of %s have several scales", l, m)
			}
		}
		if get("model.layers.0.self_attn.q_proj"+name) == get("model.layers.0.self_attn.o_proj"+name) {
			t.Errorf("%v: o has the scale of q", l)
		}
		scale := get("model.layers.0.self_attn.q_proj.weight_scale")
		if scale[0] != empty || scale[1] != empty || scale[4] != empty {
			t.Errorf("%v: blocks of zeros have scales %x", l, scale[:6])
		}
		if tiny := get("model.layers.1.mlp.down_proj.weight_scale")[6*6]; tiny != smallest {
			t.Errorf("%v: a tiny block has scale %x", l, tiny)
		}
		must(t, set.Close())
	}
}

// One choice for each linear layer; siblings stay together, and everything has its reason.
func TestChoices(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, `{"model_type": "llama"}`, map[string][]int64{
		"model.embed_tokens.weight": {64, 64}, "lm_head.weight": {64, 64}, "model.norm.weight": {64},
		"model.layers.0.self_attn.q_proj.weight": {64, 64}, "model.layers.0.self_attn.k_proj.weight": {32, 64},
		"model.layers.0.self_attn.v_proj.weight": {32, 64}, "model.layers.0.self_attn.o_proj.weight": {64, 64},
		"model.layers.0.self_attn.q_proj.bias": {64}, "model.layers.0.mlp.gate.weight": {4, 64},
		"model.layers.0.mlp.experts.0.w1.weight": {64, 64}, "model.layers.0.mlp.experts.0.w3.weight": {64, 64},
		"model.layers.0.mlp.experts.0.w2.weight": {64, 72}, "model.layers.0.mlp.shared.up_proj.weight": {64, 64},
		"model.layers.0.conv1d.weight": {64, 1, 4}, "vision_tower.blocks.0.proj.weight": {64, 64},
	}, 1<<20)
	r := quantize(t, dir, t.TempDir(), Options{To: dtype.NVFP4, Skip: []string{"*.v_proj"},
		Policy: func(module string, rows, cols int64) (dtype.Format, string) {
			switch {
			case strings.HasSuffix(module, ".w1"):
				return None, "it is the first"
			case strings.HasSuffix(module, ".o_proj"):
				return dtype.MXFP8, ""
			}
			return dtype.NVFP4, ""
		}})
	got := map[string]string{}
	for _, row := range r.Tensors {
		got[row.Name] = row.Kept + strings.TrimPrefix(string(row.Format), "none")
	}
	for name, want := range map[string]string{
		"model.embed_tokens.weight": "embedding", "lm_head.weight": "head", "model.norm.weight": "norm",
		"model.layers.0.self_attn.q_proj.weight":   "is fused with v_proj, which is kept",
		"model.layers.0.self_attn.k_proj.weight":   "is fused with v_proj, which is kept",
		"model.layers.0.self_attn.v_proj.weight":   "--skip *.v_proj",
		"model.layers.0.self_attn.o_proj.weight":   "mxfp8",
		"model.layers.0.self_attn.q_proj.bias":     "no matrix of a linear layer",
		"model.layers.0.mlp.gate.weight":           "router",
		"model.layers.0.mlp.experts.0.w1.weight":   "it is the first",
		"model.layers.0.mlp.experts.0.w3.weight":   "is fused with w1, which is kept",
		"model.layers.0.mlp.experts.0.w2.weight":   "72 columns are no multiple of 16",
		"model.layers.0.mlp.shared.up_proj.weight": "nvfp4",
		"model.layers.0.conv1d.weight":             "no matrix of a linear layer",
		"vision_tower.blocks.0.proj.weight":        "not of the language model",
	} {
		if got[name] != want {
			t.Errorf("%s: %q, want %q", name, got[name], want)
		}
	}
}

// What cannot be done says why, and leaves no half-written folder behind as a whole one.
func TestRefusals(t *testing.T) {
	llama := map[string][]int64{"model.layers.0.mlp.up_proj.weight": {32, 32}}
	for name, row := range map[string]struct {
		config  string
		tensors map[string][]int64
		options Options
		code    diag.Code
		words   string
	}{
		"fp8":     {`{"quantization_config": {"quant_method": "fp8"}}`, llama, Options{To: dtype.MXFP8}, diag.WeightQuantized, "by fp8"},
		"no name": {`{"quantization_config": {}}`, llama, Options{To: dtype.MXFP8}, diag.WeightQuantized, "without a name"},
		"mxfp4":   {`{"quantization_config": {"quant_method": "mxfp4"}}`, llama, Options{To: dtype.NVFP4}, diag.WeightQuantized, "_blocks"},
		"json":    {`[]`, llama, Options{To: dtype.MXFP8}, diag.BadInput, "not a JSON object"},
		"format":  {`{}`, llama, Options{}, diag.BadUsage, "no format"},
		"amax":    {`{}`, llama, Options{To: dtype.MXFP8, InputAmax: 4}, diag.BadUsage, "activations"},
		"nan":     {`{}`, llama, Options{To: dtype.NVFP4, InputAmax: float32(math.NaN())}, diag.BadUsage, "NaN"},
		"skip":    {`{}`, llama, Options{To: dtype.MXFP8, Skip: []string{"model.layers.0.mlp.up_prj"}}, diag.BadUsage, "up_prj"},
		"pattern": {`{}`, llama, Options{To: dtype.MXFP8, Skip: []string{"[x"}}, diag.BadUsage, "not a pattern"},
		"nothing": {`{}`, llama, Options{To: dtype.MXFP8, Skip: []string{"*"}}, diag.WeightType, "nothing to quantize"},
		"gpt2":    {`{"model_type": "gpt2"}`, llama, Options{To: dtype.MXFP8}, diag.WeightType, "nothing to quantize"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
			write(t, dir, row.config, row.tensors, 1<<20)
			_, err := Quantize(t.Context(), dir, out, row.options)
			if e := diag.From(err); err == nil || e.Code != row.code || !strings.Contains(e.Error(), row.words) {
				t.Errorf("%v, want %s with %q", err, row.code, row.words)
			}
			if _, err := os.Stat(filepath.Join(out, configName)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("there is a config.json: %v", err)
			}
		})
	}
}

// Numbers that are not finite are found in all element types and formats.
func TestNotFinite(t *testing.T) {
	for _, kind := range []dtype.DType{dtype.BF16, dtype.F16, dtype.F32} {
		for _, bad := range []float64{math.NaN(), math.Inf(-1)} {
			for _, to := range []dtype.Format{dtype.MXFP8, dtype.NVFP4} {
				dir := t.TempDir()
				values := make([]float64, 32*64)
				values[777] = bad
				writeItems(t, dir, `{}`, []safetensors.Item{{Name: "l.0.up_proj.weight",
					Shape: dtype.Shape{Type: kind, Dims: []int64{32, 64}},
					Data:  safetensors.FromBytes(kind.Append(nil, values...))}}, 1<<20)
				_, err := Quantize(t.Context(), dir, t.TempDir(), Options{To: to})
				if e := diag.From(err); err == nil || e.Code != diag.WeightNotFinite {
					t.Errorf("%s %v to %s: %v", kind, bad, to, err)
				}
			}
		}
	}
}

// The element type of the source does not matter where it holds the same numbers.
func TestElementTypes(t *testing.T) {
	digests := map[dtype.Format]map[string]bool{}
	for _, kind := range []dtype.DType{dtype.BF16, dtype.F16, dtype.F32} {
		rng := rand.New(rand.NewPCG(1, 2))
		values := make([]float64, 48*96)
		for i := range values { // numbers that all three hold
			values[i] = float64(rng.IntN(255)-127) / 256
		}
		dir := t.TempDir()
		writeItems(t, dir, `{}`, []safetensors.Item{{Name: "l.0.up_proj.weight",
			Shape: dtype.Shape{Type: kind, Dims: []int64{48, 96}},
			Data:  safetensors.FromBytes(kind.Append(nil, values...))}}, 1<<20)
		for _, to := range []dtype.Format{dtype.MXFP8, dtype.NVFP4} {
			out := t.TempDir()
			r := quantize(t, dir, out, Options{To: to})
			file, err := os.ReadFile(filepath.Join(out, "model.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			if digests[to] == nil {
				digests[to] = map[string]bool{}
			}
			row := r.Tensors[0]
			digests[to][fmt.Sprintf("%x %v %v %v", sha256.Sum256(file), row.Power, row.Noise, row.Underflow)] = true
			// The sums against the slow way.
			set, err := safetensors.Parse("", file)
			if err != nil {
				t.Fatal(err)
			}
			var power, noise, flushed float64
			for i, v := range numbers(t, set, "l.0.up_proj", CompressedTensors) {
				power += values[i] * values[i]
				noise += (values[i] - float64(v)) * (values[i] - float64(v))
				if v == 0 && values[i] != 0 {
					flushed++
				}
			}
			if math.Abs(power/row.Power-1) > 1e-6 || math.Abs(noise/row.Noise-1) > 1e-5 ||
				flushed/float64(len(values)) != row.Underflow {
				t.Errorf("%s %s: %v %v %v, want %v %v %v", kind, to, row.Power, row.Noise, row.Underflow,
					power, noise, flushed/float64(len(values)))
			}
		}
	}
	for to, set := range digests {
		if len(set) != 1 {
			t.Errorf("%s: %d results from the same numbers", to, len(set))
		}
	}
}

func quantize(t *testing.T, dir, out string, o Options) *Report {
	t.Helper()
	r, err := Quantize(t.Context(), dir, out, o)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string, v any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, v)
	}
	must(t, err)
}

// write makes a checkpoint of random bf16 tensors.
func write(t *testing.T, dir, config string, shapes map[string][]int64, shard int64) {
	t.Helper()
	var items []safetensors.Item
	for name, dims := range shapes {
		shape := dtype.Shape{Type: dtype.BF16, Dims: dims}
		seed := sha256.Sum256([]byte(name))
		rng := rand.New(rand.NewChaCha8(seed))
		data := make([]byte, 0, shape.Bytes())
		for range shape.Elements() {
			data = binary.LittleEndian.AppendUint16(data, dtype.BF16FromF32(float32(rng.NormFloat64())))
		}
		items = append(items, safetensors.Item{Name: name, Shape: shape, Data: safetensors.FromBytes(data)})
	}
	writeItems(t, dir, config, items, shard)
}

func writeItems(t *testing.T, dir, config string, items []safetensors.Item, shard int64) {
	t.Helper()
	_, err := safetensors.WriteFolder(dir, items, safetensors.Options{MaxBytes: shard})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, configName), []byte(config), 0o644))
}

// contents gives every file of a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		all[rel] = string(text)
		return err
	}))
	return all
}
