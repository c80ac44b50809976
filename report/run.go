package report

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// eventsName is the log in the folder of a run.
const eventsName = "events.jsonl"

// A Run is the history of a run, as far as its log has been read.
type Run struct {
	Name string // the folder, as it was given
	event.History

	path string
	read int64 // bytes of the log, up to the end of a line
	file os.FileInfo
}

// Open reads the log of the run in a folder.
func Open(folder string) (*Run, error) {
	r := &Run{Name: filepath.ToSlash(filepath.Clean(folder)), path: filepath.Join(folder, eventsName)}
	if info, err := os.Stat(folder); err == nil && !info.IsDir() {
		return nil, diag.New(diag.BadInput, "%s is a file, not the folder of a run", folder).
			Try("give the folder that its recipe has as out")
	}
	if err := r.Update(); err != nil {
		return nil, err
	}
	return r, nil
}

// Update reads what was written since the last time. A log that was replaced is read anew.
func (r *Run) Update() error {
	f, err := plainfile.Open(r.path, os.O_RDONLY, 0)
	if errors.Is(err, diag.NotPlain) {
		return err
	}
	if err != nil {
		e := diag.New(diag.FileError, "cannot read the events of a run").At("%s", r.path).Wrap(err)
		if errors.Is(err, fs.ErrNotExist) {
			e = e.Try("give the folder of a run: deepwell train makes one, and its recipe names it as out")
		}
		return e
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return diag.New(diag.FileError, "cannot read the events of a run").At("%s", r.path).Wrap(err)
	}
	if r.file != nil && (!os.SameFile(r.file, info) || info.Size() < r.read) {
		r.History, r.read = event.History{}, 0
	}
	r.file = info
	text, err := io.ReadAll(io.NewSectionReader(f, r.read, info.Size()-r.read))
	if err != nil {
		return diag.New(diag.FileError, "cannot read the events of a run").At("%s", r.path).Wrap(err)
	}
	text = text[:bytes.LastIndexByte(text, '\n')+1] // the last line may be on its way
	for rec, err := range event.Read(bytes.NewReader(text)) {
		if err != nil {
			return diag.New(diag.BadInput, "the log of the run is damaged").At("%s", r.path).
				Because("%s", strings.TrimPrefix(err.Error(), "event: ")).
				Try("remove the line, or restore the file")
		}
		r.Add(rec)
	}
	r.read += int64(len(text))
	return nil
}
