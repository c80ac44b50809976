package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
)

const steps = 60

const recipeText = `model = "config.json"
steps = %d
batch = 4
seq = 16
precision = "f32"
init = "random"
[optimizer]
lr = 1e-2
warmup = 4
[data]
sources = ["text"]
tokenizer = "tokenizer.json"
[eval]
data = "5%%"
every = 7
[save]
every = 1
keep = 2
`

const modelText = `{"model_type": "llama", "vocab_size": 1024, "hidden_size": 48,
"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`

const planText = `{"version": 1, "model": "config.json", "cluster": "2xcpu", "seq": 16, "batch": 4,
"microbatches": 2, "pp": {"size": 2, "schedule": "1f1b"}}`

// lay makes the folder of a run.
func (a *attack) lay(name string) (string, error) {
	dir := filepath.Join(a.work, name)
	if err := os.MkdirAll(filepath.Join(dir, "text"), 0o777); err != nil {
		return "", err
	}
	files := map[string]string{"run.toml": fmt.Sprintf(recipeText, steps), "config.json": modelText,
		"plan.json": planText, "tokenizer_config.json": `{"eos_token": "<|endoftext|>"}`}
	for from, to := range map[string]string{"tokenizer/testdata/trained.json": "tokenizer.json",
		"doc.go": "text/a.txt", "deepwell.go": "text/b.txt", "compile.go": "text/c.txt",
		"train.go": "text/d.txt", "README.md": "text/e.txt"} {
		text, err := os.ReadFile(filepath.Join(a.root, filepath.FromSlash(from)))
		if err != nil {
			return "", err
		}
		files[to] = string(text)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// A process is one of a run, with what it said.
type process struct {
	*exec.Cmd
	out   bytes.Buffer
	ended chan struct{}
	code  int // once ended
}

// start begins a process of the run in dir.
func (a *attack) start(dir string, more ...string) (*process, error) {
	p := &process{ended: make(chan struct{})}
	p.Cmd = exec.CommandContext(a.ctx, a.binary, append([]string{"train", "run.toml"}, more...)...)
	p.Dir, p.Stdout, p.Stderr = dir, &p.out, &p.out
	p.Env = append(os.Environ(), "DEEPWELL_CACHE="+filepath.Join(a.work, "cache"))
	if err := p.Start(); err != nil {
		return nil, err
	}
	go func() {
		err := p.Wait()
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			p.code = e.ExitCode()
		}
		close(p.ended)
	}()
	return p, nil
}

// within waits for the end of a process.
func (p *process) within(limit time.Duration) bool {
	select {
	case <-p.ended:
		return true
	case <-time.After(limit):
		return false
	}
}

// kill ends a process for good, a suspended one too.
func (p *process) kill() {
	_ = p.Process.Signal(syscall.SIGKILL)
	<-p.ended
}

// pair begins both processes of a run in two.
func (a *attack) pair(dir string, more ...string) ([2]*process, error) {
	var both [2]*process
	addresses, err := link.FreeAddresses(len(both))
	if err != nil {
		return both, err
	}
	for i := range both {
		both[i], err = a.start(dir, append([]string{"--plan", "plan.json", "--peers",
			strings.Join(addresses, ","), "--self", fmt.Sprint(i)}, more...)...)
		if err != nil {
			return both, err
		}
	}
	return both, nil
}

// reached is the step of the newest whole checkpoint, or 0. A damaged checkpoint counts as a
// failure.
func (a *attack) reached(dir string) int64 {
	c, err := ckpt.Latest(a.ctx, filepath.Join(dir, "run", "checkpoints"), event.Discard)
	if err != nil {
		if !errors.Is(err, errMissing) {
			a.harm("%v", err)
		}
		return 0
	}
	defer func() { _ = c.Close() }()
	return c.Step
}

// tensors reads all that the newest checkpoint holds.
func (a *attack) tensors(dir string) (map[string][]byte, error) {
	c, err := ckpt.Latest(a.ctx, filepath.Join(dir, "run", "checkpoints"), event.Discard)
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	if c.Step != steps {
		return nil, fmt.Errorf("%s ends at step %d", dir, c.Step)
	}
	all := map[string][]byte{}
	for _, t := range c.Tensors() {
		data := make([]byte, t.Bytes())
		if err := c.ReadSlice(t.Name, t.Box(), data); err != nil {
			return nil, err
		}
		all[t.Name] = data
	}
	return all, nil
}

// same holds the end of a run to the reference.
func (a *attack) same(dir string, want map[string][]byte) {
	have, err := a.tensors(dir)
	if err != nil {
		a.harm("%v", err)
		return
	}
	for name := range want {
		if !bytes.Equal(have[name], want[name]) {
			a.harm("%s: %s has other bits than the run that was left alone", dir, name)
			return
		}
	}
	if len(have) != len(want) {
		a.harm("%s: %d tensors, not %d", dir, len(have), len(want))
	}
}
