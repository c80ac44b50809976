package safedir

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A Folder opens files that may not leave it.
type Folder struct {
	root *os.Root
	dir  string // the folder within the root, with slashes
	path string // as the caller spelled it
}

// Open follows dir wherever the caller's own links lead, but the files in it no further than the
// folder. In a Hugging Face cache they are links from snapshots/REVISION to blobs, so there the
// repository's folder is the limit.
func Open(dir string) (*Folder, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return nil, unreadable(dir, err)
	}
	limit, within := real, "."
	if snapshots := filepath.Dir(real); filepath.Base(snapshots) == "snapshots" {
		repo := filepath.Dir(snapshots)
		if info, err := os.Lstat(filepath.Join(repo, "blobs")); err == nil && info.IsDir() {
			limit, within = repo, path.Join("snapshots", filepath.Base(real))
		}
	}
	root, err := os.OpenRoot(limit)
	if err != nil {
		return nil, unreadable(dir, err)
	}
	return &Folder{root: root, dir: within, path: dir}, nil
}

func unreadable(path string, err error) *diag.Error {
	return diag.New(diag.FileError, "cannot read %s", path).At("%s", path).Wrap(err)
}

// Close ends the use of the folder; files that were opened stay open.
func (f *Folder) Close() { f.root.Close() }

// Path is the path of the folder, or of a file in it, as the caller spelled it.
func (f *Folder) Path(name string) string { return filepath.Join(f.path, filepath.FromSlash(name)) }

// Has reports whether there is a file or folder of that name which does not leave the folder.
func (f *Folder) Has(name string) bool {
	_, err := f.root.Stat(path.Join(f.dir, name))
	return err == nil
}

// Names lists what is in the folder, sorted.
func (f *Folder) Names() ([]string, error) {
	entries, err := fs.ReadDir(f.root.FS(), f.dir)
	if err != nil {
		return nil, unreadable(f.path, err)
	}
	names := lists.Map(entries, func(e fs.DirEntry) string { return e.Name() })
	return names, nil
}

// File opens a plain file. One with a second name is refused because that name may be outside:
// os.Root follows no link out, but it cannot see a hard link.
func (f *Folder) File(name string) (*os.File, error) {
	file, info, err := Peek(path.Join(f.dir, name), f.root.OpenFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, diag.New(diag.FileError, "there is no %s", name).At("%s", f.path).Wrap(err)
	case err != nil:
		e, ok := errors.AsType[*diag.Error](err)
		if !ok {
			e = unreadable(f.Path(name), err).Try("%s", f.mend(name, err))
		}
		return nil, e.At("%s", f.Path(name))
	}
	var e *diag.Error
	switch names := plainfile.Links(info); {
	case info.IsDir():
		e = diag.New(diag.BadInput, "not a plain file but a folder").Try("give a plain file")
	case names > 1:
		e = diag.New(diag.BadInput, "the file has a second name, which may be outside the folder").
			Because("it has %d hard links", names).Try("copy the file, or open it by its path")
	default:
		return file, nil
	}
	file.Close()
	return nil, e.At("%s", f.Path(name))
}

// mend says what to do about a file that cannot be opened. Links that leave the folder are refused,
// also in folders of one's own: nobody can tell them from those that a stranger packed to have a
// private file read, and copied into an export.
func (f *Folder) mend(name string, err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return "you may not read it: chmod u+r, or ask its owner"
	}
	if to, err := f.root.Readlink(path.Join(f.dir, name)); err == nil {
		if !filepath.IsAbs(to) {
			to = f.Path(to)
		}
		return "it is a link that leaves the folder: name the folder that it leads to, " +
			filepath.Dir(to) + ", or put the file itself here"
	}
	return "if it is a link that leaves the folder, put the file itself there"
}

// Read gives a plain file of at most limit bytes.
func (f *Folder) Read(name string, limit int64) ([]byte, error) {
	file, err := f.File(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, limit+1))
	switch {
	case err != nil:
		return nil, unreadable(f.Path(name), err)
	case int64(len(text)) > limit:
		return nil, diag.New(diag.BadInput, "%s has more than %d bytes", name, limit).
			At("%s", f.Path(name)).Try("check that it is the right file")
	}
	return text, nil
}

// ReadPlain gives a file that the user named, wherever it is, of at most limit bytes. Devices and
// pipes, which may never end or never begin, are refused.
func ReadPlain(path string, limit int64) ([]byte, error) {
	f, info, err := Peek(path, os.OpenFile)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info.IsDir() {
		return nil, diag.New(diag.BadInput, "not a plain file but a folder").
			Try("name a file in it")
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = diag.New(diag.BadInput, "the file has more than %d bytes", limit).
			Try("check that it is the right file")
	}
	if err != nil {
		return nil, err
	}
	return text, nil
}

// Peek opens a file or a folder with open, and says which. O_NONBLOCK keeps a pipe from stopping
// the program until somebody writes to it; on files it means nothing.
func Peek(path string, open func(string, int, fs.FileMode) (*os.File, error)) (*os.File,
	fs.FileInfo, error) {
	f, err := open(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.IsDir() && !info.Mode().IsRegular() {
		err = diag.New(diag.BadInput, "not a plain file but %s", kind(info.Mode())).
			Try("give a plain file, or a folder of such")
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

func kind(m fs.FileMode) string {
	switch {
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "something else"
}
