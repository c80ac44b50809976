package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// Of two processes that see one folder, each writes the part of a checkpoint that its ranks have;
// if each has a folder of its own, the first writes all of it. Both are the checkpoint of one
// process, and a run goes on from either.
func TestProcessesSaveTheirOwn(t *testing.T) {
	slowtest.Only(t) // six processes
	t.Parallel()
	dir, command := hangBed(t)
	run := func(steps int, outs ...string) {
		at, both := enginetest.Addresses(t, len(outs)), []*started(nil)
		for self, out := range outs {
			args := []string{"--plan", "plan.json", "--set", "out=" + out,
				"--set", fmt.Sprintf("steps=%d", steps), "--set", "save.every=2"}
			if len(outs) > 1 {
				args = append(args, "--peers", strings.Join(at, ","), "--self", fmt.Sprint(self))
			}
			both = append(both, startTrain(t, dir, command, args...))
		}
		for _, p := range both {
			if status, _ := p.ends(t, 3*time.Minute); status != 0 {
				t.Fatalf("status %d:\n%s", status, p.out.String())
			}
		}
	}
	run(4, "one")
	run(2, "shared", "shared")
	run(4, "shared", "shared") // goes on
	run(4, "first", "second")
	for out, want := range map[string]int{"one": 1, "shared": 2, "first": 1} {
		parts, err := filepath.Glob(filepath.Join(dir, out, "checkpoints", "step-00000004", "part-*"))
		if err != nil || len(parts) != want {
			t.Errorf("%s has %v, not %d parts, %v", out, parts, want, err)
		}
		cmd := exec.Command(command, "ckpt", "diff", "one/checkpoints/step-00000004",
			out+"/checkpoints/step-00000004")
		cmd.Dir = dir
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s differs: %v\n%s", out, err, text)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "second", "checkpoints", "*")); err != nil ||
		slices.ContainsFunc(left, func(p string) bool { return strings.Contains(p, "step-") }) {
		t.Errorf("the second process wrote %v, %v", left, err)
	}
}
