package deepwell_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// A change is something that is no longer what it was: between the stop of a run and its resuming,
// or between two processes of a run.
type change struct {
	name string
	edit func(f folder) // of the run's folder
	job  deepwell.TrainJob
	env  string // NAME=VALUE
	code string // that the run is refused with; "" is a warning
	text string // of either
}

// A folder is the folder of a run.
type folder struct {
	*testing.T
	dir string
}

func (f folder) path(name string) string { return filepath.Join(f.dir, filepath.FromSlash(name)) }

func (f folder) read(name string) string {
	f.Helper()
	b, err := os.ReadFile(f.path(name))
	if err != nil {
		f.Fatal(err)
	}
	return string(b)
}

func (f folder) write(name, text string) {
	f.Helper()
	if err := os.WriteFile(f.path(name), []byte(text), 0o666); err != nil {
		f.Fatal(err)
	}
}

// swap replaces what must be there.
func (f folder) swap(name, from, to string) {
	f.Helper()
	text := f.read(name)
	if !strings.Contains(text, from) {
		f.Fatalf("%s has no %q", name, from)
	}
	f.write(name, strings.Replace(text, from, to, 1))
}

const savedManifest = "run/checkpoints/step-00000003/manifest.json"

// reseal changes the checkpoint's manifest as if it had been written so.
func (f folder) reseal(from, to string) {
	f.Helper()
	text := f.read(savedManifest)
	if !strings.Contains(text, from) {
		f.Fatalf("the manifest has no %s", from)
	}
	text = strings.Replace(text, from, to, 1)
	body := text[:strings.LastIndex(text, `"sha256": "`)]
	sum := sha256.Sum256([]byte(body))
	f.write(savedManifest, body+`"sha256": "`+hex.EncodeToString(sum[:])+"\"\n}\n")
}

// config changes the model.
func config(from, to string) func(folder) {
	return func(f folder) { f.swap("config.json", from, to) }
}

// member changes a member of the engine, or of what the loop remembers, in the manifest.
func member(name, value string) func(folder) {
	return func(f folder) {
		text := f.read(savedManifest)
		_, rest, ok := strings.Cut(text, `"`+name+`":"`)
		if !ok {
			f.Fatalf("the manifest says nothing of %s", name)
		}
		old, _, _ := strings.Cut(rest, `"`)
		f.reseal(`"`+name+`":"`+old+`"`, `"`+name+`":"`+value+`"`)
	}
}

func set(list ...string) deepwell.TrainJob { return deepwell.TrainJob{Set: list} }

