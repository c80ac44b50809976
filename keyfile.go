package deepwell

import (
	"io"
	"os"
	"syscall"

	"github.com/deepwell/deepwell/diag"
)

const (
	// arrival is how many times its patience a run waits at the start for processes that have not
	// connected: they read data and compile before.
	arrival = 30
	// minKey has as many bits as the key that is derived from it; more than maxKey is some other
	// file.
	minKey, maxKey = 32, 1 << 20
)

// readKey reads the secret that the processes of a run share. As ssh does, it refuses a file that
// others may read.
func readKey(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	bad := func(format string, args ...any) *diag.Error {
		return diag.New(diag.LinkKey, format, args...).At("%s", path)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not make it wait
	if err != nil {
		return nil, bad("the key cannot be read").Wrap(err).
			Try("head -c 32 /dev/urandom > %s; chmod 600 %s", path, path)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, bad("the key cannot be read").Wrap(err)
	}
	owner, _ := info.Sys().(*syscall.Stat_t)
	switch me := os.Getuid(); {
	case !info.Mode().IsRegular():
		return nil, bad("the key is no plain file").Try("give a plain file")
	case info.Mode().Perm()&0o077 != 0:
		return nil, bad("others may read or write the key: its mode is %04o", info.Mode().Perm()).
			Try("chmod 600 %s", path)
	case owner != nil && int(owner.Uid) != me && owner.Uid != 0:
		return nil, bad("the key belongs to another user").Try("chown %d %s", me, path)
	}
	secret, err := io.ReadAll(io.LimitReader(f, maxKey+1))
	switch n := len(secret); {
	case err != nil:
		return nil, bad("the key cannot be read").Wrap(err)
	case n < minKey || n > maxKey:
		return nil, bad("a key has %d bytes to 1 MiB; this one has %d", minKey, n).
			Try("head -c 32 /dev/urandom > %s", path)
	}
	return secret, nil
}
