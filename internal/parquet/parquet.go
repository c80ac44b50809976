// Package parquet turns a parquet file into the texts of its columns, in memory that is bounded
// whatever the file says.
//
// It reads columns of byte arrays and nothing else, page by page. Each length that a file has is
// checked before anything is made of it: the library that is in common use trusts them, so that a
// flipped bit could take all memory of a host. The format is described in
// https://github.com/apache/parquet-format, with the encodings that text is written in.
package parquet

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

const (
	maxFooter  = 1 << 28
	maxSchema  = 1 << 16 // elements
	maxGroups  = 1 << 16
	maxDepth   = 64
	maxName    = 1 << 16
	byteArray  = 6 // types of columns
	fixedArray = 7
)

var typeNames = []string{"BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY",
	"FIXED_LEN_BYTE_ARRAY"}

// A Leaf is a column that has values.
type Leaf struct {
	Path     []string
	Type     string // as the format calls it
	kind     int64
	size     int64 // of a value of a fixed size
	rep, def int   // the largest levels
}

// Text reports whether the values are bytes.
func (l *Leaf) Text() bool {
	return l.kind == byteArray || l.kind == fixedArray && l.size > 0 && l.size <= math.MaxInt32
}

// A File is an open file.
type File struct {
	Leaves []Leaf
	Groups []int64 // rows of each row group, once leaves are selected

	r        io.ReaderAt
	size     int64
	footer   *io.SectionReader
	selected []int
	chunks   [][]chunk // by group, then by place in selected
}

