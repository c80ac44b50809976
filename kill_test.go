package deepwell_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// victim is how a test tells a child of its own binary to train.
const victim = "DEEPWELL_TEST_TRAIN"

// victimJob is the rest of the child's job, as JSON; it may be missing.
const victimJob = "DEEPWELL_TEST_JOB"

func TestMain(m *testing.M) {
	path := os.Getenv(victim)
	if path == "" {
		os.Exit(m.Run())
	}
	job := deepwell.TrainJob{}
	err := json.Unmarshal([]byte(cmp.Or(os.Getenv(victimJob), "{}")), &job)
	job.Path = path
	var env *deepwell.Env
	if err == nil {
		env, err = deepwell.NewEnv(os.Getenv, event.NewPlain(os.Stderr))
	}
	if err == nil {
		_, err = env.Train(context.Background(), job)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

const killedRun = `model = "config.json"
steps = 40
batch = 4
seq = 16
precision = "f32"
[optimizer]
lr = 1e-2
warmup = 4
[data]
sources = ["text"]
tokenizer = "tokenizer.json"
[eval]
data = "2%"
every = 7
[save]
every = 3
keep = 2
`

const killedModel = `{"model_type": "llama", "vocab_size": %d, "hidden_size": 48,
"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`

// lay makes the folder of a run: a recipe, a model, a tokenizer and some text.
func lay(t *testing.T, dir string) string {
	t.Helper()
	tokenizer, err := os.ReadFile(filepath.Join("tokenizer", "testdata", "trained.json"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	write("run.toml", killedRun)
	write("config.json", fmt.Sprintf(killedModel, 1024))
	write("tokenizer.json", string(tokenizer))
	write("tokenizer_config.json", `{"eos_token": "<|endoftext|>"}`)
	for _, name := range []string{"doc.go", "deepwell.go", "compile.go", "train.go"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		write(filepath.Join("text", strings.TrimSuffix(name, ".go")+".txt"), string(text))
	}
	return filepath.Join(dir, "run.toml")
}

// trainChild starts a run in a process of its own.
func trainChild(t *testing.T, path, cache string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), victim+"="+path, "DEEPWELL_CACHE="+cache)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, &out
}

// A run that is killed with kill -9 at ten random moments, and resumed each time, ends with the
// same bits as one that is left alone.
func TestKilledRunsEndAlike(t *testing.T) {
	if testing.Short() {
		t.Skip("a dozen processes")
	}
	cache := enginetest.Caches(t)
	whole, killed := lay(t, t.TempDir()), lay(t, t.TempDir())
	start := time.Now()
	cmd, out := trainChild(t, whole, cache)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	alone := time.Since(start)
	seed := slowtest.Seed(t, "seed", 0)
	r := rand.New(rand.NewPCG(seed, 0))
	kills, resumed, log, most := 0, 0, "", 4
	if slowtest.Enabled {
		most = 10
	}
	for {
		cmd, out := trainChild(t, killed, cache)
		if kills < most {
			// Up to the time of a whole run with the programs in the cache, to hit every part of it.
			time.Sleep(time.Duration(r.Float64() * float64(alone) / 2))
			if err := cmd.Process.Kill(); err == nil {
				kills++
			}
		}
		err := cmd.Wait()
		log += out.String()
		resumed += strings.Count(out.String(), "resumed")
		if err == nil && kills >= most {
			break
		}
		if kills > most || err != nil && !strings.Contains(err.Error(), "killed") {
			t.Fatalf("seed %d: %v\n%s", seed, err, out)
		}
	}
	t.Logf("seed %d: %d kills, resumed %d times", seed, kills, resumed)
	a, b := final(t, whole), final(t, killed)
	if len(a) == 0 || len(a) != len(b) {
		t.Fatalf("seed %d: %d and %d tensors", seed, len(a), len(b))
	}
	for name := range a {
		if !bytes.Equal(a[name], b[name]) {
			t.Errorf("seed %d: %s differs", seed, name)
		}
	}
}

// final reads the last checkpoint of a run, which must be of its last step.
func final(t *testing.T, path string) map[string][]byte {
	t.Helper()
	c, err := ckpt.Latest(t.Context(), filepath.Join(filepath.Dir(path), "run", "checkpoints"),
		event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if c.Step != 40 {
		t.Errorf("the last step is %d", c.Step)
	}
	all := map[string][]byte{}
	for _, one := range c.Tensors() {
		all[one.Name] = make([]byte, one.Bytes())
		if err := c.ReadSlice(one.Name, one.Box(), all[one.Name]); err != nil {
			t.Fatal(err)
		}
	}
	return all
}
