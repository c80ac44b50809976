package autoplan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// Emit writes a plan as the configuration of another stack: arguments for Megatron-LM, TOML for
// torchtitan, YAML for MaxText. j is the job that c was found for: its profile tells what the
// prediction assumes to overlap. A plan that the stack cannot run is an error.
func Emit(stack string, j Job, c *Choice) (string, error) {
	write := map[string]func(*emitter, *plan.Plan, dtype.Format){
		"megatron": emitMegatron, "torchtitan": emitTorchtitan, "maxtext": emitMaxText,
	}[stack]
	if write == nil {
		return "", diag.New(diag.BadUsage, "there is no stack %q to write for", stack).
			Try("--emit megatron, torchtitan or maxtext")
	}
	j, err := j.filled()
	if err != nil {
		return "", err
	}
	e := &emitter{stages: c.Estimate.Stages, profile: j.Profile, latent: j.Config.MLA != nil}
	write(e, c.Plan, c.Precision)
	if e.err != nil {
		return "", e.err
	}
	return e.String(), nil
}

// An emitter collects lines, and the first feature of the plan that the other stack lacks.
type emitter struct {
	strings.Builder
	stages  []estimate.Stage // virtual stages in model order
	profile *price.Profile   // that the plan was priced with
	latent  bool             // attention is MLA
	err     *diag.Error
}

func (e *emitter) line(format string, args ...any) { fmt.Fprintf(e, format+"\n", args...) }

// lacks records the first feature of the plan that the stack does not have.
func (e *emitter) lacks(stack, format string, args ...any) {
	if e.err == nil {
		e.err = diag.New(diag.PlanLater, "%s has no %s", stack, fmt.Sprintf(format, args...))
	}
}

// rowsOf returns the sequences of a microbatch on a device, and the number of data-parallel ranks.
func rowsOf(p *plan.Plan) (microbatch, ranks int64) {
	ranks = p.DataParallelSize()
	return p.MicrobatchSequences() / ranks, ranks
}

func recomputes(p *plan.Plan, tag ir.Tag) bool { return slices.Contains(p.Recompute, tag) }

// whole reports whether a plan checkpoints whole blocks ("full" recomputation).
func whole(p *plan.Plan) bool {
	return recomputes(p, ir.Norm) && recomputes(p, ir.Attn) &&
		(recomputes(p, ir.MLP) || recomputes(p, ir.Experts))
}

// emitMegatron writes Megatron-LM's command line arguments.
func emitMegatron(e *emitter, p *plan.Plan, precision dtype.Format) {
	microbatch, _ := rowsOf(p)
	if p.FSDP.Size > 1 && p.FSDP.Zero > 1 {
		e.lacks("Megatron's distributed optimizer", "zero %d", p.FSDP.Zero)
	}
	e.line("--tensor-model-parallel-size %d", p.Size(plan.TensorAxis))
	if p.TP.Sequence {
		e.line("--sequence-parallel")
	}
	e.line("--pipeline-model-parallel-size %d", p.Size(plan.PipelineAxis))
	if p.PP.Size > 1 {
		if p.PP.Schedule != "1f1b" && p.PP.Schedule != "interleaved" {
			e.lacks("Megatron-LM", "schedule %s", p.PP.Schedule)
		}
		switch layout := layoutOf(e.stages); {
		case layout != "":
			e.line("--pipeline-model-parallel-layout %q", layout)
		case p.PP.Schedule == "interleaved":
			e.line("--num-virtual-stages-per-pipeline-rank %d", p.PP.Virtual)
		}
	}
	e.line("--context-parallel-size %d", p.Size(plan.ContextAxis))
	switch n := p.CP.AllToAll(); {
	case n > 1 && p.CP.Shards() > 1:
		e.line("--cp-comm-type a2a+p2p")
		e.line("--hierarchical-context-parallel-sizes %d %d", n, p.CP.Shards())
	case n > 1:
		e.line("--cp-comm-type a2a")
	case p.CP.Size > 1 && p.CP.Kind == "gather":
		e.line("--cp-comm-type all_gather")
	}
	e.line("--expert-model-parallel-size %d", p.Size(plan.ExpertAxis))
	// Megatron's profiles shard optimizer state over cp and ep as well (price.Profile.Sharded).
	if p.FSDP.Size > 1 || p.CP.Size > 1 || p.EP > 1 {
		e.line("--use-distributed-optimizer")
		if p.DP > 1 {
			e.line("--num-distributed-optimizer-instances %d", p.DP)
		}
	}
	e.overlaps(p)
	e.line("--micro-batch-size %d", microbatch)
	e.line("--global-batch-size %d", p.Batch)
	e.line("--seq-length %d", p.Seq)
	switch {
	case whole(p):
		e.line("--recompute-granularity full")
		e.line("--recompute-method uniform")
		e.line("--recompute-num-layers 1")
	case len(p.Recompute) > 0:
		e.line("--recompute-granularity selective")
		e.line("--recompute-modules %s", strings.Join(e.modules(p), " "))
	}
	e.line("--bf16")
	switch precision {
	case dtype.FormatFP8:
		e.line("--fp8-format hybrid\n--fp8-recipe tensorwise")
	case dtype.MXFP8:
		e.line("--fp8-format e4m3\n--fp8-recipe mxfp8")
	case dtype.NVFP4:
		e.line("--fp4-format e2m1\n--fp4-recipe nvfp4")
	}
}

