package gpucheck

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A precisionRow is a training step in one precision.
type precisionRow struct {
	name   string
	format dtype.Format
	params dtype.DType
	plain  bool // attention without cuDNN
}

var precisions = []precisionRow{
	{"f32", "f32", dtype.F32, false}, // cuDNN's attention takes 16 bits: it is plain
	{"bf16, plain attention", dtype.FormatBF16, dtype.BF16, true},
	{"bf16", dtype.FormatBF16, dtype.BF16, false},
	{"mxfp8", dtype.MXFP8, dtype.BF16, false},
	{"nvfp4", dtype.NVFP4, dtype.BF16, false},
}

// A size is a Llama whose step is compared, or timed.
type size struct {
	config     string
	seq, batch int64 // tokens, and sequences of a device
}

// small is for comparing: no two sizes that meet in a program are equal. Large takes a B200 some
// tens of milliseconds, and 20 GB of its memory.
var (
	small = size{`{"model_type": "llama", "vocab_size": 192, "hidden_size": 128,
"intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 2,
"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`, 96, 1}
	large = size{`{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
"intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false}`, 4096, 1}
)

// largeMemory is the memory of a GPU, in bytes, from which the large model is timed.
const largeMemory = 40e9

// plan is a step of a model on the host's GPUs, sharded by FSDP (ZeRO-3) if there are several.
func (r precisionRow) plan(s size, cluster machine.Cluster) *plan.Plan {
	p := plan.Default()
	n := int64(cluster.Count)
	p.FSDP = plan.FSDP{Size: n, Zero: 3, Gather: plan.GatherLayer}
	p.Seq, p.Microbatches, p.Batch = s.seq, 1, s.batch*n
	p.Types = plan.Types{Params: r.params, Grads: dtype.F32, Collectives: r.params}
	p.Cluster = fmt.Sprintf("%dx%s", cluster.Count, cluster.GPU.Name)
	if r.format != "f32" {
		p.Precision = string(r.format)
	}
	if r.plain {
		p.Attention = "plain"
	}
	return p
}

// inStep are the programs of a training step of one microbatch.
var inStep = map[step.Kind]bool{step.Quantize: true, step.Gradient: true, step.Reduce: true,
	step.Square: true, step.Update: true}

// pairs are the programs of a step, and their references.
func (r precisionRow) pairs(s size, cluster machine.Cluster) (list []replay.Pair, err error) {
	c, err := model.Parse([]byte(s.config))
	if err != nil {
		return nil, err
	}
	p := r.plan(s, cluster)
	all, err := replay.Pairs(step.Spec{Model: c, Recipe: step.RecipeOf(p), Plan: p})
	for _, p := range all {
		if inStep[p.Kind] {
			list = append(list, p)
		}
	}
	return list, err
}

// predicted is the time of a step by the cost model, in seconds.
func (r precisionRow) predicted(s size, cluster machine.Cluster) (float64, error) {
	c, err := model.Parse([]byte(s.config))
	if err != nil {
		return 0, err
	}
	profile, err := price.Find(price.Own)
	if err != nil {
		return 0, err
	}
	e, err := estimate.New(c, cluster, profile)
	if err != nil {
		return 0, err
	}
	if r.format.Quantized() {
		e = e.With(estimate.Options{Precision: r.format})
	}
	est, err := e.Price(r.plan(s, cluster))
	return est.Step, err
}

// title says what was timed.
func (s size) title() (string, error) {
	c, err := model.Parse([]byte(s.config))
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d layers of width %d, %d × %d tokens per GPU", c.Layers, c.Hidden, s.batch,
		s.seq), nil
}
