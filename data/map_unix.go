//go:build unix

package data

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

func mapFile(f *os.File, size int) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
}

func unmapFile(b []byte) error { return unix.Munmap(b) }

// stampOf tells a file, and a state of it, from all others: every write changes the time of its
// inode. It also gives the time of the last change.
func stampOf(f *os.File) (stamp string, changed time.Time, err error) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return "", changed, err
	}
	m, c := time.Unix(s.Mtim.Unix()), time.Unix(s.Ctim.Unix())
	if changed = m; c.After(m) {
		changed = c
	}
	stamp = fmt.Sprintf("%d:%d:%d:%d:%d", s.Dev, s.Ino, s.Size, m.UnixNano(), c.UnixNano())
	return stamp, changed, nil
}
