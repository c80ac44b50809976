package ckpt

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A disk that fills up while a step is written is said to have what it has without that step: it is
// removed, and nothing is missing then.
func TestFullDiskIsMeasuredWithoutTheHalfWrittenStep(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Skip("a small disk is mounted by root only: ", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	save(t, dir, 1, Options{})
	large := state(t, 2, Tensor{"w", dtype.F32, []int64{2 << 20}})
	err := Save(t.Context(), dir, 2, Meta{}, large, Options{})
	wantCode(t, err, diag.CheckpointWrite)
	if e := diag.From(err); !strings.Contains(e.What, "needs 8.0 MiB, the disk has 3.") &&
		!strings.Contains(e.What, "needs 8.0 MiB, the disk has 4.0 MiB") {
		t.Errorf("%s", e.What)
	}
	if _, err := os.Stat(dir + "/" + tempPrefix + stepName(2)); err == nil {
		t.Error("the half-written step stays")
	}
}
