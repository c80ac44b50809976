package safetensors

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// The names that Hugging Face's libraries give to a model's files.
const (
	suffix      = ".safetensors"
	indexSuffix = ".safetensors.index.json"
	modelName   = "model"
)

// maxIndex bounds an index like a header; that of a model of 10⁵ tensors has 10 MB.
const maxIndex = maxHeader

func isIndex(path string) bool { return strings.HasSuffix(path, ".json") }

// base is the last part of what errors call a file.
func base(name string) string { return filepath.Base(name) }

// A folder opens files that may not leave it.
type folder struct {
	root *os.Root
	dir  string // the folder within the root, with slashes
	path string // as the caller spelled it
}

// openFolder follows dir wherever the caller's own links lead, but the files in it no further
// than the folder. In a Hugging Face cache they are links from snapshots/REVISION to blobs, so
// there the repository's folder is the limit.
func openFolder(dir string) (*folder, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return nil, locate(err, dir)
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
		return nil, locate(err, dir)
	}
	return &folder{root: root, dir: within, path: dir}, nil
}

func (d *folder) close() { d.root.Close() }

func (d *folder) name(file string) string { return filepath.Join(d.path, file) }

// open gives a plain file of the folder. A file with a second name is refused because that name
// may be outside: os.Root follows no link out, but it cannot see a hard link.
func (d *folder) open(file string) (*os.File, error) {
	f, info, err := openAny(path.Join(d.dir, file), d.root.OpenFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, err
	case err != nil:
		e := locate(err, d.name(file))
		if e.Fix == "" {
			e = e.Try("if it is a link that leaves the folder, put the file itself there")
		}
		return nil, e
	case info.IsDir():
		err = diag.New(codeFormat, "not a plain file but a folder")
	case links(info) > 1:
		err = diag.New(codeFormat, "the file has a second name, which may be outside the folder").
			Because("it has %d hard links", links(info)).Try("copy the file, or open it by its path")
	}
	if err != nil {
		f.Close()
		return nil, locate(err, d.name(file))
	}
	return f, nil
}

// openModel opens what path, a folder or an index, leads to.
func openModel(path string, isDir bool) (*Set, error) {
	d, file, err := locateModel(path, isDir)
	if err != nil {
		return nil, err
	}
	defer d.close()
	if isIndex(file) {
		return d.openIndex(file)
	}
	f, err := d.open(file)
	if err != nil {
		return nil, locate(err, d.name(file))
	}
	s, err := openShard(d.name(file), f)
	if err != nil {
		return nil, err
	}
	return &Set{shards: []*shard{s}, entries: s.entries}, nil
}

func modelNames(path string, isDir bool) ([]string, error) {
	d, file, err := locateModel(path, isDir)
	if err != nil {
		return nil, err
	}
	defer d.close()
	if !isIndex(file) {
		set, err := openModel(path, isDir)
		if err != nil {
			return nil, err
		}
		return set.Names(), set.Close()
	}
	homes, err := d.readIndex(file)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(homes))
	for i, h := range homes {
		names[i] = h.tensor
	}
	return names, nil
}

// locateModel finds the one file to start from: a file of tensors or an index.
func locateModel(path string, isDir bool) (*folder, string, error) {
	dir, file := path, ""
	if !isDir {
		dir, file = filepath.Dir(path), filepath.Base(path)
	}
	d, err := openFolder(dir)
	if err == nil && isDir {
		if file, err = d.choose(); err != nil {
			d.close()
		}
	}
	return d, file, err
}

func (d *folder) choose() (string, error) {
	entries, err := fs.ReadDir(d.root.FS(), d.dir)
	if err != nil {
		return "", locate(err, d.path)
	}
	var files, pickles []string
	has := map[string]bool{}
	for _, e := range entries {
		has[e.Name()] = true
		switch filepath.Ext(e.Name()) {
		case suffix:
			files = append(files, e.Name())
		case ".bin", ".pt", ".pth":
			pickles = append(pickles, e.Name())
		}
	}
	switch {
	case has[modelName+suffix]:
		return modelName + suffix, nil
	case has[modelName+indexSuffix]:
		return modelName + indexSuffix, nil
	case len(files) == 1:
		return files[0], nil
	case len(files) > 1:
		return "", diag.New(codeFormat, "%d files of tensors and no index: %s",
			len(files), some(files)).At("%s", d.path).
			Try("fetch %s, or name one file", modelName+indexSuffix)
	case len(pickles) > 0:
		return "", diag.New(codeFormat, "only %s is here, and Deepwell reads no pickles",
			quote(pickles[0])).At("%s", d.path).Try("save the model as safetensors")
	}
	return "", diag.New(codeFormat, "no file of tensors is here").At("%s", d.path).
		Try("give the folder that holds %s or %s", modelName+suffix, modelName+indexSuffix)
}

// some prints the first names of a list.
func some(names []string) string {
	const most = 3
	quoted := make([]string, 0, most+1)
	for _, n := range names[:min(len(names), most)] {
		quoted = append(quoted, quote(n))
	}
	if len(names) > most {
		quoted = append(quoted, "…")
	}
	return strings.Join(quoted, ", ")
}

