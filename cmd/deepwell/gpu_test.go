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
	one := gpus(softgpu.Options{Memory: 64 << 20})
	args := []string{"train", "run.toml", "--set", "steps=4", "--set", "precision=f32", "--set"}
	code, out := one.run(append(args, "out=gpu", "-v")...)
	if code != 0 || !strings.Contains(out, "on 1 × NVIDIA B200") {
		t.Fatalf("status %d\n%s", code, out)
	}
	codeCPU, outCPU := cpu.run(append(args, "out=cpu")...)
	if got, want := fmt.Sprint(steps(out)), fmt.Sprint(steps(outCPU)); codeCPU != 0 || got != want ||
		len(steps(out)) == 0 {
		t.Errorf("on the GPU %s, on the CPU %s\n%s", got, want, outCPU)
	}
	_ = code
}
