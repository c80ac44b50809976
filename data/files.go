package data

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A Format says how documents are written in a file.
type Format string

// The formats. A file that ends in .zst or .gz is unpacked first, whatever its format.
const (
	Auto     Format = ""         // by the ending of the file's name
	Text     Format = "text"     // the file is a document
	JSONL    Format = "jsonl"    // an object in each line, of a kind that package chat knows
	CSV      Format = "csv"      // a row for each document, below a line with the columns' names
	TSV      Format = "tsv"      // the same with tabs
	Parquet  Format = "parquet"  // a row for each document
	Megatron Format = "megatron" // .bin and .idx of Megatron-LM: tokens
)

// Formats lists the formats that a source may be given.
func Formats() []string {
	return lists.Map([]Format{Text, JSONL, CSV, TSV, Parquet, Megatron},
		func(f Format) string { return string(f) })
}

// endings is how Auto decides; a file with another ending is text.
var endings = map[string]Format{
	".jsonl": JSONL, ".ndjson": JSONL, ".csv": CSV, ".tsv": TSV, ".parquet": Parquet,
	".bin": Megatron, ".idx": Megatron,
}

// A file is one file of a source; of Megatron it is the .bin, and the .idx belongs to it.
type file struct {
	name    string // within the source, with slashes: the same on every machine
	path    string
	format  Format
	size    int64
	limit   int                   // bytes of a document at most
	split   func(text string) int // where a long text may be split, see [tokenizer.Tokenizer.PieceEnd]
	columns chat.Columns          // of the source
	mod     time.Time
	sum     [sha256.Size]byte
	stamp   string // identifies the contents that sum belongs to, see stampOf; "" if unknown
}

// parts gives the paths of the files that a file consists of.
func (f *file) parts() []string {
	if f.format == Megatron {
		return []string{f.path, indexPath(f.path)}
	}
	return []string{f.path}
}

// indexPath gives the .idx of a .bin.
func indexPath(bin string) string { return strings.TrimSuffix(bin, ".bin") + ".idx" }

// files lists the files of a source by name. skipped counts what is not a file.
func (s Source) files() (list []*file, skipped int64, err error) {
	if s.Format != Auto && !slices.Contains(Formats(), string(s.Format)) {
		return nil, 0, diag.New(diag.BadInput, "there is no format %q", s.Format).
			Try("choose one of %s", strings.Join(Formats(), ", "))
	}
	root, names, err := s.names()
	if err != nil {
		return nil, 0, err
	}
	for _, name := range names {
		f := &file{name: name, path: filepath.Join(root, filepath.FromSlash(name)),
			limit: DefaultDocument, split: splitBlank, columns: s.Columns}
		switch ok, err := f.examine(s.Format, len(names) == 1); {
		case err != nil:
			return nil, 0, err
		case !ok:
			skipped++
		default:
			list = append(list, f)
		}
	}
	// A .idx leads to its .bin, which is listed already if both were found.
	slices.SortFunc(list, func(a, b *file) int { return strings.Compare(a.name, b.name) })
	list = slices.CompactFunc(list, func(a, b *file) bool { return a.name == b.name })
	return list, skipped, nil
}

// examine finds the format, size and time of a file. It reports false for what cannot be read as
// a file of data, which is an error if nothing else was asked for.
func (f *file) examine(format Format, alone bool) (bool, error) {
	f.format = format
	if format == Auto {
		f.format = formatOf(f.path)
	}
	if f.format == Megatron {
		f.name = strings.TrimSuffix(strings.TrimSuffix(f.name, ".bin"), ".idx") + ".bin"
		f.path = strings.TrimSuffix(strings.TrimSuffix(f.path, ".bin"), ".idx") + ".bin"
	}
	for _, p := range f.parts() {
		info, err := os.Stat(p)
		switch {
		case err != nil && errors.Is(err, fs.ErrNotExist) && f.format == Megatron:
			return false, refuse(alone || format == Megatron, diag.New(diag.DataMissing,
				"%s lacks its other half", filepath.Base(f.path)).At("%s", p).
				Try("Megatron-LM writes a .bin and a .idx; put both side by side"))
		case err != nil && errors.Is(err, fs.ErrNotExist): // a link that leads nowhere
			return false, nil
		case err != nil:
			return false, readError(p, err)
		case !info.Mode().IsRegular():
			return false, refuse(alone, diag.New(diag.BadInput, "this is not a file").At("%s", p).
				Try("give files, a folder of files, or a pattern"))
		}
		f.size += info.Size()
		if f.mod.Before(info.ModTime()) {
			f.mod = info.ModTime()
		}
	}
	return true, nil
}

