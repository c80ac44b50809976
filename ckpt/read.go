package ckpt

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A Checkpoint is one step on disk. It is a Source: any box of any tensor can be read, whatever
// the boxes it was written in. Its methods may be called from several goroutines, but not beside
// Close. Its files stay readable when the checkpoint is pruned meanwhile.
type Checkpoint struct {
	Manifest
	path  string
	files map[string]*os.File
	place map[string]int // of a tensor in the manifest
}

// Open reads the manifest of one step folder and opens its part files. It believes no name, size
// or offset before it is checked, but hashes nothing but the manifest: Verify does.
func Open(path string) (_ *Checkpoint, err error) {
	root, err := os.OpenRoot(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !isLink(path):
		return nil, diag.New(diag.CheckpointMissing, "there is no checkpoint %s", path).Wrap(err)
	case err != nil && isLink(path):
		return nil, badLink(path).Wrap(err)
	case err != nil && isFile(path):
		return nil, diag.New(diag.CheckpointLink, "%s is not a folder", filepath.Base(path)).
			At("%s", path).Wrap(err).Try("move it away: a checkpoint is a folder of that name")
	case err != nil:
		return nil, diag.New(diag.FileError, "cannot read %s", path).Wrap(err)
	}
	defer root.Close()
	m, err := readManifest(root)
	if err != nil {
		return nil, locate(err, path, manifestName)
	}
	if step, ok := parseStep(filepath.Base(path)); ok && step != m.Step {
		return nil, damaged("the manifest is of step %d", m.Step).At("%s", path)
	}
	c := &Checkpoint{Manifest: *m, path: path, files: map[string]*os.File{},
		place: make(map[string]int, len(m.Tensors))}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	for _, file := range m.Files {
		f, size, err := openPlain(root, file.Name)
		if err != nil {
			return nil, locate(err, path, file.Name)
		}
		c.files[file.Name] = f
		if size != file.Bytes {
			return nil, locate(damaged("%s has %d bytes instead of %d", file.Name, size, file.Bytes),
				path, file.Name)
		}
	}
	for i, t := range m.Tensors {
		c.place[t.Name] = i
	}
	return c, nil
}

// badLink is about a step that is a link, as of a folder that was moved to another disk, and leads
// to no folder.
func badLink(path string) *diag.Error {
	to, err := os.Readlink(path)
	if err != nil {
		to = "nowhere"
	}
	return diag.New(diag.CheckpointLink, "%s is a link to %s, which is not there or not a folder",
		filepath.Base(path), to).At("%s", path).
		Try("mount the disk that has it; or remove the link, and an older step is taken")
}

// readManifest reads and checks the manifest of a checkpoint's folder.
func readManifest(root *os.Root) (*Manifest, error) {
	f, size, err := openPlain(root, manifestName)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > maxManifest {
		return nil, damaged("the manifest has %d bytes; at most %d are read", size, maxManifest)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return nil, err
	}
	return parseManifest(text, false)
}

