package recipe

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// maxKeys is the limit of the design: a recipe is read by people.
const maxKeys = 32

func getenv(name string) string {
	return map[string]string{"DATA": "/corpora", "HOME": "/home/ada"}[name]
}

const smallest = `model = "gpt2"
steps = 1000
batch = 16
seq = 128
[data]
sources = ["a.txt"]
`

func TestDefaults(t *testing.T) {
	r, err := Parse([]byte(smallest), filepath.FromSlash("runs/x/run.toml"), nil, getenv)
	if err != nil {
		t.Fatal(err)
	}
	want := &Recipe{
		Model: "gpt2", Out: filepath.FromSlash("runs/x/run"), Steps: 1000, Batch: 16, Microbatch: 16,
		Seq: 128, Precision: dtype.BF16,
		Experts: Experts{AuxLoss: -1, BiasRate: 0.001},
		Optimizer: Optimizer{Name: "adamw", LR: 3e-4, MinLR: 3e-5, Schedule: "cosine", Warmup: 100,
			WeightDecay: 0.1, Beta1: 0.9, Beta2: 0.95, MaxGradNorm: 1, Moments: dtype.F32},
		Data:  Data{Sources: []Source{{Path: filepath.FromSlash("runs/x/a.txt")}}, DocumentMiB: 16},
		Eval:  Eval{Every: 100},
		Save:  Save{Every: 500, Keep: 2},
		Guard: Guard{Spike: 10, Stall: 20},
	}
	if diff := cmp.Diff(want, r, cmp.FilterPath(unexported, cmp.Ignore())); diff != "" {
		t.Error(diff)
	}
}

func unexported(p cmp.Path) bool { return p.Last().String() == ".written" }

func TestEverything(t *testing.T) {
	text := `model = "./base"
init = "random"
out = "${DATA}/out$$"
seed = 7
steps = 100_000
batch = 512
microbatch = 8
seq = 8192
precision = "f32"
recompute = ["attn", "mlp", "attn"]
[optimizer]
name = "muon"
lr = [2e-2, 0]
schedule = "wsd"
warmup = 2000
weight_decay = 0
betas = [0.95, 0.99]
max_grad_norm = 0
moments = "bf16"
[data]
tokenizer = "~/tok/tokenizer.json"
document_mib = 64
[[data.sources]]
path = "$DATA/books.jsonl.zst"
weight = 3
[[data.sources]]
path = "chat"
weight = 0.5
name = "talk"
format = "jsonl"
template = "chatml"
[eval]
data = "0.07%"
every = 0
[save]
every = 0
keep = 0
[guard]
spike = 0
stall = 0
`
	r, err := Parse([]byte(text), "run.toml", []string{"seq=4096", "optimizer.max_grad_norm=0.5", "model=base/x"}, getenv)
	if err != nil {
		t.Fatal(err)
	}
	want := &Recipe{
		Model: "base/x", Init: "random", Out: "/corpora/out$", Seed: 7, Steps: 100000, Batch: 512, Microbatch: 8,
		Seq: 4096, Precision: dtype.F32, Recompute: []ir.Tag{ir.Attn, ir.MLP},
		Experts: Experts{AuxLoss: -1, BiasRate: 0.001},
		Optimizer: Optimizer{Name: "muon", LR: 2e-2, Schedule: "wsd", Warmup: 2000,
			Beta1: 0.95, Beta2: 0.99, MaxGradNorm: 0.5, Moments: dtype.BF16},
		Data: Data{Tokenizer: "/home/ada/tok/tokenizer.json", DocumentMiB: 64, Sources: []Source{
			{Path: "/corpora/books.jsonl.zst", Weight: 3},
			{Path: "chat", Name: "talk", Weight: 0.5, Format: "jsonl", Template: "chatml"}}},
		Eval: Eval{Share: 0.0007000000000000001}, // 0.07/100 in float64
	}
	if diff := cmp.Diff(want, r, cmp.FilterPath(unexported, cmp.Ignore())); diff != "" {
		t.Error(diff)
	}
	same(t, r)
	if !strings.Contains(r.String(), `"$DATA/books.jsonl.zst"`) {
		t.Errorf("the stored recipe has lost the name of a place:\n%s", r)
	}
}

