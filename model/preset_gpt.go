package model

import "math"

// padded is the vocabulary of GPT-2 as Megatron pads it, for models whose sources give none.
const padded = 51200

// gpt makes a model of GPT-2's kind, whose MLP is four times as wide as it is.
func gpt(vocab, context, layers, hidden, heads int64, tied bool) *Config {
	c := sized(layers, hidden, 4*hidden, heads, heads)
	c.Arch, c.Vocab, c.Context, c.Tied, c.Learned = "gpt2", vocab, context, tied, true
	c.Norm = Norm{Layer: true, Eps: 1e-5}
	c.HeadDim, c.Activation = hidden/heads, GELU
	c.QKVBias, c.OutBias, c.MLPBias = true, true, true
	c.AttnScale = 1 / math.Sqrt(float64(c.HeadDim))
	if vocab == 50257 {
		c.BOS, c.EOS = 50256, []int64{50256}
	}
	return &c
}

// gptPresets: GPT-2, and models of its kind that were measured: GPT-3 as NeMo has it, calculon's
// Megatron and Turing models, Megatron-LM's scaling table (whose names are right with an output
// layer of its own), and MPT with learned positions.
func gptPresets() []Preset {
	list := []Preset{
		{Name: "gpt2", Aliases: []string{"openai-community/gpt2", "gpt2-small"},
			Config: gpt(50257, 1024, 12, 768, 12, true)},
		{Name: "gpt2-medium", Config: gpt(50257, 1024, 24, 1024, 16, true)},
		{Name: "gpt2-large", Config: gpt(50257, 1024, 36, 1280, 20, true)},
		{Name: "gpt2-xl", Config: gpt(50257, 1024, 48, 1600, 25, true)},
	}
	rows := []struct {
		name                  string
		vocab, context        int64
		layers, hidden, heads int64
		tied                  bool
		note                  string
	}{
		{"gpt3-5b", padded, 2048, 24, 4096, 32, true, guessed},
		{"gpt3-20b", padded, 2048, 44, 6144, 48, true, guessed},
		{"gpt3-175b", 51200, 2048, 96, 12288, 96, true, ""},
		{"megatron-22b", padded, 2048, 48, 6144, 64, true, guessed},
		{"turing-530b", padded, 2048, 105, 20480, 128, true, guessed},
		{"megatron-1t", padded, 2048, 128, 25600, 160, true, guessed},
		{"megatron-gpt-1.7b", 131072, 4096, 24, 2048, 16, false, ""},
		{"megatron-gpt-7.1b", 131072, 4096, 30, 4096, 32, false, ""},
		{"megatron-gpt-16b", 131072, 4096, 32, 6144, 48, false, ""},
		{"megatron-gpt-32b", 131072, 4096, 48, 7168, 56, false, ""},
		{"megatron-gpt-70b", 131072, 4096, 84, 8192, 64, false, ""},
		{"megatron-gpt-119b", 131072, 4096, 92, 10240, 80, false, ""},
		{"megatron-gpt-177b", 131072, 4096, 96, 12288, 96, false, ""},
		{"megatron-gpt-314b", 131072, 4096, 96, 16384, 128, false, ""},
		{"megatron-gpt-462b", 131072, 4096, 112, 18432, 144, false, ""},
		{"mpt-1b", 50368, 2048, 24, 2048, 16, true, mptNote},
		{"mpt-3b", 50368, 2048, 32, 2560, 20, true, mptNote},
		{"mpt-7b", 50368, 2048, 32, 4096, 32, true, mptNote},
		{"mpt-13b", 50368, 2048, 40, 5120, 40, true, mptNote},
		{"mpt-30b", 50368, 2048, 48, 7168, 56, true, mptNote},
		{"mpt-70b", 50368, 2048, 80, 8192, 64, true, mptNote},
	}
	for _, r := range rows {
		list = append(list, Preset{Name: r.name, Note: r.note,
			Config: gpt(r.vocab, r.context, r.layers, r.hidden, r.heads, r.tied)})
	}
	return list
}

const (
	guessed = "the source gives no vocabulary; 51,200 is GPT-2's as Megatron pads it"
	mptNote = "with learned positions, for sequences of 2,048; the graph and names are GPT-2's"
)

// nemotronPresets: Nemotron-3 and Nemotron-4 (arXiv 2402.16819, 2406.11704) as NeMo has them, with
// the vocabulary of those papers.
func nemotronPresets() []Preset {
	nemotron := func(c Config) *Config {
		c.Arch, c.Vocab, c.Context, c.Activation = "nemotron", 256000, 4096, ReLU2
		c.Norm = Norm{Layer: true, Shift: 1}
		p := rotary(c, 1e4, 1e-5)
		p.Rotary = p.HeadDim / 2
		return p
	}
	return []Preset{
		{Name: "nemotron-8b", Config: nemotron(sized(32, 4096, 16384, 32, 32))},
		{Name: "nemotron-22b", Config: nemotron(sized(40, 6144, 24576, 48, 48))},
		{Name: "nemotron4-15b", Config: nemotron(sized(32, 6144, 24576, 48, 8))},
		{Name: "nemotron4-340b", Aliases: []string{"nvidia/Nemotron-4-340B-Base"},
			Config: nemotron(sized(96, 18432, 73728, 96, 8))},
	}
}

