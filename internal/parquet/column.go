package parquet

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/dsnet/compress/brotli"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// A Value is one value of a column. Its bytes hold until the next one is read.
type Value struct {
	First bool // it begins a row
	Null  bool
	Bytes []byte
}

// A Column gives the values of a column of a row group.
type Column struct {
	chunk
	leaf  *Leaf
	limit int64
	in    *thrift
	given int64 // values of the pages that were read

	raw, page  []byte // of the page at hand, packed and not
	zstd       *zstd.Decoder
	dictionary texts
	left       int64 // values of the page that were not given yet
	reps, defs hybrid
	next       func() ([]byte, error)
}

// Close gives back what the column holds.
func (c *Column) Close() {
	if c.zstd != nil {
		c.zstd.Close()
	}
}

// Next gives the next value. After the last one the error is io.EOF.
func (c *Column) Next() (v Value, err error) {
	for c.left == 0 {
		if c.given >= c.values {
			return v, io.EOF
		}
		if err := c.readPage(); err != nil {
			return v, err
		}
	}
	c.left--
	v.First = true
	if c.leaf.rep > 0 {
		level, err := c.reps.next()
		if err != nil {
			return v, err
		}
		v.First = level == 0
	}
	if c.leaf.def > 0 {
		level, err := c.defs.next()
		if err != nil {
			return v, err
		}
		if v.Null = int(level) < c.leaf.def; v.Null {
			return v, nil
		}
	}
	v.Bytes, err = c.next()
	if int64(len(v.Bytes)) > c.limit {
		return v, fmt.Errorf("a value has %d bytes", len(v.Bytes))
	}
	return v, err
}

// A header is what stands before a page.
type header struct {
	kind, size, packed     int64
	values, encoding       int64
	reps, defs             int64 // bytes of levels, of pages of version 2
	plain                  bool  // a page of version 2 that is not packed
	repEncoding, defCoding int64
}

const (
	dataPage       = 0
	indexPage      = 1
	dictionaryPage = 2
	dataPageV2     = 3

	rle = 3 // an encoding of levels
)

func readHeader(t *thrift) (h header, err error) {
	h.repEncoding, h.defCoding = rle, rle
	page := func(to map[int]any) func() { return func() { t.into(to) } }
	t.into(map[int]any{1: &h.kind, 2: &h.size, 3: &h.packed,
		5: page(map[int]any{1: &h.values, 2: &h.encoding, 3: &h.defCoding, 4: &h.repEncoding}),
		7: page(map[int]any{1: &h.values, 2: &h.encoding}),
		8: page(map[int]any{1: &h.values, 4: &h.encoding, 5: &h.defs, 6: &h.reps, 7: &h.plain})})
	return h, t.failed()
}

// maxValues bounds the values of a page: no writer puts that many into one.
const maxValues = 1 << 26

// readPage reads the next page.
func (c *Column) readPage() error {
	h, err := readHeader(c.in)
	if err != nil {
		return err
	}
	if h.packed < 0 || h.packed > c.in.left || h.size < 0 || h.size > c.limit ||
		h.packed > c.limit+c.limit/8+1024 {
		return fmt.Errorf("a page has %d bytes, packed %d; %d are allowed", h.size, h.packed, c.limit)
	}
	if h.values < 0 || h.values > maxValues {
		return fmt.Errorf("a page has %d values", h.values)
	}
	if h.kind == indexPage {
		c.in.discard(uint64(h.packed))
		return c.in.failed()
	}
	c.raw = lists.Resize(c.raw, int(h.packed))
	if _, err := io.ReadFull(c.in.r, c.raw); err != nil {
		return err
	}
	c.in.left -= h.packed
	switch h.kind {
	case dictionaryPage:
		return c.readDictionary(h)
	case dataPage, dataPageV2:
		if h.values > c.values-c.given {
			return fmt.Errorf("a page has %d values, and the column %d", h.values, c.values)
		}
		c.given += h.values
		c.left = h.values
		return c.readData(h)
	}
	return fmt.Errorf("it has a page of type %d", h.kind)
}

func (c *Column) readDictionary(h header) (err error) {
	if h.encoding != plain && h.encoding != plainDictionary {
		return fmt.Errorf("its dictionary has the encoding %d", h.encoding)
	}
	page, err := c.unpack(nil, c.raw, h.size)
	if err != nil {
		return err
	}
	// The dictionary outlives the buffer of the page.
	c.dictionary = texts{bytes: bytes.Clone(page)}
	values := c.leaf.plainValues(c.dictionary.bytes)
	for range h.values {
		v, err := values()
		if err != nil {
			return err
		}
		c.dictionary.ends = append(c.dictionary.ends, uint32(cap(c.dictionary.bytes)-cap(v)+len(v)))
		c.dictionary.sizes = append(c.dictionary.sizes, uint32(len(v)))
	}
	return nil
}

