package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

// childrenOf are the processes that a process has started.
func childrenOf(t *testing.T, pid int) (list []int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil || len(tasks) == 0 {
		t.Skip("no /proc")
	}
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for word := range strings.FieldsSeq(string(text)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, n)
		}
	}
	return list
}

var launchedStep = regexp.MustCompile(`(?m)^\[0\] (step )`)

// A run on this host survives the end of one of its processes, saves when it is asked to end, and
// goes on with the bits that one process would have.
func TestLaunchedRunGoesOn(t *testing.T) {
	slowtest.Only(t)
	d := newDesk(t, enginetest.Cache())
	model := strings.Replace(signalModel, `"num_hidden_layers": 1`, `"num_hidden_layers": 2`, 1)
	for name, text := range map[string]string{"plan.json": pairPlan, "config.json": model} {
		if err := os.WriteFile(filepath.Join(d.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := func(verb string, more ...string) []string {
		return append([]string{verb, "run.toml", "--plan", "plan.json", "--set", "precision=f32", "--set",
			"batch=4", "--set", "steps=1000", "--set", "save.every=100"}, more...)
	}
	local := args("launch", "--to", "local", "--processes", "2", "--set", "out=launched")
	s := d.start(t, "] step 1", local...)
	var children []int
	for range 100 {
		if children = childrenOf(t, s.Process.Pid); len(children) == 2 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if len(children) != 2 {
		t.Fatalf("%v", children)
	}
	if err := syscall.Kill(children[1], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.until(t, "restart 1 of 100")
	s.until(t, "] step")
	_ = s.Process.Signal(syscall.SIGTERM)
	code, out := s.end(t)
	if code != 143 || !strings.Contains(out, "saved launched/checkpoints") {
		t.Fatalf("status %d\n%s", code, out)
	}
	if code, out := d.run(local...); code != 0 {
		t.Fatalf("status %d\n%s", code, out)
	}
	if code, out := d.run(args("train", "--set", "out=one")...); code != 0 {
		t.Fatalf("status %d\n%s", code, out)
	}
	const last = "/checkpoints/step-00001000"
	if code, out := d.run("ckpt", "diff", "one"+last, "launched"+last); code != 0 {
		t.Errorf("status %d\n%s", code, out)
	}
}

// A host's four GPUs are shared by two processes that launch starts.
func TestLaunchSharesGPUs(t *testing.T) {
	slowtest.Only(t)
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	model := strings.Replace(signalModel, `"num_key_value_heads": 1`, `"num_key_value_heads": 2`, 1)
	for name, text := range map[string]string{"plan.json": gpuPlan, "config.json": model} {
		if err := os.WriteFile(filepath.Join(d.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := func(verb string, more ...string) []string {
		return append([]string{verb, "run.toml", "--plan", "plan.json", "--set", "precision=f32", "--set",
			"batch=4", "--set", "steps=4"}, more...)
	}
	cpu := *d
	d.env = g.Env(softgpu.Options{GPUs: 4, Memory: 64 << 20,
		Env: append([]string{"SOFTGPU_NCCL_DIR=" + t.TempDir()}, d.env[len(d.env)-2:]...)})
	code, out := d.run(args("launch", "--to", "local", "--processes", "2")...)
	want, alone := cpu.run(args("train", "--device", "cpu", "--set", "out=cpu")...)
	out = launchedStep.ReplaceAllString(out, "$1")
	if code != 0 || want != 0 || len(steps(out)) != 4 || fmt.Sprint(steps(out)) != fmt.Sprint(steps(alone)) {
		t.Errorf("status %d\n%s\nalone %d\n%s", code, out, want, alone)
	}
}
