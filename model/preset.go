package model

import (
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
)

// A Preset is a known model.
type Preset struct {
	Name string
	// Aliases are other names that people type, and its name on the Hugging Face Hub.
	Aliases []string
	// Config is nil where the sizes of the model are not public.
	Config *Config
	// Total and Active are the published numbers of parameters of a model without a Config; 0 where
	// those are not known either.
	Total, Active float64
	Note          string // what a person should know
}

// Presets lists the known models by family.
func Presets() []Preset {
	return slices.Concat(llamaPresets(), qwenPresets(), gemmaPresets(), otherPresets(),
		gptPresets(), nemotronPresets(), expertPresets(), unknownPresets())
}

// Find gives a preset by name or alias. Case, and the signs between words, do not matter, and a
// name from the Hugging Face Hub goes with or without its organization.
func Find(name string) (*Preset, error) {
	want := plain(name)
	var names []string
	for _, p := range Presets() {
		names = append(names, p.Name)
		for _, n := range append([]string{p.Name}, p.Aliases...) {
			if plain(n) == want {
				return &p, nil
			}
		}
	}
	return nil, bad("no preset is called %q", name).
		Meant(strings.ToLower(name), names, "did you mean %s?", "deepwell models")
}

// plain is a name without what people write differently.
func plain(name string) string {
	name = strings.ToLower(name)
	if i := strings.LastIndex(name, "/"); i >= 0 {
		name = name[i+1:]
	}
	return strings.NewReplacer("-", "", "_", "", " ", "").Replace(name)
}

// rotary finishes a configuration with rotary positions and RMS norms.
func rotary(c Config, theta, eps float64) *Config {
	if c.HeadDim == 0 {
		c.HeadDim = c.Hidden / c.Heads
	}
	if c.Activation == "" {
		c.Activation, c.Gated = SiLU, true
	}
	if c.Rope.Theta == 0 {
		c.Rope.Theta = theta
	}
	if c.LocalRope.Theta == 0 {
		c.LocalRope = c.Rope
	}
	if c.AttnScale == 0 {
		c.AttnScale = 1 / math.Sqrt(float64(c.HeadDim))
	}
	c.Norm.Eps, c.Rotary = eps, c.HeadDim
	return &c
}

// sized is what the tables below say of each model.
func sized(layers, hidden, mlp, heads, kv int64) Config {
	return Config{Layers: layers, Hidden: hidden, MLP: mlp, Heads: heads, KVHeads: kv, BOS: -1}
}

// windows gives layers a window by a rule.
func windows(c *Config, size int64, rule func(i int) bool) *Config {
	c.Window, c.Windowed = size, make([]bool, c.Layers)
	for i := range c.Windowed {
		c.Windowed[i] = rule(i)
	}
	return c
}

