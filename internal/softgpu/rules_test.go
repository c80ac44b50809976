package softgpu_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/softgpu"
)

// compile builds a C program of testdata against the software GPU.
func compile(t *testing.T, g *softgpu.GPU, name string, libraries ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	args := []string{"-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-pthread", "-Ic",
		"-o", program, filepath.Join("testdata", name+".c")}
	for _, l := range libraries {
		args = append(args, filepath.Join(g.Lib, l))
	}
	args = append(args, "-Wl,-rpath,"+g.Lib)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// Every rule of testdata/rules.c holds, with streams in time and with streams late.
func TestDriverKeepsItsRules(t *testing.T) {
	g := softgpu.Build(t)
	program := compile(t, g, "rules", "libcuda.so.1")
	names, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(names)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, seed := range []uint64{0, 1, 2} {
				o := softgpu.Options{GPUs: 2, Memory: 64 << 20, Delay: seed}
				o.Share = strings.HasPrefix(name, "another_process")
				if name == "failed_gpu_stays_failed" {
					o.Fail = softgpu.Failure{Launch: 2, Result: 719}
				}
				cmd := exec.CommandContext(t.Context(), program, name)
				cmd.Env = g.Env(o)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("seed %d: %v\n%s", seed, err, out)
				}
			}
		})
	}
}