// A home is one line of an index: the tensor, and the file that holds it.
type home struct{ tensor, file string }

// readIndex gives an index sorted by tensor.
func (d *folder) readIndex(file string) ([]home, error) {
	f, err := d.open(file)
	if err != nil {
		return nil, locate(err, d.name(file))
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxIndex+1))
	if err != nil {
		return nil, locate(err, d.name(file))
	}
	homes, err := parseIndex(string(text))
	if err != nil {
		return nil, locate(err, d.name(file))
	}
	return homes, nil
}

// parseIndex reads {"metadata": anything, "weight_map": {tensor: file}}.
func parseIndex(text string) ([]home, error) {
	switch {
	case len(text) > maxIndex:
		return nil, damaged("the index has more than %d bytes", maxIndex)
	case !utf8.ValidString(text):
		return nil, damaged("the index is not UTF-8")
	}
	s := scanner{text: text}
	var homes []home
	seen := map[string]bool{}
	err := s.object(func(key string) error {
		if seen[key] {
			return damaged("the index holds %s twice", quote(key))
		}
		seen[key] = true
		if key != "weight_map" {
			return s.skip(0)
		}
		return s.object(func(tensor string) error {
			file, err := s.str()
			if err != nil {
				return err
			}
			homes = append(homes, home{tensor, file})
			if err := checkName(tensor); err != nil {
				return err
			}
			return checkFile(file)
		})
	})
	if s.space(); err == nil && s.at < len(text) {
		err = s.fail("something follows the index's object")
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, damaged("the index is not well formed").Because("%s", err)
	}
	if !seen["weight_map"] {
		return nil, damaged("the index has no weight_map")
	}
	return homes, checkHomes(homes)
}

// checkFile takes only a plain name of a file of tensors: an index has no business elsewhere.
func checkFile(file string) error {
	switch {
	case strings.ContainsAny(file, `/\`) || !filepath.IsLocal(file) ||
		strings.ContainsFunc(file, unicode.IsControl) || len(file) > 255:
		return damaged("the index names the file %s, which is no name within the folder", quote(file))
	case !strings.HasSuffix(file, suffix):
		return damaged("the index names the file %s, which is not safetensors", quote(file))
	}
	return nil
}

// checkHomes sorts by tensor and refuses doubled tensors, and files whose names differ only in
// case, which are one file on some disks and two on others.
func checkHomes(homes []home) error {
	slices.SortFunc(homes, func(a, b home) int { return strings.Compare(a.tensor, b.tensor) })
	spelled := map[string]string{}
	for i, h := range homes {
		if i > 0 && homes[i-1].tensor == h.tensor {
			return damaged("the index names tensor %s twice", quote(h.tensor))
		}
		lower := strings.ToLower(h.file)
		if first, ok := spelled[lower]; ok && first != h.file {
			return damaged("the index spells one file %s and %s", quote(first), quote(h.file))
		}
		spelled[lower] = h.file
	}
	return nil
}

// openIndex opens every shard of an index and demands that they keep its promises.
func (d *folder) openIndex(file string) (_ *Set, err error) {
	homes, err := d.readIndex(file)
	if err != nil {
		return nil, err
	}
	set := &Set{}
	defer func() {
		if err != nil {
			_ = set.Close()
		}
	}()
	var files []string
	for _, h := range homes {
		files = append(files, h.file)
	}
	slices.Sort(files)
	files = slices.Compact(files)
	var missing []string
	for _, name := range files {
		f, err := d.open(name)
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		s, err := openShard(d.name(name), f)
		if err != nil {
			return nil, err
		}
		set.shards = append(set.shards, s)
	}
	if len(missing) > 0 {
		return nil, diag.New(codeFormat, "%d of %d shards are missing: %s",
			len(missing), len(files), some(missing)).
			At("%s", d.path).Try("fetch the files that the index names")
	}
	if err := set.gather(homes); err != nil {
		return nil, locate(err, d.name(file))
	}
	return set, nil
}

// gather fills the set with what the index names.
func (s *Set) gather(homes []home) error {
	byFile := map[string]*shard{}
	for _, sh := range s.shards {
		byFile[base(sh.name)] = sh
	}
	s.entries = make([]entry, 0, len(homes))
	var absent []string
	for _, h := range homes {
		if e := find(byFile[h.file].entries, h.tensor); e != nil {
			s.entries = append(s.entries, *e)
		} else {
			absent = append(absent, h.tensor)
		}
	}
	if len(absent) > 0 {
		return damaged("%d tensors are not in the shards where the index puts them: %s",
			len(absent), some(absent)).Try("the index belongs to other files: fetch both again")
	}
	for _, sh := range s.shards {
		for _, e := range sh.entries {
			switch known := find(s.entries, e.name); {
			case known == nil:
				s.extra = append(s.extra, e.name)
			case known.shard != sh:
				return damaged("tensor %s is in two shards, %s and %s",
					quote(e.name), base(known.shard.name), base(sh.name))
			}
		}
	}
	slices.Sort(s.extra)
	s.extra = slices.Compact(s.extra)
	return nil
}
