package safetensors

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// The names that Hugging Face's libraries give to a model's files.
const (
	suffix      = ".safetensors"
	indexSuffix = ".safetensors.index.json"
	modelName   = "model"
)

// maxIndex bounds an index like a header; for a model of 10⁵ tensors it has 10 MB.
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
	return alone(openShard(d.Path(file), f))
}

// indexed lists the tensors of a model that has an index, by the index alone; nil of others.
func indexed(path string, isDir bool) ([]string, error) {
	d, file, err := locateModel(path, isDir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	if !isIndex(file) {
		return nil, nil
	}
	homes, err := readIndex(d, file)
	return lists.Map(homes, func(h location) string { return h.tensor }), err
}

// locateModel finds the one file to start from: a file of tensors or an index.
func locateModel(path string, isDir bool) (*safedir.Folder, string, error) {
	dir, file := path, ""
	if !isDir {
		dir, file = filepath.Dir(path), filepath.Base(path)
	}
	d, err := safedir.Open(dir)
	if err == nil && isDir {
		if file, err = choose(d); err != nil {
			d.Close()
		}
	}
	return d, file, err
}

// choose decides what of a folder is its weights. It is the one place that knows: what it refuses
// with diag.WeightsIncomplete looks like weights and must never be taken for none, and
// diag.ModelMissing says that nothing here looks like weights.
func choose(d *safedir.Folder) (string, error) {
	names, err := d.Names()
	if err != nil {
		return "", err
	}
	var files, foreign []string
	has := map[string]bool{}
	for _, name := range names {
		has[name] = true
		switch {
		case filepath.Ext(name) == suffix:
			files = append(files, name)
		case formOf(name) != nil:
			foreign = append(foreign, name)
		}
	}
	switch {
	case has[modelName+suffix]:
		return modelName + suffix, nil
	case has[IndexName]:
		return IndexName, nil
	}
	if missing, of := gaps(files); len(missing) > 0 {
		return "", unfetched(d, missing, of)
	}
	switch {
	case len(files) == 1:
		return files[0], nil
	case len(files) > 1:
		return "", diag.New(diag.WeightsIncomplete, "%d files of tensors and no index: %s",
			len(files), some(files)).At("%s", d.Path("")).
			Try("fetch %s, or name one file", IndexName)
	case len(foreign) > 0:
		return "", formOf(foreign[0]).refuse(d, foreign[0])
	case fetching(d.Path("")):
		return "", diag.New(diag.WeightsIncomplete, "a download of this folder has not ended").
			At("%s", d.Path(".cache/huggingface/download")).Try("finish the download")
	}
	return "", diag.New(diag.ModelMissing, "no file of tensors is here").At("%s", d.Path("")).
		Try("give the folder that holds %s or %s", modelName+suffix, IndexName)
}

// unfetched is the error where some of a model's shards are here.
func unfetched(d *safedir.Folder, missing []string, of int) error {
	return diag.New(diag.WeightsIncomplete, "%d of %d shards are missing: %s", len(missing), of,
		some(missing)).At("%s", d.Path("")).Try("finish the download")
}

// numbered is the name of a shard, as every library of Hugging Face spells it.
var numbered = regexp.MustCompile(`^(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors$`)

// gaps lists the shards that the names of others promise and that are missing, and the number
// promised. Files with other names promise nothing.
func gaps(files []string) (missing []string, of int) {
	for _, name := range files {
		m := numbered.FindStringSubmatch(name)
		if m == nil {
			continue
		}
		of, _ = strconv.Atoi(m[3])
		want := make([]string, of)
		for i := range want {
			want[i] = fmt.Sprintf("%s-%05d-of-%s%s", m[1], i+1, m[3], suffix)
		}
		return without(want, files), of
	}
	return nil, 0
}

// without lists what is wanted and not there.
func without(want, there []string) []string {
	has := lists.Set(there)
	return slices.DeleteFunc(slices.Clone(want), func(name string) bool { return has[name] })
}

// A form is a way to store weights that is not read.
type form struct{ what, fix string }

var (
	pickle     = form{"is a pickle, which can run code and is not read", toSafetensors}
	inference  = form{"is a file for inference", "take the original weights: *.safetensors"}
	other      = form{"is of a form that is not read", toSafetensors}
	unfinished = form{"is a download that has not ended", "finish the download"}
)

const toSafetensors = "save the model as safetensors: " +
	"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"

// formOf tells what a file is that looks like weights and is not safetensors; nil for any other.
func formOf(name string) *form {
	lower := strings.ToLower(name)
	stem, ext := strings.TrimSuffix(lower, filepath.Ext(lower)), filepath.Ext(lower)
	switch ext {
	case ".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".tmp", ".download":
		if strings.Contains(stem, suffix) || formOf(stem) != nil {
			return &unfinished
		}
	case ".bin", ".pt", ".pth":
		if !aside(stem) {
			return &pickle
		}
	case ".gguf", ".ggml", ".onnx":
		return &inference
	case ".ckpt", ".msgpack", ".h5", ".distcp", ".nemo", ".npz":
		return &other
	case ".json":
		if strings.HasSuffix(stem, ".bin.index") {
			return &pickle
		}
	}
	if strings.HasPrefix(lower, "consolidated.") && ext != ".json" {
		return &pickle
	}
	return nil
}

// aside knows files that trainers leave beside weights, and files of tokens: they are no weights.
func aside(stem string) bool {
	for _, prefix := range []string{"training_args", "optimizer", "scheduler", "rng_state", "scaler",
		"tokenizer"} {
		if strings.HasPrefix(stem, prefix) {
			return true
		}
	}
	return slices.Contains([]string{"train", "val", "valid", "test", "eval", "tokens", "data"}, stem)
}

func (f *form) refuse(d *safedir.Folder, name string) error {
	return diag.New(diag.WeightsIncomplete, "the only weights here are %s", human.Quote(name)).
		At("%s", d.Path("")).Because("it %s", f.what).Try("%s", f.fix)
}

// fetching reports whether hf download --local-dir was stopped in a folder.
func fetching(dir string) bool {
	left, _ := filepath.Glob(filepath.Join(escape(dir), ".cache", "huggingface", "download",
		"*.incomplete"))
	return len(left) > 0
}

// escape keeps the signs of a path from being read as a pattern.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}

// some prints the first names of a list.
func some(names []string) string {
	const most = 3
	quoted := make([]string, 0, most+1)
	quoted = append(quoted, lists.Map(names[:min(len(names), most)], human.Quote)...)
	if len(names) > most {
		quoted = append(quoted, "…")
	}
	return strings.Join(quoted, ", ")
}

// A location is one line of an index: the tensor, and the file that holds it.
type location struct{ tensor, file string }

// readIndex gives an index sorted by tensor.
func readIndex(d *safedir.Folder, file string) ([]location, error) {
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
func parseIndex(text string) ([]location, error) {
	switch {
	case len(text) > maxIndex:
		return nil, damaged("the index has more than %d bytes", maxIndex)
	case !utf8.ValidString(text):
		return nil, damaged("the index is not UTF-8")
	}
	s := strictjson.Scan(text)
	var homes []location
	seen := map[string]bool{}
	err := s.Object(func(key string) error {
		if seen[key] {
			return damaged("the index holds %s twice", human.Quote(key))
		}
		seen[key] = true
		if key != "weight_map" {
			return s.Skip()
		}
		return s.Object(func(tensor string) error {
			file, err := s.Text()
			if err != nil {
				return err
			}
			homes = append(homes, location{tensor, file})
			if err := checkName(tensor); err != nil {
				return err
			}
			return checkFile(file)
		})
	})
	if err == nil {
		err = s.End("the index's object")
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
		return damaged("the index names the file %s, which is no name within the folder",
			human.Quote(file))
	case !strings.HasSuffix(file, suffix):
		return damaged("the index names the file %s, which is not safetensors", human.Quote(file))
	}
	return nil
}

// checkHomes sorts by tensor and refuses doubled tensors, and files whose names differ only in
// case, which are one file on some disks and two on others.
func checkHomes(homes []location) error {
	lists.Sort(homes, func(a, b location) int { return strings.Compare(a.tensor, b.tensor) })
	spelled := map[string]string{}
	for i, h := range homes {
		if i > 0 && homes[i-1].tensor == h.tensor {
			return damaged("the index names tensor %s twice", human.Quote(h.tensor))
		}
		lower := strings.ToLower(h.file)
		if first, ok := spelled[lower]; ok && first != h.file {
			return damaged("the index spells one file %s and %s", human.Quote(first), human.Quote(h.file))
		}
		spelled[lower] = h.file
	}
	return nil
}

// openIndex opens every shard of an index and demands that they keep its promises.
func openIndex(d *safedir.Folder, file string) (_ *Set, err error) {
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
	files := lists.Map(homes, func(h location) string { return h.file })
	slices.Sort(files)
	files = slices.Compact(files)
	names, err := d.Names()
	if err != nil {
		return nil, err
	}
	if missing := without(files, names); len(missing) > 0 {
		return nil, unfetched(d, missing, len(files))
	}
	for _, name := range files {
		f, err := d.File(name)
		if errors.Is(err, fs.ErrNotExist) { // a link in a cache whose blob is not there
			return nil, unfetched(d, []string{name}, len(files))
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
	if err := set.gather(homes); err != nil {
		return nil, locate(err, d.Path(file))
	}
	return set, nil
}

// gather fills the set with what the index names.
func (s *Set) gather(homes []location) error {
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
					human.Quote(e.name), base(known.shard.name), base(sh.name))
			}
		}
	}
	slices.Sort(s.extra)
	s.extra = slices.Compact(s.extra)
	return nil
}
