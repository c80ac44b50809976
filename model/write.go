package model

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// Write gives the configuration as a config.json that transformers reads, and that [Parse] reads
// back to the same. Dropout, which Deepwell does not train with, is written as none.
func (c *Config) Write() ([]byte, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	class := archs[c.Arch].class
	if class == "" {
		return nil, diag.New(diag.NotSupported, "a config.json of type %q cannot be written", c.Arch)
	}
	m := map[string]any{"architectures": []string{class}, "model_type": c.Arch,
		"vocab_size": c.Vocab, "tie_word_embeddings": c.Tied, "bos_token_id": nil,
		"eos_token_id": nil, "pad_token_id": nil}
	if c.BOS >= 0 {
		m["bos_token_id"] = c.BOS
	}
	switch len(c.EOS) {
	case 0:
	case 1:
		m["eos_token_id"] = c.EOS[0]
	default:
		m["eos_token_id"] = c.EOS
	}
	if c.Arch == "gpt2" {
		c.writeGPT2(m)
	} else {
		c.writeSizes(m)
		c.writeRope(m)
		c.writeWindows(m)
		c.writeExperts(m)
		c.writeLatent(m)
	}
	text, err := strictjson.Encode(m)
	if err != nil {
		return nil, err
	}
	return text, c.same(text)
}

// same makes sure that what was written says what is meant: not every Config is a model of the
// family it names.
func (c *Config) same(text []byte) error {
	back, err := Parse(text)
	if err == nil && !reflect.DeepEqual(c, back) {
		return bad("no model of type %s has this configuration", c.Arch)
	}
	return err
}

// A number is written with a point: transformers 5 refuses 30 where it wants 30.0.
type number float64

// MarshalJSON writes the shortest form that reads back to the same.
func (n number) MarshalJSON() ([]byte, error) {
	text, err := json.Marshal(float64(n))
	if err == nil && !bytes.ContainsAny(text, ".e") {
		text = append(text, ".0"...)
	}
	return text, err
}

// activationName is one that transformers knows.
func (c *Config) activationName() string {
	switch c.Activation {
	case GELU:
		if c.Arch == "gpt2" {
			return "gelu_new"
		}
		return "gelu_pytorch_tanh"
	case relu2:
		return "relu2"
	}
	return "silu"
}

// writeGPT2 writes GPT-2's own keys, such as n_embd for hidden_size.
func (c *Config) writeGPT2(m map[string]any) {
	m["n_embd"], m["n_layer"], m["n_head"] = c.Hidden, c.Layers, c.Heads
	m["n_positions"], m["n_inner"] = c.Context, c.MLP
	m["activation_function"], m["layer_norm_epsilon"] = c.activationName(), number(c.Norm.Eps)
	m["scale_attn_weights"] = c.AttnScale != 1
	m["attn_pdrop"], m["resid_pdrop"], m["embd_pdrop"] = number(0), number(0), number(0)
}

// writeSizes writes the keys that all families but GPT-2 share.
func (c *Config) writeSizes(m map[string]any) {
	m["hidden_size"], m["intermediate_size"], m["num_hidden_layers"] = c.Hidden, c.MLP, c.Layers
	m["num_attention_heads"], m["num_key_value_heads"], m["head_dim"] = c.Heads, c.KVHeads, c.HeadDim
	m["max_position_embeddings"], m["hidden_act"] = c.Context, c.activationName()
	m["rms_norm_eps"], m["attention_dropout"] = number(c.Norm.Eps), number(0)
	switch c.Arch {
	case "gemma2", "gemma3_text":
		delete(m, "hidden_act")
		m["hidden_activation"] = c.activationName()
		m["query_pre_attn_scalar"] = scalar(c.AttnScale)
		m["attn_logit_softcapping"], m["final_logit_softcapping"] = orNull(c.AttnCap), orNull(c.LogitCap)
	case "nemotron":
		delete(m, "rms_norm_eps")
		m["norm_eps"], m["mlp_bias"] = number(c.Norm.Eps), c.MLPBias
		m["partial_rotary_factor"] = c.partial()
	case "phi3":
		m["partial_rotary_factor"] = c.partial()
		m["original_max_position_embeddings"] = c.Context
		m["resid_pdrop"], m["embd_pdrop"] = number(0), number(0)
	case "llama":
		m["mlp_bias"] = c.MLPBias
	}
	if !slices.Contains([]string{"qwen2", "mistral", "phi3", "mixtral"}, c.Arch) {
		m["attention_bias"] = c.OutBias
	}
}

// scalar is the number whose root divides scores. It is a whole number in every known model, which
// the root of its inverse does not show to the last digit.
func scalar(scale float64) any {
	x := 1 / (scale * scale)
	if whole := math.Round(x); 1/math.Sqrt(whole) == scale {
		return int64(whole)
	}
	return number(x)
}

// partial is the share of a head that rotary embeddings rotate.
func (c *Config) partial() number { return number(c.Rotary) / number(c.HeadDim) }

// orNull writes 0 as null: config.json has no bound then.
func orNull(x float64) any {
	if x == 0 {
		return nil
	}
	return number(x)
}

// writeRope writes angles in the older form, which every version of transformers reads.
func (c *Config) writeRope(m map[string]any) {
	m["rope_theta"], m["rope_scaling"] = number(c.Rope.Theta), nil
	switch r := c.Rope; {
	case r.Fast != 0:
		m["rope_scaling"] = map[string]any{"rope_type": "yarn", "type": "yarn",
			"factor": number(r.Factor), "beta_fast": number(r.Fast), "beta_slow": number(r.Slow),
			"truncate": !r.Exact, "attention_factor": number(r.Magnitude),
			"original_max_position_embeddings": int64(r.Original)}
	case r.Original != 0:
		m["rope_scaling"] = map[string]any{"rope_type": "llama3", "factor": number(r.Factor),
			"low_freq_factor": number(r.Low), "high_freq_factor": number(r.High),
			"original_max_position_embeddings": int64(r.Original)}
	case c.Arch == "gpt_oss" && r.Factor == 0: // which has YaRN where nothing is said
		m["rope_scaling"] = map[string]any{"rope_type": "default"}
	case r.Factor != 0:
		m["rope_scaling"] = map[string]any{"rope_type": "linear", "factor": number(r.Factor)}
	}
	if c.Arch == "gemma3_text" {
		m["rope_local_base_freq"] = number(c.LocalRope.Theta)
	}
}

// writeWindows writes which layers have a sliding window, in the family's own way.
func (c *Config) writeWindows(m map[string]any) {
	var types []string
	some := false
	for i := range c.Layers {
		if some = some || c.windowed(i); c.windowed(i) {
			types = append(types, "sliding_attention")
		} else {
			types = append(types, "full_attention")
		}
	}
	switch c.Arch {
	case "mistral", "phi3", "mixtral":
		m["sliding_window"] = nil
		if some {
			m["sliding_window"] = c.Window
		}
	case "qwen2", "qwen3":
		m["use_sliding_window"] = some
		if some {
			m["layer_types"], m["sliding_window"] = types, c.Window
		}
	case "qwen3_moe":
		if m["use_sliding_window"] = some; some {
			m["sliding_window"] = c.Window
		}
	case "gemma2", "gemma3_text", "gpt_oss":
		m["layer_types"], m["sliding_window"] = types, max(c.Window, 1)
	}
}
