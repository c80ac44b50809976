package deepwell_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A run whose checkpoints do not fit on the disk is refused before its first step.
func TestRunIsRefusedOnADiskThatIsTooSmall(t *testing.T) {
	path := lay(t, t.TempDir())
	out := filepath.Join(filepath.Dir(path), "run")
	if err := os.Mkdir(out, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", out, "tmpfs", 0, "size=900k"); err != nil {
		t.Skip("a small disk is mounted by root only: ", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(out, 0) })
	cmd, text := trainChild(t, path, t.TempDir())
	if err := cmd.Wait(); err == nil {
		t.Error("the run did not fail")
	}
	if s := text.String(); !strings.Contains(s, "DW3003 checkpoints need") || strings.Contains(s, "loss") {
		t.Errorf("a step was trained, or it was not the disk:\n%s", s)
	}
	if entries, err := os.ReadDir(filepath.Join(out, "checkpoints")); err == nil && len(entries) > 0 {
		t.Errorf("left %v", entries)
	}
}
