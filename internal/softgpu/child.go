package softgpu

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"
)

// inChild is the variable that tells a test that it is the child.
const inChild = "SOFTGPU_CHILD"

// Child runs the calling test once more, in a process of the same binary that sees the software
// GPU: libraries are found when a process starts. In that process it returns true, and the test
// goes on; in the first one it returns false when the child is done, and the test has failed if
// the child has.
func Child(t *testing.T, o Options) bool {
	t.Helper()
	if os.Getenv(inChild) == t.Name() {
		return true
	}
	out, status := Run(t, o)
	if status != 0 {
		t.Errorf("the child ends with status %d\n%s", status, out)
	} else if testing.Verbose() {
		t.Logf("the child says:\n%s", out)
	}
	return false
}

// InChild tells whether the calling test runs in a child of Run or Child.
func InChild(t *testing.T) bool { return os.Getenv(inChild) == t.Name() }

// Run is Child for a test that wants to see how the child ends: it gives the child's output and its
// exit status. The caller must not be in the child: ask InChild.
func Run(t *testing.T, o Options) (output string, status int) {
	t.Helper()
	g := Build(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"-test.run=" + pattern(t.Name()), "-test.v", "-test.count=1"}
	if end, ok := t.Deadline(); ok {
		args = append(args, fmt.Sprintf("-test.timeout=%s", time.Until(end)))
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	// Communicators meet in a folder of the test's own: two runs of the tests must not.
	o.Env = append([]string{"SOFTGPU_NCCL_DIR=" + t.TempDir(), inChild + "=" + t.Name()}, o.Env...)
	cmd.Env = g.Env(o)
	out, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out), 0
}

// pattern matches one test, or one subtest, and no other.
func pattern(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}
