package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/diag"
)

// playsEnv makes the test's own binary a process of a run.
const playsEnv = "LAUNCH_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(playsEnv) != "" {
		play(os.Args[1:])
	}
	goleak.VerifyTestMain(m)
}

// play does what a script says, one word for each start: a status to end with, "kill" itself,
// "wait" for a signal, which ends it with 143, or be "deaf" to one. The words of processes are
// separated by commas, of starts by slashes.
func play(args []string) {
	flag := func(name string) string { return args[slices.Index(args, name)+1] }
	self, _ := strconv.Atoi(flag("--self"))
	heard := make(chan os.Signal, 2)
	signal.Notify(heard, syscall.SIGTERM)
	info, err := os.Stat(flag("--key-file"))
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != 32 {
		fmt.Println("key", info, err)
		os.Exit(9)
	}
	count := filepath.Join(os.Getenv("LAUNCH_DIR"), "count"+flag("--self"))
	before, _ := os.ReadFile(count)
	_ = os.WriteFile(count, append(before, 'x'), 0o600)
	starts := strings.Split(args[0], "/")
	words := strings.Split(starts[min(len(before), len(starts)-1)], ",")
	fmt.Printf("start %d of %d\nno end of a line", len(before), strings.Count(flag("--peers"), ":"))
	switch word := words[min(self, len(words)-1)]; word {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "wait":
		<-heard
		time.Sleep(200 * time.Millisecond) // saves; a second signal would end it
		if len(heard) > 0 {
			os.Exit(1)
		}
		os.Exit(143)
	case "deaf":
		select {}
	default:
		status, _ := strconv.Atoi(word)
		os.Exit(status)
	}
}

// a shared buffer is read while processes write to it.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func local(t *testing.T, script string) (*Local, *output) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, out := t.TempDir(), &output{}
	t.Setenv("TMPDIR", dir)
	return &Local{Command: []string{self, script}, Processes: 2, Restarts: 3, Output: out,
		Env: func(int) []string { return append(os.Environ(), playsEnv+"=1", "LAUNCH_DIR="+dir) },
		Addresses: func(n int) ([]string, error) {
			return slices.Repeat([]string{"127.0.0.1:1"}, n), nil
		},
		wait: time.Millisecond, grace: 2 * time.Second, stop: 2 * time.Second}, out
}

// A run ends when all of its processes do; it is started again after failures that a restart may
// mend, and only after those, a bounded number of times.
func TestLocalRuns(t *testing.T) {
	for _, c := range []struct {
		script   string
		restarts int
		status   diag.Class // 0 is success
		says     string
	}{
		{"0,0", 0, 0, "[1] start 0 of 2\n"},
		{"0,5/0,0", 1, 0, "[launch] process 1 ended with status 5; restart 1 of 3\n"},
		{"5,kill/0,0", 1, 0, "[launch] process 1 was ended by signal 9 (killed); restart 1 of 3\n"},
		{"5,5/5,0/0,0", 2, 0, "restart 2 of 3\n"},
		{"5,5", 3, diag.Stalled, "restart 3 of 3\n"},
		{"5,2", 0, diag.Usage, ""},
		{"4,5", 0, diag.Numerics, ""},
		{"143,5", 0, diag.Terminated, ""},
		{"5,deaf/0,0", 1, 0, "[launch] process 0 ended with status 5; restart 1 of 3\n"},
		{"5,wait/0,0", 1, 0, "[launch] process 0 ended with status 5; restart 1 of 3\n"},
		{"1,wait", 0, diag.Failed, ""},
	} {
		t.Run(c.script, func(t *testing.T) {
			l, out := local(t, c.script)
			restarts, err := l.Run(t.Context())
			status := diag.Class(0)
			if err != nil {
				status = diag.From(err).Class()
			}
			if restarts != c.restarts || status != c.status || !strings.Contains(out.String(), c.says) ||
				!strings.Contains(out.String(), "[0] no end of a line\n") {
				t.Errorf("%d restarts, status %d, %v\n%s", restarts, status, err, out)
			}
			if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "deepwell-run-*")); len(left) > 0 {
				t.Errorf("the key stays: %v", left)
			}
		})
	}
}

// A launcher that is asked to end passes it on once, and waits for processes to save.
func TestLocalStops(t *testing.T) {
	for _, script := range []string{"wait,wait", "wait,deaf"} {
		l, out := local(t, script)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := l.Run(ctx)
			done <- err
		}()
		for end := time.Now().Add(20 * time.Second); strings.Count(out.String(), "start") < 2 &&
			time.Now().Before(end); time.Sleep(time.Millisecond) {
		}
		cancel()
		if err := <-done; !errors.Is(err, diag.Canceled) {
			t.Errorf("%s: %v\n%s", script, err, out)
		}
	}
}

// What cannot be started is an error, and leaves nothing behind.
func TestLocalCannotStart(t *testing.T) {
	l, _ := local(t, "0")
	l.Command[0] = filepath.Join(t.TempDir(), "missing")
	if _, err := l.Run(t.Context()); !errors.Is(err, diag.ProcessFailed) {
		t.Error(err)
	}
	l, _ = local(t, "0")
	l.Processes = 0
	if _, err := l.Run(t.Context()); !errors.Is(err, diag.BadUsage) {
		t.Error(err)
	}
}

// The launcher starts again after the statuses that the table in docs/errors.md says, which is
// printed from the same function.
func TestRestartsAreTheTables(t *testing.T) {
	table, err := os.ReadFile(filepath.Join("..", "docs", "errors.md"))
	if err != nil {
		t.Fatal(err)
	}
	for status := range 256 {
		again, err := judge([]end{{process: 0}, {process: 1, status: status}})
		row := fmt.Sprintf("\n| %d | ", status)
		_, rest, listed := strings.Cut(string(table), row)
		line, _, _ := strings.Cut(rest, "\n")
		switch {
		case (err == nil) != (status == 0):
			t.Errorf("status %d: %v", status, err)
		case listed && strings.Contains(line, "| yes") != again || !listed && again:
			t.Errorf("status %d: again %t, and the table says %q", status, again, line)
		}
	}
	slurm, err := Script("slurm", Run{Name: "a", Hosts: 1, GPUs: 1, Recipe: "r", Plan: "p", Key: "k"})
	if err != nil || !strings.Contains(slurm, "    5 | 132") || !strings.Contains(slurm, ":7000\"") {
		t.Errorf("%v\n%s", err, slurm)
	}
	jobset, err := Script("jobset", Run{Name: "a", Hosts: 1, GPUs: 1, Recipe: "r", Plan: "p", Key: "k",
		Image: "i", Volume: "v", Folder: "/f"})
	if err != nil || !strings.Contains(jobset, "values: [1, 2, 3, 4]") {
		t.Errorf("%v\n%s", err, jobset)
	}
}