// same holds that a recipe is read back from its own text.
func same(t interface{ Fatalf(string, ...any) }, r *Recipe) {
	again, err := Parse([]byte(r.String()), "run.toml", nil, getenv)
	if err != nil {
		t.Fatalf("%v in\n%s", err, r)
	}
	if diff := cmp.Diff(r, again, cmp.AllowUnexported(Recipe{}), cmp.AllowUnexported(spelling{})); diff != "" {
		t.Fatalf("%s", diff)
	}
	if r.String() != again.String() || r.Fingerprint() != again.Fingerprint() {
		t.Fatalf("the text or fingerprint of a recipe changes when it is read again:\n%s%s", r, again)
	}
}

func TestMistakes(t *testing.T) {
	// edit replaces the first line that begins with the key, or adds a line to its section.
	for _, c := range []struct {
		name, text string // "=" in front means: instead of the smallest recipe
		set        []string
		code       diag.Code
		want       []string
	}{
		{"syntax", "model = gpt2\n", nil, diag.RecipeText, []string{"dir/run.toml:1:9 model = gpt2", "not TOML"}},
		{"no equals", "model\n", nil, diag.RecipeText, []string{"dir/run.toml:1:"}},
		{"twice", smallest + "[data]\n", nil, diag.RecipeText, []string{"dir/run.toml:7"}},
		{"missing", "", nil, diag.RecipeKey, []string{"model is not given", `add model = "gpt2"`, "seq is not given",
			`below [data]`}},
		{"near", smallest + "tokeniser = \"x\"\n", nil, diag.RecipeKey,
			[]string{`there is no key "data.tokeniser"`, "dir/run.toml:7 tokeniser = ", `did you mean "tokenizer"?`}},
		{"name of others", smallest + "[optimizer]\nlearning_rate = 1e-3\n", nil, diag.RecipeKey,
			[]string{`"optimizer.learning_rate"`, "run.toml:8 learning_rate = 1e-3", `did you mean "lr"?`}},
		{"renamed", smallest + "[optimizer]\nrate = 1e-3\nclip = 2\n", nil, diag.RecipeKey,
			[]string{"optimizer.rate is now optimizer.lr", "run.toml:8 rate = 1e-3", "write optimizer.lr",
				"optimizer.clip is now optimizer.max_grad_norm"}},
		{"renamed override", smallest, []string{"micro=4"}, diag.RecipeKey,
			[]string{"micro is now microbatch", "--set micro=4"}},
		{"below a section", smallest + "microbatch = 2\n", nil, diag.RecipeKey,
			[]string{`"data.microbatch"`, `did you mean "microbatch"? It stands above the first [section]`}},
		{"above the sections", "rate = 1\n" + smallest, nil, diag.RecipeKey,
			[]string{"run.toml:1 rate = 1", `did you mean "lr" in section [optimizer]?`}},
		{"section", smallest + "[optimiser]\nrate = 1\n", nil, diag.RecipeKey,
			[]string{"there is no section [optimiser]", "run.toml:7 [optimiser]", "did you mean [optimizer]?"}},
		{"section as key", "optimizer = \"adamw\"\n" + smallest, nil, diag.RecipeKey,
			[]string{"optimizer is a section", "run.toml:1", "write [optimizer]"}},
		{"far", smallest + "[optimizer]\nxyzzyxyzzy = 1\n", nil, diag.RecipeKey, []string{"[optimizer] has name, lr,"}},
		{"type", strings.Replace(smallest, "16", `"16"`, 1), nil, diag.RecipeValue,
			[]string{`batch: it is the string "16", not a whole number`, "run.toml:3"}},
		{"fraction", strings.Replace(smallest, "16", `1.5`, 1), nil, diag.RecipeValue, []string{"the number 1.5"}},
		{"range", strings.Replace(smallest, "16", `0`, 1), nil, diag.RecipeValue, []string{"0 is outside 1", "1 or more"}},
		{"too many", strings.Replace(smallest, "16", `2147483648`, 1), nil, diag.RecipeValue,
			[]string{"2147483648 is outside 1", "2147483647 or less"}},
		{"more than f32", smallest + "[guard]\nspike = 1e308\n", nil, diag.RecipeValue,
			[]string{"more than an f32 holds"}},
		{"nan", smallest + "[optimizer]\nweight_decay = nan\n", nil, diag.RecipeValue, []string{"NaN is outside 0.0 … 1.0"}},
		{"word", smallest + "[optimizer]\nname = \"adam\"\n", nil, diag.RecipeValue,
			[]string{`"adam" is not one of adamw, muon`, `write "adamw"`}},
		{"pair", smallest + "[optimizer]\nbetas = [0.9]\n", nil, diag.RecipeValue, []string{"a list of 1, not a pair"}},
		{"rates", smallest + "[optimizer]\nlr = [1e-4, 1e-3]\n", nil, diag.RecipeValue, []string{"write [lr, min_lr]"}},
		{"constant", smallest + "[optimizer]\nlr = [1e-3, 1e-4]\nschedule = \"constant\"\n", nil, diag.RecipeValue,
			[]string{"run.toml:8", "0.001 to 0.0001"}},
		{"microbatch", "microbatch = 3\n" + smallest, nil, diag.RecipeValue,
			[]string{"microbatch = 3 does not divide batch = 16", "run.toml:1 microbatch = 3", "set microbatch to 2"}},
		{"warmup", smallest + "[optimizer]\nwarmup = 2000\n", nil, diag.RecipeValue,
			[]string{"warmup = 2000 is more than steps = 1000"}},
		{"recompute", "recompute = [\"attention\"]\n" + smallest, nil, diag.RecipeValue, []string{`"none", "full"`}},
		{"last part", "precision = [\"nvfp4\", 1.5]\n" + smallest, nil, diag.RecipeValue, []string{"1.5 is outside 0"}},
		{"last part of nothing", "precision = [\"bf16\", 0.1]\n" + smallest, nil, diag.RecipeValue,
			[]string{"bf16 is not lower than bf16", `["nvfp4", 0.15]`}},
		{"no pair", "precision = [\"nvfp4\"]\n" + smallest, nil, diag.RecipeValue, []string{"a list of 1, not of two"}},
		{"stall", smallest + "[guard]\nstall = 1.5\n", nil, diag.RecipeValue, []string{"ordinary step"}},
		{"spike", smallest + "[guard]\nspike = 0.5\n", nil, diag.RecipeValue, []string{"every second step"}},
		{"unset", strings.Replace(smallest, "a.txt", "${CORPUS}/a.txt", 1), nil, diag.RecipeValue,
			[]string{"CORPUS is not set", "run.toml:6"}},
		{"dollar", strings.Replace(smallest, "a.txt", "a$ b", 1), nil, diag.RecipeValue, []string{"write $$"}},
		{"one source", strings.Replace(smallest, `["a.txt"]`, `"a.txt"`, 1), nil, diag.RecipeValue,
			[]string{`write ["a.txt"]`}},
		{"no sources", strings.Replace(smallest, `["a.txt"]`, `[]`, 1), nil, diag.RecipeValue, []string{"it is empty"}},
		{"source key", strings.Replace(smallest, `["a.txt"]`, "[\n{path = \"a\"},\n{path = \"b\",\n wieght = 2}]", 1), nil,
			diag.RecipeValue, []string{`no key "wieght"`, "run.toml:9 wieght = 2}]", `did you mean "weight"?`}},
		{"source list", "[[data.sources]]\npath = 'a'\n[[data.sources]]\nformat = 'xlsx'\n", nil,
			diag.RecipeValue, []string{`"xlsx" is not one of text,`, "run.toml:4"}},
		{"no path", strings.Replace(smallest, `["a.txt"]`, "[{weight = 1.0}]", 1), nil, diag.RecipeValue,
			[]string{"a source has no path"}},
		{"weight", strings.Replace(smallest, `["a.txt"]`, "[{path = 'a', weight = 0}]", 1), nil, diag.RecipeValue,
			[]string{"never gives a token"}},
		{"standard input in a mixture", strings.Replace(smallest, `["a.txt"]`, `["-", "a.txt"]`, 1), nil, diag.RecipeValue,
			[]string{"not a part of a mixture"}},
		{"standard input with a holdout", strings.Replace(smallest, `["a.txt"]`, `["-"]`, 1) + "[eval]\ndata = \"1%\"\n", nil,
			diag.RecipeValue, []string{"nothing can be held out"}},
		{"some weights", strings.Replace(smallest, `["a.txt"]`, "['b',\n {path = 'a', weight = 2}, {path = 'c'}]", 1), nil,
			diag.RecipeValue, []string{"1 of 3 sources have a weight", "run.toml:6"}},
		{"templates", strings.Replace(smallest, `["a.txt"]`, "[{path = 'a', template = 'chatml'},\n'x',\n"+
			"{path = 'c', template = 'plain'}]", 1), nil,
			diag.RecipeValue, []string{`two templates, "chatml" and "plain"`, "run.toml:8"}},
		{"share", smallest + "[eval]\ndata = \"99%\"\n", nil, diag.RecipeValue, []string{`such as "1%"`}},
		{"override key", smallest, []string{"optimizer.learning_rate=1"}, diag.RecipeKey,
			[]string{"--set optimizer.learning_rate=1", "did you mean --set optimizer.lr=1?"}},
		{"accumulation", smallest, []string{"gradient_accumulation_steps=4"}, diag.RecipeKey,
			[]string{"gradient accumulation steps = batch / microbatch: --set microbatch=4 with batch = 16"}},
		{"accumulation of another batch", smallest, []string{"gradient_accumulation_steps=4", "batch=64"}, diag.RecipeKey,
			[]string{"--set microbatch=16 with batch = 64"}},
		{"accumulation in the file", "grad_accum = 8\n" + smallest, nil, diag.RecipeKey,
			[]string{"run.toml:1", "batch / microbatch: microbatch = 2 with batch = 16"}},
		{"accumulation that does not divide", smallest, []string{"gradient_accumulation_steps=3"}, diag.RecipeKey,
			[]string{"3 steps do not divide batch = 16"}},
		{"accumulation without a batch", "gradient_accumulation_steps = 2\n", nil, diag.RecipeKey,
			[]string{"batch / microbatch: set microbatch"}},
		{"parallelism", smallest, []string{"fsdp=4"}, diag.RecipeKey, []string{"--set fsdp=4", "deepwell train --plan plan.json"}},
		{"parallelism of torchtitan", smallest, []string{"parallelism.tensor_parallel_degree=2"}, diag.RecipeKey,
			[]string{"parallelism is in a plan: deepwell train --plan plan.json"}},
		{"section of parallelism", smallest + "[parallelism]\ntp = 2\n", nil, diag.RecipeKey,
			[]string{"there is no section [parallelism]", "deepwell train --plan plan.json"}},
		{"override value", smallest, []string{"steps=many"}, diag.RecipeValue, []string{"--set steps=many", `the string "many"`}},
		{"override form", smallest, []string{"steps"}, diag.BadUsage, []string{"KEY=VALUE"}},
		{"override bytes", smallest, []string{"model=a\xff"}, diag.BadUsage, []string{"not UTF-8"}},
		{"override quotes", smallest, []string{"data.sources=[a.txt]"}, diag.RecipeText, []string{"quote it"}},
		{"override clash", smallest, []string{"microbatch=5"}, diag.RecipeValue, []string{"--set microbatch=5", "set microbatch to 4"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse([]byte(c.text), "dir/run.toml", c.set, getenv)
			e, ok := errors.AsType[*diag.Error](err)
			if !ok {
				t.Fatalf("error is %v", err)
			}
			if e.Code != c.code {
				t.Errorf("code is %s, want %s", e.Code, c.code)
			}
			for _, want := range append(c.want, "") {
				if !strings.Contains(e.Format(), want) {
					t.Errorf("no %q in\n%s", want, e.Format())
				}
			}
			if e.Fix == "" || e.Where == "" && c.code != diag.BadUsage && c.code != diag.RecipeText {
				t.Errorf("no place or no fix in\n%s", e.Format())
			}
		})
	}
}

