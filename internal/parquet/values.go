package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/bits"
)

// Encodings of values, by their numbers.
const (
	plain             = 0
	plainDictionary   = 2
	deltaBinaryPacked = 5
	deltaLength       = 6
	deltaByteArray    = 7
	rleDictionary     = 8
)

// decoder gives what reads the values of a page.
func (c *Column) decoder(h header, page []byte) (func() ([]byte, error), error) {
	switch h.encoding {
	case plain:
		return c.leaf.plainValues(page), nil
	case plainDictionary, rleDictionary:
		if len(page) == 0 {
			return func() ([]byte, error) { return nil, io.ErrUnexpectedEOF }, nil // all are null
		}
		if page[0] > 32 {
			return nil, fmt.Errorf("the places in a dictionary have %d bits", page[0])
		}
		places := newHybrid(page[1:], uint(page[0]))
		return func() ([]byte, error) {
			i, err := places.next()
			if err != nil {
				return nil, err
			}
			return c.dictionary.at(i)
		}, nil
	case deltaLength:
		sizes, rest, err := deltas(page, h.values)
		if err != nil {
			return nil, err
		}
		return func() (v []byte, err error) {
			v, rest, err = take(&sizes, rest)
			return v, err
		}, nil
	case deltaByteArray:
		return c.shared(h, page)
	}
	return nil, fmt.Errorf("its values have the encoding %d, in which text is not written", h.encoding)
}

// plainValues reads values as they are.
func (l *Leaf) plainValues(page []byte) func() ([]byte, error) {
	return func() (v []byte, err error) {
		if l.kind == fixedArray {
			if int64(len(page)) < l.size {
				return nil, io.ErrUnexpectedEOF
			}
			v, page = page[:l.size:l.size], page[l.size:]
			return v, nil
		}
		if len(page) < 4 {
			return nil, io.ErrUnexpectedEOF
		}
		n := uint64(binary.LittleEndian.Uint32(page))
		if page = page[4:]; n > uint64(len(page)) {
			return nil, io.ErrUnexpectedEOF
		}
		v, page = page[:n], page[n:]
		return v, nil
	}
}

// take takes the next value, whose size is the next of sizes.
func take(sizes *[]int32, page []byte) (v, rest []byte, err error) {
	if len(*sizes) == 0 {
		return nil, nil, io.ErrUnexpectedEOF
	}
	n := (*sizes)[0]
	*sizes = (*sizes)[1:]
	if n < 0 || int(n) > len(page) {
		return nil, nil, io.ErrUnexpectedEOF
	}
	return page[:n], page[n:], nil
}

// shared reads values each of which begins as the one before it.
func (c *Column) shared(h header, page []byte) (func() ([]byte, error), error) {
	heads, rest, err := deltas(page, h.values)
	if err != nil {
		return nil, err
	}
	sizes, rest, err := deltas(rest, h.values)
	if err != nil {
		return nil, err
	}
	var last []byte
	return func() (v []byte, err error) {
		if v, rest, err = take(&sizes, rest); err != nil {
			return nil, err
		}
		if len(heads) == 0 || heads[0] < 0 || int(heads[0]) > len(last) ||
			int64(heads[0])+int64(len(v)) > c.limit {
			return nil, errors.New("a value begins with more than the one before it has")
		}
		last = append(last[:heads[0]], v...)
		heads = heads[1:]
		return last, nil
	}, nil
}

// deltas reads numbers that are written as differences, at most "most" of them, and gives what
// stands behind them.
func deltas(b []byte, most int64) (list []int32, rest []byte, err error) {
	bad := func() ([]int32, []byte, error) {
		return nil, nil, errors.New("the lengths of its values are damaged")
	}
	uvarint := func() uint64 {
		x, n := binary.Uvarint(b)
		if n <= 0 {
			err = io.ErrUnexpectedEOF
			return 0
		}
		b = b[n:]
		return x
	}
	varint := func() int64 {
		x := uvarint()
		return int64(x>>1) ^ -int64(x&1)
	}
	block, minis, total, value := uvarint(), uvarint(), uvarint(), varint()
	if err != nil || block == 0 || block > 1<<20 || block%128 != 0 || minis == 0 || block%minis != 0 ||
		block/minis%32 != 0 || total > uint64(most) {
		return bad()
	}
	// Each number but the first takes no byte if all differences are equal: most bounds them.
	list = make([]int32, 0, total)
	if total > 0 {
		list = append(list, int32(value))
	}
	for uint64(len(list)) < total {
		least := varint()
		if err != nil || uint64(len(b)) < minis {
			return bad()
		}
		widths := b[:minis]
		b = b[minis:]
		for _, w := range widths {
			if uint64(len(list)) == total {
				break // what is not needed is not there
			}
			size := block / minis * uint64(w) / 8
			if w > 64 || size > uint64(len(b)) {
				return bad()
			}
			bitsOf := bitReader{b: b[:size], width: uint(w)}
			for range min(block/minis, total-uint64(len(list))) {
				value += least + int64(bitsOf.next())
				list = append(list, int32(value))
			}
			b = b[size:]
		}
	}
	return list, b, nil
}

// A bitReader reads numbers of equal widths, lowest bits first. It must not be asked for more than
// there are.
type bitReader struct {
	b     []byte
	at    uint // bits
	width uint
}

func (r *bitReader) next() uint64 {
	x := uint64(0)
	for got := uint(0); got < r.width; {
		i, off := r.at/8, r.at%8
		n := min(8-off, r.width-got)
		x |= uint64(r.b[i]>>off) & (1<<n - 1) << got
		got += n
		r.at += n
	}
	return x
}

// width gives the bits that a level needs.
func width(most int) uint { return uint(bits.Len(uint(most))) }

// A hybrid reads numbers of equal widths that are written as runs of one number, or packed.
type hybrid struct {
	b      []byte
	width  uint
	left   uint64 // of the run at hand
	value  uint32 // of a run of one number
	packed bool
	bits   bitReader
}

func newHybrid(b []byte, width uint) hybrid { return hybrid{b: b, width: width} }

func (h *hybrid) next() (uint32, error) {
	for h.left == 0 {
		if err := h.run(); err != nil {
			return 0, err
		}
	}
	h.left--
	if h.packed {
		return uint32(h.bits.next()), nil
	}
	return h.value, nil
}

// run begins the next run.
func (h *hybrid) run() error {
	x, n := binary.Uvarint(h.b)
	if n <= 0 {
		return io.ErrUnexpectedEOF
	}
	h.b = h.b[n:]
	h.left, h.packed = x>>1, x&1 == 1
	if h.packed {
		size := h.left * uint64(h.width)
		if h.left > 1<<40 {
			return io.ErrUnexpectedEOF
		}
		// The last group may end where its values end.
		size = min(size, uint64(len(h.b)))
		h.bits = bitReader{b: h.b[:size], width: h.width}
		h.left *= 8
		if h.width > 0 {
			h.left = min(h.left, 8*size/uint64(h.width))
		}
		h.b = h.b[size:]
		return nil
	}
	bytes := int(h.width+7) / 8
	if len(h.b) < bytes {
		return io.ErrUnexpectedEOF
	}
	h.value = 0
	for i := range bytes {
		h.value |= uint32(h.b[i]) << (8 * i)
	}
	h.b = h.b[bytes:]
	return nil
}
