package data

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/diag"
)

// Megatron-LM writes tokens into a .bin without any structure, and says in a .idx where sequences
// lie and which of them make a document (megatron/core/datasets/indexed_dataset.py). There are two
// forms of it: the one that is written today, and one that older versions wrote ("lazy" and
// "cached").
var (
	magicMapped = []byte("MMIDIDX\x00\x00")
	magicLazy   = []byte("TNTIDX\x00\x00")
)

// A megatronType is how tokens are written; 6 and 7 are floating point, which no token is.
type megatronType struct {
	size int64
	get  func([]byte) int64
}

// megatronTypes are the element types of .bin files, by the code in their index.
var megatronTypes = map[uint64]megatronType{
	1: {1, func(b []byte) int64 { return int64(b[0]) }},
	2: {1, func(b []byte) int64 { return int64(int8(b[0])) }},
	3: {2, func(b []byte) int64 { return int64(int16(binary.LittleEndian.Uint16(b))) }},
	4: {4, func(b []byte) int64 { return int64(int32(binary.LittleEndian.Uint32(b))) }},
	5: {8, func(b []byte) int64 { return int64(binary.LittleEndian.Uint64(b)) }},
	8: {2, func(b []byte) int64 { return int64(binary.LittleEndian.Uint16(b)) }},
}

// A megatronIndex is a .idx: sequences with their lengths in tokens and their places in bytes, and
// for each document its first sequence.
type megatronIndex struct {
	megatronType
	lengths   []byte // 4 bytes each, or 8 in the older form
	wide      bool
	places    []byte // 8 bytes each
	inTokens  bool   // places are counted in tokens, not bytes
	first     []byte // 8 bytes each; the last entry is the number of sequences
	sequences int64
	documents int64
}

// length is the number of tokens of sequence i; a document is one or more sequences.
func (x *megatronIndex) length(i int64) int64 {
	if x.wide {
		return int64(binary.LittleEndian.Uint64(x.lengths[8*i:]))
	}
	return int64(int32(binary.LittleEndian.Uint32(x.lengths[4*i:])))
}

// span gives the bytes of a sequence in the .bin.
func (x *megatronIndex) span(i int64) (from, to int64) {
	from = int64(binary.LittleEndian.Uint64(x.places[8*i:]))
	if x.inTokens {
		from *= x.size
	}
	return from, from + x.length(i)*x.size
}

// sequencesOf returns the range of a document's sequences.
func (x *megatronIndex) sequencesOf(document int64) (from, to int64) {
	return int64(binary.LittleEndian.Uint64(x.first[8*document:])),
		int64(binary.LittleEndian.Uint64(x.first[8*document+8:]))
}

// parseMegatron reads a .idx whose .bin has the given size. All that it says lies within bounds.
func parseMegatron(b []byte, bin int64) (*megatronIndex, error) {
	x := &megatronIndex{}
	var err error
	if bytes.HasPrefix(b, magicLazy) {
		err = x.parseLazy(b[len(magicLazy):])
	} else if bytes.HasPrefix(b, magicMapped) {
		err = x.parseMapped(b[len(magicMapped):])
	} else {
		return nil, fmt.Errorf("it does not begin with %q", magicMapped[:7])
	}
	if err != nil {
		return nil, err
	}
	total := int64(0)
	for i := range x.sequences {
		place, most := int64(binary.LittleEndian.Uint64(x.places[8*i:])), bin
		if x.inTokens {
			most /= x.size
		}
		if n := x.length(i); n < 0 || n > bin/x.size || place < 0 || place > most {
			return nil, fmt.Errorf("sequence %d lies outside the .bin", i)
		}
		from, to := x.span(i)
		if to-from > bin-from {
			return nil, fmt.Errorf("sequence %d ends at byte %d; the .bin has %d", i, to, bin)
		}
		// A small file must not stand for a large one.
		if total += to - from; total > bin {
			return nil, fmt.Errorf("sequence %d has bytes that an earlier one has", i)
		}
	}
	for d := range x.documents {
		if from, to := x.sequencesOf(d); from < 0 || from > to || to > x.sequences {
			return nil, fmt.Errorf("document %d has the sequences %d to %d of %d", d, from, to, x.sequences)
		}
	}
	return x, nil
}

// fields reads numbers of 8 bytes from the beginning of b.
func fields(b *[]byte, to ...*uint64) error {
	for _, v := range to {
		if len(*b) < 8 {
			return io.ErrUnexpectedEOF
		}
		*v = binary.LittleEndian.Uint64(*b)
		*b = (*b)[8:]
	}
	return nil
}

// table takes n entries of a size from the beginning of b.
func table(b *[]byte, n uint64, size int) ([]byte, error) {
	if n > uint64(len(*b)/size) {
		return nil, io.ErrUnexpectedEOF
	}
	part := (*b)[:int(n)*size]
	*b = (*b)[len(part):]
	return part, nil
}

// kind sets the element type from the index's code and checks the version.
func (x *megatronIndex) kind(version, code uint64) error {
	var ok bool
	if x.megatronType, ok = megatronTypes[code]; !ok {
		return fmt.Errorf("its type of token has the code %d", code)
	}
	if version != 1 {
		return fmt.Errorf("it has version %d; version 1 is known", version)
	}
	return nil
}