func TestAllMistakesAreReported(t *testing.T) {
	_, err := Parse([]byte("mode = \"gpt2\"\n"+smallest+"tokenzier = 3\n[save]\nkeep = -1\n"), "run.toml", nil, getenv)
	text := diag.From(err).Format()
	at := 0
	for _, want := range []string{"run.toml:1 ", "run.toml:8 ", "run.toml:10 "} {
		i := strings.Index(text[at:], want)
		if i < 0 {
			t.Fatalf("no %q, or not in order, in\n%s", want, text)
		}
		at += i
	}
}

func TestOverridesNeedNoQuotes(t *testing.T) {
	set := []string{"model=llama3.1-8b", "out=2026", "eval.data=2%", "optimizer.lr=[1e-3, 1e-5]", "recompute=full",
		`data.sources=["b", {path = "c", format = "text"}]`}
	r, err := Parse([]byte(smallest), "run.toml", set, getenv)
	if err != nil {
		t.Fatal(err)
	}
	if r.Model != "llama3.1-8b" || r.Out != "2026" || r.Eval.Share != 0.02 || r.Optimizer.MinLR != 1e-5 ||
		len(r.Data.Sources) != 2 || len(r.Recompute) != len(ir.BlockTags) {
		t.Errorf("got %+v", r)
	}
	same(t, r)
}

