package event

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A File is a Sink that appends JSON lines to a file: the memory of a run, across its restarts.
type File struct {
	mu  sync.Mutex
	f   *os.File
	now Clock
	err error
	// torn is how many events could not be written since the last that could, for instance because
	// the disk was full. The last of them may be there in part.
	torn int
}

// Open opens a file of events, or makes it. A last line that a kill truncated is removed, so
// that what follows it can be read. A link is refused (code NotPlain). A file that has a second
// name, as in a backup by hard links, is copied first, so that the backup stays as it is.
func Open(path string, now Clock) (*File, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := trim(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{f: f, now: now}, nil
}

// open gives a file that only has this name, for appending.
func open(path string) (*os.File, error) {
	for {
		f, err := plainfile.Open(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && plainfile.Links(info) <= 1 { // some file systems count none
			return f, nil
		}
		if err == nil {
			err = atomicfile.WriteFunc(path, 0o644, func(w io.Writer) error {
				_, err := io.Copy(w, io.NewSectionReader(f, 0, info.Size()))
				return err
			})
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// trim truncates a file after its last complete line, which it finds reading from the end.
func trim(f *os.File) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	block := make([]byte, 4096)
	for end > 0 {
		part := block[:min(end, int64(len(block)))]
		if _, err := f.ReadAt(part, end-int64(len(part))); err != nil {
			return err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return f.Truncate(end - int64(len(part)) + int64(i) + 1)
		}
		end -= int64(len(part))
	}
	return f.Truncate(0)
}

// Emit implements Sink. A line is written at once and whole: a kill of the process loses nothing
// that was emitted before it.
func (f *File) Emit(e Event) {
	if _, ok := e.(Busy); ok { // nobody asks later
		return
	}
	text, err := encode(e, f.now())
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && f.torn > 0 {
		err = f.mend()
	}
	if err == nil {
		_, err = f.f.WriteString(text + "\n")
	}
	if err != nil {
		f.torn++
	}
	f.err = cmp.Or(f.err, err)
}

// mend takes away the part of a line that was left when a write failed, and tells how many events
// are missing.
func (f *File) mend() error {
	if err := trim(f.f); err != nil {
		return err
	}
	text, err := encode(Warning{Text: fmt.Sprintf("%d events could not be written here: %v", f.torn,
		f.err)}, f.now())
	if err == nil {
		_, err = f.f.WriteString(text + "\n")
	}
	if err == nil {
		f.torn = 0
	}
	return err
}

// Close closes the file and gives the first error that Emit met.
func (f *File) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.err, f.f.Close())
}

// Tee is a Sink that gives every event to each of several sinks, in order.
func Tee(sinks ...Sink) Sink { return tee(slices.Clone(sinks)) }

type tee []Sink

func (t tee) Emit(e Event) {
	for _, s := range t {
		s.Emit(e)
	}
}

// Curve reads the course of a run: each step and validation once, in order. Where a run was
// resumed, what came after the checkpoint is what the resumed run did.
func Curve(r io.Reader) (steps []Step, evals []Eval, err error) {
	var h History
	for rec, err := range Read(r) {
		if err != nil {
			return nil, nil, err
		}
		h.Add(rec)
	}
	return h.Steps, h.Evals, nil
}
