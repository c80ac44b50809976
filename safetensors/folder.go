package safetensors

import (
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/folder"
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

// openModel opens what path, a folder or an index, leads to.
func openModel(path string, isDir bool) (*Set, error) {
	d, file, err := locateModel(path, isDir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if isIndex(file) {
		return openIndex(d, file)
	}
	f, err := d.File(file)
	if err != nil {
		return nil, err
	}
	s, err := openShard(d.Path(file), f)
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
	defer d.Close()
	if !isIndex(file) {
		set, err := openModel(path, isDir)
		if err != nil {
			return nil, err
		}
		return set.Names(), set.Close()
	}
	homes, err := readIndex(d, file)
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
func locateModel(path string, isDir bool) (*folder.Folder, string, error) {
	dir, file := path, ""
	if !isDir {
		dir, file = filepath.Dir(path), filepath.Base(path)
	}
	d, err := folder.Open(dir)
	if err == nil && isDir {
		if file, err = choose(d); err != nil {
			d.Close()
		}
	}
	return d, file, err
}

func choose(d *folder.Folder) (string, error) {
	names, err := d.Names()
	if err != nil {
		return "", err
	}
	var files, pickles []string
	has := map[string]bool{}
	for _, name := range names {
		has[name] = true
		switch filepath.Ext(name) {
		case suffix:
			files = append(files, name)
		case ".bin", ".pt", ".pth":
			pickles = append(pickles, name)
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
			len(files), some(files)).At("%s", d.Path("")).
			Try("fetch %s, or name one file", modelName+indexSuffix)
	case len(pickles) > 0:
		return "", diag.New(codeFormat, "only %s is here, and Deepwell reads no pickles",
			quote(pickles[0])).At("%s", d.Path("")).Try("save the model as safetensors")
	}
	return "", diag.New(codeFormat, "no file of tensors is here").At("%s", d.Path("")).
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
func readIndex(d *folder.Folder, file string) ([]home, error) {
	text, err := d.Read(file, maxIndex)
	if err != nil {
		return nil, err
	}
	homes, err := parseIndex(string(text))
	if err != nil {
		return nil, locate(err, d.Path(file))
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
func openIndex(d *folder.Folder, file string) (_ *Set, err error) {
	homes, err := readIndex(d, file)
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
		f, err := d.File(name)
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, name)
			continue
		}
		if err != nil {
			return nil, err
		}
		s, err := openShard(d.Path(name), f)
		if err != nil {
			return nil, err
		}
		set.shards = append(set.shards, s)
	}
	if len(missing) > 0 {
		return nil, diag.New(codeFormat, "%d of %d shards are missing: %s",
			len(missing), len(files), some(missing)).
			At("%s", d.Path("")).Try("fetch the files that the index names")
	}
	if err := set.gather(homes); err != nil {
		return nil, locate(err, d.Path(file))
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