// A policy's path is relative to the recipe, and is stored as it was written. A final bf16 phase may
// be asked for later on.
func TestPrecisions(t *testing.T) {
	for _, row := range []struct {
		text, gemms string
		final       float64
	}{
		{`"bf16"`, "", 0}, {`"nvfp4"`, "nvfp4", 0}, {`["mxfp8", 0.25]`, "mxfp8", 0.25},
		{`"policy.json"`, filepath.Join("dir", "policy.json"), 0},
		{`["policy.json", 0.1]`, filepath.Join("dir", "policy.json"), 0.1},
	} {
		r, err := Parse([]byte("precision = "+row.text+"\n"+smallest), "dir/run.toml", nil, getenv)
		if err != nil {
			t.Error(err)
			continue
		}
		if r.GEMMs != row.gemms || r.FinalBF16 != row.final ||
			!strings.Contains(r.String(), "precision = "+row.text+"\n") {
			t.Errorf("%s: %q, %v in\n%s", row.text, r.GEMMs, r.FinalBF16, r)
		}
	}
	parse := func(precision string) *Recipe {
		r, err := Parse([]byte("precision = "+precision+"\n"+smallest), "run.toml", nil, getenv)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	old := []byte(parse(`"nvfp4"`).String())
	if err := parse(`["nvfp4", 0.15]`).Resumable(old, "run"); err != nil {
		t.Errorf("a run cannot add a final bf16 phase: %v", err)
	}
	if parse(`["mxfp8", 0.15]`).Resumable(old, "run") == nil {
		t.Error("another format is the same run")
	}
}

// The steps of a run are given, or follow from epochs once the data is known.
func TestEpochs(t *testing.T) {
	text := strings.Replace(smallest, "steps = 1000\n", "epochs = 2.5\n", 1)
	r, err := Parse([]byte(text), "run.toml", nil, getenv)
	if err != nil || r.Steps != 0 || r.Epochs != 2.5 {
		t.Fatalf("%v %+v", err, r)
	}
	same(t, r)
	if err := r.SetSteps(33); err != nil || r.Steps != 6 || r.Optimizer.Warmup != 6 { // 2.5 × 33 / 16
		t.Errorf("%d steps, warmup %d, %v", r.Steps, r.Optimizer.Warmup, err)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
	// A checkpoint has both, and the run goes on from it, also for longer.
	saved := r.String()
	if was, err := Saved([]byte(saved), "run"); err != nil || was.Steps != 6 || was.Epochs != 2.5 {
		t.Errorf("%+v, %v", was, err)
	}
	longer, err := Parse([]byte(text), "run.toml", []string{"epochs=4", "optimizer.warmup=6"}, getenv)
	if err != nil {
		t.Fatal(err)
	}
	if err := longer.SetSteps(33); err != nil || longer.Steps != 9 || longer.Resumable([]byte(saved), "run") != nil {
		t.Errorf("%+v, %v, %v", longer, err, longer.Resumable([]byte(saved), "run"))
	}
	// Of the two, the one that is set counts.
	if r, err = Parse([]byte(text), "run.toml", []string{"steps=7"}, getenv); err != nil || r.Steps != 7 || r.Epochs != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := r.SetSteps(33); err != nil || r.Steps != 7 {
		t.Errorf("%d steps, %v", r.Steps, err)
	}
	for want, set := range map[string][]string{
		"both given":       {"steps=7", "epochs=1"},
		"never gives":      {"epochs=0"},
		"is less than 0.0": {"epochs=-1"},
		"no length":        {"epochs=1", `data.sources=["-"]`},
	} {
		if _, err := Parse([]byte(text), "run.toml", set, getenv); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v; want %s", set, err, want)
		}
	}
	if r, err = Parse([]byte(text), "run.toml", []string{"optimizer.warmup=50"}, getenv); err != nil {
		t.Fatal(err)
	}
	if err := r.SetSteps(33); !errors.Is(err, diag.RecipeValue) {
		t.Errorf("a warmup that is longer than the run: %v", err)
	}
	r.Optimizer.Warmup, r.Epochs = 0, 1e9
	if err := r.SetSteps(1 << 40); !errors.Is(err, diag.RecipeValue) {
		t.Errorf("a run without end: %v", err)
	}
}

func TestColumns(t *testing.T) {
	parse := func(columns string) (*Recipe, error) {
		return Parse([]byte(smallest), "run.toml",
			[]string{`data.sources=[{path = "a.csv", columns = ` + columns + `}]`}, getenv)
	}
	r, err := parse(`{prompt = "question", completion = "the \"answer\""}`)
	if err != nil || r.Data.Sources[0].Columns["completion"] != `the "answer"` {
		t.Fatalf("%+v, %v", r, err)
	}
	same(t, r)
	for columns, want := range map[string]string{
		`"question"`: "not a table", `{}`: "not a table", `{promt = "x"}`: `did you mean "prompt"?`,
		`{text = 3}`: "not a string", `{text = "a", prompt = "b"}`: "of two kinds",
	} {
		if _, err := parse(columns); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", columns, err, want)
		}
	}
}

