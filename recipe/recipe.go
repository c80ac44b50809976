package recipe

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A Recipe is run.toml with every default filled in and every path complete. keys.txt documents the
// keys. A tag names the key of a field, the values in its range or list of words, and whether the
// value is free to change when a run is resumed.
type Recipe struct {
	Model string `key:"model" kind:"source"` // preset, hf:org/name, or a path
	Init  string `key:"init" in:"random weights"`
	Out   string `key:"out" kind:"path" resume:"free"`
	Seed  int    `key:"seed"`
	// Of Steps and Epochs one is given, and the other 0 until SetSteps.
	Steps      int         `key:"steps" in:"1.." resume:"free"`
	Epochs     float64     `key:"epochs" resume:"free"`
	Batch      int         `key:"batch" in:"1.."` // sequences per step, on all devices together
	Microbatch int         `key:"microbatch" in:"1.." resume:"free"`
	Seq        int         `key:"seq" in:"2.."`
	Precision  dtype.DType `key:"precision"`
	// GEMMs is the format of linear-layer GEMMs, "mxfp8" or "nvfp4", if it is not Precision, or
	// the path of a policy file that sets it by layer.
	GEMMs string
	// FinalBF16 is the last share of the steps, whose forward GEMMs run in Precision.
	FinalBF16 float64
	Recompute []ir.Tag `key:"recompute" resume:"free"`

	Optimizer Optimizer
	Experts   Experts
	Data      Data
	Eval      Eval
	Save      Save
	Guard     Guard

	written map[spelling]string
}

// An Optimizer is the section [optimizer]. MinLR is the final learning rate, not a share of LR; a
// negative one, as in [Default], stands for a tenth of LR ([Optimizer.FinalLR]).
type Optimizer struct {
	Name        string  `key:"optimizer.name" in:"adamw muon sgd"`
	LR          float64 `key:"optimizer.lr"`
	MinLR       float64
	Schedule    string  `key:"optimizer.schedule" in:"cosine wsd constant"`
	Warmup      int     `key:"optimizer.warmup"`
	WeightDecay float64 `key:"optimizer.weight_decay" in:"0..1"`
	Beta1       float64 `key:"optimizer.betas"`
	Beta2       float64
	MaxGradNorm float64     `key:"optimizer.max_grad_norm"`
	Moments     dtype.DType `key:"optimizer.moments"`
}

// Experts is the section [experts], for models that have them. A negative AuxLoss, as in [Default],
// stands for the model's own.
type Experts struct {
	Capacity float64 `key:"experts.capacity" resume:"free"`
	AuxLoss  float64 `key:"experts.aux_loss" resume:"free"`
	ZLoss    float64 `key:"experts.z_loss" resume:"free"`
	BiasRate float64 `key:"experts.bias_rate" in:"0..1" resume:"free"`
}

// Data is the section [data].
type Data struct {
	Sources     []Source `key:"data.sources"`
	Tokenizer   string   `key:"data.tokenizer" kind:"source"` // "" is the model's
	DocumentMiB int      `key:"data.document_mib" in:"1..1024" resume:"free"`
}

// Stdin is the path of the only source of a recipe whose batches come from standard input
// ([data.Stream]).
const Stdin = "-"

// Streams reports whether batches come from standard input.
func (d *Data) Streams() bool { return len(d.Sources) > 0 && d.Sources[0].Path == Stdin }

// A Source is one dataset, and its share of the mixture. Weight is 0 in all sources of a recipe, or
// in none; without weights, each counts by its size. Name and Format are inferred from the path,
// Template from the tokenizer, where they are empty. All chat templates of a recipe agree. Columns
// are names of columns ([chat.Columns]) that the rows call otherwise.
type Source struct {
	Path     string       `key:"path" kind:"path"`
	Name     string       `key:"name"`
	Weight   float64      `key:"weight"`
	Format   string       `key:"format" in:"text jsonl csv tsv parquet megatron"`
	Template string       `key:"template"`
	Columns  chat.Columns `key:"columns"`
}

// Eval is the section [eval]. Path or Share is the held-out data; at most one of them is set.
type Eval struct {
	Path  string  `key:"eval.data"`
	Share float64 // of the training data, from 0 to 1
	Every int     `key:"eval.every" resume:"free"`
}

// Save is the section [save].
type Save struct {
	Every int `key:"save.every" resume:"free"`
	Keep  int `key:"save.keep" resume:"free"`
}

// Guard is the section [guard].
type Guard struct {
	Spike float64 `key:"guard.spike" resume:"free"`
	Stall float64 `key:"guard.stall" resume:"free"`
}

// A spelling is a complete path of one key; written tells how the recipe spelled it.
type spelling struct{ key, path string }

// Default is a recipe with nothing but the defaults of keys.txt, which docs/run.toml.md lists. It
// lacks a model, data and the sizes Steps (or Epochs), Batch and Seq. Of the defaults, mind Out,
// the folder "run" in the working directory; Warmup, 100 steps, or all of a shorter run; and MinLR,
// which follows LR.
func Default() *Recipe {
	p := &reader{r: &Recipe{written: map[spelling]string{}}}
	p.fill(nil)
	p.r.Optimizer.MinLR = -1
	return p.r
}

// FinalLR is the learning rate at the last step: MinLR, or a tenth of LR if that is negative. A
// constant schedule stays at LR.
func (o Optimizer) FinalLR() float64 {
	switch {
	case o.MinLR >= 0:
		return o.MinLR
	case o.Schedule == "constant":
		return o.LR
	case o.LR == 3e-4:
		return 3e-5 // 0.1 * 3e-4 has other bits, and runs have stored these
	}
	return minShare * o.LR
}

