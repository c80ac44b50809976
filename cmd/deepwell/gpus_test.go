package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

const gpuPlan = `{"version": 1, "model": "config.json", "cluster": "4xb200", "seq": 8, "batch": 4,
"microbatches": 1, "fsdp": {"size": 2, "zero": 3, "gather": "layer"}, "tp": {"size": 2},
"types": {"params": "f32", "grads": "f32", "collectives": "f32"}}`

// wroteCompiled finds out of -v which programs were compiled, by whom, and how long they took to load.
var wroteCompiled = regexp.MustCompile(
	`compiled (\S+) for \d+ x cuda (?:by (.+), loaded )?(?:in ([\d.]+) s|from the cache)`)

// A program that was compiled without a GPU runs on one, and a second process of the run gets it from
// the first: nobody compiles again.
func TestProgramsAreCompiledOnce(t *testing.T) {
	g := softgpu.Build(t)
	d := newDesk(t, t.TempDir())
	plan := strings.NewReplacer("4xb200", "2xb200", `"tp": {"size": 2}`, `"compile": "ahead"`).
		Replace(gpuPlan)
	if err := os.WriteFile(filepath.Join(d.dir, "plan.json"), []byte(plan), 0o600); err != nil {
		t.Fatal(err)
	}
	with := func(o softgpu.Options, cache string) *desk {
		on := *d
		o.Memory, o.Env = 64<<20, append(o.Env, d.env[len(d.env)-2], "DEEPWELL_CACHE="+cache)
		on.env = g.Env(o)
		return &on
	}
	caches := []string{t.TempDir(), t.TempDir()}
	ahead := with(softgpu.Options{}, caches[0])
	ahead.env = slices.DeleteFunc(ahead.env, func(v string) bool { // ptxas alone is of the software GPU
		return strings.HasPrefix(v, "LD_") || strings.HasPrefix(v, "SOFTGPU_")
	})
	if status, out := ahead.run("compile", "plan.json"); status != 0 {
		t.Fatalf("status %d\n%s", status, out)
	}
	args := []string{"train", "run.toml", "-v", "--set", "steps=2", "--set", "precision=f32", "--set",
		"batch=4", "--plan", "plan.json"}
	status, one := with(softgpu.Options{GPUs: 2}, caches[0]).run(append(args, "--set", "out=one")...)
	if status != 0 || len(steps(one)) != 2 {
		t.Fatalf("status %d\n%s", status, one)
	}
	outs := make([]string, 2)
	at := strings.Join(enginetest.Addresses(t, 2), ",")
	var wg sync.WaitGroup
	for self := range outs {
		wg.Go(func() {
			var status int
			status, outs[self] = with(softgpu.Options{Env: []string{"SOFTGPU_NCCL_DIR=" + d.dir}},
				caches[self]).run(append(args, "--set", "out=two", "--peers", at, "--self",
				fmt.Sprint(self))...)
			if status != 0 {
				t.Errorf("process %d: status %d\n%s", self, status, outs[self])
			}
		})
	}
	wg.Wait()
	if fmt.Sprint(steps(outs[0])) != fmt.Sprint(steps(one)) {
		t.Errorf("%v in two processes, %v in one", steps(outs[0]), steps(one))
	}
	for i, row := range []struct{ out, from string }{{one, "a compile ahead"},
		{outs[0], "a compile ahead"}, {outs[1], "process 0"}} {
		found := wroteCompiled.FindAllStringSubmatch(row.out, -1)
		if len(found) < 2 {
			t.Errorf("%d: no programs in\n%s", i, row.out)
		}
		for _, m := range found {
			if m[1] == "digest" {
				continue // compares replicas before a save; it belongs to no plan
			}
			seconds, err := strconv.ParseFloat(m[3], 64)
			if m[2] != row.from || err != nil || seconds >= 1 {
				t.Errorf("%d: %s, not by %s within a second", i, m[0], row.from)
			}
			t.Log(m[0])
		}
	}
}