func TestResume(t *testing.T) {
	base, err := Parse([]byte(smallest), "run.toml", nil, getenv)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range table {
		change := map[string]string{
			"model": "other", "init": "random", "out": "elsewhere", "seed": "9", "steps": "5000", "epochs": "2", "batch": "32", "microbatch": "4",
			"seq": "64", "precision": "f32", "recompute": "full", "optimizer.name": "muon", "optimizer.lr": "1e-3",
			"optimizer.schedule": "wsd", "optimizer.warmup": "7", "optimizer.weight_decay": "0", "optimizer.betas": "[0.8, 0.9]",
			"optimizer.max_grad_norm": "2", "optimizer.moments": "bf16", "data.sources": `["b.txt"]`, "data.tokenizer": "x.json", "data.document_mib": "7",
			"eval.data": "held.txt", "eval.every": "7", "save.every": "7", "save.keep": "7", "guard.spike": "7", "guard.stall": "7",
			"experts.capacity": "2", "experts.aux_loss": "1e-3", "experts.z_loss": "1e-3", "experts.bias_rate": "0",
		}[k.Name]
		r, err := Parse([]byte(smallest), "run.toml", []string{k.Name + "=" + change}, getenv)
		if err != nil {
			t.Errorf("%s: %v", k.Name, err)
			continue
		}
		err = r.Resumable([]byte(base.String()), "run/recipe.toml")
		mayChange := k.free() || k.Name == "eval.data"
		if (err == nil) != mayChange || err != nil && !strings.Contains(err.Error(), k.Name+" was ") {
			t.Errorf("%s changes: %v", k.Name, err)
		}
		if (r.Fingerprint() == base.Fingerprint()) != mayChange {
			t.Errorf("%s changes, and the fingerprint does not agree", k.Name)
		}
	}
	r, err := Parse([]byte(smallest), "run.toml", []string{"eval.data=1%"}, getenv)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Resumable([]byte(base.String()), "x"); err == nil {
		t.Error("a share that is held out of the training data changed, and the run goes on")
	}
}

