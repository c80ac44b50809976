package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

var stepLine = regexp.MustCompile(`(?m)^step (\d+)/\d+ +loss +([\d.]+) +\|g\| +([\d.e+-]+)`)

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
	args := func(more ...string) []string {
		return append([]string{"train", "run.toml", "--set", "steps=4", "--set", "precision=f32"}, more...)
	}
	one := gpus(softgpu.Options{Memory: 64 << 20})
	code, out := one.run(args("--set", "out=gpu", "-v")...)
	if code != 0 || !strings.Contains(out, "on 1 × NVIDIA B200") {
		t.Fatalf("status %d\n%s", code, out)
	}
	want, outCPU := cpu.run(args("--set", "out=cpu")...)
	if got, on := fmt.Sprint(steps(out)), fmt.Sprint(steps(outCPU)); want != 0 || got != on ||
		len(steps(out)) != 4 {
		t.Errorf("on the GPU %s, on the CPU %s\n%s", got, on, outCPU)
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
	for _, row := range []struct {
		name   string
		desk   *desk
		args   []string
		status int
		says   string
	}{
		{"no GPU", cpu, []string{"--device", "gpu"}, 1, "DW2406 this host has no GPU"},
		{"small GPU", gpus(softgpu.Options{Memory: 1 << 20}), nil, 3, "DW2107 a GPU needs"},
		{"failing GPU", gpus(softgpu.Options{Memory: 64 << 20,
			Fail: softgpu.Failure{Launch: 40, Result: 719}}), nil, 5, "DW2109 "},
		{"no cuDNN", one, []string{"--set", "precision=bf16"}, 1,
			"DW2014 cuDNN does not open on this host's GPUs"},
		{"uncorrectable memory", gpus(softgpu.Options{Memory: 64 << 20,
			Fail: softgpu.Failure{Launch: 40, Result: 214}}), nil, 5, "DW2109 "},
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

// Preflight names the GPU that is slow, and the one that fails.
func TestPreflight(t *testing.T) {
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	for _, row := range []struct {
		name   string
		gpus   softgpu.Options
		status int
		says   []string
	}{
		{"sound", softgpu.Options{}, 0, []string{"0    NVIDIA B200 ", "3    NVIDIA B200 ",
			"all-reduce of 16.0 KiB over 4 GPUs in "}},
		{"slow", softgpu.Options{SlowGPU: 2, SlowMicroseconds: 100000}, 1, []string{
			"GPU 2: it is slow: its GEMM takes ", "DW2407 preflight finds 1 of"}},
		{"failing", softgpu.Options{Fail: softgpu.Failure{GPU: 1, Launch: 1, Result: 719}}, 1,
			[]string{"GPU 1: DW2109 ", "DW2407 "}},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.gpus.GPUs, row.gpus.Memory = 4, 256<<20
			row.gpus.Env = d.env[len(d.env)-2:]
			on := *d
			on.env = g.Env(row.gpus)
			status, out := on.run("preflight", "--size", "64", "--slow", "0.001")
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
