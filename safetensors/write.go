package safetensors

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// An Item is one tensor to write.
type Item struct {
	Name  string
	Shape dtype.Shape
	Data  Source
}

// A Source writes one tensor's bytes, exactly as many as its shape has. It is called once, when
// the tensor's turn comes, so a tensor need not be in memory before.
type Source func(w io.Writer) error

// FromBytes is the source of bytes in memory.
func FromBytes(b []byte) Source {
	return func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}
}

// Write streams one file to w. Every item is checked before the first byte is written. The file
// it tells of has no name.
func Write(w io.Writer, items []Item, metadata map[string]string) (File, error) {
	l, err := arrange(items, metadata)
	if err != nil {
		return File{}, err
	}
	f, err := l.write(w)
	return f, unwritten(err, "the tensors")
}

// WriteFile puts one file in place when it is whole and on disk.
func WriteFile(path string, items []Item, metadata map[string]string) (File, error) {
	l, err := arrange(items, metadata)
	if err != nil {
		return File{}, err
	}
	return l.writeFile(path)
}

func unwritten(err error, path string) error {
	if _, ok := errors.AsType[*diag.Error](err); ok || err == nil {
		return err
	}
	return diag.New(codeFile, "cannot write %s", path).Wrap(err)
}

// A layout is a file that is ready to be written: its header, and the tensors in its order.
type layout struct {
	header   []byte // with the length before it and the spaces after it
	items    []Item
	data     int64
	metadata map[string]string
}

func (l layout) writeFile(path string) (f File, err error) {
	err = atomicfile.WriteFunc(path, 0o644, func(w io.Writer) error {
		f, err = l.write(w)
		return err
	})
	f.Name = filepath.Base(path)
	return f, unwritten(err, path)
}

func (l layout) write(w io.Writer) (File, error) {
	digest := sha256.New()
	out := bufio.NewWriterSize(io.MultiWriter(w, digest), window)
	if _, err := out.Write(l.header); err != nil {
		return File{}, err
	}
	for _, it := range l.items {
		size, _ := span(it.Shape) // checked by arrange
		m := &meter{w: out, left: size}
		err := it.Data(m)
		switch {
		case m.over:
			return File{}, m.mismatch("more", it)
		case err != nil:
			return File{}, err
		case m.left > 0:
			return File{}, m.mismatch("less", it)
		}
	}
	if err := out.Flush(); err != nil {
		return File{}, err
	}
	return File{
		Bytes:    int64(len(l.header)) + l.data,
		Tensors:  len(l.items),
		Metadata: maps.Clone(l.metadata),
		SHA256:   hex.EncodeToString(digest.Sum(nil)),
	}, nil
}

// A meter lets as many bytes through as a tensor has.
type meter struct {
	w    io.Writer
	left int64
	over bool
}

func (m *meter) mismatch(how string, it Item) error {
	return diag.New(diag.BufferMismatch, "tensor %s: its source gave %s than the %d bytes of %v",
		human.Quote(it.Name), how, it.Shape.Bytes(), it.Shape)
}

var errOver = errors.New("more bytes than the tensor has")

func (m *meter) Write(p []byte) (int, error) {
	if int64(len(p)) > m.left {
		m.over = true
		return 0, errOver
	}
	n, err := m.w.Write(p)
	m.left -= int64(n)
	return n, err
}

// arrange checks the items, orders them and writes the header. Wider element types come first:
// the format has no padding between tensors, so this order alone keeps them aligned.
func arrange(items []Item, metadata map[string]string) (layout, error) {
	items = slices.Clone(items)
	Sort(items)
	header, data, err := Header(items, metadata)
	return layout{header, items, data, metadata}, err
}

// Sort puts tensors in the order of the reference library, in which all are aligned.
func Sort(items []Item) {
	lists.Sort(items, func(a, b Item) int {
		return cmp.Or(cmp.Compare(typeRank(b.Shape.Type), typeRank(a.Shape.Type)),
			strings.Compare(a.Name, b.Name))
	})
}

// Header gives the beginning of a file whose tensors follow it in the order of the items, and the
// bytes of these. It is for whoever does not write them one after the other; sources are not asked.
func Header(items []Item, metadata map[string]string) (header []byte, data int64, err error) {
	if err := check(items, metadata); err != nil {
		return nil, 0, err
	}
	var h bytes.Buffer
	h.Write(make([]byte, prefixBytes))
	h.WriteByte('{')
	comma := ""
	if len(metadata) > 0 {
		h.WriteString(`"` + metadataKey + `":{`)
		for _, key := range slices.Sorted(maps.Keys(metadata)) {
			fmt.Fprintf(&h, "%s%s:%s", comma, encode(key), encode(metadata[key]))
			comma = ","
		}
		h.WriteByte('}')
	}
	at := int64(0)
	for _, it := range items {
		size, _ := span(it.Shape)
		if at+size < at {
			return nil, 0, diag.New(codeCaller, "the tensors' sizes overflow")
		}
		fmt.Fprintf(&h, `%s%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, comma,
			encode(it.Name), types[typeRank(it.Shape.Type)].name, dtype.List(it.Shape.Dims), at, at+size)
		comma = ","
		at += size
	}
	h.WriteByte('}')
	for h.Len()%prefixBytes != 0 {
		h.WriteByte(' ')
	}
	n := h.Len() - prefixBytes
	if n > maxHeader {
		return nil, 0, diag.New(codeCaller, "the header would have %d bytes; at most %d are read",
			n, maxHeader).Try("spread the tensors over several files")
	}
	binary.LittleEndian.PutUint64(h.Bytes(), uint64(n))
	return h.Bytes(), at, nil
}

// check refuses what the reader would refuse.
func check(items []Item, metadata map[string]string) error {
	seen := make(map[string]bool, len(items))
	for _, it := range items {
		err := checkName(it.Name)
		if err == nil && it.Name == metadataKey {
			err = damaged("no tensor may be called %s", metadataKey)
		}
		if err == nil && seen[it.Name] {
			err = damaged("the name stands twice")
		}
		if err == nil && typeRank(it.Shape.Type) < 0 {
			err = damaged("the format has no element type %v", it.Shape.Type)
		}
		if err == nil {
			_, err = span(it.Shape)
		}
		if err == nil && it.Data == nil {
			err = damaged("it has no source")
		}
		if err != nil {
			// The checks are the reader's, but here no file is to blame.
			e := diag.From(within(err, it.Name))
			return diag.New(codeCaller, "%s", e.What).Because("%s", e.Cause)
		}
		seen[it.Name] = true
	}
	if len(metadata) > maxKeys {
		return diag.New(codeCaller, "metadata of %d keys; at most %d are read", len(metadata), maxKeys)
	}
	for key, value := range metadata {
		if !utf8.ValidString(key) || !utf8.ValidString(value) {
			return diag.New(codeCaller, "the metadata %s is not UTF-8", human.Quote(key))
		}
	}
	return nil
}

// encode writes a JSON string as the reference library does: only what JSON demands is escaped.
func encode(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c >= ' ':
			b.WriteByte(c)
		default:
			if j := strings.IndexByte("\b\f\n\r\t", c); j >= 0 {
				b.WriteByte('\\')
				b.WriteByte("bfnrt"[j])
			} else {
				fmt.Fprintf(&b, `\u%04x`, c)
			}
		}
	}
	b.WriteByte('"')
	return b.String()
}