// llamaPresets: Llama 2 (arXiv 2307.09288), Llama 3 (arXiv 2407.21783) and the config.json of each.
func llamaPresets() []Preset {
	two := func(c Config) *Config {
		c.Arch, c.Vocab, c.Context, c.BOS, c.EOS = "llama", 32000, 4096, 1, []int64{2}
		return rotary(c, 1e4, 1e-5)
	}
	three := func(c Config, context int64, factor float64, tied bool) *Config {
		c.Arch, c.Vocab, c.Context, c.Tied = "llama", 128256, context, tied
		c.BOS, c.EOS = 128000, []int64{128001}
		c.Rope = ir.Rope{Theta: 5e5}
		if factor != 0 {
			c.Rope = ir.Rope{Theta: 5e5, Factor: factor, Low: 1, High: 4, Original: 8192}
		}
		return rotary(c, 5e5, 1e-5)
	}
	small, large := sized(32, 4096, 14336, 32, 8), sized(80, 8192, 28672, 64, 8)
	const long = 131072
	return []Preset{
		{Name: "llama2-7b", Aliases: []string{"meta-llama/Llama-2-7b-hf"},
			Config: two(sized(32, 4096, 11008, 32, 32))},
		{Name: "llama2-13b", Aliases: []string{"meta-llama/Llama-2-13b-hf"},
			Config: two(sized(40, 5120, 13824, 40, 40))},
		{Name: "llama2-70b", Aliases: []string{"meta-llama/Llama-2-70b-hf"},
			Config: two(sized(80, 8192, 28672, 64, 8))},
		{Name: "llama3-8b", Aliases: []string{"meta-llama/Meta-Llama-3-8B"},
			Config: three(small, 8192, 0, false)},
		{Name: "llama3-70b", Aliases: []string{"meta-llama/Meta-Llama-3-70B"},
			Config: three(large, 8192, 0, false)},
		{Name: "llama3.1-8b", Aliases: []string{"meta-llama/Llama-3.1-8B", "Meta-Llama-3.1-8B"},
			Config: three(small, long, 8, false)},
		{Name: "llama3.1-70b", Aliases: []string{"meta-llama/Llama-3.1-70B", "Meta-Llama-3.1-70B"},
			Config: three(large, long, 8, false)},
		{Name: "llama3.1-405b", Aliases: []string{"meta-llama/Llama-3.1-405B", "llama3-405b"},
			Config: three(sized(126, 16384, 53248, 128, 8), long, 8, false)},
		{Name: "llama3-405b-simumax", Config: three(sized(128, 16384, 53248, 128, 16), long, 8, false),
			Note: "SimuMax's variant: 128 layers and 16 key heads"},
		{Name: "llama3.2-1b", Aliases: []string{"meta-llama/Llama-3.2-1B"},
			Config: three(sized(16, 2048, 8192, 32, 8), long, 32, true)},
		{Name: "llama3.2-3b", Aliases: []string{"meta-llama/Llama-3.2-3B"},
			Config: three(sized(28, 3072, 8192, 24, 8), long, 32, true)},
	}
}

// qwenPresets: Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense.
func qwenPresets() []Preset {
	two := func(vocab int64, tied bool, c Config) *Config {
		c.Arch, c.Vocab, c.Tied, c.QKVBias, c.Context = "qwen2", vocab, tied, true, 32768
		c.BOS, c.EOS = 151643, []int64{151643}
		if !tied {
			c.Context = 131072 // from 7B up
		}
		return rotary(c, 1e6, 1e-6)
	}
	three := func(tied bool, c Config) *Config {
		c.Arch, c.Vocab, c.Tied, c.QKNorm, c.Context = "qwen3", 151936, tied, true, 32768
		c.HeadDim, c.BOS, c.EOS = 128, 151643, []int64{151643}
		return rotary(c, 1e6, 1e-6)
	}
	row := func(name, hub string, c *Config) Preset {
		return Preset{Name: name, Aliases: []string{"Qwen/" + hub, "Qwen/" + hub + "-Base"}, Config: c}
	}
	return []Preset{
		row("qwen2.5-0.5b", "Qwen2.5-0.5B", two(151936, true, sized(24, 896, 4864, 14, 2))),
		row("qwen2.5-1.5b", "Qwen2.5-1.5B", two(151936, true, sized(28, 1536, 8960, 12, 2))),
		row("qwen2.5-3b", "Qwen2.5-3B", two(151936, true, sized(36, 2048, 11008, 16, 2))),
		row("qwen2.5-7b", "Qwen2.5-7B", two(152064, false, sized(28, 3584, 18944, 28, 4))),
		row("qwen2.5-14b", "Qwen2.5-14B", two(152064, false, sized(48, 5120, 13824, 40, 8))),
		row("qwen2.5-32b", "Qwen2.5-32B", two(152064, false, sized(64, 5120, 27648, 40, 8))),
		row("qwen2.5-72b", "Qwen2.5-72B", two(152064, false, sized(80, 8192, 29568, 64, 8))),
		row("qwen3-0.6b", "Qwen3-0.6B", three(true, sized(28, 1024, 3072, 16, 8))),
		row("qwen3-1.7b", "Qwen3-1.7B", three(true, sized(28, 2048, 6144, 16, 8))),
		row("qwen3-4b", "Qwen3-4B", three(true, sized(36, 2560, 9728, 32, 8))),
		row("qwen3-8b", "Qwen3-8B", three(false, sized(36, 4096, 12288, 32, 8))),
		row("qwen3-14b", "Qwen3-14B", three(false, sized(40, 5120, 17408, 40, 8))),
		row("qwen3-32b", "Qwen3-32B", three(false, sized(64, 5120, 25600, 64, 8))),
	}
}

