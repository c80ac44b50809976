package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

var processesAll = flag.Bool("processes.all", false,
	"run ten plans on 8 GPUs in 1, 2 and 4 processes, and 100 faults, not a sample of them")

const processModel = `{"model_type": "llama", "vocab_size": 300, "hidden_size": 32,
"intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`

// A processPlan is a plan that is run in one process and in several, which share one client.
type processPlan struct {
	name, axes string
	gpus       int
	processes  []int
}

// processPlans has every axis, threes of them, and every schedule once. In CI there are fewer GPUs.
func processPlans() []processPlan {
	if !*processesAll {
		return []processPlan{
			{"zero3 1f1b", `"fsdp": {"size": 2, "zero": 3, "gather": "layer"}, "pp": 2`, 4, []int{4}},
			{"tp", `"tp": {"size": 2, "sequence": true}`, 2, []int{2}},
		}
	}
	var list []processPlan
	for _, row := range [][2]string{
		{"dp", `"dp": 8`},
		{"zero1", `"fsdp": {"size": 8, "zero": 1, "gather": "step"}`},
		{"zero3", `"fsdp": {"size": 8, "zero": 3, "gather": "layer"}`},
		{"dp zero2 tp", `"dp": 2, "fsdp": {"size": 2, "zero": 2, "gather": "step"}, "tp": {"size": 2}`},
		{"zero3 sp cp", `"fsdp": {"size": 2, "zero": 3, "gather": "layer"},
			"tp": {"size": 2, "sequence": true}, "cp": {"size": 2, "kind": "gather"}`},
		{"dp ring balance", `"dp": 4, "cp": {"size": 2, "kind": "ring", "balance": true}`},
		{"zero3 tp 1f1b", `"fsdp": {"size": 2, "zero": 3, "gather": "layer"}, "tp": {"size": 2},
			"pp": {"size": 2, "schedule": "1f1b"}`},
		{"dp tp interleaved", `"dp": 2, "tp": {"size": 2},
			"pp": {"size": 2, "schedule": "interleaved", "virtual": 2}`},
		{"dp gpipe", `"dp": 2, "pp": {"size": 4, "schedule": "gpipe"}`},
		{"zero3 zb-h1", `"fsdp": {"size": 4, "zero": 3, "gather": "layer"},
			"pp": {"size": 2, "schedule": "zb-h1"}`},
	} {
		list = append(list, processPlan{row[0], row[1], 8, []int{2, 4}})
	}
	return list
}

// hosts run the command in several processes that share one client.
type hosts struct {
	*desk
	gpu *softgpu.GPU
}

func newHosts(t *testing.T) *hosts {
	t.Helper()
	c := &hosts{newDesk(t, enginetest.Cache()), softgpu.Build(t)}
	c.write("config.json", processModel)
	return c
}

