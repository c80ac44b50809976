package plugin

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// Bounds on what a wheel may claim. The longest name in a pinned wheel has 99 bytes and the
// fullest holds 101 entries; 255 is the limit of a file name on Linux.
const (
	maxEntries   = 10_000
	maxName      = 512
	maxComponent = 255
)

// A file is one regular file of an installed engine.
type file struct {
	Path   string `json:"path"` // with slashes, below the engine's folder
	SHA256 string `json:"sha256"`
	Bytes  int64  `json:"bytes"`
}

// A selection says what to take out of a wheel and how much that may be.
type selection struct {
	wheel    string   // file name, for messages
	keep     []string // patterns that must each match
	maybe    []string // patterns that may match
	limit    int64    // most bytes that all entries together may hold
	progress func(done, total int64)
}

// unpack writes the selected entries of a wheel below root and returns them with their digests.
// Every entry is inspected before the first is written, also those that are not selected. Writing
// goes through an os.Root, so that even a fault in the inspection cannot leave the folder.
func unpack(
	ctx context.Context, r io.ReaderAt, size int64, root *os.Root, sel selection,
) ([]file, error) {
	z, err := zip.NewReader(r, size)
	if err != nil {
		return nil, diag.New(diag.EngineArchive, "wheel %s is not a whole zip archive", sel.wheel).
			Wrap(err)
	}
	if err := inspect(z.File, sel); err != nil {
		return nil, err
	}
	chosen, total, err := sel.choose(z.File)
	if err != nil {
		return nil, err
	}
	var files []file
	progress := &meter{total: total, tell: sel.progress}
	for _, entry := range chosen {
		f, err := extract(ctx, entry, root, sel.wheel, progress)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// A meter counts the bytes that pass and tells the count every few megabytes and at the end.
type meter struct {
	done, reported, total int64
	tell                  func(done, total int64)
}

// meterStep is at most some ten lines a second in a log of events, at the speed of inflating.
const meterStep = 16 << 20

func (m *meter) Write(p []byte) (int, error) {
	m.done += int64(len(p))
	if m.tell != nil && (m.done-m.reported >= meterStep || m.done == m.total) {
		m.reported = m.done
		m.tell(m.done, m.total)
	}
	return len(p), nil
}

// choose picks the selected files and adds their sizes up; every pattern of keep must find one.
func (s selection) choose(entries []*zip.File) (chosen []*zip.File, total int64, err error) {
	used := map[string]bool{}
	for _, entry := range entries {
		pattern, selected := s.match(entry.Name)
		if !selected || strings.HasSuffix(entry.Name, "/") {
			continue
		}
		used[pattern] = true
		chosen = append(chosen, entry)
		total += int64(entry.UncompressedSize64)
	}
	for _, pattern := range s.keep {
		if !used[pattern] {
			return nil, 0, diag.New(diag.EngineArchive, "wheel %s holds no %s", s.wheel, pattern)
		}
	}
	return chosen, total, nil
}

// match finds the pattern that selects a name.
func (s selection) match(name string) (pattern string, selected bool) {
	for _, list := range [][]string{s.keep, s.maybe} {
		for _, pattern := range list {
			if ok, err := path.Match(pattern, name); ok && err == nil {
				return pattern, true
			}
		}
	}
	return "", false
}

// inspect refuses an archive that holds what no honest wheel holds.
func inspect(entries []*zip.File, sel selection) error {
	refuse := func(name, format string, args ...any) error {
		why := fmt.Sprintf(format, args...)
		return diag.New(diag.EngineArchive, "wheel entry %q %s", name, why).At("%s", sel.wheel)
	}
	if len(entries) > maxEntries {
		return diag.New(diag.EngineArchive, "wheel %s holds %d entries, more than %d",
			sel.wheel, len(entries), maxEntries)
	}
	seen := map[string]string{} // folded name of every file, to the name as written
	for _, entry := range entries {
		isDir := strings.HasSuffix(entry.Name, "/")
		if why := badName(strings.TrimSuffix(entry.Name, "/")); why != "" {
			return refuse(entry.Name, "%s", why)
		}
		mode := entry.Mode()
		if isDir != mode.IsDir() || mode.Type()&^fs.ModeDir != 0 {
			return refuse(entry.Name, "is not a regular file (%v)", mode)
		}
		if isDir {
			continue
		}
		folded := fold(entry.Name)
		if other, twice := seen[folded]; twice {
			return refuse(entry.Name, "is there twice (also as %q)", other)
		}
		seen[folded] = entry.Name
	}
	var total uint64
	for _, entry := range entries {
		// A file that is also a folder of another file.
		for dir := path.Dir(entry.Name); dir != "."; dir = path.Dir(dir) {
			if other, is := seen[fold(dir)]; is {
				return refuse(entry.Name, "lies below %q, which is a file", other)
			}
		}
		if entry.UncompressedSize64 > uint64(sel.limit) {
			return refuse(entry.Name, "claims %d bytes, more than the whole wheel's %d",
				entry.UncompressedSize64, sel.limit)
		}
		if total += entry.UncompressedSize64; total > uint64(sel.limit) {
			return refuse(entry.Name, "brings the wheel to %d bytes, over the pinned %d",
				total, sel.limit)
		}
	}
	return nil
}

// badName says what is wrong with the name of an entry, or "".
func badName(name string) string {
	switch {
	case len(name) > maxName:
		return "has too long a name"
	case !utf8.ValidString(name):
		return "has a name that is not UTF-8"
	case strings.ContainsFunc(name, unicode.IsControl):
		return "has a control character in its name"
	case strings.Contains(name, `\`):
		return "has a backslash in its name"
	case path.IsAbs(name):
		return "has an absolute path"
	case !filepath.IsLocal(name):
		return "leaves the engine's folder"
	case path.Clean(name) != name || name == ".":
		return "has a path that is not in its shortest form"
	}
	for part := range strings.SplitSeq(name, "/") {
		if len(part) > maxComponent {
			return "has too long a name"
		}
	}
	return ""
}

// fold maps names that some file system takes for the same to the same string.
func fold(name string) string { return strings.ToLower(strings.ToUpper(name)) }

// extract writes one entry and hashes it on the way.
func extract(
	ctx context.Context, entry *zip.File, root *os.Root, wheel string, progress io.Writer,
) (file, error) {
	damaged := func(err error) (file, error) {
		return file{}, diag.New(diag.EngineArchive, "wheel entry %q is damaged", entry.Name).
			At("%s", wheel).Wrap(err)
	}
	in, err := entry.Open()
	if err != nil {
		return damaged(err)
	}
	defer in.Close()
	declared := int64(entry.UncompressedSize64)
	got := file{Path: entry.Name}
	limited := io.LimitReader(in, declared+1) // one more byte is enough to catch a lie
	counted := io.TeeReader(limited, progress)
	got.SHA256, got.Bytes, err = writeFile(ctx, root, entry.Name, counted)
	switch read, isRead := errors.AsType[*readError](err); {
	case isRead:
		return damaged(read.err)
	case err != nil:
		return file{}, err
	case got.Bytes != declared:
		return file{}, diag.New(diag.EngineArchive,
			"wheel entry %q is not of the %d bytes that it declares", entry.Name, declared).
			At("%s", wheel)
	}
	return got, nil
}

// A readError is a failure to read what is to be written; any other error of writeFile is a
// *diag.Error.
type readError struct{ err error }

func (e *readError) Error() string { return e.err.Error() }
func (e *readError) Unwrap() error { return e.err }

// chunk is how much is copied between two looks at the context.
const chunk = 256 << 10

// writeFile copies r to a new file below root and returns its digest and size. A file in a folder
// called bin is executable.
func writeFile(
	ctx context.Context, root *os.Root, name string, r io.Reader,
) (digest string, size int64, err error) {
	fail := func(err error) (string, int64, error) {
		return "", 0, cannotWrite(err).At("%s", name)
	}
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return fail(err)
	}
	mode := fs.FileMode(0o644)
	if path.Base(path.Dir(name)) == "bin" {
		mode = 0o755
	}
	out, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return "", 0, diag.New(diag.EngineArchive, "two wheels hold %q", name)
	}
	if err != nil {
		return fail(err)
	}
	defer out.Close()
	hash := sha256.New()
	buf := make([]byte, chunk)
	for {
		if err := ctx.Err(); err != nil {
			return "", 0, canceled(err, "unpacking %s", name)
		}
		n, readErr := r.Read(buf)
		hash.Write(buf[:n])
		if _, err := out.Write(buf[:n]); err != nil {
			return fail(err)
		}
		size += int64(n)
		if readErr == io.EOF {
			break
		}
		if readErr != nil {
			return "", 0, &readError{readErr}
		}
	}
	if err := out.Close(); err != nil {
		return fail(err)
	}
	return hex.EncodeToString(hash.Sum(nil)), size, nil
}

// cannotWrite is the error of a data folder that takes no files.
func cannotWrite(err error) *diag.Error {
	return diag.New(diag.EngineWrite, "cannot write to the engine folder").Wrap(err).
		Try("set DEEPWELL_HOME to a folder that can be written and has room")
}

// canceled is the error of work that the caller stopped.
func canceled(err error, format string, args ...any) *diag.Error {
	return diag.New(diag.Canceled, "stopped while "+format, args...).Wrap(err)
}