// overlaps writes the flags of the overlap that the prediction assumes. Plain "megatron" is fitted
// to runs without any.
func (e *emitter) overlaps(p *plan.Plan) {
	if !e.profile.Overlaps() {
		return
	}
	e.line("--overlap-grad-reduce")
	if p.FSDP.Size > 1 || p.CP.Size > 1 || p.EP > 1 { // Megatron asserts a distributed optimizer
		e.line("--overlap-param-gather")
	}
}

// modules names what a plan recomputes of a layer as Megatron's --recompute-modules does. Its
// module for attention is less than the tag: see price.Profile.Modules.
func (e *emitter) modules(p *plan.Plan) (list []string) {
	attention := "core_attn"
	if e.latent {
		attention = "mla_up_proj"
	}
	for _, m := range []struct {
		tag  ir.Tag
		name string
	}{{ir.Norm, "layernorm"}, {ir.Attn, attention}, {ir.MLP, "mlp"}, {ir.Experts, "moe_act"}} {
		if recomputes(p, m.tag) {
			list = append(list, m.name)
		}
	}
	return list
}

// layoutOf spells an uneven split of layers as Megatron's --pipeline-model-parallel-layout does: E
// is the embedding, t a layer, L the loss, a bar ends a stage, and *n repeats. It is empty for an
// even split, which Megatron makes on its own.
func layoutOf(stages []estimate.Stage) string {
	even := true
	for i := range stages {
		even = even && stages[i].Layers == stages[0].Layers
	}
	if even {
		return ""
	}
	layers := func(n int64) string {
		switch n {
		case 0:
			return ""
		case 1:
			return "t"
		}
		return fmt.Sprintf("t*%d", n)
	}
	last := len(stages) - 1
	text := "E" + layers(stages[0].Layers) + "|"
	for i := 1; i < last; {
		n := i
		for n < last && stages[n].Layers == stages[i].Layers {
			n++
		}
		one := layers(stages[i].Layers) + "|"
		if n-i > 1 {
			one = fmt.Sprintf("(%s)*%d", one, n-i)
		}
		text, i = text+one+",", n
	}
	return text + layers(stages[last].Layers) + "L"
}

