package quantize

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/flock"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// An outFolder is the folder that is written. While the work goes on, its folder .quantize holds
// job.json, the key of the work, and for every file that is in place what was found in it.
type outFolder struct {
	dir  string
	lock *os.File
	done *Report // of work that was finished before
}

// StateName is the folder inside the output folder with the state needed to resume. It is removed
// with all its contents when the work is done.
const StateName = ".quantize"

const jobName = "job.json"

// state is job.json.
type state struct {
	Version int    `json:"version"`
	Key     string `json:"key"`
}

func (f *outFolder) path(name string) string { return filepath.Join(f.dir, name) }

func (f *outFolder) state(name string) string { return filepath.Join(f.dir, StateName, name) }

// enter makes the folder ready: a new one, or one that the same work was stopped in.
func (j *job) enter() (_ *outFolder, err error) {
	f := &outFolder{dir: j.out}
	if err := os.MkdirAll(f.dir, 0o755); err != nil {
		return nil, unwritten(f.dir, err)
	}
	if f.lock, err = acquire(f.dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.leave()
		}
	}()
	names, err := f.names()
	if err != nil {
		return nil, err
	}
	var s state
	begun, err := readJSON(f.state(jobName), &s)
	switch {
	case err != nil:
		return nil, err
	case begun && s.Key == j.key:
		return f, f.sweep(names)
	case begun:
		return nil, diag.New(diag.FolderForeign, "the folder is half-written, by other work").
			At("%s", f.state(jobName)).
			Because("the source, the format or another option is not the same").
			Try("give the same command again, remove the folder, or name another one")
	case len(names) == 0:
		return f, f.begin(j.key)
	}
	var r Report
	if there, err := readJSON(f.path(reportName), &r); err == nil && there && r.Key == j.key {
		if err := j.whole(f); err != nil {
			return nil, err
		}
		f.done = &r
		return f, f.clear() // a kill may have left a part of it
	}
	return nil, diag.New(diag.FolderForeign, "the folder holds %s, which is not of this work",
		names[0]).At("%s", f.dir).Try("name a new folder")
}

// whole demands of finished work that its files are still there.
func (j *job) whole(f *outFolder) error {
	for _, file := range j.files {
		info, err := os.Stat(f.path(file.name))
		if err != nil || info.Size() != file.size {
			return diag.New(diag.FolderForeign, "%s is not what was written", file.name).
				At("%s", f.dir).Wrap(err).Try("remove the folder and give the command again")
		}
	}
	return nil
}

// names lists what is in the folder beside the state of the work.
func (f *outFolder) names() ([]string, error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", f.dir).Wrap(err)
	}
	return lists.Pick(entries, func(e os.DirEntry) (string, bool) {
		return e.Name(), e.Name() != StateName
	}), nil
}

func (f *outFolder) begin(key string) error {
	if err := os.MkdirAll(filepath.Dir(f.state(jobName)), 0o755); err != nil {
		return unwritten(f.dir, err)
	}
	return f.writeJSON(filepath.Join(StateName, jobName), state{version, key})
}

// sweep removes what a kill left of files that were not whole: atomicfile begins their names with a
// dot.
func (f *outFolder) sweep(names []string) error {
	for _, name := range names {
		if !strings.HasPrefix(name, ".") {
			continue
		}
		if err := os.Remove(f.path(name)); err != nil {
			return unwritten(f.path(name), err)
		}
	}
	return nil
}

// has reports whether a file is in place, and then fills in what was found in it.
func (f *outFolder) has(want *file) bool {
	var rows []Tensor
	there, err := readJSON(f.state(want.name+".json"), &rows)
	if err != nil || !there || len(rows) != len(want.works) {
		return false
	}
	in, err := os.Open(f.path(want.name))
	if err != nil {
		return false
	}
	defer in.Close()
	head := make([]byte, len(want.header))
	info, err := in.Stat()
	if err != nil || info.Size() != want.size {
		return false
	}
	if _, err := io.ReadFull(in, head); err != nil || !bytes.Equal(head, want.header) {
		return false
	}
	want.rows = rows
	return true
}

func (f *outFolder) write(name string, text []byte) error {
	if err := atomicfile.Write(f.path(name), text, 0o644); err != nil {
		return unwritten(f.path(name), err)
	}
	return nil
}

func (f *outFolder) writeJSON(name string, v any) error {
	text, err := strictjson.Encode(v)
	if err != nil {
		return err
	}
	return f.write(name, text)
}

// readJSON reads a file that may not be there.
func readJSON(path string, v any) (bool, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, v)
	}
	if err != nil {
		return false, diag.New(diag.FileError, "cannot read %s", path).Wrap(err).
			Try("remove the folder and give the command again")
	}
	return true, nil
}

// clear removes the state of finished work.
func (f *outFolder) clear() error {
	if err := os.RemoveAll(f.path(StateName)); err != nil {
		return unwritten(f.path(StateName), err)
	}
	return nil
}

// acquire takes the folder for this process. An flock ends with the process, however it ends.
func acquire(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	if err := flock.Try(f); err != nil {
		f.Close()
		return nil, diag.New(diag.CheckpointBusy, "another process is writing into %s", dir).
			Wrap(err).Try("wait for it, or name another folder")
	}
	return f, nil
}

func (f *outFolder) leave() { f.lock.Close() }