// parseMapped reads the index of Megatron's current format (MMIDIDX).
func (x *megatronIndex) parseMapped(b []byte) error {
	var version, sequences, entries uint64
	if err := fields(&b, &version); err != nil || len(b) == 0 {
		return io.ErrUnexpectedEOF
	}
	if err := x.kind(version, uint64(b[0])); err != nil {
		return err
	}
	b = b[1:]
	if err := fields(&b, &sequences, &entries); err != nil {
		return err
	}
	return x.tables(&b, sequences, entries, func() (err error) {
		if x.lengths, err = table(&b, sequences, 4); err == nil {
			x.places, err = table(&b, sequences, 8)
		}
		return err
	})
}

// parseLazy reads the index of fairseq's older format (TNTIDX).
func (x *megatronIndex) parseLazy(b []byte) error {
	var version, code, size, sequences, lengths, entries uint64
	if err := fields(&b, &version, &code, &size, &sequences, &lengths, &entries); err != nil {
		return err
	}
	if err := x.kind(version, code); err != nil {
		return err
	}
	if size != uint64(x.size) || lengths != sequences || sequences > math.MaxInt32*64 {
		return fmt.Errorf("its sequences are not lists of tokens")
	}
	x.wide, x.inTokens = true, true
	return x.tables(&b, sequences, entries, func() (err error) {
		if _, err = table(&b, sequences+1, 8); err != nil { // where the sizes of each one begin
			return err
		}
		if x.places, err = table(&b, sequences+1, 8); err == nil {
			x.lengths, err = table(&b, sequences, 8)
		}
		return err
	})
}

// tables reads the rest of a .idx: what rest reads, the documents, and for multimodal data a byte
// for each sequence, which says nothing about text.
func (x *megatronIndex) tables(b *[]byte, sequences, entries uint64,
	rest func() error) (err error) {
	if err = rest(); err != nil {
		return err
	}
	if x.first, err = table(b, entries, 8); err != nil {
		return err
	}
	if len(*b) != 0 && uint64(len(*b)) != sequences {
		return fmt.Errorf("it has %d bytes too many", len(*b))
	}
	x.sequences, x.documents = int64(sequences), max(0, int64(entries)-1)
	return nil
}

// readMegatron takes the tokens of every document.
func readMegatron(ctx context.Context, f *file, emit func(item) error) error {
	bad := func(err error) error {
		return diag.New(diag.DataFormat, "%s cannot be read", filepath.Base(indexPath(f.path))).
			At("%s", indexPath(f.path)).Wrap(err).
			Try("write it again with Megatron-LM's tools/preprocess_data.py; .bin and .idx belong together")
	}
	bin, err := os.Open(f.path)
	if err != nil {
		return readError(f.path, err)
	}
	defer bin.Close()
	info, err := bin.Stat()
	if err != nil {
		return readError(f.path, err)
	}
	idx, err := os.Open(indexPath(f.path))
	if err != nil {
		return readError(indexPath(f.path), err)
	}
	defer idx.Close()
	about, err := idx.Stat()
	if err != nil || about.Size() > math.MaxInt {
		return readError(indexPath(f.path), err)
	}
	raw, release, err := contents(idx, int(about.Size()))
	if err != nil {
		return readError(indexPath(f.path), err)
	}
	defer func() { _ = release() }()
	x, err := parseMegatron(raw, info.Size())
	if err != nil {
		return bad(err)
	}
	for d := range x.documents {
		it := item{where: place{f.path, d + 1}}
		if size := x.bytes(d); size > int64(f.limit) {
			return f.tooLong(it.where, int(size))
		}
		if it.ids, it.read, err = x.document(bin, d); err != nil {
			return diag.New(diag.DataFormat, "document %d cannot be read", d+1).At("%s", f.path).Wrap(err)
		}
		if len(it.ids) == 0 {
			continue
		}
		if err := emit(it); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// bytes tells how much memory a document takes as tokens.
func (x *megatronIndex) bytes(d int64) (n int64) {
	from, to := x.sequencesOf(d)
	for i := from; i < to; i++ {
		begin, end := x.span(i)
		n += (end - begin) / x.size * 4
	}
	return n
}

// document reads the tokens of a document, and tells how far into the .bin they reach.
func (x *megatronIndex) document(bin io.ReaderAt, d int64) (ids []int32, read int64, err error) {
	from, to := x.sequencesOf(d)
	var buf []byte
	for i := from; i < to; i++ {
		begin, end := x.span(i)
		buf = append(buf[:0], make([]byte, end-begin)...)
		if _, err := bin.ReadAt(buf, begin); err != nil && end > begin {
			return nil, 0, err
		}
		for at := int64(0); at < end-begin; at += x.size {
			v := x.get(buf[at:])
			if v < 0 || v > math.MaxInt32 {
				return nil, 0, fmt.Errorf("%d is not a token", v)
			}
			ids = append(ids, int32(v))
		}
		read = end
	}
	return ids, read, nil
}