// stopped lists what may change while a run is stopped.
func stopped() []change {
	return []change{
		{name: "smaller MLP", edit: config(`"intermediate_size": 96`, `"intermediate_size": 64`),
			code: "DW2604", text: "intermediate_size was 96, now it is 64"},
		{name: "larger MLP", edit: config(`"intermediate_size": 96`, `"intermediate_size": 128`),
			code: "DW2604", text: "intermediate_size was 96, now it is 128"},
		{name: "smaller vocabulary", edit: config("1024", "704"), code: "DW2604", text: "vocab_size"},
		{name: "fewer heads", edit: config(`heads": 4`, `heads": 2`), code: "DW2604",
			text: "num_attention_heads was 4, now it is 2"},
		{name: "more heads of keys", edit: config(`key_value_heads": 2`, `key_value_heads": 4`),
			code: "DW2604", text: "num_key_value_heads was 2"},
		{name: "wider heads", edit: config(`head_dim": 12`, `head_dim": 24`), code: "DW2604",
			text: "head_dim was 12"},
		{name: "other angles", edit: config("10000.0", "500000.0"), code: "DW2604",
			text: "rope_theta was 10000.0, now it is 500000.0"},
		{name: "another epsilon", edit: config("1e-5", "1e-2"), code: "DW2604", text: "rms_norm_eps"},
		{name: "untied embeddings", edit: config(`embeddings": true`, `embeddings": false`),
			code: "DW2604", text: "tie_word_embeddings was true"},
		{name: "a layer less", edit: config(`layers": 2`, `layers": 1`), code: "DW2604",
			text: "num_hidden_layers was 2, now it is 1"},
		{name: "a layer more", edit: config(`layers": 2`, `layers": 3`), code: "DW2604",
			text: "num_hidden_layers was 2, now it is 3"},
		{name: "another activation", edit: config(`"silu"`, `"gelu_pytorch_tanh"`), code: "DW2604",
			text: "hidden_act"},
		{name: "another family", edit: config(`"llama"`, `"mistral"`), code: "DW2604",
			text: "model_type"},
		{name: "tensors of another shape", edit: func(f folder) {
			f.reseal(`"intermediate_size":96`, `"intermediate_size":64`)
			f.swap("config.json", `"intermediate_size": 96`, `"intermediate_size": 64`)
		}, code: "DW2906", text: "f32 [48 96], the model as f32 [48 64]"},
		{name: "another end of text", edit: func(f folder) {
			f.swap("config.json", `"model_type"`, `"eos_token_id": 0, "model_type"`)
		}, text: "eos_token_id was null, now it is 0"},

		{name: "another tokenizer", edit: func(f folder) {
			f.swap("tokenizer_config.json", "<|endoftext|>", "<|pad|>")
		}, code: "DW2604", text: "data is not what it was"},
		{name: "an edited file", edit: func(f folder) { f.swap("text/doc.txt", "Package", "package") },
			code: "DW2604", text: "data is not what it was"},
		{name: "a new file", edit: func(f folder) { f.write("text/new.txt", "A file more.") },
			code: "DW2604", text: "data is not what it was"},
		{name: "a file less", edit: func(f folder) {
			if err := os.Remove(f.path("text/doc.txt")); err != nil {
				f.Fatal(err)
			}
		}, code: "DW2604", text: "data is not what it was"},
		{name: "files in another order", edit: func(f folder) {
			if err := os.Rename(f.path("text/doc.txt"), f.path("text/zoo.txt")); err != nil {
				f.Fatal(err)
			}
		}, code: "DW2604", text: "data is not what it was"},
		{name: "other data of the validation", edit: func(f folder) {
			f.write("held.txt", strings.Repeat("Something else is held out. ", 40))
		}, text: "eval.data is not what it was"},

		{name: "longer rows", job: set("seq=32"), code: "DW2604", text: "seq was 16"},
		{name: "a larger batch", job: set("batch=8"), code: "DW2604", text: "batch was 4"},
		{name: "another seed", job: set("seed=9"), code: "DW2604", text: "seed was"},
		{name: "another optimizer", job: set("optimizer.name=muon"), code: "DW2604",
			text: "optimizer.name was"},
		{name: "parameters of another type", job: set("precision=bf16"), code: "DW2604",
			text: "precision was"},
		{name: "an edited policy", edit: member("policy", "0123456789abcdef"), code: "DW2604",
			text: "the policy of precision is not what it was"},
		{name: "another plan", job: deepwell.TrainJob{Plan: "dp2.json"}, text: "another plan"},
		{name: "decisions of precision, on stages", edit: func(f folder) {
			fallen := `{"version":1,"layers":2,"rules":[{"linears":["mlp"],"layers":"all",` +
				`"format":"mxfp8","why":"a test"}]}`
			f.reseal(`"policy":`, fmt.Sprintf(`"precision":{"watch":{},"works":%s,"aim":%[1]s,"from":0},`+
				`"policy":`, fallen))
		}, job: deepwell.TrainJob{Plan: "pp2.json"}, code: "DW2604",
			text: "fallbacks of quantized GEMMs"},

		{name: "another engine", edit: member("version", "0.0.0"), text: "engine cpu 0.0.0"},
		{name: "another interface", edit: func(f folder) { f.reseal(`"pjrt":[0,`, `"pjrt":[9,`) },
			text: "(PJRT 9."},
		{name: "other files of the engine", edit: member("digest", "ab"), text: "other files of engine"},
		{name: "another processor", edit: member("host", "ab"), text: "another processor"},
		{name: "other programs", edit: member("adamw", strings.Repeat("0", 64)),
			text: "other programs (adamw)"},
		{name: "other compile options", edit: member("options", "ab"), text: "other compile options"},
		{name: "another Deepwell", edit: member("build", "v0.0.1"), text: "Deepwell v0.0.1 →"},

		{name: "XLA_FLAGS", env: "XLA_FLAGS=--xla_cpu_enable_fast_math=true", code: "DW2208",
			text: "XLA_FLAGS"},
		{name: "TF_XLA_FLAGS", env: "TF_XLA_FLAGS=--tf_xla_cpu_global_jit", code: "DW2208",
			text: "TF_XLA_FLAGS"},
		{name: "NVIDIA_TF32_OVERRIDE", env: "NVIDIA_TF32_OVERRIDE=1", text: "OVERRIDE unset → 1"},
		{name: "CUBLAS", env: "CUBLAS_WORKSPACE_CONFIG=:16:8", text: "CONFIG unset → :16:8"},
		{name: "more steps", job: set("steps=12", "optimizer.warmup=9"),
			text: "steps was 9 when the run was saved, now it is 12"},
		{name: "LD_PRELOAD", env: "LD_PRELOAD=/nowhere/lib.so", text: "LD_PRELOAD unset → /nowhere"},
		{name: "NCCL", env: "NCCL_ALGO=Tree", text: "NCCL_ALGO unset → Tree"},
	}
}

