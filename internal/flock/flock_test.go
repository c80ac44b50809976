package flock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestOneHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".lock")
	l, err := Take(t.Context(), path, 0, nil)
	must(t, err)
	if !l.Firm() {
		t.Error("the lock keeps nobody out")
	}
	reports := 0
	_, err = Take(t.Context(), path, 50*time.Millisecond, func(*Held) { reports++ })
	held, ok := errors.AsType[*Held](err)
	if !ok || held.PID != os.Getpid() || held.Host != "" || reports != 1 {
		t.Errorf("%#v, reported %d times", err, reports)
	}
	l.Release()
	l.Release()
	again, err := Take(t.Context(), path, 0, nil)
	must(t, err)
	again.Release()
}

// Who waits gets the lock when it is given up; the limit is never reached.
func TestWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".lock")
	l, err := Take(t.Context(), path, 0, nil)
	must(t, err)
	second, err := Take(t.Context(), path, time.Minute, func(*Held) { l.Release() })
	must(t, err)
	second.Release()
}

func TestWaitingEndsWithTheContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".lock")
	l, err := Take(t.Context(), path, 0, nil)
	must(t, err)
	defer l.Release()
	ctx, cancel := context.WithCancel(t.Context())
	_, err = Take(ctx, path, time.Minute, func(*Held) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A file system that gives everybody the lock, and one that has none, are distinguished from others.
func TestNoOpIsNoticed(t *testing.T) {
	for name, flock := range map[string]flocker{
		"no-op":   func(int, int) error { return nil },
		"missing": func(int, int) error { return unix.ENOSYS },
	} {
		l, err := take(t.Context(), filepath.Join(t.TempDir(), ".lock"), 0, nil, flock)
		must(t, err)
		if l.Firm() {
			t.Errorf("%s: the lock is said to keep others out", name)
		}
		l.Release()
	}
}

// Nothing is written through a link, and nothing into a file that holds something else.
func TestForeignFilesStay(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	must(t, os.WriteFile(mine, []byte("ssh-ed25519 AAAA\n"), 0o600))
	must(t, os.Symlink(mine, filepath.Join(dir, "link")))
	must(t, os.Link(mine, filepath.Join(dir, "hard")))
	for _, name := range []string{"link", "hard", "mine"} {
		_, err := Take(t.Context(), filepath.Join(dir, name), 0, nil)
		if e := diag.From(err); e == nil || e.Code != diag.NotPlain || e.Where == "" || e.Fix == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if text, err := os.ReadFile(mine); err != nil || string(text) != "ssh-ed25519 AAAA\n" {
		t.Errorf("%q %v", text, err)
	}
}

func TestHolderOfOldFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), ".lock")
	for text, want := range map[string]string{"4711\n": "process 4711", "": "another process",
		"4711 node7\n": "process 4711 on node7", "x": "another process"} {
		must(t, os.WriteFile(path, []byte(text), 0o600))
		f, err := os.Open(path)
		must(t, err)
		if got := holder(f).Error(); got != want {
			t.Errorf("%q is held by %q, want %q", text, got, want)
		}
		must(t, f.Close())
	}
}