// A run that stored its recipe under old keys is the same run; a run.toml with them is refused.
func TestOldKeysOfAStoredRecipe(t *testing.T) {
	now := "microbatch = 4\n" + smallest + "[optimizer]\nlr = [1e-3, 1e-4]\nweight_decay = 0.2\nmax_grad_norm = 2.0\n"
	r, err := Parse([]byte(now), "run.toml", nil, getenv)
	if err != nil {
		t.Fatal(err)
	}
	old := strings.NewReplacer("microbatch =", "micro =", "weight_decay =", "decay =", "max_grad_norm =", "clip =",
		"lr =", "rate =").Replace(r.String())
	if err := r.Resumable([]byte(old), "run"); err != nil {
		t.Errorf("old keys: %v", err)
	}
	was, err := Saved([]byte(old), "run")
	if err != nil || was.String() != r.String() || was.Fingerprint() != r.Fingerprint() {
		t.Errorf("old keys are another recipe: %v\n%s", err, was)
	}
	if err := r.Resumable([]byte(strings.Replace(old, "clip = 2.0", "clip = 3.0", 1)), "run"); err == nil ||
		!strings.Contains(err.Error(), "optimizer.max_grad_norm was 3.0") {
		t.Errorf("a change under an old key: %v", err)
	}
	if _, err := Parse([]byte(old), "run.toml", nil, getenv); diag.From(err) == nil || diag.From(err).Code != diag.RecipeKey {
		t.Errorf("old keys in run.toml: %v", err)
	}
}

