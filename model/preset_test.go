package model_test

import (
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
)

// The number of parameters of the published weights, to the last. (For some, such as Llama 2, the
// Hugging Face Hub shows a few more: tables of angles that older files keep beside them.)
func TestCountsAreThePublishedOnes(t *testing.T) {
	for name, want := range map[string]int64{
		"llama2-7b":       6_738_415_616,
		"llama2-13b":      13_015_864_320,
		"llama2-70b":      68_976_648_192,
		"llama3.1-8b":     8_030_261_248,
		"llama3.1-70b":    70_553_706_496,
		"llama3.1-405b":   405_853_388_800,
		"llama3.2-1b":     1_235_814_400,
		"llama3.2-3b":     3_212_749_824,
		"qwen2.5-0.5b":    494_032_768,
		"qwen2.5-1.5b":    1_543_714_304,
		"qwen2.5-3b":      3_085_938_688,
		"qwen2.5-7b":      7_615_616_512,
		"qwen2.5-14b":     14_770_033_664,
		"qwen2.5-32b":     32_763_876_352,
		"qwen2.5-72b":     72_706_203_648,
		"qwen3-0.6b":      596_049_920,
		"qwen3-1.7b":      1_720_574_976,
		"qwen3-4b":        4_022_468_096,
		"qwen3-8b":        8_190_735_360,
		"qwen3-14b":       14_768_307_200,
		"qwen3-32b":       32_762_123_264,
		"gemma2-2b":       2_614_341_888,
		"gemma2-9b":       9_241_705_984,
		"gemma2-27b":      27_227_128_320,
		"gemma3-270m":     268_098_176,
		"gemma3-1b":       999_885_952,
		"mistral-7b-v0.1": 7_241_732_096,
		"mistral-7b":      7_248_023_552,
		"phi3-mini":       3_821_079_552,
		"gpt2":            124_439_808,
		"gpt2-medium":     354_823_168,
		"gpt2-large":      774_030_080,
		"gpt2-xl":         1_557_611_200,
		"mixtral-8x7b":    46_702_792_704,
		"qwen3-30b-a3b":   30_532_122_624,
		"qwen3-235b-a22b": 235_093_634_560,
		"gpt-oss-120b":    116_829_156_672,
		"gpt-oss-20b":     20_914_757_184,
		"olmoe-1b-7b":     6_919_161_856,
		"deepseek-v2":     235_741_434_880,
		// Less the biases that balance the routers, one for each expert, which no gradient reaches.
		"deepseek-v3": 671_026_419_200 - 58*256,
		"kimi-k2":     1_026_408_232_448 - 60*384,
	} {
		p, err := model.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Config.Count().Total; got != want {
			t.Errorf("%s has %d parameters, published are %d", name, got, want)
		}
	}
}

// What papers and names say, in billions, rounded as they round (and once truncated: 1.75 is called
// 1.7).
func TestCountsAreNearTheirNames(t *testing.T) {
	for name, want := range map[string][2]float64{
		"deepseek-v3": {671, 37}, "deepseek-v2": {236, 21}, "kimi-k2": {1026, 32.6},
		"mixtral-8x7b": {46.7, 12.9}, "qwen3-30b-a3b": {30.5, 3.3}, "qwen3-235b-a22b": {235, 22}, "grok1-314b": {314, 86},
		"gpt3-5b": {5, 5}, "gpt3-20b": {20, 20}, "gpt3-175b": {175, 175}, "megatron-22b": {22, 22},
		"turing-530b": {530, 530}, "megatron-1t": {1008, 1008}, "megatron-gpt-1.7b": {1.75, 1.75},
		"megatron-gpt-7.1b": {7.1, 7.1}, "megatron-gpt-16b": {16, 16}, "megatron-gpt-32b": {31.5, 31.5},
		"megatron-gpt-70b": {70, 70}, "megatron-gpt-119b": {119, 119}, "megatron-gpt-177b": {177, 177},
		"megatron-gpt-314b": {314, 314}, "megatron-gpt-462b": {462, 462}, "mpt-7b": {6.65, 6.65},
		"mpt-30b": {30, 30}, "nanotron-1.34b": {1.342, 1.342}, "nanotron-3.57b": {3.574, 3.574},
		"nanotron-8.86b": {8.858, 8.858}, "nanotron-80b": {79.994, 79.994}, "nemotron-8b": {8.5, 8.5},
		"nemotron4-15b": {15.6, 15.6}, "nemotron4-340b": {341, 341},
	} {
		p, err := model.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		n := p.Config.Count()
		for i, got := range []float64{float64(n.Total) / 1e9, float64(n.Active) / 1e9} {
			if math.Abs(got/want[i]-1) > 0.03 {
				t.Errorf("%s: %.2f billion parameters, expected %v (%d)", name, got, want[i], i)
			}
		}
	}
}