// texts are the values of a dictionary.
type texts struct {
	bytes       []byte
	ends, sizes []uint32
}

func (t *texts) at(i uint32) ([]byte, error) {
	if uint64(i) >= uint64(len(t.ends)) {
		return nil, fmt.Errorf("its dictionary has %d values, not %d", len(t.ends), i)
	}
	return t.bytes[t.ends[i]-t.sizes[i] : t.ends[i]], nil
}

// readData takes a page of values apart.
func (c *Column) readData(h header) (err error) {
	levels := c.raw
	var page []byte
	if h.kind == dataPageV2 {
		if h.reps < 0 || h.defs < 0 || h.reps > h.packed || h.defs > h.packed-h.reps ||
			h.reps+h.defs > h.size {
			return errors.New("the levels of a page are longer than the page")
		}
		page = c.raw[h.reps+h.defs:]
		if !h.plain {
			if page, err = c.unpack(c.page, page, h.size-h.reps-h.defs); err != nil {
				return err
			}
			c.page = page
		}
		c.reps = newHybrid(levels[:h.reps], width(c.leaf.rep))
		c.defs = newHybrid(levels[h.reps:h.reps+h.defs], width(c.leaf.def))
	} else {
		if h.repEncoding != rle && c.leaf.rep > 0 || h.defCoding != rle && c.leaf.def > 0 {
			return errors.New("its levels have an encoding that is no longer in use")
		}
		if page, err = c.unpack(c.page, c.raw, h.size); err != nil {
			return err
		}
		c.page = page
		for _, part := range []struct {
			most int
			to   *hybrid
		}{{c.leaf.rep, &c.reps}, {c.leaf.def, &c.defs}} {
			if part.most == 0 {
				continue
			}
			if levels, page, err = cutSized(page); err != nil {
				return err
			}
			*part.to = newHybrid(levels, width(part.most))
		}
	}
	c.next, err = c.decoder(h, page)
	return err
}

// cutSized takes a length-prefixed part off the front.
func cutSized(b []byte) (part, rest []byte, err error) {
	if len(b) < 4 {
		return nil, nil, io.ErrUnexpectedEOF
	}
	n := uint64(binary.LittleEndian.Uint32(b))
	if b = b[4:]; n > uint64(len(b)) {
		return nil, nil, io.ErrUnexpectedEOF
	}
	return b[:n:n], b[n:], nil
}

// Codecs, by their numbers.
const (
	uncompressed = 0
	codecSnappy  = 1
	codecGzip    = 2
	codecBrotli  = 4
	codecZstd    = 6
	codecLZ4     = 7 // LZ4_RAW
)

// unpack gives the size bytes that src unpacks to, in dst if it is large enough. It makes no more
// than that, whatever src says.
func (c *Column) unpack(dst, src []byte, size int64) ([]byte, error) {
	if c.codec == uncompressed {
		if int64(len(src)) != size {
			return nil, fmt.Errorf("a page has %d bytes, not %d", len(src), size)
		}
		return src, nil
	}
	dst = lists.Resize(dst, int(size))
	if size == 0 {
		return dst, nil
	}
	switch c.codec {
	case codecSnappy:
		if n, err := snappy.DecodedLen(src); err != nil || int64(n) != size {
			return nil, errors.Join(errors.New("a page does not unpack to its size"), err)
		}
		return snappy.Decode(dst, src)
	case codecLZ4:
		n, err := lz4.UncompressBlock(src, dst)
		if err == nil && int64(n) != size {
			err = fmt.Errorf("a page unpacks to %d bytes, not %d", n, size)
		}
		return dst, err
	}
	r, err := c.unpacker(src)
	if err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(r, dst); err != nil {
		return nil, err
	}
	if n, err := io.ReadFull(r, make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
		return nil, errors.Join(fmt.Errorf("a page unpacks to more than %d bytes", size), err)
	}
	return dst, nil
}

// unpacker gives a reader of what src unpacks to.
func (c *Column) unpacker(src []byte) (io.Reader, error) {
	switch c.codec {
	case codecGzip:
		return gzip.NewReader(bytes.NewReader(src))
	case codecBrotli:
		return brotli.NewReader(bytes.NewReader(src), nil)
	case codecZstd:
		if c.zstd == nil {
			// A window may be no larger than a page, but the decoder asks for some memory at least.
			most := uint64(max(c.limit, 1<<20))
			z, err := zstd.NewReader(bytes.NewReader(src), zstd.WithDecoderConcurrency(1),
				zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(most), zstd.WithDecoderMaxWindow(most))
			c.zstd = z
			return z, err
		}
		return c.zstd, c.zstd.Reset(bytes.NewReader(src))
	}
	return nil, fmt.Errorf("its pages are packed with codec %d, which is not known", c.codec)
}
