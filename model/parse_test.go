package model_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/model"
	"github.com/google/go-cmp/cmp"
)

// published are the keys of published files that have a bearing, and some that have none, by the
// preset that each is.
var published = map[string]string{
	"llama3.1-8b": `{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
		"bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
		"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
		"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
		"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
		"high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
		"rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256}`,
	"llama2-7b": `{"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
		"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
		"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": null,
		"tie_word_embeddings": false, "vocab_size": 32000}`,
	"qwen2.5-7b": `{"model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
		"hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
		"max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
		"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
		"use_sliding_window": false, "vocab_size": 152064}`,
	"qwen3-0.6b": `{"model_type": "qwen3", "attention_bias": false, "bos_token_id": 151643, "eos_token_id": 151643,
		"head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
		"max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 16,
		"num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
		"rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
		"vocab_size": 151936}`,
	"mistral-7b-v0.1": `{"model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
		"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
		"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
		"sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000}`,
	"gemma2-2b": `{"model_type": "gemma2", "attention_bias": false, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
		"cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
		"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
		"intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
		"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
		"sliding_window": 4096, "vocab_size": 256000}`,
	"gemma3-1b": `{"model_type": "gemma3_text", "attention_bias": false, "attn_logit_softcapping": null,
		"bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": null, "head_dim": 256,
		"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
		"max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
		"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
		"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144}`,
	"phi3-mini": `{"model_type": "phi3", "attention_bias": false, "bos_token_id": 1, "eos_token_id": 32000,
		"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
		"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
		"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
		"sliding_window": 2047, "tie_word_embeddings": false, "vocab_size": 32064}`,
	"mixtral-8x7b": `{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
		"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
		"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
		"num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
		"output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
		"router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32000}`,
	"qwen3-30b-a3b": `{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
		"decoder_sparse_step": 1, "eos_token_id": 151643, "head_dim": 128, "hidden_act": "silu",
		"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 32768, "max_window_layers": 28,
		"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
		"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
		"num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
		"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
		"tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936}`,
	"olmoe-1b-7b": `{"architectures": ["OlmoeForCausalLM"], "attention_bias": false, "clip_qkv": null,
		"eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
		"max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false,
		"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
		"num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05,
		"rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
		"tie_word_embeddings": false, "vocab_size": 50304}`,
	"gpt-oss-20b": `{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "eos_token_id": 200002,
		"experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
		"initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
		"model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
		"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
		"pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["lm_head"],
		"quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0,
		"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
		"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
		"tie_word_embeddings": false, "vocab_size": 201088}`,
	"deepseek-v3": `{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "bos_token_id": 0,
		"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
		"intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
		"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
		"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
		"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
		"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
		"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
		"weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
		"beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
		"original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
		"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
		"topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280}`,
	"gpt2": `{"model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256,
		"embd_pdrop": 0.1, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
		"n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257}`,
}

