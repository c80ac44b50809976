package plugin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// manifestName is the file beside the engine's own files that lists them.
const manifestName = "manifest.json"

// A manifest lists the files of an installed engine. It is not trusted: treeDigest of its files
// must be the digest in the binary.
type manifest struct {
	Version  int      `json:"version"`
	Engine   string   `json:"engine"`
	Packages []string `json:"packages"` // name==version, in the order of the table
	Files    []file   `json:"files"`    // sorted by path
}

const manifestVersion = 1

// treeDigest is the SHA-256 over one line a file, "<sha256>  <path>\n", sorted by path: what
// sha256sum prints for the tree.
func treeDigest(files []file) string {
	hash := sha256.New()
	sorted := slices.Clone(files)
	lists.Sort(sorted, byPath)
	for _, f := range sorted {
		fmt.Fprintf(hash, "%s  %s\n", f.SHA256, f.Path)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

func byPath(a, b file) int { return cmp.Compare(a.Path, b.Path) }

func (m manifest) bytes() (total int64) {
	return lists.Sum(m.Files, func(f file) int64 { return f.Bytes })
}

// readManifest reads the manifest of the engine in folder. The error is fs.ErrNotExist if there
// is no manifest.
func readManifest(folder string) (manifest, error) {
	var m manifest
	text, err := os.ReadFile(filepath.Join(folder, manifestName))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, err
	}
	if m.Version != manifestVersion {
		return m, fmt.Errorf("manifest has version %d; this binary reads %d", m.Version, manifestVersion)
	}
	return m, nil
}

// verify holds the tree in folder against the digest in the table: first the names and kinds of
// all files, then every byte: with all of every file, else of those that were written, or put in
// place, since they were hashed. Measured warm on two cores with SHA instructions, about 1 GB/s
// each: 0.24 s for cpu (one file of 259 MB), 0.9 s for cuda13 (1.8 GB), 2.4 s for cuda13-run
// (3.2 GB). Without them a core hashes 165 to 350 MB/s.
func (c *catalogue) verify(ctx context.Context, folder string, e *engine, all bool) ([]seal,
	error) {
	if err := checkOwners(filepath.Dir(folder), folder); err != nil {
		return nil, err
	}
	untrusted := func(format string, args ...any) *diag.Error {
		return diag.New(diag.EngineUntrusted, format, args...).At("%s", folder).
			Try("deepwell engine install %s", e.name)
	}
	m, err := readManifest(folder)
	if errors.Is(err, fs.ErrNotExist) {
		if _, statErr := os.Lstat(folder); statErr == nil {
			return nil, untrusted("%s of engine %q was removed after it was installed", manifestName, e.name)
		}
		return nil, missing(e, folder)
	}
	if err != nil {
		return nil, untrusted("%s of engine %q cannot be read", manifestName, e.name).Wrap(err)
	}
	if m.Engine == e.name && !slices.Equal(m.Packages, e.packages()) {
		return nil, diag.New(diag.EngineMissing, "another release of engine %q is installed", e.name).
			At("%s", folder).
			Because("installed %v, wanted %v", m.Packages, e.packages()).
			Try("deepwell engine install %s", e.name)
	}
	if m.Engine != e.name || treeDigest(m.Files) != e.trees[c.host] {
		return nil, untrusted("%s of engine %q was changed after it was installed", manifestName, e.name)
	}
	folders, err := checkNames(folder, m.Files)
	if err != nil {
		return nil, untrusted("%s", err)
	}
	kept := recordPath(filepath.Dir(folder), e.name)
	known, began := record{}, c.now()
	if !all {
		known = readRecord(kept, e.trees[c.host])
	}
	seals, changed, err := checkBytes(ctx, folder, m.Files, known)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, canceled(err, "verifying engine %q", e.name)
	case err != nil:
		return nil, untrusted("%s cannot be read", changed).Wrap(err)
	case changed != "":
		return nil, untrusted("%s was changed after it was installed", changed)
	}
	if now := remember(e.trees[c.host], folder, seals, began); !maps.Equal(now.Files, known.Files) {
		now.write(kept)
	}
	return append(seals, folders...), nil
}

