package model

import (
	"encoding/json"
	"slices"
)

// mixtral is llama with experts in all layers, and windows in all or none.
func (r *reader) mixtral() {
	r.gated()
	r.shared()
	r.c.Norm.Eps = get(r, 1e-5, "rms_norm_eps")
	r.rope(1e6)
	r.window = find[int64](r, "sliding_window")
	r.windows(func(int64) bool { return r.window != nil })
	r.experts(2, 0.001)
	r.c.MoE.MLP, r.c.MoE.Normalize = r.c.MLP, true
}

// experts reads what all families with experts say, with the family's own defaults. Noise that a
// router is trained with, as dropout, is not read.
func (r *reader) experts(topK int64, auxLoss float64) {
	r.c.MoE = &MoE{Experts: r.need("num_local_experts", "num_experts", "n_routed_experts"),
		TopK:    get(r, topK, "num_experts_per_tok", "experts_per_token"),
		AuxLoss: get(r, auxLoss, "router_aux_loss_coef"), Score: softmax, Scale: 1}
}

// qwen3MoE is qwen3 with experts; windows are in all layers or none.
func (r *reader) qwen3MoE() {
	r.gated()
	r.biases()
	r.c.QKNorm = true
	r.shared()
	r.rope(10000)
	if get(r, false, "use_sliding_window") {
		r.window = unlessNull[int64](r, 4096, "sliding_window")
	}
	r.windows(func(int64) bool { return r.window != nil })
	r.experts(8, 0.001)
	r.c.MoE.MLP = r.need("moe_intermediate_size")
	r.c.MoE.Normalize = get(r, false, "norm_topk_prob")
	r.dense()
}

// dense counts the leading layers without experts, which must be all of that kind.
func (r *reader) dense() {
	every := get(r, int64(1), "decoder_sparse_step")
	list := get[[]int64](r, nil, "mlp_only_layers")
	if every < 1 {
		r.fail("decoder_sparse_step", "decoder_sparse_step is %d", every)
		return
	}
	m := r.c.MoE
	for i := range r.c.Layers {
		switch sparse := (i+1)%every == 0 && !slices.Contains(list, i); {
		case !sparse && i == m.Dense:
			m.Dense++
		case !sparse:
			r.fail("mlp_only_layers", "layer %d has no experts, and layers before it have", i)
		}
	}
}

// olmoe is llama with experts, and norms over all queries and all keys.
func (r *reader) olmoe() {
	c := r.c
	r.gated()
	r.biases()
	c.Norm.Eps = get(r, 1e-5, "rms_norm_eps")
	c.QKNorm, c.WideQKNorm = true, true
	c.ClipQKV = get(r, 0.0, "clip_qkv")
	if c.HeadDim*c.Heads != c.Hidden { // the norms have these sizes in transformers
		r.fail("head_dim", "%d heads of %d are not a hidden size of %d", c.Heads, c.HeadDim, c.Hidden)
	}
	r.rope(10000)
	r.experts(8, 0.01)
	c.MoE.MLP, c.MoE.Normalize = c.MLP, get(r, false, "norm_topk_prob")
}

// gptOSS has sinks, windows in every other layer, biases everywhere, and a gate with bounds.
func (r *reader) gptOSS() {
	c := r.c
	r.gated()
	r.heads(64)
	r.shared()
	c.QKVBias = get(r, true, "attention_bias")
	c.OutBias = c.QKVBias
	c.Norm.Eps = get(r, 1e-5, "rms_norm_eps")
	if !set(r.keys["rope_scaling"]) && !set(r.keys["rope_parameters"]) { // transformers' own default
		r.keys["rope_scaling"] = json.RawMessage(`{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
			"beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}`)
	}
	r.rope(150000)
	r.window = unlessNull[int64](r, 128, "sliding_window")
	r.windows(func(i int64) bool { return i%2 == 0 })
	r.experts(4, 0.001)
	m := c.MoE
	m.MLP, m.Bias, m.Normalize, m.OverChosen = c.MLP, true, true, true
	c.Sinks = true
	m.Limit, m.Alpha = get(r, 7.0, "swiglu_limit"), get(r, 1.702, "swiglu_alpha")
}

// deepseekV3 has latent attention, and experts behind some dense layers.
func (r *reader) deepseekV3() {
	r.gated()
	r.latent()
	if get(r, int64(3), "first_k_dense_replace") < r.c.Layers {
		r.deepseekExperts()
	}
}

// deepseekExperts reads the experts of DeepSeek-V3.
func (r *reader) deepseekExperts() {
	for key, only := range map[string]string{"scoring_func": sigmoid, "topk_method": "noaux_tc"} {
		if have := get(r, only, key); have != only {
			r.fail(key, "experts that are chosen by %q are not supported; by %q they are", have, only)
		}
	}
	if get(r, int64(1), "moe_layer_freq") != 1 {
		r.fail("moe_layer_freq", "dense layers between layers with experts are not supported")
	}
	r.experts(8, 0)
	m := r.c.MoE
	m.AuxLoss = 0 // transformers has none for it
	m.MLP = r.need("moe_intermediate_size")
	bounded := func(n int64) int64 { return min(max(n, -1), maxSize+1) } // no product overflows
	m.Shared = bounded(m.MLP) * bounded(get(r, int64(1), "n_shared_experts"))
	m.Dense = get(r, int64(3), "first_k_dense_replace")
	m.Score, m.Normalize, m.Correction = sigmoid, get(r, true, "norm_topk_prob"), true
	m.Scale = get(r, 2.5, "routed_scaling_factor")
	m.Groups = get(r, int64(8), "n_group")
	m.TopGroups = get(r, int64(4), "topk_group")
	if m.Groups < 2 { // all compete
		m.Groups, m.TopGroups = 0, 0
	}
}

// writeExperts writes a family's keys of experts.
func (c *Config) writeExperts(m map[string]any) {
	e := c.MoE
	if e == nil {
		return
	}
	m["num_experts_per_tok"], m["router_aux_loss_coef"] = e.TopK, number(e.AuxLoss)
	switch c.Arch {
	case "mixtral":
		m["num_local_experts"], m["router_jitter_noise"] = e.Experts, number(0)
	case "qwen3_moe":
		m["num_experts"], m["moe_intermediate_size"] = e.Experts, e.MLP
		m["norm_topk_prob"], m["decoder_sparse_step"] = e.Normalize, 1
		dense := make([]int64, e.Dense)
		for i := range dense {
			dense[i] = int64(i)
		}
		m["mlp_only_layers"] = dense
	case "olmoe":
		delete(m, "head_dim")
		m["num_experts"], m["norm_topk_prob"] = e.Experts, e.Normalize
		m["clip_qkv"] = orNull(c.ClipQKV)
	case "gpt_oss":
		m["num_local_experts"] = e.Experts
		m["swiglu_limit"], m["swiglu_alpha"] = number(e.Limit), number(e.Alpha)
	case "deepseek_v3":
		delete(m, "router_aux_loss_coef")
		m["n_routed_experts"], m["moe_intermediate_size"] = e.Experts, e.MLP
		m["n_shared_experts"], m["first_k_dense_replace"] = e.Shared/e.MLP, e.Dense
		m["norm_topk_prob"], m["routed_scaling_factor"] = e.Normalize, number(e.Scale)
		m["n_group"], m["topk_group"] = max(e.Groups, 1), max(e.TopGroups, 1)
		m["scoring_func"], m["topk_method"], m["moe_layer_freq"] = sigmoid, "noaux_tc", 1
		m["num_nextn_predict_layers"] = 0
	}
}