func TestPresetsAreThePublishedFiles(t *testing.T) {
	for name, text := range published {
		got, err := model.Parse([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want, err := model.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want.Config, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// with changes keys of a published file; a nil value takes the key out.
func with(t *testing.T, name string, keys map[string]any) []byte {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal([]byte(published[name]), &m); err != nil {
		t.Fatal(err)
	}
	maps.Copy(m, keys)
	maps.DeleteFunc(m, func(_ string, v any) bool { return v == nil })
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// What would change the numbers and is not understood is an error that names the key.
func TestParseIsStrict(t *testing.T) {
	type keys = map[string]any
	for _, c := range []struct {
		file string
		keys keys
		says string
	}{
		{"llama3.1-8b", keys{"model_type": "lama"}, "model_type"},
		{"llama3.1-8b", keys{"model_type": "mamba"}, "model_type"},
		{"llama3.1-8b", keys{"model_type": nil}, "model_type"},
		{"llama3.1-8b", keys{"architectures": []string{"LlamaForSequenceClassification"}}, "architectures"},
		{"llama3.1-8b", keys{"architectures": []string{""}}, "architectures"},
		{"llama3.1-8b", keys{"hidden_act": "gelu"}, "hidden_act"},
		{"llama3.1-8b", keys{"vocab_size": nil}, "vocab_size"},
		{"llama3.1-8b", keys{"hidden_size": 4097}, "num_attention_heads"},
		{"llama3.1-8b", keys{"num_attention_heads": 0}, "heads"},
		{"llama3.1-8b", keys{"num_key_value_heads": 5}, "5 KV heads"},
		{"llama3.1-8b", keys{"num_hidden_layers": -1}, "layers"},
		{"llama3.1-8b", keys{"num_hidden_layers": 1 << 40}, "layers"},
		{"llama3.1-8b", keys{"head_dim": 7}, "even number"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"rope_type": "yarn", "factor": 4, "beta_fast": 0.5}}, "beta_fast"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"rope_type": "yarn", "factor": 4, "attention_factor": -1}}, "attention_factor"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"type": "dynamic", "factor": 4}}, "rope_scaling.rope_type"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"type": "linear"}}, "rope_scaling.factor"},
		{"llama3.1-8b", keys{"rope_scaling": keys{"type": "llama3", "factor": 4}}, "low_freq_factor"},
		{"llama3.1-8b", keys{"rope_scaling": "linear"}, "rope_scaling"},
		{"llama3.1-8b", keys{"rope_parameters": keys{"rope_type": "yarn"}}, "rope_parameters.factor"},
		{"llama3.1-8b", keys{"quantization_config": keys{"bits": 4}}, "quantization_config"},
		{"llama3.1-8b", keys{"quantization_config": keys{"quant_method": "fp8"}}, "quantization_config"},
		{"mixtral-8x7b", keys{"num_local_experts": nil}, "num_local_experts"},
		{"mixtral-8x7b", keys{"num_experts_per_tok": 9}, "9 of 8 experts"},
		{"mixtral-8x7b", keys{"num_local_experts": 1 << 14}, "16384 experts"},
		{"mixtral-8x7b", keys{"router_aux_loss_coef": -1}, "below 0"},
		{"qwen3-30b-a3b", keys{"decoder_sparse_step": 2}, "mlp_only_layers"},
		{"qwen3-30b-a3b", keys{"decoder_sparse_step": 0}, "decoder_sparse_step"},
		{"qwen3-30b-a3b", keys{"mlp_only_layers": []int{0, 1, 7}}, "layer 7 has no experts"},
		{"qwen3-30b-a3b", keys{"mlp_only_layers": []int{0, 1}, "num_hidden_layers": 2}, "2 of 2 layers"},
		{"qwen3-30b-a3b", keys{"moe_intermediate_size": 0}, "MLP of 0"},
		{"olmoe-1b-7b", keys{"head_dim": 64}, "head_dim"},
		{"olmoe-1b-7b", keys{"clip_qkv": -8}, "bounded by -8"},
		{"deepseek-v3", keys{"scoring_func": "softmax"}, "scoring_func"},
		{"deepseek-v3", keys{"topk_method": "greedy"}, "topk_method"},
		{"deepseek-v3", keys{"moe_layer_freq": 2}, "moe_layer_freq"},
		{"deepseek-v3", keys{"n_group": 7}, "7 groups"},
		{"deepseek-v3", keys{"topk_group": 9}, "9 of 8 groups"},
		{"deepseek-v3", keys{"routed_scaling_factor": 0}, "multiplied by 0"},
		{"gpt-oss-20b", keys{"swiglu_limit": -1}, "below 0"},
		{"phi3-mini", keys{"rope_scaling": keys{"type": "longrope", "short_factor": []int{1}}}, "longrope"},
		{"qwen2.5-7b", keys{"layer_types": []string{"full_attention"}}, "layer_types"},
		{"qwen2.5-7b", keys{"layer_types": slices.Repeat([]string{"linear_attention"}, 28)}, "layer_types"},
		{"mistral-7b-v0.1", keys{"num_key_value_heads": nil}, "num_key_value_heads"},
		{"mistral-7b-v0.1", keys{"sliding_window": 0}, "window of 0"},
		{"gemma2-2b", keys{"use_bidirectional_attention": true}, "use_bidirectional_attention"},
		{"gemma2-2b", keys{"sliding_window": nil}, "sliding_window"},
		{"gemma2-2b", keys{"query_pre_attn_scalar": -1}, "scores"},
		{"gemma3-1b", keys{"sliding_window_pattern": 0}, "sliding_window_pattern"},
		{"gpt2", keys{"scale_attn_by_inverse_layer_idx": true}, "scale_attn_by_inverse_layer_idx"},
		{"gpt2", keys{"add_cross_attention": true}, "add_cross_attention"},
		{"gpt2", keys{"n_layer": "12"}, "n_layer"},
	} {
		_, err := model.Parse(with(t, c.file, c.keys))
		if err == nil {
			t.Errorf("%s with %v is taken", c.file, c.keys)
			continue
		}
		e := diag.From(err)
		if text := e.What + e.Where + e.Cause; e.Code != diag.BadInput || !strings.Contains(text, c.says) {
			t.Errorf("%s with %v: %v does not say %q", c.file, c.keys, err, c.says)
		}
	}
}

