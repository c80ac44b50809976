package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/plugin"
)

const signalRun = `model = "config.json"
steps = 200000
batch = 2
seq = 8
[optimizer]
lr = 1e-6
[data]
sources = ["text"]
tokenizer = "tokenizer.json"
[save]
every = 0
`

const signalModel = `{"model_type": "llama", "vocab_size": 300, "hidden_size": 16,
"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`

// A desk is a folder in which the command is run, in processes of its own.
type desk struct {
	t   *testing.T
	dir string
	env []string
}

func newDesk(t *testing.T, cache string) *desk {
	t.Helper()
	engines, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	d := &desk{t: t, dir: t.TempDir()}
	d.env = append(os.Environ(), "DEEPWELL_HOME="+filepath.Dir(engines),
		"DEEPWELL_CACHE="+cache)
	text := strings.Repeat("The river bends where the old mill stood, and the water is slow.\n", 40)
	for name, text := range map[string]string{"run.toml": signalRun, "config.json": signalModel,
		"text/a.txt": text} {
		path := filepath.Join(d.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code, out := d.run("data", "tokenizer", "text", "--vocab", "300", "-o", "tokenizer.json"); code != 0 {
		t.Fatal(out)
	}
	return d
}

func (d *desk) command(args ...string) *exec.Cmd {
	cmd := exec.Command("deepwell", args...)
	cmd.Dir, cmd.Env = d.dir, d.env
	return cmd
}

// run gives the exit status and all that was printed.
func (d *desk) run(args ...string) (int, string) {
	d.t.Helper()
	out, err := d.command(args...).CombinedOutput()
	return status(d.t, err), string(out)
}

func status(t *testing.T, err error) int {
	t.Helper()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		return e.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

// A process is a command at work, and what it printed so far.
type process struct {
	*exec.Cmd
	lines chan string
	seen  bytes.Buffer
}

// start starts a command, and waits until it prints a word.
func (d *desk) start(t *testing.T, word string, args ...string) *process {
	t.Helper()
	s := &process{Cmd: d.command(args...), lines: make(chan string, 1<<16)}
	pipe, err := s.StderrPipe()
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Process.Kill() })
	go func() {
		defer close(s.lines)
		in := bufio.NewReader(pipe)
		for {
			line, err := in.ReadString('\n')
			s.lines <- line
			if err != nil {
				return
			}
		}
	}()
	s.until(t, word)
	return s
}

func (s *process) until(t *testing.T, word string) {
	t.Helper()
	for line := range s.lines {
		s.seen.WriteString(line)
		if strings.Contains(line, word) {
			return
		}
	}
	t.Fatalf("no %q in:\n%s", word, &s.seen)
}

// end reads the rest, and gives the exit status and all that was printed.
func (s *process) end(t *testing.T) (int, string) {
	t.Helper()
	for line := range s.lines {
		s.seen.WriteString(line)
	}
	return status(t, s.Wait()), s.seen.String()
}

func (d *desk) checkpoints(out string) int {
	list, err := filepath.Glob(filepath.Join(d.dir, out, "checkpoints", "step-*"))
	if err != nil {
		d.t.Fatal(err)
	}
	return len(list)
}

// What happens to runs that are processes of their own, as users start them.
func TestProcesses(t *testing.T) {
	cache := enginetest.Caches(t)
	for _, c := range []struct {
		name string
		test func(*testing.T, string)
	}{
		{"SignalsSaveAndExit", signalsSaveAndExit},
		{"BrokenPipeDoesNotKill", brokenPipeDoesNotKill},
		{"SecondRunIsRefused", secondRunIsRefused},
		{"RunWaitsForTheLock", runWaitsForTheLock},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, cache) })
	}
}