// identityRun is the run that changes: it validates on a file of its own.
const identityRun = `model = "config.json"
steps = 9
batch = 4
seq = 16
precision = "f32"
[optimizer]
lr = 1e-2
[data]
sources = ["text"]
tokenizer = "tokenizer.json"
[eval]
data = "held.txt"
`

func layIdentity(t *testing.T) folder {
	t.Helper()
	f := folder{t, t.TempDir()}
	lay(t, f.dir)
	f.write("run.toml", identityRun)
	f.write("held.txt", strings.Repeat("What is held out is never trained on. ", 40))
	const plan = `{"version": 1, "model": "./config.json", "cluster": "2xcpu", "seq": 16, "batch": 4,` +
		` "microbatches": 2, "types": {"params": "f32"}, %s}`
	f.write("pp2.json", fmt.Sprintf(plan, `"pp": 2`))
	f.write("dp2.json", fmt.Sprintf(strings.Replace(plan, `"microbatches": 2`, `"microbatches": 1`, 1),
		`"dp": 2`))
	return f
}

// A heard is the events of a run.
type heard struct {
	mu       sync.Mutex
	warnings []string
	steps    []event.Step
	resumed  bool
}

func (h *heard) Emit(e event.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch e := e.(type) {
	case event.Warning:
		h.warnings = append(h.warnings, e.Code+" "+e.Text)
	case event.Resumed:
		h.resumed = true
	case event.Step:
		h.steps = append(h.steps, e)
	}
}

// train runs a job in this process.
func (f folder) train(cache string, job deepwell.TrainJob) (*heard, error) {
	f.Helper()
	h := &heard{}
	env, err := deepwell.NewEnv(os.Getenv, h)
	if err != nil {
		f.Fatal(err)
	}
	env.Cache = cache
	job.Path, job.Until = f.path("run.toml"), max(job.Until, 3)
	if job.Plan != "" {
		job.Plan = f.path(job.Plan)
	}
	_, err = env.Train(f.Context(), job)
	return h, err
}

// Whatever changes while a run is stopped, resuming it is refused or warns. What is refused leaves
// the run's folder as it was.
func TestNoChangeIsSilent(t *testing.T) {
	base, cache := layIdentity(t), enginetest.Caches(t)
	if _, err := base.train(cache, deepwell.TrainJob{}); err != nil {
		t.Fatal(err)
	}
	if h, err := base.train(cache, deepwell.TrainJob{}); err != nil || !h.resumed || len(h.warnings) > 0 {
		t.Fatalf("nothing changed: resumed %v, warnings %q, %v", h.resumed, h.warnings, err)
	}
	for i, c := range stopped() {
		t.Run(c.name, func(t *testing.T) {
			if c.code == "" && i%4 != 0 && !slowtest.Enabled {
				t.Skip("what is warned about goes on to train: the rest with -tags long")
			}
			f := folder{t, t.TempDir()}
			if err := os.CopyFS(f.dir, os.DirFS(base.dir)); err != nil {
				t.Fatal(err)
			}
			if c.edit != nil {
				c.edit(f)
			}
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			before := f.kept()
			h, err := f.train(cache, c.job)
			if c.code == "" {
				if all := strings.Join(h.warnings, "\n"); err != nil || !h.resumed ||
					!strings.Contains(all, "DW2605 ") || !strings.Contains(all, c.text) {
					t.Errorf("resumed %v with warnings %q, want %q; %v", h.resumed, h.warnings, c.text, err)
				}
				return
			}
			if e := diag.From(err); err == nil || string(e.Code) != c.code || e.Fix == "" ||
				!strings.Contains(err.Error(), c.text) {
				t.Errorf("not refused with %s %q: %v, warnings %q", c.code, c.text, err, h.warnings)
			}
			if after := f.kept(); after != before {
				t.Errorf("a refused run changed its folder from\n%s to\n%s", before, after)
			}
		})
	}
}

