package replay

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/step"
)

// gpu is what cases are compiled for: the architecture is sm_100.
const gpu = "b200"

// allExperts is the model whose tokens all see every expert.
const allExperts = "mixtral 4 of 4"

// A modelRow is a small model. Its config has a %d for the number of layers.
type modelRow struct {
	name, config string
	// formats and plans, by name, are those that the model is replayed in; nil are all. Of a model
	// with plans, gradients alone are replayed, and one of them belongs to CI's selection.
	formats, plans []string
	documents      int64 // that a sequence may have; 0 is what one call of attention takes
	grouped        bool  // GEMMs of experts are, although so small ones do not pay
}

// models are small siblings of Llama and Qwen3. No two sizes that meet in a program are equal, so
// that a transposed or swapped operand does not fit: width 256, sequences of 128, MLPs of 640 and
// 384; queries of Qwen3 are wider than its hidden state, and normalized. GPT-2 adds constants of
// bf16 in its GELU, biases, of which the keys' has no gradient, and learned positions; Gemma 2 a
// scaled embedding, soft caps and windows; Qwen3 with windows has a layer without and one with;
// DeepSeek latent attention, with heads of 96 and values of 48. Of models with experts, Mixtral has
// a softmax and a loss of its router, DeepSeek groups of sigmoids, a shared expert and a layer
// without experts. Where all of 4 experts see every token, no rounding chooses another one.
var models = []modelRow{
	{name: "llama", config: `{"model_type": "llama", "vocab_size": 512, "hidden_size": 256,
"intermediate_size": 640, "num_hidden_layers": %d, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`},
	{name: "qwen3", config: `{"model_type": "qwen3", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": %d, "num_attention_heads": 8,
"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
"rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": true}`},
	{name: "gpt2", config: `{"model_type": "gpt2", "vocab_size": 448, "n_embd": 256,
"n_inner": 640, "n_layer": %d, "n_head": 4, "n_positions": 512, "layer_norm_epsilon": 1e-5,
"activation_function": "gelu_new", "tie_word_embeddings": true}`,
		formats: []string{"bf16"}, plans: []string{"one", "fsdp8", "tp2 fsdp4", "cp4 gather fsdp2",
			"cp4 ring balanced fsdp2"}, documents: 16},
	{name: "gemma2", config: `{"model_type": "gemma2", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": %d, "num_attention_heads": 8,
"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
"query_pre_attn_scalar": 48, "sliding_window": 32, "attn_logit_softcapping": 50.0,
"final_logit_softcapping": 30.0, "rope_theta": 10000.0,
"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true}`,
		formats: []string{"bf16"}, plans: []string{"one", "fsdp8"}},
	{name: "qwen3 windows", config: `{"model_type": "qwen3", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": %d, "num_attention_heads": 8,
"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
"use_sliding_window": true, "sliding_window": 12, "max_window_layers": 1,
"rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": true}`,
		formats: []string{"bf16"}, plans: append([]string{"cp2 gather balanced fsdp4"}, exchangePlans...)},
	{name: "deepseek", config: `{"model_type": "deepseek_v3", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 640, "num_hidden_layers": %[1]d, "first_k_dense_replace": %[1]d,
"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 160,
"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 48, "max_position_embeddings": 512,
"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 8.0,
"beta_fast": 32, "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 1.0,
"original_max_position_embeddings": 64}, "hidden_act": "silu", "tie_word_embeddings": false}`,
		plans: append([]string{"one", "fsdp8", "tp2 fsdp4"}, contextPlans...)},
	{name: "mixtral", config: `{"model_type": "mixtral", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": %d, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "sliding_window": null,
"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}`,
		plans: []string{"one", expertPlan}},
	{name: allExperts, config: `{"model_type": "mixtral", "vocab_size": 448, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": %d, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "sliding_window": null,
"num_local_experts": 4, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.02}`,
		formats: []string{"bf16"}, plans: []string{"one", expertPlan}},
	{name: "deepseek experts", config: `{"model_type": "deepseek_v3", "vocab_size": 448,
"hidden_size": 256, "intermediate_size": 640, "moe_intermediate_size": 192,
"num_hidden_layers": %d, "first_k_dense_replace": 1, "n_routed_experts": 16,
"num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true,
"routed_scaling_factor": 2.5, "num_attention_heads": 8, "num_key_value_heads": 8,
"q_lora_rank": 192, "kv_lora_rank": 160, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
"v_head_dim": 48, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
"hidden_act": "silu", "tie_word_embeddings": false}`,
		plans: []string{expertPlan}},
}

// formats are the precisions of linear layers.
var formats = []string{"bf16", "mxfp8", "nvfp4"}

// A planRow is one way to use one or eight devices.
type planRow struct {
	name   string
	layers int // 2, or one for each stage
	apply  func(p *plan.Plan)
}

