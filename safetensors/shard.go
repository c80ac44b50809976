package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A shard is one file: its header, and two ways to its bytes.
type shard struct {
	name     string // as errors call it
	size     int64
	base     int64 // where the data begins
	entries  []entry
	metadata map[string]string
	reader   io.ReaderAt // the file, or the memory that was given
	file     *os.File    // nil for a file in memory

	mu     sync.RWMutex
	memory []byte // the mapping, or the memory that was given; nil where neither is
	closed bool
}

// newShard reads and checks the header of a file of the given size.
func newShard(name string, r io.ReaderAt, size int64) (*shard, error) {
	s := &shard{name: name, size: size, reader: r}
	text, err := readHeader(r, size)
	if err == nil {
		s.base = prefixBytes + int64(len(text))
		s.entries, s.metadata, err = parseHeader(text, size-s.base)
	}
	if err != nil {
		return nil, locate(err, name)
	}
	for i := range s.entries {
		s.entries[i].shard = s
	}
	return s, nil
}

// locate names the file in an error, and gives a code to one that has none.
func locate(err error, where string) *diag.Error {
	e, ok := errors.AsType[*diag.Error](err)
	if !ok {
		e = diag.New(codeFile, "cannot read %s", where).Wrap(err)
	}
	if e.Where == "" {
		e = e.At("%s", where)
	}
	return e
}

// readHeader gives the header's text. Nothing is allocated before the file is known to be as
// long as the header claims.
func readHeader(r io.ReaderAt, size int64) (string, error) {
	if size < prefixBytes {
		return "", damaged("the file has %d bytes, too few for the length of a header", size)
	}
	start := make([]byte, min(size, 64))
	if err := readFull(r, start, 0); err != nil {
		return "", err
	}
	n := binary.LittleEndian.Uint64(start)
	rest := uint64(size - prefixBytes)
	switch {
	case n > maxHeader:
		if e := mistaken(start); e != nil {
			return "", e
		}
		return "", damaged("the header claims %d bytes; at most %d are read", n, maxHeader)
	case n > rest:
		return "", diag.New(codeFormat,
			"the file is truncated: the header has %d bytes, the file only %d more", n, rest).
			Try("the download or copy did not finish: fetch the file again")
	case n == 0:
		return "", damaged("the header is empty")
	case start[prefixBytes] != '{':
		return "", damaged("the header does not begin with {")
	}
	var b strings.Builder
	b.Grow(int(n))
	if _, err := io.Copy(&b, io.NewSectionReader(r, prefixBytes, int64(n))); err != nil {
		return "", err
	}
	if b.Len() < int(n) {
		return "", shrunk()
	}
	return b.String(), nil
}

// mistaken knows what people and tools put in the place of weights.
func mistaken(start []byte) *diag.Error {
	for _, known := range []struct{ magic, what, fix string }{
		{"version https://git-lfs", "this is a Git LFS pointer, not the weights", "git lfs pull"},
		{"PK\x03\x04", "this is a zip archive, perhaps a PyTorch file",
			"Deepwell reads no pickles; save the model as safetensors"},
		{"\x80\x02", "this is a pickle", "Deepwell reads no pickles; save the model as safetensors"},
		{"GGUF", "this is a GGUF file", "give the safetensors of the model"},
		{"<", "this is a web page", "fetch the file again: the server sent a page instead"},
	} {
		if bytes.HasPrefix(start, []byte(known.magic)) {
			return diag.New(codeFormat, "%s", known.what).Try("%s", known.fix)
		}
	}
	return nil
}

func shrunk() *diag.Error {
	return diag.New(codeFile, "the file became shorter while it was open").
		Try("let no other program write the file, and open it again")
}

// readFull fills p; the end of the file before that is an error of its own, because the sizes
// were checked when the file was opened.
func readFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return shrunk()
	}
	return err
}

// openShard takes an open file over: Close closes it.
func openShard(name string, f *os.File) (_ *shard, err error) {
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, locate(err, name)
	}
	s, err := newShard(name, f, info.Size())
	if err != nil {
		return nil, err
	}
	s.file = f
	if s.size <= math.MaxInt {
		// A file that cannot be mapped (no address space, a file system without mmap) is
		// read through the file instead.
		s.memory, _ = plainfile.Map(f, int(s.size))
	}
	if after, err := f.Stat(); err != nil || after.Size() != s.size {
		_ = s.unmap()
		return nil, diag.New(codeFile, "the file changed while it was being opened").
			At("%s", name).Wrap(err).Try("let no other program write the file, and open it again")
	}
	return s, nil
}

func (s *shard) unmap() error {
	if s.file == nil || s.memory == nil {
		return nil
	}
	return unix.Munmap(s.memory)
}

func (s *shard) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	err := s.unmap()
	s.memory = nil
	if s.file != nil {
		err = errors.Join(err, s.file.Close())
	}
	if err != nil {
		return diag.New(codeFile, "cannot close %s", s.name).Wrap(err)
	}
	return nil
}

// view gives a part of the data without a copy, nil where the file is not mapped.
func (s *shard) view(begin, end int64) ([]byte, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return nil, s.gone()
	}
	if s.file != nil {
		// A view of a file that has become shorter would end the process when it is read.
		info, err := s.file.Stat()
		if err != nil {
			return nil, locate(err, s.name)
		}
		if info.Size() < s.size {
			return nil, locate(shrunk(), s.name)
		}
	}
	if s.memory == nil {
		return nil, nil
	}
	return s.memory[s.base+begin : s.base+end : s.base+end], nil
}

// read copies a part of the data through the file.
func (s *shard) read(p []byte, at int64) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.closed {
		return s.gone()
	}
	if err := readFull(s.reader, p, s.base+at); err != nil {
		return locate(err, s.name)
	}
	return nil
}

func (s *shard) gone() *diag.Error {
	return diag.New(codeClosed, "a tensor was used after its set was closed").At("%s", s.name).
		Try("close the set when no tensor of it is needed any more")
}