// refuse gives the error if there is nothing else to take.
func refuse(really bool, err error) error {
	if really {
		return err
	}
	return nil
}

// readError is the error of a file that cannot be read, with what to do.
func readError(path string, err error) error {
	return diag.New(diag.FileError, "cannot read %s", filepath.Base(path)).At("%s", path).Wrap(err)
}

// formatOf tells the format of a file by its name.
func formatOf(name string) Format {
	ext := path.Ext(unpackedName(name))
	if f, ok := endings[strings.ToLower(ext)]; ok {
		return f
	}
	return Text
}

// unpackedName is the name of a file without the ending that says how it is packed.
func unpackedName(name string) string {
	return strings.TrimSuffix(strings.TrimSuffix(name, ".zst"), ".gz")
}

// names expands the path of a source: a file, a folder, or a pattern. Names are relative to root
// and sorted.
func (s Source) names() (root string, names []string, err error) {
	if s.Path == "" {
		return "", nil, diag.New(diag.BadInput, "a source has no path").
			Try("name a file, a folder, or a pattern such as 'corpus/**/*.txt'")
	}
	info, err := os.Stat(s.Path)
	switch {
	case err == nil && info.IsDir():
		names, err = walk(s.Path, []string{"**"})
		return s.Path, names, err
	case err == nil:
		return filepath.Dir(s.Path), []string{filepath.Base(s.Path)}, nil
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrInvalid):
		return "", nil, readError(s.Path, err)
	}
	// Megatron-LM is given the name without the endings.
	if _, err := os.Stat(s.Path + ".idx"); err == nil {
		return filepath.Dir(s.Path), []string{filepath.Base(s.Path) + ".idx"}, nil
	}
	pattern := strings.Split(filepath.ToSlash(filepath.Clean(s.Path)), "/")
	fixed := slices.IndexFunc(pattern, isPattern)
	if fixed < 0 {
		return "", nil, missing(s.Path)
	}
	root = filepath.FromSlash(strings.Join(pattern[:fixed], "/"))
	switch {
	case root == "" && fixed == 0:
		root = "."
	case root == "":
		root = string(filepath.Separator)
	}
	for _, part := range pattern[fixed:] {
		if _, err := path.Match(part, ""); err != nil {
			return "", nil, diag.New(diag.BadInput, "%q is not a pattern", s.Path).Wrap(err).
				Try("close its brackets, or escape them with a backslash")
		}
	}
	if names, err = walk(root, pattern[fixed:]); err != nil {
		return "", nil, err
	}
	if len(names) == 0 {
		return "", nil, diag.New(diag.DataMissing, "nothing matches %s", s.Path).
			Try("look with: ls %s; ** stands for any number of folders", root)
	}
	return root, names, nil
}

// isPattern reports whether a part of a path has wildcards.
func isPattern(part string) bool { return strings.ContainsAny(part, "*?[") }

// missing says that a path leads nowhere, and what is near.
func missing(p string) error {
	e := diag.New(diag.DataMissing, "there is no file or folder %s", filepath.Base(p)).At("%s", p)
	entries, err := os.ReadDir(filepath.Dir(p))
	if err != nil {
		return e.Try("the folder %s is not there either", filepath.Dir(p))
	}
	names := lists.Map(entries, func(entry os.DirEntry) string { return entry.Name() })
	if near := diag.Nearest(filepath.Base(p), names); near != "" {
		return e.Try("did you mean %s?", filepath.Join(filepath.Dir(p), near))
	}
	return e.Try("name a file, a folder, or a pattern such as 'corpus/**/*.txt'")
}

// walk lists the files below root that match a pattern, by name. Hidden files and folders are
// passed over unless the pattern spells the dot.
func walk(root string, pattern []string) ([]string, error) {
	var names []string
	err := filepath.WalkDir(root, func(p string, entry fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) && p == root {
				return missing(root)
			}
			return readError(p, err)
		}
		rel, err := filepath.Rel(root, p)
		if err != nil || rel == "." {
			return err
		}
		parts := strings.Split(filepath.ToSlash(rel), "/")
		if entry.IsDir() {
			if !match(pattern, parts, true) {
				return filepath.SkipDir
			}
			return nil
		}
		if match(pattern, parts, false) && !isFolder(p, entry) {
			names = append(names, strings.Join(parts, "/"))
		}
		return nil
	})
	slices.Sort(names)
	return names, err
}