// planRows are one device, and what eight are used for.
func planRows() []planRow {
	fsdp := func(n int64) plan.FSDP { return plan.FSDP{Size: n, Zero: 3, Gather: plan.GatherLayer} }
	rows := []planRow{
		{"one", 2, func(*plan.Plan) {}},
		{"fsdp8", 2, func(p *plan.Plan) { p.FSDP = fsdp(8) }},
		// Gathers are a layer ahead, and leave a loop over 2 layers one iteration: no stride is seen.
		{"fsdp8 of 3 layers", 3, func(p *plan.Plan) { p.FSDP = fsdp(8) }},
		{"tp2 fsdp4", 2, func(p *plan.Plan) {
			p.TP, p.FSDP = plan.TP{Size: 2, Sequence: true}, fsdp(4)
		}},
		{"cp4 ring fsdp2", 2, func(p *plan.Plan) { // in a ring of 2 both directions are the same
			p.CP, p.FSDP = plan.CP{Size: 4, Kind: "ring"}, fsdp(2)
		}},
		{"cp2 a2a fsdp4", 2, func(p *plan.Plan) { // whole sequences, so that documents are masked
			p.CP, p.FSDP = plan.CP{Size: 2, Kind: "a2a"}, fsdp(4)
		}},
		{"cp4 a2a2 ring2 fsdp2", 2, func(p *plan.Plan) {
			p.CP = plan.CP{Size: 4, Kind: "a2a+ring", Inner: 2, Balance: true}
			p.FSDP = fsdp(2)
		}},
		{"cp2 gather balanced fsdp4", 2, func(p *plan.Plan) {
			p.CP, p.FSDP = plan.CP{Size: 2, Kind: "gather", Balance: true}, fsdp(4)
		}},
		{"cp4 gather fsdp2", 2, func(p *plan.Plan) {
			p.CP, p.FSDP = plan.CP{Size: 4, Kind: "gather"}, fsdp(2)
		}},
		{"cp4 ring balanced fsdp2", 2, func(p *plan.Plan) {
			p.CP, p.FSDP = plan.CP{Size: 4, Kind: "ring", Balance: true}, fsdp(2)
		}},
		{expertPlan, 3, func(p *plan.Plan) {
			p.EP, p.FSDP, p.Recompute = 2, fsdp(4), []ir.Tag{ir.Router, ir.Experts}
		}},
		{"fsdp8 offload", 2, func(p *plan.Plan) {
			p.FSDP, p.Offload = fsdp(8), []string{plan.Activations, plan.OptimizerState}
		}},
	}
	for _, name := range schedule.Names() {
		rows = append(rows, planRow{"pp2 " + name + " fsdp4", max(2, 2*schedule.MinVirtual(name)),
			func(p *plan.Plan) { p.PP, p.FSDP = plan.PP{Size: 2, Schedule: name}, fsdp(4) }})
	}
	return rows
}

// listedPlans are for models that list their plans, and not for those that are replayed in all.
var listedPlans = append([]string{expertPlan}, contextPlans...)

// expertPlan is for models with experts alone.
const expertPlan = "ep2 fsdp4"

// contextPlans are context parallelism beside what all models are replayed in.
var contextPlans = append([]string{"cp4 gather fsdp2", "cp4 ring balanced fsdp2"}, exchangePlans...)

// exchangePlans exchange heads. GPT-2 is not among their models: its keys' biases have gradients
// that are zero but for rounding, and an all-to-all rounds each token's.
var exchangePlans = []string{"cp2 a2a fsdp4", "cp4 a2a2 ring2 fsdp2"}

// A testCase is one program of a model, a precision and a plan.
type testCase struct {
	model, format, plan string
	pair                Pair
}

func (c testCase) String() string {
	return fmt.Sprintf("%s %s, %s, %s", c.model, c.format, c.plan, c.pair.GPU.Name)
}

// has reports whether the model is replayed in a format and a plan.
func (m modelRow) has(format, plan string) bool {
	if m.plans == nil && slices.Contains(listedPlans, plan) {
		return false
	}
	listed := func(list []string, one string) bool { return list == nil || slices.Contains(list, one) }
	return listed(m.formats, format) && listed(m.plans, plan)
}

func modelNamed(name string) modelRow {
	return lists.Find(models, func(m modelRow) bool { return m.name == name })
}

// cases builds the programs of one combination.
func cases(m, format string, row planRow) ([]testCase, error) {
	return modelNamed(m).cases(format, row)
}

func (m modelRow) cases(format string, row planRow) ([]testCase, error) {
	c, err := model.Parse(fmt.Appendf(nil, m.config, row.layers))
	if err != nil {
		return nil, err
	}
	p := plan.Default()
	row.apply(p)
	p.Seq, p.Microbatches = max(128, 32*p.CP.Chunks()), 2 // chunks of whole scale blocks
	if p.Size(plan.PipelineAxis) > 1 {
		p.Microbatches = 4
	}
	p.Batch = 2 * p.Microbatches * p.DataParallelSize()
	if m.grouped {
		p.Slots = []float64{4} // two tiles, or four of two devices
	}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	p.Precision, p.Cluster = format, fmt.Sprintf("%dx%s", p.Devices(), gpu)
	pairs, err := Pairs(step.Spec{Model: c, Recipe: step.RecipeOf(p), Plan: p,
		Documents: m.documents, Kernels: kernels.Options{Grouped: m.grouped}})
	if err != nil {
		return nil, fmt.Errorf("%s %s, %s: %w", m.name, format, row.name, err)
	}
	return lists.Map(pairs, func(one Pair) testCase {
		return testCase{m.name, format, row.name, one}
	}), nil
}
