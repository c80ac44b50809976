package plainfile

import (
	"context"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

// Open opens a file for writing in place. Flags are as for [os.OpenFile]; os.O_TRUNC must not be
// among them: a file is looked at before anything of it is changed. What is no plain file is
// refused with code NotPlain; other errors are the system's.
func Open(path string, flag int, mode os.FileMode) (*os.File, error) {
	// A pipe must not make the call wait.
	f, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, mode)
	if err != nil {
		if info, look := os.Lstat(path); look == nil && !info.Mode().IsRegular() {
			return nil, refuse(path, info).Wrap(err)
		}
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = refuse(path, info)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Create makes an empty file in the place of an old one. Other names of the old one, as a backup by
// hard links has them, keep its contents.
func Create(path string, mode os.FileMode) (*os.File, error) {
	if info, err := os.Lstat(path); err == nil {
		if !info.Mode().IsRegular() {
			return nil, refuse(path, info)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
}

// Links counts the names that a file has.
func Links(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // uint32 on arm64
	}
	return 1
}

// Map maps a file that is only read. What is mapped stays until unix.Munmap, whatever becomes of
// the file's name.
func Map(f *os.File, size int) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
}

// Flush asks the kernel to begin writing a range to disk and does not wait. The disk then works
// while the next chunk is made, and the sync at the end finds little left to do. Where the file
// system cannot, the sync does it all.
func Flush(f *os.File, at, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), at, n, unix.SYNC_FILE_RANGE_WRITE)
}

func refuse(path string, info fs.FileInfo) *diag.Error {
	what := "not a plain file"
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		what = "a symbolic link, and nothing is written through one"
	case info.IsDir():
		what = "a folder"
	}
	return diag.New(diag.NotPlain, "%s is %s", info.Name(), what).At("%s", path).
		Try("move it away; the file is made anew")
}

// Until gives a reader that ends with the context's error when the context does.
func Until(ctx context.Context, r io.Reader) io.Reader { return &until{ctx, r} }

type until struct {
	ctx context.Context
	r   io.Reader
}

func (u *until) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(p)
}
