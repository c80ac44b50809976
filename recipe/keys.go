package recipe

import (
	_ "embed" // for keys.txt
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Key is one key of run.toml, as the reference page shows it.
type Key struct {
	Name    string // with its section: optimizer.lr
	Type    string
	Default string // as TOML, or in words; "" if it must be given
	Doc     string
}

// A row is a key with what reading, printing and resuming need to know of it.
type row struct {
	Key
	sample string // what the example gives it; "" leaves it at its default, as a comment
	also   string // what other programs call it, for "did you mean"
	binding
}

// A binding is the field of a key.
type binding struct {
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
	return lists.Map(table, func(k *row) Key { return k.Key })
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
	return lists.Find(table, func(r *row) bool { return r.Name == name })
}

// whole binds a value that must not change when a run is resumed.
func whole(f field) binding { return binding{f, f.get} }

// free binds a value that may change when a run is resumed: it decides how long, how often or
// where, and not what is computed.
func free(f field) binding { return binding{field: f} }

// The words that keys may have.
var (
	inits      = []string{"random", "weights"}
	optimizers = []string{"adamw", "muon"}
	schedules  = []string{"cosine", "wsd", "constant"}
	formats    = []string{"text", "jsonl", "parquet", "megatron"}
	precisions = []string{"f32", "bf16", "mxfp8", "nvfp4"}
	tags       = []ir.Tag{ir.Embed, ir.Norm, ir.Attn, ir.MLP, ir.Router, ir.Experts, ir.Head}
)

// bindings say for each key how it is read and printed, and what of it a resumed run must keep.
var bindings = map[string]binding{
	"model":      whole(sourceKey("model", func(r *Recipe) *string { return &r.Model })),
	"init":       whole(wordKey(inits, func(r *Recipe) *string { return &r.Init })),
	"out":        free(placeKey("out", func(r *Recipe) *string { return &r.Out }, (*reader).complete)),
	"seed":       whole(intKey(0, maxInt, func(r *Recipe) *int { return &r.Seed })),
	"steps":      free(intKey(1, maxInt, func(r *Recipe) *int { return &r.Steps })),
	"batch":      whole(intKey(1, maxInt, func(r *Recipe) *int { return &r.Batch })),
	"microbatch": free(intKey(1, maxInt, func(r *Recipe) *int { return &r.Microbatch })),
	"seq":        whole(intKey(2, maxInt, func(r *Recipe) *int { return &r.Seq })),
	"precision":  {precisionKey(), (*Recipe).gemmPrecision},
	"recompute":  free(recomputeKey()),
	"optimizer.name": whole(wordKey(optimizers,
		func(r *Recipe) *string { return &r.Optimizer.Name })),
	"optimizer.lr": whole(lrKey()),
	"optimizer.schedule": whole(wordKey(schedules,
		func(r *Recipe) *string { return &r.Optimizer.Schedule })),
	"optimizer.warmup": whole(intKey(0, maxInt,
		func(r *Recipe) *int { return &r.Optimizer.Warmup })),
	"optimizer.weight_decay": whole(floatKey(0, 1,
		func(r *Recipe) *float64 { return &r.Optimizer.WeightDecay })),
	"optimizer.betas": whole(betasKey()),
	"optimizer.max_grad_norm": whole(floatKey(0, maxFloat,
		func(r *Recipe) *float64 { return &r.Optimizer.MaxGradNorm })),
	"optimizer.moments": whole(typeKey(
		func(r *Recipe) *dtype.DType { return &r.Optimizer.Moments })),
	"data.sources": whole(sourcesKey()),
	"data.tokenizer": whole(sourceKey("data.tokenizer",
		func(r *Recipe) *string { return &r.Data.Tokenizer })),
	"data.document_mib": free(intKey(1, maxDocument,
		func(r *Recipe) *int { return &r.Data.DocumentMiB })),
	"eval.data":  {evalKey(), func(r *Recipe) string { return float(r.Eval.Share) }},
	"eval.every": free(intKey(0, maxInt, func(r *Recipe) *int { return &r.Eval.Every })),
	"save.every": free(intKey(0, maxInt, func(r *Recipe) *int { return &r.Save.Every })),
	"save.keep":  free(intKey(0, maxInt, func(r *Recipe) *int { return &r.Save.Keep })),
	"guard.spike": free(factorKey(func(x float64) bool { return x > 1 },
		"give it 2 or more, or 0", "reject every second step",
		func(r *Recipe) *float64 { return &r.Guard.Spike })),
	"guard.stall": free(factorKey(func(x float64) bool { return x >= 2 },
		"give it 5 or more, or 0", "call an ordinary step a stall",
		func(r *Recipe) *float64 { return &r.Guard.Stall })),
}

// renamed gives the present name of keys that had another one. Recipes that runs have stored under
// old names are still read ([Saved]); in run.toml and in overrides they are errors.
var renamed = map[string]string{
	"micro":           "microbatch",
	"optimizer.rate":  "optimizer.lr",
	"optimizer.decay": "optimizer.weight_decay",
	"optimizer.clip":  "optimizer.max_grad_norm",
}

//go:embed keys.txt
var keysText string

// table is the whole of run.toml. keys.txt has a paragraph for each key: its name, type, default as
// TOML or in words (none if it must be given), what the example gives it, and what other programs
// call it; then what it means.
var table = func() (rows []*row) {
	words := strings.NewReplacer("\n", " ", "{tags}", join(tags, ", "),
		"{formats}", join(formats, ", "))
	for paragraph := range strings.SplitSeq(strings.TrimSpace(keysText), "\n\n") {
		head, doc, _ := strings.Cut(paragraph, "\n")
		cells := strings.Split(head, " | ")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		key := Key{cells[0], cells[1], cells[2], words.Replace(doc)}
		rows = append(rows, &row{key, cells[3], cells[4], bindings[key.Name]})
	}
	return rows
}()
