package capture

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/model"
)

const (
	configName = "config.json"
	// maxConfig bounds config.json, which has some kilobytes; lists of labels make the longest
	// published ones about a megabyte.
	maxConfig = 16 << 20
)

// A folder opens files that may not leave it: models come from strangers, and what a link leads to
// would be copied into an export. In a Hugging Face cache files are links from snapshots/REVISION
// to blobs, so there the repository's folder is the limit. Package safetensors holds weights to the
// same rule.
type folder struct {
	root *os.Root
	dir  string // the folder within the root, with slashes
	path string // as the caller spelled it
}

func confine(dir string) (*folder, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
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
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	return &folder{root: root, dir: within, path: dir}, nil
}

func (f *folder) close() { f.root.Close() }

// has reports whether there is a file or folder of that name which does not leave the folder.
func (f *folder) has(name string) bool {
	_, err := f.root.Stat(path.Join(f.dir, name))
	return err == nil
}

// list gives the names in the folder, sorted.
func (f *folder) list() ([]string, error) {
	entries, err := fs.ReadDir(f.root.FS(), f.dir)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// read gives a plain file of at most limit bytes. O_NONBLOCK keeps a pipe from stopping the program
// until somebody writes to it. A second name of a file may be outside, where os.Root cannot see it.
func (f *folder) read(name string, limit int64) ([]byte, error) {
	where := filepath.Join(f.path, filepath.FromSlash(name))
	file, err := f.root.OpenFile(path.Join(f.dir, name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.FileError, "there is no %s", name).At("%s", f.path).Wrap(err)
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", where).Wrap(err).
			Try("if it is a link that leaves the folder, put the file itself there")
	}
	defer file.Close()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, diag.New(diag.FileError, "cannot read %s", where).Wrap(err)
	case !info.Mode().IsRegular():
		return nil, diag.New(diag.BadInput, "%s is not a plain file", where)
	case links(info) > 1:
		return nil, diag.New(diag.BadInput, "%s has a second name, which may be outside the folder",
			where).Because("it has %d hard links", links(info)).Try("copy the file")
	}
	text, err := io.ReadAll(io.LimitReader(file, limit+1))
	switch {
	case err != nil:
		return nil, diag.New(diag.FileError, "cannot read %s", where).Wrap(err)
	case int64(len(text)) > limit:
		return nil, diag.New(diag.BadInput, "%s has more than %d bytes", where, limit)
	}
	return text, nil
}

// config reads a config.json.
func (f *folder) config(name string) (*model.Config, error) {
	text, err := f.read(name, maxConfig)
	if err != nil {
		return nil, err
	}
	c, err := model.Parse(text)
	if err != nil {
		e, where := diag.From(err), filepath.Join(f.path, name)
		if e.Where != "" {
			where += ", " + strings.TrimSuffix(e.Where, " of "+configName)
		}
		return nil, e.At("%s", where)
	}
	return c, nil
}
