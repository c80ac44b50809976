package flock

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/deepwell/deepwell/diag"
)

// Run takes the lock of a run's folder, which exists. It does not wait: two runs in one folder
// would mix their checkpoints and events.
func Run(out string) (*Lock, error) {
	l, err := Take(context.Background(), filepath.Join(out, ".lock"), 0, nil)
	if held, ok := errors.AsType[*Held](err); ok {
		return nil, diag.New(diag.RunBusy, "%s is training in %s", held, out).
			Try("wait for it, stop it, or give this run a folder of its own")
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot lock the run's folder").At("%s", out).Wrap(err)
	}
	return l, nil
}

// Loose says that the lock of a run's folder is not firm.
func Loose(out string) string {
	return "locks do not work on the file system of " + out +
		": nothing keeps a second run out of the folder"
}
