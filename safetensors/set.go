package safetensors

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/safedir"
)

// A Set is the tensors of one file, or of all files of one model, under one space of names. Its
// methods may be called from several goroutines.
type Set struct {
	shards  []*shard
	entries []entry // sorted by name
	extra   []string
}

// A File tells of one file of a set.
type File struct {
	Name     string // base name within the folder
	Bytes    int64
	Tensors  int
	Metadata map[string]string
	SHA256   string // in hexadecimal, of a file that was written; empty when it was read
}

// Open reads the headers of a model: of one file, of a folder, or of an index with the shards it
// names. In a folder, model.safetensors comes before model.safetensors.index.json, as in
// transformers, and both before the only other file of tensors.
func Open(path string) (*Set, error) {
	f, info, err := safedir.Peek(path, os.OpenFile)
	if err != nil {
		return nil, locate(err, path)
	}
	if info.IsDir() || isIndex(path) {
		f.Close()
		return openModel(path, info.IsDir())
	}
	return alone(openShard(path, f))
}

// alone is the set of one file.
func alone(s *shard, err error) (*Set, error) {
	if err != nil {
		return nil, err
	}
	return &Set{shards: []*shard{s}, entries: s.entries}, nil
}

// Parse reads a file that is in memory; name is what errors call it. The set's views share data.
func Parse(name string, data []byte) (*Set, error) {
	s, err := newShard(name, bytes.NewReader(data), int64(len(data)))
	if err == nil {
		s.memory = data
	}
	return alone(s, err)
}

// Names lists a model's tensors from its index alone where it has one, so that a model whose
// shards were never fetched can be listed, and from the header of its only file otherwise.
func Names(path string) ([]string, error) {
	f, info, err := safedir.Peek(path, os.OpenFile)
	if err != nil {
		return nil, locate(err, path)
	}
	f.Close()
	if info.IsDir() || isIndex(path) {
		if names, err := indexed(path, info.IsDir()); names != nil || err != nil {
			return names, err
		}
	}
	set, err := Open(path)
	if err != nil {
		return nil, err
	}
	return set.Names(), set.Close()
}

// Names lists the tensors, sorted.
func (s *Set) Names() []string {
	return lists.Map(s.entries, func(e entry) string { return e.name })
}

// Extra lists the tensors, sorted, that stand in a shard but not in the index. They are not in
// the set: what the index does not name is not part of the model.
func (s *Set) Extra() []string { return slices.Clone(s.extra) }

// Files lists the files in the order of their names.
func (s *Set) Files() []File {
	return lists.Map(s.shards, func(sh *shard) File {
		return File{Name: base(sh.name), Bytes: sh.size, Tensors: len(sh.entries),
			Metadata: maps.Clone(sh.metadata)}
	})
}

// Shape gives a tensor's element type and dimensions; it touches no data and works after Close.
func (s *Set) Shape(name string) (dtype.Shape, error) {
	t, err := s.Tensor(name)
	if err != nil {
		return dtype.Shape{}, err
	}
	return t.Shape(), nil
}

// Tensor finds a tensor by name.
func (s *Set) Tensor(name string) (Tensor, error) {
	if e := find(s.entries, name); e != nil {
		return Tensor{e}, nil
	}
	err := diag.New(codeFormat, "no tensor is called %s", human.Quote(name))
	if len(s.shards) > 0 {
		err = err.At("%s", s.shards[0].name)
	}
	// Edit distance is for lists that a person could read: 5,000 names take some 30 ms.
	if len(s.entries) <= 5000 && len(name) <= 200 {
		if near := diag.Nearest(name, s.Names()); near != "" {
			err = err.Try("did you mean %s?", human.Quote(near))
		}
	}
	return Tensor{}, err
}

func find(entries []entry, name string) *entry {
	i, ok := slices.BinarySearchFunc(entries, name, func(e entry, name string) int {
		return strings.Compare(e.name, name)
	})
	if !ok {
		return nil
	}
	return &entries[i]
}

// Close unmaps and closes the files. Every view that Tensor.Bytes gave is dead from then on.
func (s *Set) Close() error {
	errs := lists.Map(s.shards, func(sh *shard) error { return sh.close() })
	return errors.Join(errs...)
}
