package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/gpucheck"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

var times = regexp.MustCompile(`\d[\d.e+]* (ms|µs|s)\b`)

// verifyOn runs verify --gpu on software GPUs, and gives its report.
func verifyOn(t *testing.T, o softgpu.Options, args ...string) (status int, out string,
	r *gpucheck.Report) {
	t.Helper()
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	o.Memory = 256 << 20
	o.Env = append([]string{"SOFTGPU_NCCL_DIR=" + t.TempDir()}, d.env[len(d.env)-2:]...)
	d.env = g.Env(o)
	status, out = d.run(append([]string{"verify", "--gpu", "-o", "report.json"}, args...)...)
	text, err := os.ReadFile(filepath.Join(d.dir, "report.json"))
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	r = &gpucheck.Report{}
	if err := json.Unmarshal(text, r); err != nil {
		t.Fatal(err)
	}
	host, _ := os.Hostname()
	for _, private := range []string{d.dir, g.Lib, "/home", "/root", "/tmp", host} {
		if private != "" && strings.Contains(string(text), private) {
			t.Errorf("the report has %q", private)
		}
	}
	return status, out, r
}

// Two software GPUs are verified end to end: nothing is refuted, all that cuDNN would do is skipped
// by name. docs/results has the output, but for times.
func TestVerifyOnGPUs(t *testing.T) {
	slowtest.Only(t)
	status, out, r := verifyOn(t, softgpu.Options{GPUs: 2}, "--timeout", "20m")
	if status != 0 {
		t.Fatalf("status %d\n%s", status, out)
	}
	for _, c := range r.Checks {
		// Tensor cores are not played either.
		if c.Status != gpucheck.OK && c.Note != "cuDNN does not open here" &&
			!strings.HasPrefix(c.Note, "not played: kernel attention:") {
			t.Error(c)
		}
	}
	head, _, _ := strings.Cut(out, "\nwrote ")
	head = times.ReplaceAllStringFunc(head, func(s string) string {
		return "…" + strings.Repeat(" ", max(0, len([]rune(s))-1))
	})
	var lines []string
	for line := range strings.Lines(head) { // padding depends on the times
		lines = append(lines, strings.TrimRight(line, " \n"))
	}
	text := strings.Join(lines, "\n") + "\n"
	path := filepath.Join("..", "..", "docs", "results", "verify_gpu.txt")
	if golden.Update() {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Differences are rounding, which another processor that plays the GPU may give otherwise.
	mask := func(s string) string { return rounding.ReplaceAllString(s, "x") }
	if mask(text) != mask(string(want)) {
		t.Errorf("the output and %s differ (-update writes it):\n%s", path, text)
	}
}

var rounding = regexp.MustCompile(`\b\d(\.\d)?e-\d\d? +|ok +0 +`)

// A GPU whose GEMMs are 1 % too large is found, and one that fails is the result of each check and
// not the end.
func TestVerifyFindsABrokenGPU(t *testing.T) {
	for _, row := range []struct {
		name string
		gpus softgpu.Options
		want gpucheck.Status
	}{
		{"wrong", softgpu.Options{WrongPermille: 10}, gpucheck.Beyond},
		{"failing", softgpu.Options{Fail: softgpu.Failure{Launch: 2, Result: 719}}, gpucheck.Failed},
	} {
		t.Run(row.name, func(t *testing.T) {
			if row.want == gpucheck.Failed {
				slowtest.Only(t) // each check opens a client
			}
			status, out, r := verifyOn(t, row.gpus, "--timeout", "40s")
			found := map[gpucheck.Status]int{}
			for _, c := range r.Checks {
				found[c.Status]++
			}
			if status != 4 || found[row.want] == 0 || !strings.Contains(out, "DW3407 ") {
				t.Errorf("status %d, %v\n%s", status, found, out)
			}
			if row.want == gpucheck.Beyond && !strings.Contains(fmt.Sprint(r.Conventions), "refuted") {
				t.Errorf("nothing was refuted:\n%s", out)
			}
		})
	}
}
