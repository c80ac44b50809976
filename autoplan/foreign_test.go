package autoplan

import (
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

const megatronArgs = `torchrun pretrain_gpt.py \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size=4 --sequence-parallel \
  --num-virtual-stages-per-pipeline-rank 5 \
  --micro-batch-size 1 --global-batch-size 512 --seq-length 8192 \
  --use-distributed-optimizer --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 \
  --recompute-granularity selective --recompute-modules layernorm mlp  # both
`

const megatronYAML = `
model:
  tensor_model_parallel_size: 2
  context_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  recompute_modules:
    - "mla_up_proj"
    - mlp
train:
  micro_batch_size: 2
  global_batch_size: 128
`

const torchtitanTOML = `
[parallelism]
data_parallel_shard_degree = -1   # what is left
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "ZBVZeroBubble"
[training]
local_batch_size = 8
seq_len = 4096
[activation_checkpoint]
mode = "selective"
[model]
converters = ["float8"]
`

const maxtextYAML = `
ici_fsdp_parallelism: 8
dcn_fsdp_parallelism: 8
per_device_batch_size: 2
max_target_length: 8192
remat_policy: "full"
quantization: "fp8"
`

func TestReadForeign(t *testing.T) {
	for name, c := range map[string]struct {
		stack, text string
		want        Fixed
		precision   dtype.Format
		batch, m    int64
	}{
		"megatron's arguments": {"megatron", megatronArgs, Fixed{"tp": "4", "cp": "1", "ep": "1", "pp": "4", "dp": "1", "fsdp": "4", "zero": "1",
			"gather": "step", "virtual": "5", "schedule": "interleaved", "microbatch": "1", "recompute": "norm+mlp"}, dtype.MXFP8, 512, 128},
		"megatron's YAML": {"megatron", megatronYAML, Fixed{"tp": "2", "cp": "2", "ep": "1", "pp": "1", "dp": "1", "fsdp": "16", "zero": "1",
			"gather": "step", "microbatch": "2", "recompute": "attn+mlp"}, dtype.FormatBF16, 128, 4},
		"torchtitan": {"torchtitan", torchtitanTOML, Fixed{"tp": "2", "cp": "1", "ep": "1", "pp": "2", "dp": "1", "fsdp": "16", "zero": "2",
			"gather": "step", "virtual": "2", "schedule": "zb-v", "microbatch": "1", "recompute": "norm"}, dtype.FormatFP8, 128, 8},
		"maxtext": {"maxtext", maxtextYAML, Fixed{"tp": "1", "cp": "1", "ep": "1", "pp": "1", "dp": "1", "fsdp": "64", "zero": "3",
			"gather": "layer", "microbatch": "2", "recompute": "norm+attn+mlp"}, dtype.FormatFP8, 128, 1},
	} {
		t.Run(name, func(t *testing.T) {
			j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 1<<20)
			f, err := ReadForeign(c.stack, []byte(c.text), "config", j)
			if err != nil {
				t.Fatal(err)
			}
			if got := fixedOf(f.Plan); got.String() != c.want.String() {
				t.Errorf("\n%s, want\n%s", got, c.want)
			}
			if f.Precision != c.precision || f.Plan.Batch != c.batch || f.Plan.Microbatches != c.m {
				t.Errorf("%s, %d rows, %d microbatches", f.Precision, f.Plan.Batch, f.Plan.Microbatches)
			}
		})
	}
}

func TestForeignExpertsAreFolded(t *testing.T) {
	j := jobFor(t, "deepseek-v3", "256xgb200", 4096, 4<<20)
	f, err := ReadForeign("megatron", []byte("--pipeline-model-parallel-size 4 --expert-model-parallel-size 32 --use-distributed-optimizer --global-batch-size 1024"), "args", j)
	if err != nil {
		t.Fatal(err)
	}
	if f.Plan.EP != 32 || f.Plan.FSDP.Size != 2 || f.Plan.Devices() != 256 {
		t.Errorf("%v", f.Plan)
	}
}