// isFolder reports whether a link leads to a folder. Such links are not followed: they may run in
// circles.
func isFolder(p string, entry fs.DirEntry) bool {
	if entry.Type()&fs.ModeSymlink == 0 {
		return false
	}
	info, err := os.Stat(p)
	return err == nil && info.IsDir()
}

// match reports whether the parts of a name match the parts of a pattern; with prefix, whether a
// name that goes on could.
func match(pattern, parts []string, prefix bool) bool {
	if len(parts) == 0 {
		return prefix || len(pattern) == 0 || len(pattern) == 1 && pattern[0] == "**"
	}
	if len(pattern) == 0 {
		return false
	}
	hidden := strings.HasPrefix(parts[0], ".")
	if pattern[0] == "**" {
		return match(pattern[1:], parts, prefix) && len(pattern) > 1 ||
			!hidden && match(pattern, parts[1:], prefix)
	}
	if hidden && !strings.HasPrefix(pattern[0], ".") {
		return false
	}
	ok, _ := path.Match(pattern[0], parts[0])
	return ok && match(pattern[1:], parts[1:], prefix)
}

// digest reads all files and fills in their sums, several at once.
func digest(ctx context.Context, task string, files []*file, events event.Sink,
	now func() time.Time) error {
	total, done := lists.Sum(files, func(f *file) int64 { return f.size }), int64(0)
	var mu sync.Mutex
	return parallel.Each(runtime.GOMAXPROCS(0), len(files), func() func(int) error {
		return func(i int) error {
			err := files[i].digest(ctx, now)
			mu.Lock()
			defer mu.Unlock()
			done += files[i].size
			events.Emit(event.Progress{Task: task, Done: done, Total: total, Unit: "B"})
			return err
		}
	})
}

// settled is how long ago a file must have been changed for its sum to be remembered. A change that
// comes within one tick of a file system's clock, 2 s on the coarsest, does not show in its times.
const settled = 2 * time.Second

// digest reads a file and fills in its sum, and the stamp if the sum may be remembered.
func (f *file) digest(ctx context.Context, now func() time.Time) error {
	h := sha256.New()
	var stamps []string
	quiet := true
	for _, p := range f.parts() {
		in, err := os.Open(p)
		if err != nil {
			return readError(p, err)
		}
		stamp, changed, before := stampOf(in)
		quiet = quiet && before == nil && now().Sub(changed) > settled
		n, err := io.Copy(h, plainfile.Until(ctx, in))
		again, _, after := stampOf(in)
		quiet = quiet && after == nil && again == stamp
		in.Close()
		if err != nil {
			return readError(p, err)
		}
		// The .idx begins where the .bin ends; the length keeps the two apart.
		h.Write([]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24), byte(n >> 32)})
		stamps = append(stamps, stamp)
	}
	h.Sum(f.sum[:0])
	if quiet {
		f.stamp = strings.Join(stamps, ",")
	}
	return nil
}

// stampOf tells a file, and a state of it, from all others: every write changes the time of its
// inode. It also gives the time of the last change.
func stampOf(f *os.File) (stamp string, changed time.Time, err error) {
	var s unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &s); err != nil {
		return "", changed, err
	}
	m, c := time.Unix(s.Mtim.Unix()), time.Unix(s.Ctim.Unix())
	if changed = m; c.After(m) {
		changed = c
	}
	stamp = fmt.Sprintf("%d:%d:%d:%d:%d", s.Dev, s.Ino, s.Size, m.UnixNano(), c.UnixNano())
	return stamp, changed, nil
}

// recall takes the sum of a file from those that are known, if it has not changed since.
func (f *file) recall(known map[string][sha256.Size]byte) bool {
	var stamps []string
	for _, p := range f.parts() {
		in, err := os.Open(p)
		if err != nil {
			return false
		}
		stamp, _, err := stampOf(in)
		in.Close()
		if err != nil {
			return false
		}
		stamps = append(stamps, stamp)
	}
	stamp := strings.Join(stamps, ",")
	sum, ok := known[stamp]
	if ok {
		f.sum, f.stamp = sum, stamp
	}
	return ok
}

// unchanged reports an error if a file was written since it was listed.
func unchanged(files []*file) error {
	for _, f := range files {
		again := &file{name: f.name, path: f.path}
		ok, err := again.examine(f.format, true)
		if err != nil {
			return err
		}
		if !ok || again.size != f.size || !again.mod.Equal(f.mod) {
			return diag.New(diag.FileError, "%s changed while it was being read", f.name).
				At("%s", f.path).Try("let no other program write the data, and start again")
		}
	}
	return nil
}
