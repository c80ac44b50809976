package model

import "strings"

// linearWords are what modules of PyTorch call the linear layers of a block, by the words of our
// own: the last one or two parts of a weight's name. A weight that holds several layers goes by the
// first of them.
var linearWords = func() map[string]string {
	words := map[string]string{}
	for word, names := range map[string]string{
		"q": "q_proj query wq q_lin qkv qkv_proj c_attn query_key_value Wqkv in_proj",
		"k": "k_proj key wk k_lin", "v": "v_proj value wv v_lin",
		"o": "o_proj out_proj wo out_lin attn.out attn.proj attn.c_proj attention.dense " +
			"attention.out attention.proj attn.dense",
		"q_down": "q_a_proj", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj",
		"gate":        "gate_proj gate_up_proj",
		"up":          "up_proj c_fc fc1 lin1 mlp.0 ffn.0 mlp.fc_in dense_h_to_4h intermediate.dense",
		"down":        "down_proj fc2 lin2 mlp.2 ffn.2 mlp.3 mlp.c_proj mlp.fc_out dense_4h_to_h",
		"expert_gate": "experts.gate_proj experts.gate_up_proj", "expert_up": "experts.up_proj",
		"expert_down": "experts.down_proj",
		"shared_gate": "shared_experts.gate_proj shared_experts.gate_up_proj " +
			"shared_expert.gate_proj",
		"shared_up":   "shared_experts.up_proj shared_expert.up_proj",
		"shared_down": "shared_experts.down_proj shared_expert.down_proj",
	} {
		for name := range strings.FieldsSeq(names) {
			words[name] = word
		}
	}
	return words
}()

// LinearName is the word by which policies know a linear layer, from its weight's name in a graph
// or checkpoint (block.q, block.q.7, model.layers.mlp.up_proj), or the word itself. What modules of
// PyTorch call a layer is translated, if it is known. A trailing number is the layer's index in a
// stack, or a place in a list of modules.
func LinearName(weight string) string {
	for {
		at := strings.LastIndexByte(weight, '.')
		word := weight[at+1:]
		two := word
		if at >= 0 {
			two = weight[strings.LastIndexByte(weight[:at], '.')+1:]
		}
		if known := linearWords[two]; known != "" {
			return known
		}
		if known := linearWords[word]; known != "" {
			return known
		}
		if at < 0 || strings.Trim(word, "0123456789") != "" {
			return word
		}
		weight = weight[:at]
	}
}