func TestFind(t *testing.T) {
	for typed, want := range map[string]string{
		"llama3.1-8b": "llama3.1-8b", "Llama-3.1-8B": "llama3.1-8b",
		"meta-llama/Llama-3.1-8B": "llama3.1-8b", "Qwen/Qwen3-0.6B-Base": "qwen3-0.6b",
		"qwen3_8b": "qwen3-8b", "gpt2 xl": "gpt2-xl",
	} {
		p, err := model.Find(typed)
		if err != nil || p.Name != want {
			t.Errorf("%q finds %v, %v", typed, p, err)
		}
	}
	_, err := model.Find("lama3.1-8b")
	if e := diag.From(err); e.Code != diag.BadInput || !strings.Contains(e.Fix, "llama3.1-8b") {
		t.Errorf("a misspelled name: %v, %s", err, e.Fix)
	}
}

// Every name finds its own preset, and every preset that has a configuration has a graph, or says
// why not.
func TestPresetsAreWhole(t *testing.T) {
	for _, p := range model.Presets() {
		for _, name := range append([]string{p.Name}, p.Aliases...) {
			if got, err := model.Find(name); err != nil || got.Name != p.Name {
				t.Errorf("%q finds %v, %v", name, got, err)
			}
		}
		if p.Config == nil {
			if p.Note == "" {
				t.Errorf("%s has neither sizes nor a reason", p.Name)
			}
			continue
		}
		if err := p.Config.Check(); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		_, err := p.Config.Graph(model.Shape{Batch: 1, Seq: 1024, Elem: dtype.BF16})
		switch {
		case err != nil && diag.From(err).Code != diag.NotSupported:
			t.Errorf("%s: %v", p.Name, err)
		case err != nil:
			t.Logf("%s: %v", p.Name, err)
		}
	}
}

// Six operations for each parameter of a linear layer are what a step takes (Kaplan et al., 2020);
// attention adds 12·layers·hidden·seq over the whole square.
func TestFlops(t *testing.T) {
	p, err := model.Find("llama3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	c, n := p.Config, p.Config.Count()
	norms := (2*c.Layers + 1) * c.Hidden
	f := c.Forward(8192).Training()
	if want := 6 * float64(n.Total-n.Embed-norms); f.Linear != want {
		t.Errorf("linear layers take %v, want %v", f.Linear, want)
	}
	if want := 12 * float64(c.Layers*c.Hidden*8192); f.Square != want {
		t.Errorf("attention takes %v, want %v", f.Square, want)
	}
	if want := f.Square * 8193 / (2 * 8192); math.Abs(f.Attention-want) > 1 {
		t.Errorf("attention under its mask takes %v, want %v", f.Attention, want)
	}
}

// Counts and work are counted apart; they agree, but for norms and biases, on two operations for
// each parameter that a token is multiplied by.
func TestFlopsAgreeWithCounts(t *testing.T) {
	for _, p := range model.Presets() {
		c := p.Config
		if c == nil {
			continue
		}
		n := c.Count()
		used := n.Active - n.Embed
		if n.Head == 0 { // the table of tokens is the output layer too
			used += c.Vocab * c.Hidden
		}
		if r := c.Forward(1).Linear / 2 / float64(used); r > 1 || r < 0.998 {
			t.Errorf("%s: linear layers take %.4f times two operations for each parameter", p.Name, r)
		}
	}
}

// With a window, later queries see no more than it.
func TestFlopsOfWindows(t *testing.T) {
	c := model.Config{Layers: 2, Hidden: 4, Heads: 1, HeadDim: 1, Window: 3, Windowed: []bool{true, false}}
	// Five queries see 1+2+3+3+3 keys in one layer and 1+2+3+4+5 in the other, four operations each.
	if got, want := c.Forward(5).Attention, 4*(12+15)/5.0; math.Abs(got-want) > 1e-9 {
		t.Errorf("attention takes %v, want %v", got, want)
	}
}
