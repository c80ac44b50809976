package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
)

const hangRecipe = `model = "./config.json"
init = "random"
steps = 1000000
batch = 2
microbatch = 1
seq = 8
precision = "f32"
[optimizer]
warmup = 1
schedule = "constant"
lr = 1e-6
[data]
sources = ["text"]
tokenizer = "tokenizer.json"
[save]
every = 0
[guard]
spike = 0.0
`

const hangModel = `{"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
"tie_word_embeddings": true}`

const hangPlan = `{"version": 1, "model": "./config.json", "cluster": "2xcpu", "seq": 8, "batch": 2,
"microbatches": 2, "pp": 2, "types": {"params": "f32", "grads": "f32", "collectives": "f32"}}`

// hangBed makes the folder of a run of two pipeline ranks, and the command to run in it.
func hangBed(t *testing.T) (dir, command string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{"run.toml": hangRecipe, "config.json": hangModel,
		"plan.json": hangPlan, "text/a.txt": strings.Repeat("A stopped process says nothing. ", 400)} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777),
			os.WriteFile(path, []byte(text), 0o666)); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command = filepath.Join(t.TempDir(), "deepwell") // TestMain is the command under this name
	if err := os.Symlink(self, command); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(command, "data", "tokenizer", "text", "--vocab", "300", "-o", "tokenizer.json")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir, command
}

// A shared buffer is read while a process writes to it.
type sharedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *sharedBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *sharedBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// A started is a process of a run.
type started struct {
	*exec.Cmd
	out  sharedBuffer
	done chan struct{} // closed when it has ended
}

// startTrain starts a process of a run. It is killed with the test.
func startTrain(t *testing.T, dir, command string, args ...string) *started {
	t.Helper()
	p := &started{Cmd: exec.Command(command, append([]string{"train", "run.toml"}, args...)...),
		done: make(chan struct{})}
	p.Dir, p.Stdout, p.Stderr = dir, &p.out, &p.out
	p.Env = append(os.Environ(), "DEEPWELL_CACHE="+filepath.Join(dir, "cache"))
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		_ = p.Process.Signal(syscall.SIGCONT)
		_ = p.Process.Kill()
		<-p.done
	})
	return p
}

// until waits until the output matches.
func (p *started) until(t *testing.T, pattern string, within time.Duration) {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for end := time.Now().Add(within); !re.MatchString(p.out.String()); time.Sleep(10 * time.Millisecond) {
		select {
		case <-p.done:
			t.Fatalf("the process has ended:\n%s", p.out.String())
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("no %q within %s:\n%s", pattern, within, p.out.String())
		}
	}
}

// ends gives the exit status, and how long the process took from now on.
func (p *started) ends(t *testing.T, within time.Duration) (status int, took time.Duration) {
	t.Helper()
	start := time.Now()
	select {
	case <-p.done:
		return p.ProcessState.ExitCode(), time.Since(start)
	case <-time.After(within):
		t.Fatalf("the process hangs for %s:\n%s", within, p.out.String())
	}
	return 0, 0
}

// A process that is stopped is found within 10 s: the other one ends with status 5 and names it by
// address and ranks. Before there were heartbeats, it waited for ever.
func TestStoppedPeerIsFound(t *testing.T) {
	slowtest.Only(t) // eight seconds of silence are eight seconds
	t.Parallel()
	dir, command := hangBed(t)
	at := enginetest.Addresses(t, 2)
	var both []*started
	for self := range 2 {
		both = append(both, startTrain(t, dir, command, "--plan", "plan.json", "--peers",
			strings.Join(at, ","), "--self", fmt.Sprint(self), "--set", fmt.Sprintf("out=run%d", self)))
	}
	both[0].until(t, `step +\d`, 2*time.Minute)
	if err := both[1].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	status, took := both[0].ends(t, 40*time.Second)
	text := both[0].out.String()
	t.Logf("found after %s:\n%s", took, text[max(0, len(text)-600):])
	if status != 5 {
		t.Errorf("status %d", status)
	}
	if took > 20*time.Second { // 10 s, and as much for a busy machine
		t.Errorf("found after %s", took)
	}
	for _, want := range []string{"process 1 at " + at[1], "pipeline rank 1", "DW3211", "newest checkpoint"} {
		if !strings.Contains(text, want) {
			t.Errorf("the error does not have %q:\n%s", want, text[max(0, len(text)-600):])
		}
	}
}

// Two processes that are suspended together for longer than the patience, as on a laptop that
// sleeps, and one that is suspended for less, go on as if nothing had been.
func TestSuspendedRunGoesOn(t *testing.T) {
	slowtest.Only(t)
	t.Parallel()
	dir, command := hangBed(t)
	at := enginetest.Addresses(t, 2)
	var both []*started
	for self := range 2 {
		both = append(both, startTrain(t, dir, command, "--plan", "plan.json", "--peers",
			strings.Join(at, ","), "--self", fmt.Sprint(self), "--set", fmt.Sprintf("out=run%d", self),
			"--set", "save.every=500"))
	}
	both[0].until(t, `step +\d`, 2*time.Minute)
	signal := func(s syscall.Signal, list ...*started) {
		for _, p := range list {
			if err := p.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		who []*started
		how time.Duration
	}{{both, 12 * time.Second}, {both[1:], 4 * time.Second}, {both[:1], 4 * time.Second}, {both, 10 * time.Second}} {
		signal(syscall.SIGSTOP, c.who...)
		time.Sleep(c.how)
		signal(syscall.SIGCONT, c.who...)
		for _, p := range both {
			text := p.out.String()
			for end := time.Now().Add(time.Minute); len(p.out.String()) == len(text); time.Sleep(50 * time.Millisecond) {
				select {
				case <-p.done:
					t.Fatalf("the process has ended:\n%s", p.out.String())
				default:
				}
				if time.Now().After(end) {
					t.Fatal("the process does not go on")
				}
			}
		}
	}
}

// Without a key, processes on several hosts are refused with the way to make one.
func TestPeersNeedAKey(t *testing.T) {
	t.Parallel()
	dir, command := hangBed(t)
	p := startTrain(t, dir, command, "--plan", "plan.json", "--peers", "0.0.0.0:0,127.0.0.1:1", "--self", "0")
	status, _ := p.ends(t, time.Minute)
	if text := p.out.String(); status != 2 || !strings.Contains(text, "DW3213") || !strings.Contains(text, "chmod 600 run.key") {
		t.Errorf("status %d\n%s", status, text)
	}
}
