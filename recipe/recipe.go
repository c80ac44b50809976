package recipe

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A Recipe is what run.toml says, with every default filled in and every path complete. The table
// in keys.txt tells what each field means.
type Recipe struct {
	Model      string // preset, hf:org/name, or a path
	Init       string // "random", "weights", or "" for weights if the source has them
	Out        string
	Seed       int
	Steps      int
	Batch      int
	Microbatch int
	Seq        int
	Precision  dtype.DType
	// Products is the format of the products of linear layers, "mxfp8" or "nvfp4", if it is not
	// Precision, or the path of a policy that says it layer by layer.
	Products string
	// FinalBF16 is the last part of the steps in which forward products have no fewer bits than
	// Precision.
	FinalBF16 float64
	Recompute []ir.Tag

	Optimizer Optimizer
	Data      Data
	Eval      Eval
	Save      Save
	Guard     Guard

	written map[spelling]string
}

// An Optimizer is the section [optimizer]. MinLR is the final learning rate, not a share of LR.
type Optimizer struct {
	Name         string // "adamw" or "muon"
	LR, MinLR    float64
	Schedule     string // "cosine", "wsd" or "constant"
	Warmup       int
	WeightDecay  float64
	Beta1, Beta2 float64
	MaxGradNorm  float64
	Moments      dtype.DType
}

// Data is the section [data].
type Data struct {
	Sources     []Source
	Tokenizer   string // "" is the one of the model
	DocumentMiB int    // the longest document
}

// A Source is one place that text comes from, and its share of the mixture.
type Source struct {
	Path     string
	Name     string  // "" is told by the path
	Weight   float64 // 0 in all sources of a recipe, or in none: then each counts by its size
	Format   string  // "" is told by the name of the file
	Template string  // of chats; "" is told by the tokenizer. All sources that have one agree
}

// Eval is the section [eval]: Path or Share says what is held out, and at most one of them is set.
type Eval struct {
	Path  string
	Share float64 // of the training data, from 0 to 1
	Every int
}

// Save is the section [save].
type Save struct {
	Every, Keep int
}

// Guard is the section [guard].
type Guard struct {
	Spike, Stall float64
}

// A spelling is a complete path of one key; written tells how the recipe spelled it.
type spelling struct{ key, path string }

// Default is a recipe with nothing but the defaults. It lacks a model, data and sizes.
func Default() *Recipe {
	return &Recipe{
		Out: "run", Precision: dtype.BF16,
		Optimizer: Optimizer{Name: "adamw", LR: 3e-4, MinLR: 3e-5, Schedule: "cosine",
			Warmup: defaultWarmup, WeightDecay: 0.1, Beta1: 0.9, Beta2: 0.95, MaxGradNorm: 1,
			Moments: dtype.F32},
		Data:  Data{DocumentMiB: 16},
		Eval:  Eval{Every: 100},
		Save:  Save{Every: 500, Keep: 2},
		Guard: Guard{Spike: 10, Stall: 20},
	}
}

// defaultWarmup is enough for the second moment of AdamW to settle: it averages over
// 1/(1-0.95) = 20 steps.
const defaultWarmup = 100

// minShare is the default min_lr as a share of the peak: where the cosine of Hoffmann et al. (2022)
// ends.
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
		if value := k.get(r); value != `""` && value != "[]" {
			fmt.Fprintf(&b, "%s = %s\n", k.short(), value)
		}
	}
	return b.String()
}

// Fingerprint names the part of the recipe that must not change while a run lasts.
func (r *Recipe) Fingerprint() string {
	h := sha256.New()
	for _, k := range table {
		if k.fixed != nil {
			fmt.Fprintf(h, "%s = %s\n", k.Name, k.fixed(r))
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
		if k.fixed == nil || k.fixed(r) == k.fixed(old) {
			continue
		}
		changes = append(changes, changed(k.Name, k.get(old), k.get(r)))
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
