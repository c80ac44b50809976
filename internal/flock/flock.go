package flock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A Lock is a lock that this process holds. The zero Lock holds nothing.
type Lock struct {
	f    *os.File
	firm bool
}

// Held says that another process has the lock.
type Held struct {
	PID  int    // 0 if it is not known
	Host string // "" is this one
}

// Error implements error, in words that can begin a sentence about what the holder does.
func (h *Held) Error() string {
	switch {
	case h.PID == 0:
		return "another process"
	case h.Host == "":
		return fmt.Sprintf("process %d", h.PID)
	}
	return fmt.Sprintf("process %d on %s", h.PID, h.Host)
}

// poll is how often a waiting process looks again; flock has no wait with a deadline.
const poll = 20 * time.Millisecond

// flocker is the system's call; a test plays a file system without it.
type flocker func(fd, how int) error

// Take takes the lock of a file, which is made if it is not there. If another process has it, Take
// waits up to limit, having called waiting once if that is not nil, and then fails with *Held. A
// link, or a file with other contents than a lock's, is refused and left as it is.
func Take(ctx context.Context, path string, limit time.Duration,
	waiting func(*Held)) (*Lock, error) {
	return take(ctx, path, limit, waiting, unix.Flock)
}

func take(ctx context.Context, path string, limit time.Duration, waiting func(*Held),
	flock flocker) (*Lock, error) {
	f, err := plainfile.Open(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*Lock, error) {
		_ = f.Close()
		return nil, err
	}
	deadline := time.Now().Add(limit)
	for first := true; ; first = false {
		err := retry(flock, f)
		if err == nil || unsupported(err) {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fail(&os.PathError{Op: "lock", Path: path, Err: err})
		}
		held := holder(f)
		if !time.Now().Before(deadline) {
			return fail(held)
		}
		if first && waiting != nil {
			waiting(held)
		}
		select {
		case <-ctx.Done():
			return fail(ctx.Err())
		case <-time.After(poll):
		}
	}
	if err := sign(f, path); err != nil {
		return fail(err)
	}
	return &Lock{f: f, firm: firm(path, flock)}, nil
}

func retry(flock flocker, f *os.File) error {
	for {
		err := flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Try takes the lock of an open file or folder, until it is closed, or fails at once. Where there
// are no locks it takes none.
func Try(f *os.File) error {
	if err := retry(unix.Flock, f); !unsupported(err) {
		return err
	}
	return nil
}

// unsupported tells a file system without locks, as some network disks are.
func unsupported(err error) bool {
	return slices.ContainsFunc([]error{unix.ENOTSUP, unix.ENOSYS, unix.EBADF},
		func(e error) bool { return errors.Is(err, e) })
}

// firm asks for the lock once more, as another process would.
func firm(path string, flock flocker) bool {
	f, err := plainfile.Open(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(retry(flock, f), unix.EWOULDBLOCK)
}

// Firm reports whether the lock keeps others out. On some network file systems flock says yes to
// everybody, or is not there.
func (l *Lock) Firm() bool { return l.firm }

// Release gives the lock up.
func (l *Lock) Release() {
	if l.f != nil {
		_ = l.f.Close()
		l.f = nil
	}
}

// maxNote bounds what a lock file may hold: a number, and a host's name of at most 255 bytes.
const maxNote = 300

// note is what a lock file holds; older ones have no host.
var note = regexp.MustCompile(`^(?:([0-9]{1,18})(?: ([!-~]{1,255}))?\n?)?$`)

// sign writes down who has the lock. A file with other contents is not a lock file, and is left as
// it is. A lock on a full disk holds without a name.
func sign(f *os.File, path string) error {
	if _, ok := read(f); !ok {
		return diag.New(diag.NotPlain, "%s is not a lock file", f.Name()).At("%s", path).
			Because("it holds something else").Try("move it away; the file is made anew")
	}
	text := strconv.Itoa(os.Getpid())
	if host, err := os.Hostname(); err == nil && note.MatchString(text+" "+host) {
		text += " " + host
	}
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(text+"\n"), 0)
	}
	return nil
}

func read(f *os.File) (groups []string, ok bool) {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, maxNote+1))
	groups = note.FindStringSubmatch(string(text))
	return groups, err == nil && len(text) <= maxNote && groups != nil
}

func holder(f *os.File) *Held {
	groups, ok := read(f)
	if !ok {
		return &Held{}
	}
	h := &Held{Host: groups[2]}
	h.PID, _ = strconv.Atoi(groups[1]) // "" is 0: not known
	if host, err := os.Hostname(); err == nil && host == h.Host {
		h.Host = ""
	}
	return h
}
