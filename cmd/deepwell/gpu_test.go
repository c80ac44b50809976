package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

var stepLine = regexp.MustCompile(`(?m)^step (\d+)/\d+ +loss +([\d.]+) .*grad norm +([\d.e+-]+)`)

// steps reads losses and norms of gradients from what a run prints.
func steps(out string) (list [][3]float64) {
	for _, m := range stepLine.FindAllStringSubmatch(out, -1) {
		var row [3]float64
		for i := range row {
			row[i], _ = strconv.ParseFloat(m[i+1], 64)
		}
		list = append(list, row)
	}
	return list
}

// offloadPlan is one that programs for GPUs get wrong.
const offloadPlan = `{"version": 1, "model": "config.json", "cluster": "2xb200", "seq": 8, "batch": 2,
"microbatches": 1, "fsdp": {"size": 2, "zero": 3, "gather": "layer"}, "offload": ["activations"],
"types": {"params": "f32", "grads": "f32", "collectives": "f32"}}`

// The command trains on GPUs where the host has them, a run goes from CPU devices to GPUs and back,
// and what is wrong with GPUs has its code and its fix. The GPUs are software.
func TestTrainOnGPUs(t *testing.T) {
	g := softgpu.Build(t)
	cpu := newDesk(t, enginetest.Cache())
	gpus := func(o softgpu.Options) *desk {
		d := *cpu
		o.Env = append(o.Env, d.env[len(d.env)-2:]...)
		d.env = g.Env(o)
		return &d
	}
	if err := os.WriteFile(filepath.Join(cpu.dir, "offload.json"), []byte(offloadPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	args := func(more ...string) []string {
		return append([]string{"train", "run.toml", "--set", "steps=4", "--set", "precision=f32"}, more...)
	}
	one := gpus(softgpu.Options{Memory: 64 << 20})
	code, out := one.run(args("--set", "out=gpu", "-v", "--profile", "2:3")...)
	if code != 0 || !strings.Contains(out, "on 1 × NVIDIA B200") {
		t.Fatalf("status %d\n%s", code, out)
	}
	if !strings.Contains(out, "profile.json  open it at ui.perfetto.dev  (only the host: the plugin's"+
		" profiler fails: CUPTI call error)") {
		t.Errorf("the line of the profile is missing\n%s", out)
	}
	trace, err := os.ReadFile(filepath.Join(one.dir, "gpu/profile.json"))
	if err != nil || !strings.Contains(string(trace), `"nccl":"2.`) {
		t.Errorf("no version of NCCL in the profile: %v\n%s", err, trace)
	}
	want, outCPU := cpu.run(args("--set", "out=cpu")...)
	if got, on := fmt.Sprint(steps(out)), fmt.Sprint(steps(outCPU)); want != 0 || got != on ||
		len(steps(out)) != 4 {
		t.Errorf("on the GPU %s, on the CPU %s\n%s", got, on, outCPU)
	}
	for _, on := range []string{"gpu", "cpu"} { // MFU and XLA's account of memory are of GPUs only
		text, err := os.ReadFile(filepath.Join(cpu.dir, on, "events.jsonl"))
		for _, word := range []string{`"mfu":`, `"pool_bytes":`} {
			if err != nil || strings.Contains(string(text), word) != (on == "gpu") {
				t.Errorf("on the %s: %v, %s in\n%s", on, err, word, text)
			}
		}
	}
	t.Run("goes on elsewhere", func(t *testing.T) {
		for _, row := range []struct {
			name          string
			first, second *desk
		}{{"cpu to gpu", cpu, one}, {"gpu to cpu", one, cpu}} {
			into := []string{"--set", "out=" + strings.ReplaceAll(row.name, " ", "-")}
			code1, out1 := row.first.run(args(append(into, "--until", "2")...)...)
			code2, out2 := row.second.run(args(into...)...)
			both := append(steps(out1), steps(out2)...)
			if code1 != 0 || code2 != 0 || fmt.Sprint(both) != fmt.Sprint(steps(out)) {
				t.Errorf("%s: status %d, %d: %v\n%s%s", row.name, code1, code2, both, out1, out2)
			}
		}
	})
	t.Run("leaves other GPUs alone", func(t *testing.T) {
		for place, list := range []string{"", "CUDA_VISIBLE_DEVICES=1"} {
			log := filepath.Join(t.TempDir(), "log")
			d := gpus(softgpu.Options{GPUs: 2, Memory: 64 << 20, Log: log, Env: strings.Fields(list)})
			code, out := d.run(args("--set", fmt.Sprintf("out=alone%d", place), "--until", "1")...)
			text, err := os.ReadFile(log)
			if code != 0 || err != nil {
				t.Fatalf("status %d, %v\n%s", code, err, out)
			}
			for gpu := range 2 {
				if taken := strings.Contains(string(text), fmt.Sprintf("GPU %d: ", gpu)); taken != (gpu == place) {
					t.Errorf("with %q memory of GPU %d is taken: %v", list, gpu, taken)
				}
			}
		}
	})
	for _, row := range []struct {
		name   string
		desk   *desk
		args   []string
		status int
		says   string
	}{
		{"hidden GPU", gpus(softgpu.Options{Env: []string{"CUDA_VISIBLE_DEVICES=1"}}),
			[]string{"--device", "gpu"}, 1, "CUDA_VISIBLE_DEVICES=1 shows none"},
		{"no GPU", cpu, []string{"--device", "gpu"}, 1, "DW2406 this host has no GPU"},
		{"small GPU", gpus(softgpu.Options{Memory: 1 << 20}), nil, 3, "DW2107 a GPU needs"},
		{"failing GPU", gpus(softgpu.Options{Memory: 64 << 20,
			Fail: softgpu.Failure{Launch: 40, Result: 719}}), nil, 5, "DW2109 "},
		{"no cuDNN", one, []string{"--set", "precision=bf16"}, 1,
			"DW2014 cuDNN does not open on this host's GPUs"},
		{"uncorrectable memory", gpus(softgpu.Options{Memory: 64 << 20,
			Fail: softgpu.Failure{Launch: 40, Result: 214}}), nil, 5, "DW2109 "},
		{"layers and offload", gpus(softgpu.Options{GPUs: 2, Memory: 64 << 20}),
			[]string{"--plan", "offload.json"}, 2, "DW3106 programs that offload activations and gather"},
	} {
		t.Run(row.name, func(t *testing.T) {
			code, out := row.desk.run(args(append(row.args, "--set", "out="+
				strings.ReplaceAll(row.name, " ", "-"))...)...)
			if code != row.status || !strings.Contains(out, row.says) {
				t.Errorf("status %d\n%s", code, out)
			}
		})
	}
}

// Preflight names the GPU that is slow, the one that fails, the one that computes wrong numbers, and
// those whose driver tells of something.
func TestPreflight(t *testing.T) {
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	if err := os.WriteFile(filepath.Join(d.dir, "plan.json"), []byte(gpuPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name   string
		gpus   softgpu.Options
		plan   bool
		status int
		says   []string
	}{
		{"sound", softgpu.Options{}, true, 0, []string{"GPU 0            NVIDIA B200 ",
			"GPU 3            NVIDIA B200 ", "all-reduce of 16.0 KiB over 4 GPUs in ", "nccl 2.",
			"cudnn 9.", "Xid: none while it ran", "bf16 GEMM of 64 ", "all-reduce of 16.0 KiB, tp 2 ",
			"all-reduce of 16.0 KiB, fsdp 2 "}},
		{"slow", softgpu.Options{SlowGPU: 2, SlowMicroseconds: 100000}, false, 1, []string{
			"GPU 2: it is slow: its GEMM takes ", "DW2407 preflight finds 1 problem"}},
		{"failing", softgpu.Options{Fail: softgpu.Failure{GPU: 1, Launch: 1, Result: 719}}, false, 1,
			[]string{"GPU 1: DW2109 ", "DW2407 "}},
		{"wrong", softgpu.Options{WrongGPU: 3, WrongPermille: 10}, false, 1,
			[]string{"GPU 3: its GEMM gives ", "DW2407 preflight finds 1 problem"}},
		{"reported", softgpu.Options{Env: []string{"SOFTGPU_CLOCK=1:300", "SOFTGPU_THROTTLE=2:0x40",
			"SOFTGPU_ECC=3:5", "SOFTGPU_XID_EVENT=0:79"}}, false, 1, []string{
			"GPU 0: the driver reported Xid 79", "GPU 1: its clock is 300 MHz under load, of 1965",
			"GPU 2: its clock is held back: hardware thermal slowdown",
			"GPU 3: 5 uncorrectable ECC errors", "DW2407 preflight finds 4 problems"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.gpus.GPUs, row.gpus.Memory = 4, 256<<20
			row.gpus.Env = append(row.gpus.Env, d.env[len(d.env)-2:]...)
			on := *d
			on.env = g.Env(row.gpus)
			args := []string{"preflight", "--size", "64", "--slow", "0.001"}
			if row.plan {
				args = append(args, "plan.json", "--slow", "1e-9")
			}
			status, out := on.run(args...)
			for _, word := range row.says {
				if status != row.status || !strings.Contains(out, word) {
					t.Errorf("status %d, no %q in\n%s", status, word, out)
				}
			}
			t.Log(out)
		})
	}
	if status, out := d.run("preflight"); status != 1 || !strings.Contains(out, "DW2406 this host has no GPU") {
		t.Errorf("status %d\n%s", status, out)
	}
}

// Two hosts of a plan look at their GPUs together, and both name the slow one. A run on it begins
// with a warning if its driver tells of something.
func TestPreflightOfTwoHosts(t *testing.T) {
	slowtest.Only(t)
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	if err := os.WriteFile(filepath.Join(d.dir, "plan.json"), []byte(gpuPlan), 0o600); err != nil {
		t.Fatal(err)
	}
	at := enginetest.Addresses(t, 2)
	meet := "SOFTGPU_NCCL_DIR=" + t.TempDir()
	var wg sync.WaitGroup
	var codes [2]int
	var outs [2]string
	for self := range 2 {
		wg.Go(func() {
			o := softgpu.Options{GPUs: 2, Memory: 256 << 20, Env: append([]string{meet},
				d.env[len(d.env)-2:]...)}
			if self == 1 {
				o.SlowGPU, o.SlowMicroseconds = 1, 100000
			}
			on := *d
			on.env = g.Env(o)
			codes[self], outs[self] = on.run("preflight", "plan.json", "--size", "64", "--slow", "0.001",
				"--peers", strings.Join(at, ","), "--self", fmt.Sprint(self))
		})
	}
	wg.Wait()
	want := "process 1, GPU 1 at " + at[1] + ": it is slow: its GEMM takes "
	for self, out := range outs {
		if codes[self] != 1 || !strings.Contains(out, want) {
			t.Errorf("process %d: status %d, no %q in\n%s", self, codes[self], want, out)
		}
	}
	t.Log(outs[0])
	on := *d
	on.env = g.Env(softgpu.Options{Memory: 64 << 20,
		Env: append([]string{"SOFTGPU_THROTTLE=0:0x80"}, d.env[len(d.env)-2:]...)})
	code, out := on.run("train", "run.toml", "--set", "steps=1", "--set", "precision=f32", "--set",
		"out=warned")
	if code != 0 || !strings.Contains(out, "DW2407 warning: GPU 0: its clock is held back: power brake") {
		t.Errorf("status %d\n%s", code, out)
	}
}