// expertPresets are models with experts, which can be counted but not built yet.
func expertPresets() []Preset {
	deepseek := func(vocab int64, c Config, m MoE) *Config {
		c.Arch, c.Vocab, c.Context, c.MoE = "deepseek", vocab, 4096, &m
		c.MLA = &MLA{QRank: 1536, KVRank: 512, NoPE: 128, Rope: 64, Value: 128}
		c.HeadDim = c.MLA.NoPE + c.MLA.Rope
		return rotary(c, 1e4, 1e-6)
	}
	qwen := func(c Config, expert int64) *Config {
		c.Arch, c.Vocab, c.Context, c.QKNorm, c.HeadDim = "qwen3_moe", 151936, 32768, true, 128
		c.MoE = &MoE{Experts: 128, TopK: 8, MLP: expert}
		return rotary(c, 1e6, 1e-6)
	}
	oss, grok := sized(36, 2880, 2880, 64, 8), sized(64, 6144, 32768, 48, 8)
	oss.Arch, oss.Vocab, oss.Context, oss.HeadDim = "gpt_oss", 201088, 131072, 64
	oss.QKVBias, oss.OutBias = true, true
	oss.MoE = &MoE{Experts: 128, TopK: 4, MLP: 2880, Bias: true, Sinks: true}
	grok.Arch, grok.Vocab, grok.Context = "grok", 128256, 8192
	grok.MoE = &MoE{Experts: 8, TopK: 2, MLP: 32768}
	mixtral := sized(32, 4096, 14336, 32, 8)
	mixtral.Arch, mixtral.Vocab, mixtral.Context = "mixtral", 32000, 32768
	mixtral.MoE = &MoE{Experts: 8, TopK: 2, MLP: 14336}
	return []Preset{
		{Name: "mixtral-8x7b", Aliases: []string{"mistralai/Mixtral-8x7B-v0.1"},
			Config: rotary(mixtral, 1e6, 1e-5)},
		{Name: "deepseek-v2", Aliases: []string{"deepseek-ai/DeepSeek-V2"},
			Config: deepseek(102400, sized(60, 5120, 12288, 128, 128),
				MoE{Experts: 160, TopK: 6, MLP: 1536, Shared: 3072, Dense: 1})},
		{Name: "deepseek-v3", Aliases: []string{"deepseek-ai/DeepSeek-V3"},
			Config: deepseek(129280, sized(61, 7168, 18432, 128, 128),
				MoE{Experts: 256, TopK: 8, MLP: 2048, Shared: 2048, Dense: 3}),
			Note: "without the layer that predicts a second token"},
		{Name: "kimi-k2", Aliases: []string{"moonshotai/Kimi-K2-Base"},
			Config: deepseek(163840, sized(61, 7168, 18432, 64, 64),
				MoE{Experts: 384, TopK: 8, MLP: 2048, Shared: 2048, Dense: 1})},
		{Name: "qwen3-30b-a3b", Aliases: []string{"Qwen/Qwen3-30B-A3B"},
			Config: qwen(sized(48, 2048, 6144, 32, 4), 768)},
		{Name: "qwen3-235b-a22b", Aliases: []string{"Qwen/Qwen3-235B-A22B"},
			Config: qwen(sized(94, 4096, 12288, 64, 4), 1536)},
		{Name: "gpt-oss-120b", Aliases: []string{"openai/gpt-oss-120b"},
			Config: windows(rotary(oss, 15e4, 1e-5), 128, func(i int) bool { return i%2 == 0 })},
		{Name: "grok1-314b", Aliases: []string{"xai-org/grok-1"}, Config: rotary(grok, 1e4, 1e-5),
			Note: "with the vocabulary of the benchmark that it was measured in"},
	}
}

// unknownPresets are models whose sizes are not all public, or that need more than a Config says.
func unknownPresets() []Preset {
	const hidden = "its sizes are not public"
	return []Preset{
		{Name: "moonlight-16b", Aliases: []string{"moonshotai/Moonlight-16B-A3B"}, Total: 16e9,
			Active: 3e9, Note: "27 layers and 64 experts; other sizes are not in the sources"},
		{Name: "nemotron-3-nano", Total: 30e9, Active: 3e9,
			Note: "a hybrid of Mamba-2, experts and attention, which is not supported"},
		{Name: "nemotron-3.5-lightning", Total: 30e9, Active: 3e9,
			Note: "a hybrid of Mamba-2, experts and attention, which is not supported"},
		{Name: "nemotron-3-super", Total: 120e9, Active: 12e9, Note: hidden},
		{Name: "nemotron-3-ultra", Total: 550e9, Active: 55e9, Note: hidden},
		{Name: "deepseek-v4-flash", Aliases: []string{"deepseek-ai/DeepSeek-V4-Flash"}, Note: hidden},
	}
}