// minShare is the default min_lr as a share of the peak: where the cosine of Hoffmann et al. (2022)
// ends. A warmup of 100 steps is enough for AdamW's second moment to settle, since it averages over
// 1/(1-0.95) = 20 steps.
const minShare = 0.1

// String gives the recipe as TOML with all values in the order of the table, and paths as they were
// written. The same recipe gives the same bytes, and Parse reads it back.
func (r *Recipe) String() string {
	var b strings.Builder
	section := ""
	for _, k := range table {
		if s := k.section(); s != section {
			section = s
			fmt.Fprintf(&b, "\n[%s]\n", s)
		}
		// "" is a default that only words can say, and [] are the sources of a recipe without data.
		if value := k.get(r); value != `""` && value != "[]" && !r.leavesOut(k.Name) {
			fmt.Fprintf(&b, "%s = %s\n", k.short(), value)
		}
	}
	return b.String()
}

// leavesOut reports whether a key is not printed: of steps and epochs, what is not known.
func (r *Recipe) leavesOut(key string) bool {
	return key == "steps" && r.Steps == 0 && r.Epochs > 0 || key == "epochs" && r.Epochs == 0
}

// SetSteps derives Steps from Epochs and the number of sequences that the data has: the steps that
// go through them that often, the last one begun counting whole. A recipe with steps stays as it
// is.
func (r *Recipe) SetSteps(sequences int64) error {
	if r.Epochs == 0 {
		return nil
	}
	steps := math.Ceil(r.Epochs * float64(sequences) / float64(r.Batch))
	if steps > maxInt {
		return diag.New(diag.RecipeValue, "epochs: %s epochs of %d sequences are %.0f steps",
			float(r.Epochs), sequences, steps).At("epochs").Try("give fewer, or steps = %d", maxInt)
	}
	r.Steps = max(1, int(steps))
	if o := &r.Optimizer; o.Warmup == Default().Optimizer.Warmup {
		o.Warmup = min(o.Warmup, r.Steps)
	} else if o.Warmup > r.Steps {
		return diag.New(diag.RecipeValue, "warmup = %d is more than the %d steps of %s epochs", o.Warmup,
			r.Steps, float(r.Epochs)).At("optimizer.warmup").Try("set warmup to %d, or epochs to more",
			r.Steps/10)
	}
	return nil
}

// Fingerprint names the part of the recipe that must not change while a run lasts.
func (r *Recipe) Fingerprint() string {
	h := sha256.New()
	for _, k := range table {
		if !k.free() {
			fmt.Fprintf(h, "%s = %s\n", k.Name, k.kept(r))
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Saved reads the recipe that a run stored, the text of [Recipe.String] found at path. Keys may
// have names of older versions, $NAME in a path need not be set any more, and a run that was
// described in code may lack model and data.sources, since it brings its own.
func Saved(text []byte, path string) (*Recipe, error) {
	return parse(text, path, nil, func(string) string { return "unset" }, true)
}

// Check reports the first value of a recipe made in code that run.toml could not have. Model and
// data sources may be empty.
func (r *Recipe) Check() error {
	if !(r.FinalBF16 >= 0 && r.FinalBF16 <= 1) { // the text leaves out what is not positive
		return diag.New(diag.RecipeValue, "precision: a last share of %v", r.FinalBF16).At("recipe").
			Try("set FinalBF16 to 0 … 1")
	}
	for _, k := range table {
		s := k.get(r) // words and paths are in quotes
		if !strings.Contains(s, `"`) && (strings.Contains(s, "NaN") || strings.Contains(s, "Inf")) {
			return diag.New(diag.RecipeValue, "%s is %s, not a finite number", k.Name, s).At("recipe").
				Try("set a finite number")
		}
	}
	_, err := Saved([]byte(r.String()), "recipe")
	return err
}

// Resumable reports whether r may go on with a run that was saved with the given recipe, the text
// of [Recipe.String] found at path; if not, it names the keys that changed.
func (r *Recipe) Resumable(saved []byte, path string) error {
	old, err := Saved(saved, path)
	if err != nil {
		return err
	}
	var changes []string
	for _, k := range table {
		if k.kept(r) != k.kept(old) {
			changes = append(changes, changed(k.Name, k.get(old), k.get(r)))
		}
	}
	if len(changes) == 0 {
		return nil
	}
	fix := "set it back, or give the new run another folder: --set out=NAME"
	if len(changes) > 1 {
		fix = "set them back, or give the new run another folder: --set out=NAME"
	}
	return diag.New(diag.RecipeChanged, "%s", strings.Join(changes, "; ")).At("%s", path).
		Try("%s", fix)
}

var longNumber = regexp.MustCompile(`\d\.\d{6,}(e[-+]\d+)?`)

// changed spells a change for a person: numbers have six digits unless they differ later.
func changed(name, from, to string) string {
	short := func(s string) string {
		return longNumber.ReplaceAllStringFunc(s, func(n string) string {
			x, err := strconv.ParseFloat(n, 64)
			if err != nil {
				return n
			}
			return strconv.FormatFloat(x, 'g', 6, 64)
		})
	}
	if a, b := short(from), short(to); a != b {
		from, to = a, b
	}
	return fmt.Sprintf("%s was %s when the run was saved, now it is %s", name, from, to)
}