// emitTorchtitan writes the [parallelism], [training] and related sections of torchtitan's TOML.
func emitTorchtitan(e *emitter, p *plan.Plan, precision dtype.Format) {
	microbatch, ranks := rowsOf(p)
	pipeline := p.Size(plan.PipelineAxis)
	if p.FSDP.Size > 1 && p.FSDP.Zero == 1 {
		e.lacks("torchtitan", "zero 1")
	}
	e.line("[training]")
	e.line("seq_len = %d", p.Seq)
	if pipeline > 1 {
		e.line("local_batch_size = %d", p.Batch/ranks)
	} else {
		e.line("local_batch_size = %d", microbatch)
	}
	e.line("global_batch_size = %d\n", p.Batch)
	e.line("[parallelism]")
	e.line("data_parallel_replicate_degree = %d", p.Size(plan.DataAxis))
	e.line("data_parallel_shard_degree = %d", p.Size(plan.FSDPAxis)*p.Size(plan.ExpertAxis))
	reshard := "always"
	if p.FSDP.Zero < 3 || p.FSDP.Gather != plan.GatherLayer {
		reshard = "never"
	}
	e.line("fsdp_reshard_after_forward = %q", reshard)
	e.line("tensor_parallel_degree = %d", p.Size(plan.TensorAxis))
	e.line("context_parallel_degree = %d", p.Size(plan.ContextAxis))
	e.line("expert_parallel_degree = %d", p.Size(plan.ExpertAxis))
	e.line("pipeline_parallel_degree = %d", pipeline)
	if pipeline > 1 {
		name, ok := map[string]string{"gpipe": "GPipe", "1f1b": "1F1B",
			"interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}[p.PP.Schedule]
		if !ok {
			e.lacks("torchtitan", "schedule %s", p.PP.Schedule)
		}
		e.line("pipeline_parallel_schedule = %q", name)
		e.line("pipeline_parallel_microbatch_size = %d", microbatch)
	}
	mode := "none"
	switch {
	case whole(p):
		mode = "full"
	case len(p.Recompute) > 0:
		mode = "selective"
	}
	e.line("\n[activation_checkpoint]\nmode = %q", mode)
	switch precision {
	case dtype.FormatFP8:
		e.line("\n[model]\nconverters = [\"float8\"]")
	case dtype.MXFP8:
		e.line("\n[model]\nconverters = [\"mx\"]")
	case dtype.NVFP4:
		e.lacks("torchtitan", "training in nvfp4")
	}
}

// emitMaxText writes MaxText's YAML. MaxText has one mesh axis per kind of parallelism, for ICI
// (within a slice) and DCN (between slices).
func emitMaxText(e *emitter, p *plan.Plan, precision dtype.Format) {
	if p.FSDP.Size > 1 && p.FSDP.Zero < 3 {
		e.lacks("MaxText", "zero %d", p.FSDP.Zero)
	}
	e.line("max_target_length: %d", p.Seq)
	e.line("per_device_batch_size: %g", float64(p.Batch)/float64(p.Devices())/
		float64(accumulations(p)))
	e.line("gradient_accumulation_steps: %d", accumulations(p))
	e.line("ici_data_parallelism: %d", p.Size(plan.DataAxis))
	e.line("ici_fsdp_parallelism: %d", p.Size(plan.FSDPAxis))
	e.line("ici_tensor_parallelism: %d", p.Size(plan.TensorAxis))
	e.line("ici_context_parallelism: %d", p.Size(plan.ContextAxis))
	e.line("ici_expert_parallelism: %d", p.Size(plan.ExpertAxis))
	e.line("ici_pipeline_parallelism: %d", p.Size(plan.PipelineAxis))
	if p.Size(plan.PipelineAxis) > 1 {
		if p.PP.Schedule != "gpipe" && p.PP.Schedule != "interleaved" {
			e.lacks("MaxText", "schedule %s", p.PP.Schedule)
		}
		e.line("num_pipeline_microbatches: %d", p.Microbatches)
		e.line("num_pipeline_repeats: %d", max(1, p.PP.Virtual))
	}
	policy := "minimal"
	switch {
	case whole(p):
		policy = "full"
	case recomputes(p, ir.MLP) || recomputes(p, ir.Experts):
		policy = "save_qkv_proj"
	}
	e.line("remat_policy: %s", policy)
	switch precision {
	case dtype.FormatFP8:
		e.line("quantization: fp8")
	case dtype.MXFP8, dtype.NVFP4:
		e.lacks("MaxText", "training in %s", precision)
	}
}

// accumulations is MaxText's number of gradient accumulation steps. A pipeline has its own
// microbatches.
func accumulations(p *plan.Plan) int64 {
	if p.Size(plan.PipelineAxis) > 1 {
		return 1
	}
	return max(1, p.Microbatches)
}
