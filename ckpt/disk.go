package ckpt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/flock"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A disk is where every change of a folder is made, one operation at a time. A test stops it
// before the n-th of them, which is what a kill or a full disk does.
type disk struct {
	before func(op, path string) error // nil outside tests
}

// do runs one operation on the file system. Tests hook in here to fail, or to stop, before each.
func (d disk) do(op, path string, run func() error) error {
	if d.before != nil {
		if err := d.before(op, path); err != nil {
			return &fs.PathError{Op: op, Path: path, Err: err}
		}
	}
	return run()
}

// mkdir makes a folder, like the other wrappers below through do.
func (d disk) mkdir(path string) error {
	return d.do("mkdir", path, func() error { return os.Mkdir(path, 0o755) })
}

func (d disk) rename(from, to string) error {
	return d.do("rename", to, func() error { return os.Rename(from, to) })
}

func (d disk) removeAll(path string) error {
	return d.do("remove", path, func() error { return os.RemoveAll(path) })
}

func (d disk) create(path string) (f *os.File, err error) {
	err = d.do("create", path, func() error {
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		return err
	})
	return f, err
}

// flushBytes is the least that is worth a call of its own; smaller tensors wait for the sync.
const flushBytes = 1 << 20

func (d disk) writeAt(f *os.File, p []byte, at int64) error {
	return d.do("write", f.Name(), func() error {
		n, err := f.WriteAt(p, at)
		if n >= flushBytes {
			plainfile.Flush(f, at, int64(n))
		}
		return err
	})
}

// sync makes the file's bytes outlive a power cut, and closes it.
func (d disk) sync(f *os.File) error {
	err := d.do("sync", f.Name(), f.Sync)
	return errors.Join(err, f.Close())
}

// syncDir makes the names in a folder outlive a power cut.
func (d disk) syncDir(path string) error {
	return d.do("syncdir", path, func() error { return atomicfile.SyncDir(path) })
}

const (
	// lockName is the file whose lock the one process holds that may change the folder.
	lockName = ".lock"
	// lockWait is how long a writer waits for another one. A run must not die because somebody prunes
	// beside it, nor the other way round.
	lockWait = time.Minute
)

// acquire takes the folder's lock, waiting for whoever has it.
func acquire(ctx context.Context, dir string, o Options) (*flock.Lock, error) {
	limit := cmp.Or(o.wait, lockWait)
	l, err := flock.Take(ctx, filepath.Join(dir, lockName), limit, func(held *flock.Held) {
		o.Events.Emit(event.Warning{Code: string(diag.CheckpointBusy),
			Text: fmt.Sprintf("%s is writing checkpoints into %s; waiting for it", held, dir)})
	})
	if held, ok := errors.AsType[*flock.Held](err); ok {
		return nil, diag.New(diag.CheckpointBusy, "%s is writing checkpoints into %s", held, dir).
			Because("waited %v for it", limit).
			Try("wait for it, stop it, or give this run a folder of its own")
	}
	return l, err
}

// unwritten says why a step cannot be written, and what it would have taken.
func unwritten(err error, dir string, step, needed int64) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return diag.New(diag.Canceled, "stopped while writing step %d", step).Wrap(err)
	}
	size := event.Size(needed)
	e := diag.New(diag.CheckpointWrite, "step %d cannot be written; it needs %s", step, size)
	switch {
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		left := "less"
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil {
			left = event.Size(int64(st.Bavail*uint64(st.Bsize)) + unfinished(dir, step))
		}
		e = diag.New(diag.CheckpointWrite, "step %d needs %s, the disk has %s left", step, size, left).
			Try("make room, or keep fewer: deepwell ckpt prune %s --keep 1", dir)
	case errors.Is(err, unix.EFBIG):
		e = e.Try("raise the limit on the size of files (ulimit -f), or use another disk")
	case errors.Is(err, unix.EROFS):
		e = e.Try("the disk is mounted read-only: give the run a folder that can be written")
	case errors.Is(err, fs.ErrPermission):
		e = e.Try("give the run a folder that this user may write")
	}
	return e.At("%s", dir).Wrap(err)
}

// unfinished is what a half-written step takes of the disk, which is removed before anybody reads
// of it.
func unfinished(dir string, step int64) (bytes int64) {
	drafts, _ := os.ReadDir(dir)
	for _, d := range drafts {
		if own := tempName(step, ""); d.Name() != own && !strings.HasPrefix(d.Name(), own+".") {
			continue
		}
		entries, _ := os.ReadDir(filepath.Join(dir, d.Name()))
		for _, e := range entries {
			var st unix.Stat_t
			if unix.Lstat(filepath.Join(dir, d.Name(), e.Name()), &st) == nil {
				bytes += st.Blocks * 512
			}
		}
	}
	return bytes
}
