package main

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/softgpu"
)

// The form of bench, on a software GPU: times mean nothing there, and cuDNN does not open.
func TestBench(t *testing.T) {
	g := softgpu.Build(t)
	d := newDesk(t, enginetest.Cache())
	on := *d
	on.env = g.Env(softgpu.Options{Memory: 64 << 20, Env: d.env[len(d.env)-2:]})
	for _, row := range []struct {
		args   []string
		status int
		says   []string
	}{
		{[]string{"gemm", "config.json", "--seq", "64"}, 0, []string{"measured, the best of several",
			"linear, self_attn.q_proj", "torch.compile: not asked for: --torch PYTHON"}},
		{[]string{"gemm", "config.json", "--json"}, 0, []string{`"own_seconds": `}},
		{[]string{"attention", "config.json"}, 1, []string{"cuDNN", "DW"}},
		{[]string{"moe", "config.json"}, 2, []string{"DW1001 config.json has no experts"}},
		{[]string{"gemm"}, 2, []string{"DW1001 bench takes what to measure and a model"}},
		{[]string{"gemm", "config.json", "--precision", "int4"}, 2, []string{"bench knows no precision"}},
	} {
		status, out := on.run(append([]string{"bench"}, row.args...)...)
		for _, word := range row.says {
			if status != row.status || !strings.Contains(out, word) {
				t.Errorf("%v: status %d, no %q in\n%s", row.args, status, word, out)
			}
		}
	}
	if status, out := d.run("bench", "gemm", "config.json"); status != 1 ||
		!strings.Contains(out, "DW2406 this host has no GPU") {
		t.Errorf("status %d\n%s", status, out)
	}
}