// Two processes with two GPUs each are one client: they train as one process with four, and as CPU
// devices, and any of them goes on with what another wrote.
func TestProcessesShareAClient(t *testing.T) {
	slowtest.Only(t) // XLA ends a process whose devices do not meet within 40 s: no race detector
	g := softgpu.Build(t)
	cpu := newDesk(t, enginetest.Cache())
	for name, text := range map[string]string{"plan.json": gpuPlan, "config.json": strings.Replace(
		signalModel, `"num_key_value_heads": 1`, `"num_key_value_heads": 2`, 1)} {
		if err := os.WriteFile(filepath.Join(cpu.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	meet := t.TempDir()
	gpus := func(n int) *desk {
		d := *cpu
		d.env = g.Env(softgpu.Options{GPUs: n, Memory: 64 << 20,
			Env: append([]string{"SOFTGPU_NCCL_DIR=" + meet}, d.env[len(d.env)-2:]...)})
		return &d
	}
	args := func(more ...string) []string {
		return append([]string{"train", "run.toml", "--set", "steps=4", "--set", "precision=f32", "--set",
			"batch=4", "--plan", "plan.json"}, more...)
	}
	status, out := cpu.run(args("--set", "out=cpu", "--device", "cpu")...)
	if status != 0 || len(steps(out)) != 4 {
		t.Fatalf("status %d\n%s", status, out)
	}
	status, one := gpus(4).run(args("--set", "out=one")...)
	if status != 0 || fmt.Sprint(steps(one)) != fmt.Sprint(steps(out)) {
		t.Errorf("status %d\n%s\n%s", status, one, out)
	}
	together := func(more ...string) (int, string) {
		at := strings.Join(enginetest.Addresses(t, 2), ",")
		var wg sync.WaitGroup
		var codes [2]int
		var outs [2]string
		for self := range 2 {
			wg.Go(func() {
				codes[self], outs[self] = gpus(2).run(args(append(more, "--peers", at, "--self",
					fmt.Sprint(self))...)...)
			})
		}
		wg.Wait()
		t.Log(outs[1])
		return max(codes[0], codes[1]), outs[0]
	}
	status, two := together("--set", "out=two")
	if status != 0 || fmt.Sprint(steps(two)) != fmt.Sprint(steps(out)) {
		t.Fatalf("status %d\n%s\n%s", status, two, out)
	}
	t.Run("goes on elsewhere", func(t *testing.T) {
		into := []string{"--set", "out=moves", "--until"}
		var all [][3]float64
		for i, run := range []func(...string) (int, string){together,
			func(more ...string) (int, string) { return gpus(4).run(args(more...)...) },
			func(more ...string) (int, string) { return cpu.run(args(append(more, "--device", "cpu")...)...) },
			together} {
			status, out := run(append(into, fmt.Sprint(i+1))...)
			if status != 0 {
				t.Fatalf("part %d: status %d\n%s", i, status, out)
			}
			all = append(all, steps(out)...)
		}
		if fmt.Sprint(all) != fmt.Sprint(steps(out)) {
			t.Errorf("%v, and never stopped %v", all, steps(out))
		}
	})
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(signal.String(), func(t *testing.T) {
			at := strings.Join(enginetest.Addresses(t, 2), ",")
			more := args("--set", "steps=200000", "--set", "out="+strings.ReplaceAll(signal.String(), " ",
				""), "--peers", at, "--self")
			other := gpus(2).command(append(more, "1")...)
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = other.Process.Kill(); _ = other.Wait() })
			s := gpus(2).start(t, "tok/s", append(more, "0")...)
			_ = other.Process.Signal(signal)
			began := time.Now()
			code, out := s.end(t)
			took := time.Since(began)
			if code != 5 || !strings.Contains(out, "process 1 at") || took > 12*time.Second {
				t.Errorf("status %d after %s\n%s", code, took, out)
			}
			t.Logf("found after %s: %s", took.Round(100*time.Millisecond), out[strings.Index(out, "DW"):])
		})
	}
}