func missing(e *engine, folder string) *diag.Error {
	return diag.New(diag.EngineMissing, "engine %q is not installed", e.name).
		At("%s", folder).Try("deepwell engine install %s", e.name)
}

// checkNames walks folder and wants exactly the listed files, all regular and of the listed size.
// The seals of the folders will show whether a name is added later.
func checkNames(folder string, files []file) (folders []seal, err error) {
	left := make(map[string]int64, len(files))
	for _, f := range files {
		left[f.Path] = f.Bytes
	}
	err = filepath.WalkDir(folder, func(at string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(folder, at)
		if err != nil {
			return err
		}
		name := filepath.ToSlash(rel)
		size, listed := left[name]
		switch {
		case d.IsDir():
			info, err := d.Info()
			if err != nil {
				return err
			}
			s, err := newSeal(at, info)
			folders = append(folders, s)
			return err
		case !d.Type().IsRegular():
			return fmt.Errorf("%s is not a regular file", name)
		case name == manifestName:
			return nil
		case !listed:
			return fmt.Errorf("%s was added after the engine was installed", name)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Size() != size {
			return fmt.Errorf("%s was changed after it was installed: it has %d bytes, not %d",
				name, info.Size(), size)
		}
		delete(left, name)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if _, still := left[f.Path]; still {
			return nil, fmt.Errorf("%s was removed after it was installed", f.Path)
		}
	}
	return folders, nil
}

// checkBytes hashes the files that a record does not know, several at once and the largest first,
// and names one whose digest is not the listed one.
func checkBytes(ctx context.Context, folder string, files []file, known record) (
	seals []seal, changed string, err error) {
	work := slices.Clone(files)
	lists.Sort(work, func(a, b file) int { return cmp.Compare(b.Bytes, a.Bytes) })
	results := make([]error, len(work))
	seals = make([]seal, len(work))
	next := make(chan int, len(work))
	for i := range work {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for range min(len(work), max(2, runtime.NumCPU())) {
		wg.Go(func() {
			for i := range next {
				path := filepath.Join(folder, filepath.FromSlash(work[i].Path))
				if s, ok := known.has(work[i].Path, path); ok {
					seals[i] = s
					continue
				}
				got, s, err := hashFile(ctx, path)
				if err == nil && got != work[i].SHA256 {
					err = errChanged
				}
				results[i], seals[i] = err, s
			}
		})
	}
	wg.Wait()
	for i, err := range results {
		if errors.Is(err, errChanged) {
			return nil, work[i].Path, nil
		}
		if err != nil {
			return nil, work[i].Path, err
		}
	}
	return seals, "", nil
}

var errChanged = errors.New("another digest")

// hashFile gives the SHA-256 of a file in hexadecimal and seals what was hashed. A file that is
// written to, or replaced, meanwhile has changed: the bytes that were hashed need not be those that
// are loaded.
func hashFile(ctx context.Context, name string) (digest string, sealed seal, err error) {
	f, err := os.Open(name)
	if err != nil {
		return "", seal{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", seal{}, err
	}
	if sealed, err = newSeal(name, info); err != nil {
		return "", seal{}, err
	}
	hash := sha256.New()
	if _, err := io.CopyBuffer(hash, plainfile.Until(ctx, f), make([]byte, chunk)); err != nil {
		return "", seal{}, err
	}
	if info, err = f.Stat(); err != nil {
		return "", seal{}, err
	}
	if after, err := newSeal(name, info); err != nil || after != sealed || !sealed.holds() {
		return "", seal{}, errChanged
	}
	return hex.EncodeToString(hash.Sum(nil)), sealed, nil
}