func TestForeignRefusals(t *testing.T) {
	j := jobFor(t, "llama3.1-70b", "64xgb200", 8192, 1<<20)
	for text, want := range map[string]diag.Code{
		"":                                  diag.BadInput,
		"--tensor-model-parallel-size many": diag.BadInput,
		"--tensor-model-parallel-size 5":    diag.PlanMisfit,
		"--global-batch-size 7":             diag.PlanMisfit,
		"--expert-model-parallel-size 3":    diag.PlanLater,
	} {
		_, err := ReadForeign("megatron", []byte(text), "args", j)
		if e := diag.From(err); e == nil || e.Code != want {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := ReadForeign("nemo", []byte("a: 1"), "x", j); diag.From(err).Code != diag.BadUsage {
		t.Error(err)
	}
	if _, err := Emit("nemo", Job{}, &Choice{}); diag.From(err).Code != diag.BadUsage {
		t.Error(err)
	}
}

// What is written for a stack is read back as the same plan, and a search for a stack finds only
// what can be written for it.
func TestEmitIsReadBack(t *testing.T) {
	if testing.Short() {
		t.Skip("takes time")
	}
	for _, stack := range []string{"megatron", "torchtitan", "maxtext"} {
		for _, fixed := range []string{"", "pp=2", "pp=2,schedule=interleaved", "recompute=norm+attn+mlp", "tp=4"} {
			j := jobFor(t, "llama3.1-70b", "32xgb200", 8192, 2<<20)
			var err error
			if j.Fixed, err = ParseFixed(fixed); err != nil {
				t.Fatal(err)
			}
			if j.Profile, err = price.Find(stack); err != nil {
				t.Fatal(err)
			}
			j.Top = 3
			r, err := Search(t.Context(), j)
			if e := diag.From(err); e != nil && e.Code == diag.PlanNoFit && stack == "maxtext" {
				continue // GPipe holds the whole batch
			}
			if err != nil {
				t.Fatalf("%s %s: %v", stack, fixed, err)
			}
			for _, c := range r.Choices {
				text, err := Emit(stack, j, &c)
				if err != nil {
					t.Fatalf("%s: %v\n%v", stack, err, c.Plan)
				}
				f, err := ReadForeign(stack, []byte(text), "emitted", j)
				if err != nil {
					t.Fatalf("%s: %v\n%s", stack, err, text)
				}
				want, got := fixedOf(c.Plan), fixedOf(f.Plan)
				for _, x := range []Fixed{want, got} { // stacks have no words for parts of blocks
					if stack != "megatron" || slices.Contains(c.Plan.Recompute, ir.Attn) {
						delete(x, "recompute")
					}
					if x["pp"] == "1" {
						delete(x, "schedule")
					}
				}
				if want.String() != got.String() || f.Plan.Batch != c.Plan.Batch || f.Plan.Microbatches != c.Plan.Microbatches {
					t.Errorf("%s: %s m %d became %s m %d\n%s", stack, want, c.Plan.Microbatches, got, f.Plan.Microbatches, text)
				}
			}
		}
	}
}

func FuzzReadForeign(f *testing.F) {
	for _, text := range []string{megatronArgs, megatronYAML, torchtitanTOML, maxtextYAML, "--a", "- b", "a:", "=", "--=x"} {
		f.Add(text)
	}
	j := jobFor(f, "llama3.1-8b", "8xb200", 8192, 1<<20)
	f.Fuzz(func(t *testing.T, text string) {
		for _, stack := range []string{"megatron", "torchtitan", "maxtext"} {
			x, err := ReadForeign(stack, []byte(text), "fuzz", j)
			if err == nil && x.Plan.Devices() != 8 {
				t.Fatalf("%q makes %d devices", text, x.Plan.Devices())
			}
			if err != nil && strings.Contains(err.Error(), "runtime error") {
				t.Fatal(err)
			}
		}
	})
}

// Megatron's kinds of context parallelism are read, and come out again as they were.
func TestReadContextParallelism(t *testing.T) {
	for text, want := range map[string]plan.CP{
		"":                          {Size: 8, Kind: "ring", Balance: true},
		"--cp-comm-type p2p":        {Size: 8, Kind: "ring", Balance: true},
		"--cp-comm-type all_gather": {Size: 8, Kind: "gather", Balance: true},
		"--cp-comm-type a2a":        {Size: 8, Kind: "a2a"},
		"--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4": {Size: 8, Kind: "a2a+ring", Inner: 2,
			Balance: true},
		"--cp-comm-type a2a+p2p": {},
	} {
		j := jobFor(t, "llama3.1-8b", "8xb200", 32768, 1<<20)
		f, err := ReadForeign("megatron", []byte("--context-parallel-size 8 --global-batch-size 8 "+text), "args", j)
		if want.Size == 0 {
			if err == nil || !strings.Contains(err.Error(), "hierarchical") {
				t.Errorf("%s: %v", text, err)
			}
			continue
		}
		if err != nil || f.Plan.CP != want {
			t.Errorf("%s: %+v, %v", text, f, err)
		}
	}
}