// openPlain opens a plain file of the folder without waiting on a pipe. os.Root follows no link out
// of the folder. A second name, as in a backup by hard links (cp -al), does no harm: files are only
// read, what is read is hashed, and they are removed by name.
func openPlain(root *os.Root, name string) (*os.File, int64, error) {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, damaged("%s is missing", name)
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = damaged("%s is not a plain file", name)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// locate names the place in an error and gives a code to one that has none. A disk that answers
// with an I/O error has damaged the checkpoint as much as one that answers with other bytes.
func locate(err error, path, file string) error {
	e, ok := errors.AsType[*diag.Error](err)
	switch {
	case ok:
	case errors.Is(err, syscall.EIO):
		e = damaged("%s cannot be read", file).Wrap(err)
	default:
		e = diag.New(diag.FileError, "cannot read %s", filepath.Join(path, file)).Wrap(err)
	}
	if e.Where == "" {
		e = e.At("%s", path)
	}
	return e
}

// Path is the step folder.
func (c *Checkpoint) Path() string { return c.path }

// Close closes the part files.
func (c *Checkpoint) Close() error {
	var errs []error
	for _, f := range c.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// Tensors implements Source.
func (c *Checkpoint) Tensors() []Tensor {
	return lists.Map(c.Manifest.Tensors, func(t Stored) Tensor { return t.Tensor })
}

// ReadSlice implements Source. It reads through the file, not through mapped memory: a file that
// becomes shorter is an error and no signal.
func (c *Checkpoint) ReadSlice(name string, box Box, dst []byte) error {
	i, ok := c.place[name]
	if !ok {
		return absent(name, c.Tensors()).At("%s", c.path)
	}
	t := &c.Manifest.Tensors[i]
	if err := checkSlice(t.Tensor, box, dst); err != nil {
		return locate(err, c.path, "")
	}
	for _, p := range t.Parts {
		shared, ok := overlap(p.Box, box)
		if !ok {
			continue
		}
		w := window{f: c.files[p.File], limit: p.Offset + p.Bytes}
		err := t.eachRun(shared, p.Box, box, func(from, to, n int64) error {
			return w.read(dst[to:to+n], p.Offset+from)
		})
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = damaged("%s became shorter", p.File)
		}
		if err != nil {
			return locate(err, c.path, p.File)
		}
	}
	return nil
}

// A window reads many short runs with few calls: while they lie close together it reads ahead,
// twice as far each time, and it stops doing so when they do not.
type window struct {
	f     io.ReaderAt
	limit int64 // nothing after it belongs to the part
	buf   []byte
	at    int64 // where buf begins
}

const (
	leastAhead = 4 << 10 // a page
	mostAhead  = 256 << 10
)

func (w *window) read(dst []byte, at int64) error {
	n := int64(len(dst))
	if n >= mostAhead/4 {
		return readFull(w.f, dst, at)
	}
	if end := w.at + int64(len(w.buf)); at < w.at || at+n > end {
		ahead := int64(leastAhead)
		if len(w.buf) > 0 && at-end < int64(len(w.buf)) {
			ahead = min(2*int64(cap(w.buf)), mostAhead)
		}
		ahead = max(ahead, n)
		if int64(cap(w.buf)) < ahead {
			w.buf = make([]byte, ahead)
		}
		w.at, w.buf = at, w.buf[:min(ahead, w.limit-at)]
		if err := readFull(w.f, w.buf, at); err != nil {
			w.buf = w.buf[:0]
			return err
		}
	}
	copy(dst, w.buf[at-w.at:])
	return nil
}

// readFull reads exactly len(p) bytes; a file that ends earlier is damaged.
func readFull(r io.ReaderAt, p []byte, at int64) error {
	n, err := r.ReadAt(p, at)
	if n == len(p) {
		return nil
	}
	return err
}

// A segment is a range of a file and the hash it must have.
type segment struct {
	what, file     string
	offset, length int64
	sum            string
}

// verifyBytes is what is hashed at a time; it stays in the processor's cache.
const verifyBytes = 256 << 10

// Verify hashes every byte of the checkpoint. It names the first damage, in the order of the
// manifest, and tells how many more there are.
func (c *Checkpoint) Verify(ctx context.Context) error {
	var all []segment
	for _, f := range c.Files {
		all = append(all, segment{"the header", f.Name, 0, f.Header, f.SHA256})
	}
	for _, t := range c.Manifest.Tensors {
		for _, p := range t.Parts {
			what := "tensor " + human.Quote(t.Name)
			if len(t.Parts) > 1 {
				what += " " + p.String()
			}
			all = append(all, segment{what, p.File, p.Offset, p.Bytes, p.SHA256})
		}
	}
	bad := make([]error, len(all))
	err := spread(ctx, 0, len(all), verifyBytes, func(i int, buf []byte) error {
		p := all[i]
		sum := sha256.New()
		from := plainfile.Until(ctx, io.NewSectionReader(c.files[p.file], p.offset, p.length))
		n, err := io.CopyBuffer(writerOnly{sum}, from, buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !errors.Is(err, syscall.EIO):
			return locate(err, c.path, p.file)
		case err != nil || n != p.length:
			bad[i] = damaged("%s: %s cannot be read whole", p.file, p.what).Wrap(err)
		case hex.EncodeToString(sum.Sum(nil)) != p.sum:
			bad[i] = damaged("%s: %s has another SHA-256 than when it was written", p.file, p.what)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return locateFirst(bad, c.path)
}

// locateFirst returns the first of the errors, in the order of the manifest, and how many follow.
func locateFirst(bad []error, path string) error {
	var first *diag.Error
	more := 0
	for _, err := range bad {
		if err == nil {
			continue
		}
		if first == nil {
			first = diag.From(err)
		} else {
			more++
		}
	}
	if first == nil {
		return nil
	}
	if more > 0 {
		first = first.Because("%d more parts are damaged", more)
	}
	return first.At("%s", path)
}

// writerOnly hides ReadFrom, so that the buffer that is given is the one that is used.
type writerOnly struct{ io.Writer }

// verifyAt opens, hashes and closes one step folder.
func verifyAt(ctx context.Context, path string) error {
	c, err := Open(path)
	if err != nil {
		return err
	}
	return errors.Join(c.Verify(ctx), c.Close())
}
