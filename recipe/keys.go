package recipe

import (
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A Key is one key of run.toml, as the reference page shows it.
type Key struct {
	Name    string // with its section: optimizer.rate
	Type    string
	Default string // as TOML, or in words; "" if it must be given
	Doc     string
}

// A row is a key with what reading, printing and resuming need to know of it.
type row struct {
	Key
	sample string // what the example gives it; "" leaves it at its default, as a comment
	also   string // what other programs call it, for "did you mean"
	field
	// fixed gives the part of the value that a resumed run must not change; nil if there is none.
	fixed func(*Recipe) string
}

// A field moves a value between TOML and a Recipe. set returns what is wrong, or nil.
type field struct {
	set func(*reader, any) *problem
	get func(*Recipe) string
}

// Keys lists the keys of run.toml in the order of the reference page.
func Keys() []Key {
	keys := make([]Key, len(table))
	for i, k := range table {
		keys[i] = k.Key
	}
	return keys
}

// section is the part of the name before the dot; "" stands above the first section.
func (r *row) section() string {
	section, _, ok := strings.Cut(r.Name, ".")
	if !ok {
		return ""
	}
	return section
}

// short is the name inside its section.
func (r *row) short() string { return r.Name[strings.IndexByte(r.Name, '.')+1:] }

func find(name string) *row {
	for _, r := range table {
		if r.Name == name {
			return r
		}
	}
	return nil
}

// whole makes a row whose value must not change when a run is resumed.
func whole(k Key, sample, also string, f field) *row {
	return &row{Key: k, sample: sample, also: also, field: f, fixed: f.get}
}

// free makes a row whose value may change when a run is resumed: it decides how long, how often
// or where, and not what is computed.
func free(k Key, sample, also string, f field) *row {
	return &row{Key: k, sample: sample, also: also, field: f}
}

// The words that keys may have.
var (
	inits      = []string{"random", "weights"}
	optimizers = []string{"adamw", "muon"}
	schedules  = []string{"cosine", "wsd", "constant"}
	formats    = []string{"text", "jsonl", "parquet", "megatron"}
	precisions = []string{"f32", "bf16", "mxfp8", "nvfp4"}
	tags       = []ir.Tag{ir.Embed, ir.Norm, ir.Attn, ir.MLP, ir.Router, ir.Experts, ir.Head}
	blockTags  = []ir.Tag{ir.Norm, ir.Attn, ir.MLP, ir.Router, ir.Experts}
)

// table is the whole of run.toml.
var table = []*row{
	whole(Key{"model", "source", "",
		"What to train: a preset (`deepwell models` lists them), a folder with config.json and " +
			"safetensors, a config.json, or hf:org/name. A path has a slash in it or ends in .json."},
		`"gpt2"`, "base_model model_name model_name_or_path", sourceKey("model",
			func(r *Recipe) *string { return &r.Model })),
	whole(Key{"init", "string", "weights if the source has them",
		"How parameters begin: \"random\" from the seed, or \"weights\" of the source. Weights that " +
			"cannot be read, as where a shard is missing, are refused unless this is \"random\"."},
		"", "initialize", wordKey(inits, func(r *Recipe) *string { return &r.Init })),
	free(Key{"out", "path", `"run"`, "The folder of checkpoints, events and logs."},
		"", "output output_dir out_dir", pathKey("out", func(r *Recipe) *string { return &r.Out })),
	whole(Key{"seed", "integer", "0", "The seed of random parameters and of the data's order."},
		"", "random_seed", intKey(0, maxInt, func(r *Recipe) *int { return &r.Seed })),
	free(Key{"steps", "integer", "", "How many updates the run has."},
		"1000", "max_steps num_steps iterations train_steps total_steps",
		intKey(1, maxInt, func(r *Recipe) *int { return &r.Steps })),
	whole(Key{"batch", "integer", "", "Sequences in one step, on all devices together."},
		"32", "batch_size global_batch_size",
		intKey(1, maxInt, func(r *Recipe) *int { return &r.Batch })),
	free(Key{"micro", "integer", "batch",
		"Sequences computed at a time; gradients of a batch are added up. Divides batch."},
		"", "micro_batch micro_batch_size gradient_accumulation_steps",
		intKey(1, maxInt, func(r *Recipe) *int { return &r.Micro })),
	whole(Key{"seq", "integer", "", "Tokens in a sequence."},
		"1024", "seq_len seq_length sequence_length max_seq_len max_seq_length context block_size",
		intKey(2, maxInt, func(r *Recipe) *int { return &r.Seq })),
	{Key: Key{"precision", "string or pair", `"bf16"`,
		"What the model computes in: \"f32\" or \"bf16\", or with the products of linear layers in " +
			"\"mxfp8\" or \"nvfp4\", or as a policy says whose path this is; or that and the last part of " +
			"the steps that compute forward in bf16, which wins back most of what few bits cost: " +
			"[\"nvfp4\", 0.15]. Parameters are kept in f32."},
		also: "dtype torch_dtype bf16", field: precisionKey(), fixed: (*Recipe).products},
	free(Key{"recompute", "string or list", `"none"`,
		"What the backward pass computes again instead of keeping, to save memory: \"none\", " +
			"\"full\" for whole blocks, or a list of " + join(tags, ", ") + "."},
		"", "remat checkpointing gradient_checkpointing activation_checkpointing", recomputeKey()),

	whole(Key{"optimizer.name", "string", `"adamw"`, "The optimizer: \"adamw\" or \"muon\"."},
		"", "optimizer type", wordKey(optimizers,
			func(r *Recipe) *string { return &r.Optimizer.Name })),
	whole(Key{"optimizer.rate", "number or pair", "3e-4",
		"The highest learning rate, or that and the last one: [3e-4, 3e-5]. The last one is a " +
			"tenth of the highest if it is not given."},
		"3e-4", "lr learning_rate max_lr peak_lr min_lr floor", rateKey()),
	whole(Key{"optimizer.schedule", "string", `"cosine"`,
		"How the rate falls after the warmup: \"cosine\", \"wsd\" (stays, then falls in a line over " +
			"the last fifth of the steps) or \"constant\"."},
		"", "lr_scheduler scheduler lr_schedule lr_scheduler_type", wordKey(schedules,
			func(r *Recipe) *string { return &r.Optimizer.Schedule })),
	whole(Key{"optimizer.warmup", "integer", "100, or steps if that is less",
		"Steps over which the rate rises in a line."},
		"", "warmup_steps", intKey(0, maxInt, func(r *Recipe) *int { return &r.Optimizer.Warmup })),
	whole(Key{"optimizer.decay", "number", "0.1",
		"Weight decay, decoupled from the gradient; norms and biases have none."},
		"", "weight_decay wd", floatKey(0, 1, func(r *Recipe) *float64 { return &r.Optimizer.Decay })),
	whole(Key{"optimizer.betas", "pair", "[0.9, 0.95]",
		"How slowly the first and second moment of AdamW forget; the momentum of Muon is 0.95."},
		"", "beta adam_betas beta1 beta2 adam_beta1 adam_beta2 momentum", betasKey()),
	whole(Key{"optimizer.clip", "number", "1.0",
		"The largest norm of all gradients together; larger ones are scaled down. 0 is no limit."},
		"", "grad_clip max_grad_norm gradient_clipping clip_grad",
		floatKey(0, maxFloat, func(r *Recipe) *float64 { return &r.Optimizer.Clip })),
	whole(Key{"optimizer.moments", "string", `"f32"`,
		"What the moments are kept in: \"f32\" or \"bf16\", which saves memory."},
		"", "moment_dtype state_dtype",
		typeKey(func(r *Recipe) *dtype.DType { return &r.Optimizer.Moments })),

	whole(Key{"data.sources", "list", "",
		"Where text comes from: a list of paths, or of tables {path, name, weight, format, " +
			"template}. A path is a file, a folder or a pattern such as `corpus/**/*.txt`. weight is " +
			"the share of the mixture, in any unit; without weights, sources count by their size. " +
			"format is " + join(formats, ", ") + ", or told by the file's name; template is how " +
			"chats are written, or told by the tokenizer; name is needed where two paths end alike."},
		`["corpus/**/*.txt"]`, "path paths source files dataset datasets train template", sourcesKey()),
	whole(Key{"data.tokenizer", "path", "the model's",
		"A tokenizer.json, a SentencePiece .model, a folder that has one, or hf:org/name."},
		"", "vocab tokenizer_path", sourceKey("data.tokenizer",
			func(r *Recipe) *string { return &r.Data.Tokenizer })),
	free(Key{"data.document_mib", "integer", "16",
		"The longest document, or line of jsonl, in MiB. Reading takes up to 30 times as much memory. " +
			"A text file may be longer: it is read in pieces."},
		"", "max_document document_size max_line", intKey(1, maxDocument,
			func(r *Recipe) *int { return &r.Data.DocumentMiB })),

	{Key: Key{"eval.data", "path or share", "none",
		"Text that is held out for the validation loss: a path, or a share of the training data " +
			"such as \"1%\". A share holds out whole documents, chosen by a hash of their contents."},
		sample: `"1%"`, also: "validation val split valid_data", field: evalKey(),
		fixed: func(r *Recipe) string { return float(r.Eval.Share) }},
	free(Key{"eval.every", "integer", "100", "Steps between two validations; 0 is only at the end."},
		"", "eval_steps eval_interval interval",
		intKey(0, maxInt, func(r *Recipe) *int { return &r.Eval.Every })),

	free(Key{"save.every", "integer", "500", "Steps between two checkpoints; 0 is only at the end."},
		"", "save_steps save_interval checkpoint_interval interval",
		intKey(0, maxInt, func(r *Recipe) *int { return &r.Save.Every })),
	free(Key{"save.keep", "integer", "2", "How many checkpoints remain on disk; 0 keeps all."},
		"", "save_total_limit keep_last",
		intKey(0, maxInt, func(r *Recipe) *int { return &r.Save.Keep })),

	free(Key{"guard.spike", "number", "10.0",
		"Rejects a step whose loss or gradient norm is more than this many times the recent " +
			"median; 0 rejects only what is not finite."},
		"", "loss_spike", factorKey(func(x float64) bool { return x > 1 }, "give it 2 or more, or 0",
			"reject every second step", func(r *Recipe) *float64 { return &r.Guard.Spike })),
	free(Key{"guard.stall", "number", "20.0",
		"Ends the run, to be started again, when a step takes more than this many times the median " +
			"step, and more than a minute; 0 never does."},
		"", "timeout watchdog hang", factorKey(func(x float64) bool { return x >= 2 },
			"give it 5 or more, or 0", "call an ordinary step a stall",
			func(r *Recipe) *float64 { return &r.Guard.Stall })),
}
