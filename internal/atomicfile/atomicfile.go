package atomicfile

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// Write replaces path by data. The new file has the mode less the process's umask.
func Write(path string, data []byte, mode os.FileMode) error {
	return WriteFunc(path, mode, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// WriteFunc replaces path by what fill writes. If fill fails, path is left as it was.
func WriteFunc(path string, mode os.FileMode, fill func(io.Writer) error) (err error) {
	f, err := create(path, mode)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if err = fill(f); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// create makes a file beside path. Unlike os.CreateTemp it lets the umask decide who may read it:
// no Chmod may come later, since that knows no umask.
func create(path string, mode os.FileMode) (*os.File, error) {
	const tries = 1000 // more than a folder has names of this pattern
	dir, base := filepath.Split(path)
	for n := 0; ; n++ {
		name := filepath.Join(dir, "."+base+"."+strconv.FormatUint(uint64(rand.Uint32()), 10))
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
		if !errors.Is(err, fs.ErrExist) || n == tries {
			return f, err
		}
	}
}

// SyncDir makes the names in a folder outlive a power cut. Some file systems cannot; they keep what
// they can.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, errors.ErrUnsupported) &&
		!errors.Is(err, syscall.EINVAL) {
		return err
	}
	return nil
}