// Open reads what a file of a size says about its columns.
func Open(r io.ReaderAt, size int64) (*File, error) {
	f := &File{r: r, size: size}
	var tail [8]byte
	if size < 12 {
		return nil, io.ErrUnexpectedEOF
	}
	if _, err := r.ReadAt(tail[:], size-8); err != nil {
		return nil, err
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	switch {
	case string(tail[4:]) == "PARE":
		return nil, errors.New("it is encrypted")
	case string(tail[4:]) != "PAR1":
		return nil, fmt.Errorf("it ends with %q, not with PAR1", tail[4:])
	case n > size-12 || n > maxFooter:
		return nil, fmt.Errorf("its footer has %d bytes, and the file %d", n, size)
	}
	f.footer = io.NewSectionReader(r, size-8-n, n)
	var schema []element
	if err := f.metadata(2, func(t *thrift) { schema = readSchema(t) }); err != nil {
		return nil, err
	}
	return f, f.leaves(schema)
}

// metadata reads one field of the footer.
func (f *File) metadata(id int, read func(t *thrift)) error {
	if _, err := f.footer.Seek(0, io.SeekStart); err != nil {
		return err
	}
	t := &thrift{r: bufio.NewReaderSize(f.footer, 1<<12), left: f.footer.Size()}
	t.into(map[int]any{id: func() { read(t) }})
	return t.failed()
}

// Select finds where the values of some leaves are; Groups is known from then on.
func (f *File) Select(leaves ...int) error {
	f.selected = leaves
	return f.metadata(4, func(t *thrift) {
		_, n := t.list()
		if n > maxGroups {
			t.fail(fmt.Errorf("it has %d row groups", n))
		}
		for i := 0; i < n && t.err == nil; i++ {
			f.group(t)
		}
	})
}

// group reads a row group.
func (f *File) group(t *thrift) {
	rows := int64(0)
	chunks := make([]chunk, len(f.selected))
	t.into(map[int]any{3: &rows, 1: func() {
		typ, n := t.list()
		for i := 0; i < n && t.err == nil; i++ {
			if k := slices.Index(f.selected, i); k >= 0 {
				chunks[k] = readChunk(t)
			} else {
				t.skip(typ, 0)
			}
		}
	}})
	f.Groups = append(f.Groups, max(0, rows))
	f.chunks = append(f.chunks, chunks)
}

// An element is a node of the schema, which is listed with each node before its children.
type element struct {
	name                       string
	kind, size, repeated, sons int64
}

func readSchema(t *thrift) []element {
	var list []element
	_, n := t.list()
	if n > maxSchema {
		t.fail(fmt.Errorf("its schema has %d elements", n))
	}
	for i := 0; i < n && t.err == nil; i++ {
		e := element{kind: -1}
		t.into(map[int]any{1: &e.kind, 2: &e.size, 3: &e.repeated, 4: &e.name, 5: &e.sons})
		list = append(list, e)
	}
	return list
}

// leaves finds the columns of a schema.
func (f *File) leaves(schema []element) error {
	if len(schema) == 0 {
		return errors.New("it has no schema")
	}
	var walk func(path []string, rep, def, depth int) error
	next := 1
	walk = func(path []string, rep, def, depth int) error {
		if next >= len(schema) || depth > maxDepth {
			return errors.New("its schema is damaged")
		}
		e := schema[next]
		next++
		switch e.repeated {
		case 1:
			def++
		case 2:
			def++
			rep++
		}
		path = append(slices.Clip(path), e.name)
		if e.sons <= 0 {
			l := Leaf{Path: path, kind: e.kind, size: e.size, rep: rep, def: def, Type: "unknown"}
			if e.kind >= 0 && e.kind < int64(len(typeNames)) {
				l.Type = typeNames[e.kind]
			}
			f.Leaves = append(f.Leaves, l)
			return nil
		}
		for range min(e.sons, maxSchema) {
			if err := walk(path, rep, def, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	for range min(schema[0].sons, maxSchema) {
		if err := walk(nil, 0, 0, 0); err != nil {
			return err
		}
	}
	return nil
}

// A chunk is where the values of a column of a row group lie.
type chunk struct {
	codec, values, size, data, dictionary int64
	found                                 bool
}

// Column gives the values of a row group that the i-th of the selected leaves has. A page or a
// value that would take more than limit bytes is refused.
func (f *File) Column(group, i int, limit int64) (*Column, error) {
	c := &Column{leaf: &f.Leaves[f.selected[i]], limit: limit, chunk: f.chunks[group][i]}
	from := c.data
	if d := c.chunk.dictionary; d > 0 && d < from {
		from = d
	}
	if !c.found || from < 4 || c.size < 0 || c.values < 0 || from > f.size || c.size > f.size-from {
		return nil, errors.New("a column lies outside the file")
	}
	if !c.leaf.Text() {
		return nil, fmt.Errorf("its values are of type %s", c.leaf.Type)
	}
	in := io.NewSectionReader(f.r, from, c.size)
	c.in = &thrift{r: bufio.NewReaderSize(in, 1<<16), left: c.size}
	return c, nil
}

func readChunk(t *thrift) (c chunk) {
	var file string
	t.into(map[int]any{1: &file, 3: func() {
		c.found = true
		t.into(map[int]any{4: &c.codec, 5: &c.values, 7: &c.size, 9: &c.data, 11: &c.dictionary})
	}})
	if file != "" {
		t.fail(errors.New("its columns are in other files"))
	}
	return c
}

// A thrift reads what is written in Thrift's compact protocol. After the first error all is zero.
type thrift struct {
	r    *bufio.Reader
	left int64 // bytes that there can be
	err  error
}

func (t *thrift) fail(err error) { t.err = cmp.Or(t.err, err) }

func (t *thrift) failed() error {
	if errors.Is(t.err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return t.err
}

func (t *thrift) byte() byte {
	if t.err != nil {
		return 0
	}
	b, err := t.r.ReadByte()
	t.fail(err)
	if t.left--; t.left < 0 {
		t.fail(io.ErrUnexpectedEOF)
	}
	return b
}

func (t *thrift) uint() uint64 {
	x := uint64(0)
	for shift := 0; shift < 64; shift += 7 {
		b := t.byte()
		x |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return x
		}
	}
	t.fail(errors.New("a number is too large"))
	return 0
}

func (t *thrift) int() int64 {
	x := t.uint()
	return int64(x>>1) ^ -int64(x&1)
}

// bytes reads a text of at most most bytes.
func (t *thrift) bytes(most int64) []byte {
	n := t.uint()
	if t.err == nil && (n > uint64(most) || n > uint64(t.left)) {
		t.fail(fmt.Errorf("a name has %d bytes", n))
	}
	if t.err != nil {
		return nil
	}
	b := make([]byte, n)
	_, err := io.ReadFull(t.r, b)
	t.fail(err)
	t.left -= int64(n)
	return b
}

// list begins a list. Each element takes a byte at least.
func (t *thrift) list() (typ byte, n int) {
	b := t.byte()
	size := uint64(b >> 4)
	if size == 15 {
		size = t.uint()
	}
	if size > uint64(max(t.left, 0)) {
		t.fail(fmt.Errorf("a list has %d elements", size))
	}
	if t.err != nil {
		return 0, 0
	}
	return b & 15, int(size)
}

// into reads a struct: by their numbers, fields go to a number, a text, or a function that reads
// them; a flag is set if the field is there and false. What is not named is passed over.
func (t *thrift) into(to map[int]any) {
	t.fields(0, func(id int, typ byte) bool {
		switch at := to[id].(type) {
		case *int64:
			*at = t.int()
		case *string:
			*at = string(t.bytes(maxName))
		case *bool:
			*at = *at || typ == 2
			return false
		case func():
			at()
		default:
			return false
		}
		return true
	})
}

func (t *thrift) fields(depth int, field func(id int, typ byte) bool) {
	id := 0
	for t.err == nil {
		b := t.byte()
		if b == 0 {
			return
		}
		if delta := int(b >> 4); delta > 0 {
			id += delta
		} else {
			id = int(int16(t.int()))
		}
		typ := b & 15
		isBool := typ == 1 || typ == 2 // whose value is its type
		if !field(id, typ) && !isBool {
			t.skip(typ, depth+1)
		}
	}
}

// skip passes over a value.
func (t *thrift) skip(typ byte, depth int) {
	if depth > maxDepth {
		t.fail(errors.New("it is nested too deep"))
	}
	if t.err != nil {
		return
	}
	switch typ {
	case 1, 2, 3: // in a list a bool is a byte
		t.byte()
	case 4, 5, 6:
		t.uint()
	case 7:
		t.discard(8)
	case 8:
		t.discard(t.uint())
	case 9, 10:
		of, n := t.list()
		for i := 0; i < n && t.err == nil; i++ {
			t.skip(of, depth+1)
		}
	case 11:
		n := t.uint()
		if n == 0 {
			return
		}
		of := t.byte()
		for i := uint64(0); i < n && t.err == nil; i++ {
			t.skip(of>>4, depth+1)
			t.skip(of&15, depth+1)
		}
	case 12:
		t.fields(depth, func(int, byte) bool { return false })
	case 13:
		t.discard(16)
	default:
		t.fail(fmt.Errorf("it has a value of type %d", typ))
	}
}

func (t *thrift) discard(n uint64) {
	if t.err == nil && n > uint64(max(t.left, 0)) {
		t.fail(io.ErrUnexpectedEOF)
	}
	if t.err != nil {
		return
	}
	_, err := t.r.Discard(int(n))
	t.fail(err)
	t.left -= int64(n)
}