// kept names the files of the run and their digests, except events and locks.
func (f folder) kept() string {
	f.Helper()
	var list strings.Builder
	err := filepath.WalkDir(f.path("run"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "events.jsonl" || d.Name() == ".lock" ||
			strings.Contains(path, "tensorboard") {
			return err
		}
		b, err := os.ReadFile(path)
		fmt.Fprintf(&list, "%s %x\n", path, sha256.Sum256(b))
		return err
	})
	if err != nil {
		f.Fatal(err)
	}
	return list.String()
}

// Two processes of a run that differ in anything refuse to train, both of them, and say in what.
func TestNoProcessDiffers(t *testing.T) {
	if testing.Short() {
		t.Skip("two processes for each row")
	}
	cache := enginetest.Caches(t)
	for _, c := range []change{
		{name: "nothing"},
		{name: "other angles", edit: config("10000.0", "999.0"), text: "another model, another programs"},
		{name: "another epsilon", edit: config("1e-5", "1e-1"), text: "another model, another programs"},
		{name: "an edited file", edit: func(f folder) { f.swap("text/doc.txt", "Package", "package") },
			text: "another data"},
		{name: "other data of the validation", edit: func(f folder) {
			f.write("held.txt", strings.Repeat("Something else is held out. ", 40))
		}, text: "another data of the validation"},
		{name: "NCCL", env: "NCCL_ALGO=Tree", text: "another environment variables"},
		{name: "LD_PRELOAD", env: "LD_PRELOAD=libm.so.6", text: "another environment variables"},
		{name: "a profile of one", text: "another profile"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name != "nothing" && c.name != "other angles" {
				slowtest.Only(t)
			}
			first, second := layIdentity(t), layIdentity(t)
			if c.edit != nil {
				c.edit(second)
			}
			ports := enginetest.Addresses(t, 2)
			out := [2]*bytes.Buffer{{}, {}}
			var errs [2]error
			var both sync.WaitGroup
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			for self, f := range []folder{first, second} {
				train := deepwell.TrainJob{Plan: f.path("pp2.json"), Until: 1, Peers: ports, Self: self}
				if c.name != "a profile of one" || self == 0 {
					train.Profile = [2]int{1, 1}
				}
				job, err := json.Marshal(train)
				if err != nil {
					t.Fatal(err)
				}
				cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^$")
				cmd.Env = append(os.Environ(), victim+"="+f.path("run.toml"), victimJob+"="+string(job),
					"DEEPWELL_CACHE="+cache)
				if self == 1 && c.env != "" {
					cmd.Env = append(cmd.Env, c.env)
				}
				cmd.Stdout, cmd.Stderr = out[self], out[self]
				both.Go(func() { errs[self] = cmd.Run() })
			}
			both.Wait()
			for self, err := range errs {
				text, other := out[self].String(), fmt.Sprintf("process %d (%s)", 1-self, ports[1-self])
				switch {
				case c.text == "" && err != nil:
					t.Errorf("process %d: %v\n%s", self, err, text)
				case c.text != "" && (err == nil || !strings.Contains(text, "DW2606") ||
					!strings.Contains(text, c.text) || !strings.Contains(text, other)):
					t.Errorf("process %d does not say %q of %s: %v\n%s", self, c.text, other, err, text)
				}
			}
			if c.name == "nothing" { // the trace of the first process has the spans of both
				text, err := os.ReadFile(first.path("run/profile.json"))
				if err != nil || !strings.Contains(string(text), "host of process 1") {
					t.Errorf("%v\n%s", err, text)
				}
			}
		})
	}
}