func (c *hosts) write(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// with is a desk on a host with that many GPUs.
func (c *hosts) with(gpus int, env ...string) *desk {
	d := *c.desk
	d.env = c.gpu.Env(softgpu.Options{GPUs: gpus, Memory: 64 << 20,
		Env: slices.Concat([]string{"SOFTGPU_NCCL_DIR=" + c.dir}, c.env[len(c.env)-2:], env)})
	return &d
}

// plan writes a plan, and gives the arguments that train by it.
func (c *hosts) plan(axes string, gpus int, more ...string) []string {
	c.t.Helper()
	name := fmt.Sprintf("plan-%x.json", crc32.ChecksumIEEE(fmt.Append(nil, gpus, axes)))
	c.write(name, fmt.Sprintf(`{"version": 1, "model": "config.json", "cluster": "%dxb200",
"seq": 16, "batch": %d, "microbatches": 2, %s,
"types": {"params": "f32", "grads": "f32", "collectives": "f32"}}`, gpus, 2*gpus, axes))
	return append([]string{"train", "run.toml", "--plan", name, "--set", "precision=f32", "--set",
		fmt.Sprintf("batch=%d", 2*gpus), "--set", "seq=16", "--set", "optimizer.lr=0.01"}, more...)
}

// together runs all processes of a run, and gives what each printed; the test fails if one does.
func (c *hosts) together(processes, gpus int, args []string) []string {
	c.t.Helper()
	outs := make([]string, processes)
	at := strings.Join(enginetest.Addresses(c.t, processes), ",")
	var wg sync.WaitGroup
	for self := range outs {
		wg.Go(func() {
			more := args
			if processes > 1 {
				more = append(slices.Clip(args), "--peers", at, "--self", fmt.Sprint(self))
			}
			var status int
			if status, outs[self] = c.with(gpus / processes).run(more...); status != 0 {
				c.t.Errorf("process %d of %d: status %d\n%s", self, processes, status, outs[self])
			}
		})
	}
	wg.Wait()
	return outs
}

// A loggedStep is a step as the run's log has it, in full precision.
type loggedStep struct {
	Step     int64   `json:"step"`
	Loss     float64 `json:"loss"`
	GradNorm float64 `json:"grad_norm"`
}

// logged reads the steps of a run. A step that was taken again after a fault counts once, and must be
// the same both times.
func (d *desk) logged(t *testing.T, out string) (list []loggedStep) {
	t.Helper()
	f, err := os.Open(filepath.Join(d.dir, out, "events.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var e struct {
			Kind string `json:"kind"`
			loggedStep
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil || e.Kind != "step" {
			continue
		}
		switch n := len(list); {
		case e.Step == int64(n)+1:
			list = append(list, e.loggedStep)
		case e.Step < 1 || e.Step > int64(n) || list[e.Step-1] != e.loggedStep:
			t.Errorf("%s: %+v after %v", out, e.loggedStep, list)
		}
	}
	return list
}

// Two and four processes that share one client give the bits of one process: losses, gradient norms,
// and the checkpoint, of which each process writes its slices.
func TestProcessesGiveTheSameNumbers(t *testing.T) {
	slowtest.Only(t) // XLA ends a process whose devices do not meet within 40 s: no race detector
	c := newHosts(t)
	for _, row := range processPlans() {
		t.Run(row.name, func(t *testing.T) {
			c := &hosts{&desk{t, c.dir, c.env}, c.gpu}
			out := func(n int) string { return fmt.Sprintf("%s-%d", strings.ReplaceAll(row.name, " ", "-"), n) }
			args := c.plan(row.axes, row.gpus, "--set", "steps=5")
			c.together(1, row.gpus, append(args, "--set", "out="+out(1)))
			want := c.logged(t, out(1))
			if len(want) != 5 {
				t.Fatalf("%v", want)
			}
			for _, n := range row.processes {
				c.together(n, row.gpus, append(args, "--set", "out="+out(n)))
				if got := c.logged(t, out(n)); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%d processes: %v, and one %v", n, got, want)
				}
				status, diff := c.run("ckpt", "diff", out(1)+"/checkpoints", out(n)+"/checkpoints")
				if status != 0 || !strings.Contains(diff, "tensors are bit-equal") {
					t.Errorf("%d processes: status %d: %s", n, status, diff)
				}
				shares, _ := filepath.Glob(filepath.Join(c.dir, out(n), "checkpoints", "step-*", "*.safetensors"))
				t.Logf("%d processes, %d GPUs: 5 steps and %d files of the checkpoint agree, loss %.6f", n,
					row.gpus, len(shares), want[4].Loss)
			}
		})
	}
}

// A checkpoint that is there when its step is to be saved is compared by each process with its own
// slices, and is not written again.
func TestProcessesFindTheirCheckpoint(t *testing.T) {
	slowtest.Only(t)
	c := newHosts(t)
	c.write("config.json", signalModel)
	args := c.plan(`"fsdp": {"size": 2, "zero": 3, "gather": "layer"}`, 2, "--set", "steps=40", "--set",
		"save.every=20", "--set", "out=found")
	c.together(2, 2, args)
	last := filepath.Join(c.dir, "found", "checkpoints", "step-00000040")
	aside := filepath.Join(c.dir, "aside")
	if err := os.Rename(last, aside); err != nil {
		t.Fatal(err)
	}
	r := c.startAll(t, gpuFault{processes: 2}, args, false)
	r.all[0].until(t, `step +21\b`, 3*time.Minute)
	if err := os.Rename(aside, last); err != nil {
		t.Fatal(err)
	}
	for n, p := range r.all {
		if status, _ := p.ends(t, 2*time.Minute); status != 0 {
			t.Errorf("process %d: status %d\n%s", n, status, p.out.String())
		}
	}
}

// Processes whose GPUs are in other NVLink domains than the plan assumes get an error that names
// them before anything is compiled.
func TestProcessesFollowNVLink(t *testing.T) {
	c := newHosts(t)
	args := c.plan(`"tp": {"size": 2}`, 2, "--set", "steps=1")
	at := strings.Join(enginetest.Addresses(t, 2), ",")
	var wg sync.WaitGroup
	for self, fabric := range []string{"a", "b"} {
		wg.Go(func() {
			status, out := c.with(1, "SOFTGPU_FABRIC="+fabric).run(append(slices.Clip(args), "--peers", at,
				"--self", fmt.Sprint(self))...)
			if status != 1 || !strings.Contains(out, "DW2408 tp would cross NVLink domains: process 0 at ") {
				t.Errorf("process %d: status %d\n%s", self, status, out)
			}
		})
	}
	wg.Wait()
}