// Where a key is missing, what transformers assumes holds; null is not a missing key.
func TestParseDefaults(t *testing.T) {
	parse := func(file string, keys map[string]any) *model.Config {
		c, err := model.Parse(with(t, file, keys))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if c := parse("mistral-7b-v0.1", map[string]any{"sliding_window": nil}); c.Window != 4096 {
		t.Errorf("without sliding_window, Mistral's is %d", c.Window)
	}
	null := json.RawMessage("null")
	if c := parse("mistral-7b-v0.1", map[string]any{"sliding_window": null}); c.Windowed != nil {
		t.Errorf("with sliding_window null, Mistral's is %d", c.Window)
	}
	if c := parse("gemma2-2b", map[string]any{"attn_logit_softcapping": nil}); c.AttnCap != 50 {
		t.Errorf("without attn_logit_softcapping, Gemma's is %v", c.AttnCap)
	}
	if c := parse("gemma2-2b", map[string]any{"attn_logit_softcapping": null}); c.AttnCap != 0 {
		t.Errorf("with attn_logit_softcapping null, Gemma's is %v", c.AttnCap)
	}
	if c := parse("llama2-7b", map[string]any{"num_key_value_heads": nil}); c.KVHeads != 32 {
		t.Errorf("without num_key_value_heads, Llama has %d", c.KVHeads)
	}
}

// What Write writes, Parse reads: for every preset and every fixture.
func TestWriteComesBack(t *testing.T) {
	configs := map[string]*model.Config{}
	for _, p := range model.Presets() {
		if p.Config != nil && model.Known(p.Config.Arch) {
			configs[p.Name] = p.Config
		}
	}
	for _, dir := range fixtures(t) {
		configs[dir] = parseFile(t, filepath.Join(dir, "config.json"))
	}
	for name, c := range configs {
		text, err := c.Write()
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
			continue
		}
		back, err := model.Parse(text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if d := cmp.Diff(c, back); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// The files that are written are committed, so that testdata/make.py can ask transformers what it
// makes of them.
func TestWrittenFiles(t *testing.T) {
	for _, dir := range fixtures(t) {
		text, err := parseFile(t, filepath.Join(dir, "config.json")).Write()
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, filepath.Join(dir, "written.json"), text)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range published {
		f.Add([]byte(text))
	}
	for _, dir := range []string{"gemma3", "phi3_partial", "qwen2", "nemotron"} {
		text, err := os.ReadFile(filepath.Join("testdata", dir, "config.json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := model.Parse(text)
		if err != nil {
			if diag.From(err).Code != diag.BadInput {
				t.Errorf("%v", err)
			}
			return
		}
		if n := c.Count(); n.Total <= 0 || n.Total < n.Embed+n.Head {
			t.Errorf("counts %+v", n)
		}
		if c.Layers > 64 {
			return
		}
		if _, err := c.Graph(model.Shape{Batch: 1, Seq: 1, Elem: dtype.BF16}); err != nil {
			t.Errorf("%v", err)
		}
	})
}

// A key that stands twice is refused, wherever it stands: encoding/json takes the last one in
// silence.
func TestKeysTwice(t *testing.T) {
	for text, key := range map[string]string{
		`{"model_type": "llama", "vocab_size": 8, "vocab_size": 16}`:                           "vocab_size",
		`{"model_type": "llama", "rope_scaling": {"factor": 1, "a": [{"b": 1}], "factor": 2}}`: "factor",
	} {
		if _, err := model.Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("the key %q stands twice", key)) {
			t.Errorf("%s: %v", text, err)
		}
	}
	_, err := model.Parse([]byte(`{"a": {"b": 1}, "c": {"b": [{"b": 2}, {"b": 3}]}, "b": "a"}`))
	if err == nil || strings.Contains(err.Error(), "twice") {
		t.Errorf("keys of different objects: %v", err)
	}
}

// A type that is one letter from another is another model, and it must not be suggested: Mixtral has
// its own parser since, and Grok is known by its sizes only.
func TestMixtralIsNotMistral(t *testing.T) {
	c, err := model.Parse([]byte(`{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 64,
		"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
		"intermediate_size": 128, "max_position_embeddings": 64, "num_local_experts": 4}`))
	if err != nil || c.Arch != "mixtral" || c.MoE == nil {
		t.Errorf("%+v, %v", c, err)
	}
	_, err = model.Parse([]byte(`{"model_type": "grok", "vocab_size": 32000, "hidden_size": 64,
		"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}`))
	if e := diag.From(err); e == nil || !strings.Contains(e.Fix, "deepwell plan grok") {
		t.Errorf("%v", err)
	}
}
