package spmd_test

import (
	"flag"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

var planFile = flag.String("plans.file", "", "compile the plan in this file for its cluster, too")

// The programs of a plan, compiled for Blackwell, send what their graphs say: the same kinds,
// groups, tensors and bytes. XLA:GPU may join the arguments of sums, so those are held to their
// bytes alone. Attention is cuDNN's in every kind of context parallelism, with a window and
// without.
func TestCensusOnBlackwell(t *testing.T) {
	slowtest.Only(t)
	c := enginetest.GPUCompiler(t, false)
	small := *shapes()["llama"]
	small.Hidden, small.Heads, small.KVHeads, small.HeadDim, small.MLP = 256, 8, 2, 64, 512
	small.Vocab, small.Rotary, small.Layers = 1001, 64, 4
	small.Window, small.Windowed, small.LocalRope = 65, []bool{true, false, true, false}, small.Rope
	p := plan.Default()
	p.Seq, p.Batch, p.Cluster, p.Recompute = 512, 8, "16xb200", []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
	p.TP, p.DP = plan.TP{Size: 2, Sequence: true}, 2
	p.CP = plan.CP{Size: 2, Kind: "gather", Balance: true}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	t.Run("small", func(t *testing.T) { censusOnBlackwell(t, c, &small, p) })
	ring := *p
	ring.CP.Kind, ring.DP, ring.Cluster, ring.Batch = "ring", 1, "8xb200", 4
	t.Run("ring", func(t *testing.T) { censusOnBlackwell(t, c, &small, &ring) })
	whole := ring
	whole.CP = plan.CP{Size: 2, Kind: "a2a"}
	t.Run("a2a", func(t *testing.T) { censusOnBlackwell(t, c, &small, &whole) })
	both := whole
	both.CP, both.TP = plan.CP{Size: 4, Kind: "a2a+ring", Inner: 2, Balance: true}, plan.TP{Size: 1}
	t.Run("a2a and ring", func(t *testing.T) { censusOnBlackwell(t, c, &small, &both) })
	for name, config := range sparseConfigs {
		sparse, err := model.Parse([]byte(config))
		if err != nil {
			t.Fatal(err)
		}
		experts := *p
		experts.CP, experts.TP, experts.DP, experts.EP = plan.CP{Size: 1}, plan.TP{Size: 1}, 1, 2
		experts.FSDP.Size, experts.Cluster = 4, "8xb200"
		experts.Recompute = append(p.Recompute[:3:3], ir.Router, ir.Experts)
		t.Run(name, func(t *testing.T) {
			censusOnBlackwell(t, c, sparse, &experts)
			exchangesOfExperts(t, sparse, &experts)
		})
	}
	if *planFile == "" {
		return
	}
	text, err := os.ReadFile(*planFile)
	if err != nil {
		t.Fatal(err)
	}
	if p, err = plan.Parse(text, *planFile); err != nil {
		t.Fatal(err)
	}
	preset, err := model.Find(p.Model)
	if err != nil {
		t.Fatal(err)
	}
	t.Run(p.Model, func(t *testing.T) { censusOnBlackwell(t, c, preset.Config, p) })
}

// sparseConfigs are small siblings of Mixtral and DeepSeek-V3, the latter with a layer without
// experts.
var sparseConfigs = map[string]string{
	"mixtral": `{"model_type": "mixtral", "vocab_size": 1001, "hidden_size": 256,
"intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
"head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
"hidden_act": "silu", "tie_word_embeddings": false, "num_local_experts": 8,
"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "sliding_window": null}`,
	"deepseek": `{"model_type": "deepseek_v3", "vocab_size": 1001, "hidden_size": 256,
"intermediate_size": 640, "moe_intermediate_size": 192, "num_hidden_layers": 3,
"first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 4,
"n_shared_experts": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
"scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 160,
"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
"hidden_act": "silu", "tie_word_embeddings": false}`,
}

// exchangesOfExperts holds the all-to-alls of a gradient, which the compiled program has, to what
// they are for. In a layer rows go to their experts forward and again for the gradient, the
// results go back, and the gradients of both go the other way: 5 tensors [experts, slots, embed].
// The weights of rows and their gradients go 3 times, [experts, slots].
func exchangesOfExperts(t *testing.T, m *model.Config, p *plan.Plan) {
	t.Helper()
	e := m.MoE
	tokens := p.MicrobatchSequences() * p.Seq
	slots := math.Ceil(p.ExpertSlots()[0] * float64(tokens*e.TopK) / float64(e.Experts))
	each := e.Experts * int64(math.Ceil(slots/float64(p.EP*p.FSDP.Size)))
	layers := m.Layers - e.Dense
	want := spmd.Traffic{Kind: hlo.AllToAll, Axes: []string{plan.ExpertAxis},
		Group: hlo.Group{Count: p.FSDP.Size, Size: p.EP, Stride: 1}, Count: 8 * layers,
		Bytes: layers * each * (5*m.Hidden + 3) * 2}
	for _, row := range spmd.CensusOf(stepOf(t, m, p).Gradient) {
		if row.Kind == hlo.AllToAll && !reflect.DeepEqual(row, want) {
			t.Errorf("%+v, not %+v", row, want)
		} else if row.Kind == hlo.AllToAll {
			t.Logf("%d all-to-alls of %d bytes", row.Count, row.Bytes)
			return
		}
	}
	t.Error("there is no all-to-all")
}

// stepOf builds the programs of a plan.
func stepOf(t *testing.T, m *model.Config, p *plan.Plan) *graphs {
	t.Helper()
	g, err := m.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: p.Types.Params,
		Experts: model.ExpertShape{Slots: p.ExpertSlots()[0]}})
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, ClipNorm: 1, Compute: p.Types.Params}
	s, err := build(sh.Graph, spmd.Options{Optimizer: o, Sharding: sh, Recompute: p.Recompute})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func censusOnBlackwell(t *testing.T, c *engine.Compiler, m *model.Config, p *plan.Plan) {
	if err := p.Check(m); err != nil {
		t.Fatal(err)
	}
	s := stepOf(t, m, p)
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	graphs := []*ir.Graph{s.Gradient, s.Reduce, s.Square, s.Update}
	if p.CP.Kind != "gather" {
		graphs = graphs[:1] // the update has no attention
	}
	for _, g := range graphs {
		if g == nil {
			continue // nothing to reduce
		}
		set := kernels.For(cluster.GPU.Arch)
		stage, err := lower.Module(g.Name, g, lower.Options{Kernels: set})
		if err != nil {
			t.Fatal(err)
		}
		for _, chosen := range set.Choices() {
			if strings.HasPrefix(chosen.Kind, "attention") && chosen.Kernel != kernels.CuDNN {
				t.Errorf("%s: %+v", g.Name, chosen)
			}
		}
		stage.Flags = map[string]any{ // as engine/compiler.go sets them
			"xla_gpu_pipeline_all_gather":          "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
			"xla_gpu_collective_domain_assignment": "scale_up_fabric",
			"xla_gpu_enable_triton_gemm":           false,
		}
		r, err := c.Compile(t.Context(), stage, cluster)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s\n%s", g.Name, r)
		if r.Recomputed > 0 {
			t.Errorf("%s: XLA computes %d instructions again on its own", g.Name, r.Recomputed)
		}
		if off := spmd.CensusOf(g).Diff(r.Collectives, false, p.Types.Collectives); off != nil {
			t.Errorf("%s: %s", g.Name, off)
		}
	}
}