// gemmaPresets: Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).
func gemmaPresets() []Preset {
	gemma := func(head, scalar int64, c Config) Config {
		c.Gated, c.Activation, c.PostNorms, c.ScaledEmbed, c.Tied = true, GELU, true, true, true
		c.Norm.Shift, c.HeadDim, c.AttnScale = 1, head, 1/math.Sqrt(float64(scalar))
		c.BOS, c.EOS = 2, []int64{1}
		return c
	}
	two := func(c Config) *Config {
		c.Arch, c.Vocab, c.Context, c.AttnCap, c.LogitCap = "gemma2", 256000, 8192, 50, 30
		return windows(rotary(c, 1e4, 1e-6), 4096, func(i int) bool { return i%2 == 0 })
	}
	three := func(c Config) *Config {
		c.Arch, c.Vocab, c.Context, c.QKNorm = "gemma3_text", 262144, 32768, true
		c.LocalRope.Theta = 1e4
		return windows(rotary(c, 1e6, 1e-6), 512, func(i int) bool { return (i+1)%6 != 0 })
	}
	return []Preset{
		{Name: "gemma2-2b", Aliases: []string{"google/gemma-2-2b"},
			Config: two(gemma(256, 256, sized(26, 2304, 9216, 8, 4)))},
		{Name: "gemma2-9b", Aliases: []string{"google/gemma-2-9b"},
			Config: two(gemma(256, 256, sized(42, 3584, 14336, 16, 8)))},
		{Name: "gemma2-27b", Aliases: []string{"google/gemma-2-27b"},
			Config: two(gemma(128, 144, sized(46, 4608, 36864, 32, 16)))},
		{Name: "gemma3-270m", Aliases: []string{"google/gemma-3-270m"},
			Config: three(gemma(256, 256, sized(18, 640, 2048, 4, 1)))},
		{Name: "gemma3-1b", Aliases: []string{"google/gemma-3-1b-pt"},
			Config: three(gemma(256, 256, sized(26, 1152, 6912, 4, 1)))},
	}
}

// otherPresets: Mistral 7B (arXiv 2310.06825), Phi-3 mini (arXiv 2404.14219), and the models of
// nanotron's scaling benchmarks, whose vocabulary and heads follow from their parameter counts.
func otherPresets() []Preset {
	mistral, phi := sized(32, 4096, 14336, 32, 8), sized(32, 3072, 8192, 32, 32)
	mistral.Arch, mistral.Vocab, mistral.Context = "mistral", 32000, 32768
	mistral.BOS, mistral.EOS = 1, []int64{2}
	later := mistral
	later.Vocab = 32768
	phi.Arch, phi.Vocab, phi.Context, phi.BOS, phi.EOS = "phi3", 32064, 4096, 1, []int64{32000}
	always := func(int) bool { return true }
	nano := func(tied bool, c Config) *Config {
		c.Arch, c.Vocab, c.Context, c.Tied = "llama", 131072, 4096, tied
		return rotary(c, 1e4, 1e-5)
	}
	return []Preset{
		{Name: "mistral-7b-v0.1", Aliases: []string{"mistralai/Mistral-7B-v0.1"},
			Config: windows(rotary(mistral, 1e4, 1e-5), 4096, always)},
		{Name: "mistral-7b", Aliases: []string{"mistralai/Mistral-7B-v0.3"},
			Config: rotary(later, 1e6, 1e-5)},
		{Name: "phi3-mini", Aliases: []string{"microsoft/Phi-3-mini-4k-instruct"},
			Config: windows(rotary(phi, 1e4, 1e-5), 2047, always)},
		{Name: "nanotron-1.34b", Config: nano(true, sized(16, 2048, 8192, 32, 32))},
		{Name: "nanotron-3.57b", Config: nano(true, sized(28, 3072, 8192, 32, 32))},
		{Name: "nanotron-8.86b", Config: nano(false, sized(32, 4096, 14336, 32, 32))},
		{Name: "nanotron-80b", Config: nano(false, sized(80, 8192, 28672, 64, 64))},
	}
}
