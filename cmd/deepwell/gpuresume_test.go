package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

// A run that is killed on GPUs goes on there, and on CPU devices, with every bit of a run that was
// never stopped, or stopped in order at the same step. The GPUs are software, and add in a fixed
// order.
func TestKilledGPURunsGoOn(t *testing.T) {
	slowtest.Only(t)
	g := softgpu.Build(t)
	cpu := newDesk(t, enginetest.Cache())
	gpu := *cpu
	gpu.env = g.Env(softgpu.Options{Memory: 64 << 20, Env: cpu.env[len(cpu.env)-2:]})
	args := func(out string, until int) []string {
		list := []string{"train", "run.toml", "--set", "precision=f32", "--set", "out=" + out, "--set",
			"optimizer.lr=0.01", "--set", "save.every=1", "--set", "save.keep=50"}
		if until > 0 {
			list = append(list, "--until", fmt.Sprint(until))
		}
		return list
	}
	run := func(d *desk, out string, until int) {
		t.Helper()
		if code, text := d.run(args(out, until)...); code != 0 {
			t.Fatalf("%s: status %d\n%s", out, code, text)
		}
	}
	// same compares two checkpoints, tensor by tensor.
	same := func(a, b string, step int) {
		t.Helper()
		name := fmt.Sprintf("checkpoints/step-%08d", step)
		code, out := cpu.run("ckpt", "diff", a+"/"+name, b+"/"+name)
		if code != 0 || !strings.Contains(out, "tensors are bit-equal") {
			t.Errorf("%s and %s at step %d: status %d\n%s", a, b, step, code, out)
		}
	}
	p := gpu.start(t, "step 2  saved", args("killed", 0)...)
	if err := p.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	at := cpu.checkpoints("killed") // one after each step
	if err := os.CopyFS(filepath.Join(cpu.dir, "moved"), os.DirFS(filepath.Join(cpu.dir, "killed"))); err != nil {
		t.Fatal(err)
	}
	run(&gpu, "killed", at+2)
	run(&gpu, "whole", at+2)
	run(&gpu, "stopped", at)
	run(cpu, "moved", at+2)
	run(cpu, "stopped", at+2)
	for _, step := range []int{at, at + 1, at + 2} {
		same("killed", "whole", step)
		same("moved", "stopped", step)
	}
	same("moved", "whole", at)
}
