package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// lockPoll is how often a waiting process looks again; flock has no wait with a deadline.
const lockPoll = 50 * time.Millisecond

// A lock is held by the one process that may change an engine's folder. It is an flock, so the
// kernel drops it when the process dies, however it dies. The file stays: removing it would let
// two processes lock two files of the same name.
type lock struct{ f *os.File }

// acquire waits until ctx ends for the lock of an engine. waiting is called once, with the
// process id of the holder, if there is one to wait for; 0 if the id is not known.
func acquire(ctx context.Context, dir, name string, waiting func(pid int)) (*lock, error) {
	path := filepath.Join(dir, "."+name+".lock")
	f, err := plainfile.Open(path, os.O_RDWR|os.O_CREATE, 0o644)
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, cannotWrite(err)
	}
	for reported := false; ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			if err := writePID(f); err != nil {
				_ = f.Close()
				return nil, cannotWrite(err)
			}
			return &lock{f}, nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			_ = f.Close()
			return nil, cannotWrite(fmt.Errorf("lock %s: %w", f.Name(), err))
		}
		if !reported {
			reported = true
			waiting(readPID(f))
		}
		select {
		case <-ctx.Done():
			pid := readPID(f)
			_ = f.Close()
			return nil, busy(name, pid).Wrap(ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}

// release gives the lock up.
func (l *lock) release() { _ = l.f.Close() }

func busy(name string, pid int) *diag.Error {
	holder := "another process"
	if pid > 0 {
		holder = fmt.Sprintf("process %d", pid)
	}
	return diag.New(diag.EngineBusy, "engine %q is being installed by %s", name, holder).
		Try("wait for it, or end it and try again")
}

func writePID(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

func readPID(f *os.File) int {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 32))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0
	}
	return pid
}