func TestMovedRunIsTheSame(t *testing.T) {
	text := strings.Replace(smallest, "a.txt", "$DATA/a.txt", 1)
	at := func(path, data string) *Recipe {
		r, err := Parse([]byte(text), path, nil, func(string) string { return data })
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	here, there := at("/a/run.toml", "/x"), at("/b/run.toml", "/y")
	if here.Fingerprint() != there.Fingerprint() || here.String() != there.String() {
		t.Error("a recipe is another one in another folder")
	}
	if err := there.Resumable([]byte(here.String()), "ckpt/recipe.toml"); err != nil {
		t.Error(err)
	}
	if here.Data.Sources[0].Path != filepath.FromSlash("/x/a.txt") {
		t.Error(here.Data.Sources[0].Path)
	}
}

func TestKeys(t *testing.T) {
	keys := Keys()
	if len(keys) > maxKeys || len(keys) != len(tagged(reflect.TypeFor[Recipe](), nil)) {
		t.Errorf("%d keys for %d fields; at most %d", len(keys), len(tagged(reflect.TypeFor[Recipe](), nil)), maxKeys)
	}
	seen := map[string]bool{}
	for _, k := range keys {
		if seen[k.Name] || k.Doc == "" || k.Type == "" || !strings.HasSuffix(k.Doc, ".") {
			t.Errorf("key %q is twice or not explained", k.Name)
		}
		seen[k.Name] = true
	}
	for _, r := range table {
		if r.Default == "" && r.sample == "" {
			t.Errorf("%s must be given and has no sample", r.Name)
		}
		for _, name := range r.also {
			full := name
			if r.section() != "" {
				full = r.section() + "." + name
			}
			if seen[full] {
				t.Errorf("%s is also called %s, which is a key", r.Name, full)
			}
		}
	}
}

// The example must work, and what it shows as defaults must be the defaults.
func TestExample(t *testing.T) {
	r, err := Parse([]byte(Example()), "run.toml", nil, getenv)
	if err != nil {
		t.Fatal(diag.From(err).Format())
	}
	var plain []string
	for line := range strings.Lines(Example()) {
		if strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "# ") && !strings.Contains(line, "by default") {
			line = line[1:]
		}
		plain = append(plain, line)
	}
	all, err := Parse([]byte(strings.Join(plain, "")), "run.toml", []string{"microbatch=32"}, getenv)
	if err != nil {
		t.Fatal(diag.From(err).Format())
	}
	if diff := cmp.Diff(r.String(), all.String()); diff != "" {
		t.Error(diff)
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		path := rapid.StringMatching(`(/|\./)?[a-z "\\.]{1,6}(/[a-zé']{1,4}){0,2}`)
		r := Default()
		r.Model = "./" + rapid.StringMatching(`[a-z]{1,4}`).Draw(t, "model")
		if rapid.Bool().Draw(t, "init") {
			r.Init = rapid.SampledFrom([]string{"random", "weights"}).Draw(t, "init")
		}
		r.Microbatch = rapid.IntRange(1, 1000).Draw(t, "microbatch")
		r.Batch = r.Microbatch * rapid.IntRange(1, 1000).Draw(t, "times")
		r.Steps = rapid.IntRange(100, maxInt).Draw(t, "steps")
		r.Seq = rapid.IntRange(2, maxInt).Draw(t, "seq")
		distinct := rapid.SliceOfNDistinct(rapid.SampledFrom(tags), 0, 4, rapid.ID[ir.Tag])
		r.Recompute = distinct.Draw(t, "tags")
		r.Optimizer.LR = rapid.Float64Range(0, 10).Draw(t, "lr")
		r.Optimizer.MinLR = r.Optimizer.LR * rapid.Float64Range(0, 1).Draw(t, "min_lr")
		r.Optimizer.MaxGradNorm = rapid.Float64Range(0, 1e30).Draw(t, "max_grad_norm")
		r.Eval.Every = rapid.IntRange(0, 100).Draw(t, "every")
		for range rapid.IntRange(1, 3).Draw(t, "sources") {
			r.Data.Sources = append(r.Data.Sources, Source{Path: path.Draw(t, "path"),
				Weight: rapid.Float64Range(1e-3, 1e3).Draw(t, "weight"),
				Format: rapid.SampledFrom([]string{"text", "jsonl", "parquet", "megatron", ""}).Draw(t, "format")})
		}
		// Spelled once, places are complete; from there on, text and recipe tell the same.
		read, err := Parse([]byte(r.String()), "run.toml", nil, getenv)
		if err != nil {
			t.Fatalf("%v in\n%s", err, r)
		}
		same(t, read)
		if err := read.Resumable([]byte(read.String()), "x"); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(smallest), "optimizer.lr=3e-4")
	f.Add([]byte(Example()), "data.sources=['a']")
	f.Add([]byte("[[data.sources]]\n\"pa\\u0074h\" = 'x'\n[[data.sources]]\nformat=1979-05-27"), "a.b.c=1")
	f.Add([]byte("a.\"b.c\".'d' = {x = [{y = 1}, [2]]}\n[a.q]\n[[z.z]]\n"), "x=\n[a]\ny=1")
	f.Fuzz(func(t *testing.T, data []byte, set string) {
		for _, overrides := range [][]string{nil, {set}} {
			r, err := Parse(data, "run.toml", overrides, getenv)
			if err == nil {
				same(t, r)
				continue
			}
			if e, ok := errors.AsType[*diag.Error](err); !ok || e.Fix == "" || e.What == "" {
				t.Fatalf("an error without a code or a fix: %v", err)
			}
		}
	})
}