// Ctrl-C, SIGTERM and a lost terminal end a run with a checkpoint, a plain sentence and a status
// that tells it from a failure; the same command goes on.
func signalsSaveAndExit(t *testing.T, cache string) {
	d := newDesk(t, cache)
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		want   int
	}{{"SIGINT", syscall.SIGINT, 130}, {"SIGTERM", syscall.SIGTERM, 143}, {"SIGHUP", syscall.SIGHUP, 143}} {
		t.Run(c.name, func(t *testing.T) {
			if signal.Ignored(c.signal) {
				t.Skip("nohup has it ignored, and a run then ignores it as well")
			}
			s := d.start(t, "tok/s", "train", "run.toml", "--set", "out="+c.name)
			if err := s.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			if c.signal == syscall.SIGHUP { // a shell sends another one
				_ = s.Process.Signal(c.signal)
			}
			code, out := s.end(t)
			if code != c.want || d.checkpoints(c.name) != 1 {
				t.Errorf("exit %d, want %d, %d checkpoints\n%s", code, c.want, d.checkpoints(c.name), out)
			}
			if !strings.Contains(out, " of 200000, saved; run the same command again to go on") ||
				strings.Contains(out, "DW1") {
				t.Errorf("it says:\n%s", out)
			}
		})
	}
	s := d.start(t, "resumed", "train", "run.toml", "--set", "out=SIGINT")
	_ = s.Process.Kill()
	_, _ = s.end(t)
}

// The reader of a run's log may go away.
func brokenPipeDoesNotKill(t *testing.T, cache string) {
	d := newDesk(t, cache)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := d.command("train", "run.toml", "--set", "steps=400")
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	if _, err := r.Read(make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	_ = r.Close()
	if code := status(t, cmd.Wait()); code != 0 || d.checkpoints("run") != 1 {
		t.Errorf("exit %d, %d checkpoints", code, d.checkpoints("run"))
	}
}

// A second run in one folder is refused while the first is at work, and changes nothing; a prune
// beside it is not, and ends neither. When the first is killed, the folder is free.
func secondRunIsRefused(t *testing.T, cache string) {
	d := newDesk(t, cache)
	first := d.start(t, " saved ", "train", "run.toml", "--set", "save.every=5", "--set", "save.keep=0")
	before, err := filepath.Glob(filepath.Join(d.dir, "run", "tensorboard", "*"))
	if err != nil {
		t.Fatal(err)
	}
	code, out := d.run("train", "run.toml", "--set", "seed=2")
	want := fmt.Sprintf("DW2909 process %d is training in ", first.Process.Pid)
	if code != 1 || !strings.Contains(out, want) || !strings.Contains(out, "fix ") {
		t.Errorf("exit %d\n%s", code, out)
	}
	after, err := filepath.Glob(filepath.Join(d.dir, "run", "tensorboard", "*"))
	if err != nil || len(after) != len(before) {
		t.Errorf("files for TensorBoard: %v, then %v", before, after)
	}
	for range 8 {
		if code, out := d.run("ckpt", "prune", "run", "--keep", "1"); code != 0 {
			t.Errorf("prune beside the run: exit %d\n%s", code, out)
		}
	}
	first.until(t, " saved ") // it goes on
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = first.end(t)
	third := d.start(t, "resumed", "train", "run.toml", "--set", "save.every=5", "--set", "save.keep=0")
	_ = third.Process.Kill()
	_, _ = third.end(t)
}

// A run waits for whoever has the lock of its checkpoints, and ends well.
func runWaitsForTheLock(t *testing.T, cache string) {
	d := newDesk(t, cache)
	lock := filepath.Join(d.dir, "run", "checkpoints", ".lock")
	if err := os.MkdirAll(filepath.Dir(lock), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(lock)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	s := d.start(t, "waiting for it", "train", "run.toml", "--set", "steps=20", "--set", "save.every=10")
	_ = f.Close()
	if code, out := s.end(t); code != 0 || d.checkpoints("run") == 0 {
		t.Errorf("exit %d\n%s", code, out)
	}
}

// A second Ctrl-C ends the process at once, with the status of a failure: 130 would say that all is
// saved. It is said why.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	if os.Getenv("DEEPWELL_TEST_SIGNALS") != "" {
		ctx := untilSignal(t.Context(), os.Exit)
		for range 2 {
			if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
			<-ctx.Done()
		}
		select {} // the second signal ends it
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestSecondSignalEndsAtOnce$")
	cmd.Env = append(os.Environ(), "DEEPWELL_TEST_SIGNALS=1")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "without a save") {
		t.Errorf("%v: %s", err, out)
	}
}