func ExampleParse() {
	_, err := Parse([]byte("model = \"llama3.1-8b\"\nsteps = 500\nbatch = 64\nseq = 4096\n"+
		"[optimizer]\nlearning_rate = 1e-3\n[data]\nsources = [\"books.jsonl\"]\n"), "run.toml", nil, os.Getenv)
	os.Stdout.WriteString(diag.From(err).Format())
	// Output:
	// DW2602 there is no key "optimizer.learning_rate"
	//   where  run.toml:6 learning_rate = 1e-3
	//   fix    did you mean "lr"?
}

// What people type, and the fix that the error should name. Letters alone suggest f32 for fp8 and a folder
// for a share.
func TestSlips(t *testing.T) {
	const rest = "\nmodel = \"m\"\nsteps = 1\n[data]\nsources = [\"a\"]\n"
	for text, want := range map[string]string{
		`precision = "fp8"`:     `"mxfp8"`,
		`precision = "float32"`: `"f32"`,
		`precision = "fp16"`:    `"bf16"`,
	} {
		_, err := Parse([]byte(text+rest), "run.toml", nil, os.Getenv)
		if e := diag.From(err); e == nil || !strings.Contains(e.Fix, want) {
			t.Errorf("%s: %v, want the fix %s", text, err, want)
		}
	}
	if _, err := Parse([]byte("\xef\xbb\xbfbatch = 4\nseq = 64"+rest), "run.toml", nil, os.Getenv); err != nil {
		t.Errorf("a byte order mark: %v", err)
	}
	saved, err := Parse([]byte("batch = 4\nseq = 64"+rest), "run.toml", nil, os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	now, err := Parse([]byte("batch = 8\nseq = 128"+rest), "run.toml", nil, os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	e := diag.From(now.Resumable([]byte(saved.String()), "run"))
	if e == nil || e.Cause != "" || !strings.Contains(e.What, "batch was 4") || !strings.Contains(e.What, "seq was 64") {
		t.Errorf("two changes: %v", e)
	}
}

// A recipe made in code needs neither a model nor data, and is read back from its text.
func TestRecipeInCode(t *testing.T) {
	r := Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq, r.Optimizer.Warmup = 20, 4, 2, 16, 5
	if err := r.Check(); err != nil {
		t.Fatal(err)
	}
	if err := r.Resumable([]byte(r.String()), "saved"); err != nil {
		t.Error(err)
	}
	other := *r
	other.Seq = 32
	if err := other.Resumable([]byte(r.String()), "saved"); err == nil {
		t.Error("another sequence length resumes")
	}
	r.Microbatch = 3
	if err := r.Check(); err == nil {
		t.Error("3 does not divide 4")
	}
}

// NaN and infinity in a recipe made in code were called a mistake of TOML, or were accepted.
func TestNumbersMadeInCode(t *testing.T) {
	for name, change := range map[string]func(r *Recipe){
		"guard.spike":  func(r *Recipe) { r.Guard.Spike = math.NaN() },
		"guard.stall":  func(r *Recipe) { r.Guard.Stall = math.Inf(1) },
		"optimizer.lr": func(r *Recipe) { r.Optimizer.LR = math.NaN() },
		"precision":    func(r *Recipe) { r.FinalBF16 = math.NaN() },
	} {
		r := Default()
		change(r)
		err := r.Check()
		if !errors.Is(err, diag.RecipeValue) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
