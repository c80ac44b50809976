package data

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A cache file holds the tokens of a source, all numbers little-endian:
//
//	head    8 bytes   "DWTOKENS"
//	tokens            2 or 4 bytes each
//	starts            8 bytes for each document: the number of its first token
//	hashes            8 bytes for each document: of its contents, see item.hash
//	mask              a bit for each token, lowest first, set where the token is learned;
//	                  left out if all are
//	foot    footSize  counts, key, and a checksum of all that stands before
//
// The counts stand last because they are known last: the file is written in one pass.
const (
	cacheMagic   = "DWTOKENS"
	cacheVersion = 2
	footSize     = 96
	cacheSuffix  = ".tokens"
)

// castagnoli is the polynomial that processors have an instruction for.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A cacheKey names what a cache was made from.
type cacheKey [32]byte

// A foot is the last part of a cache file.
type foot struct {
	width     int // bytes of a token: 2 or 4
	masked    bool
	tokens    int64
	documents int64
	text      int64  // bytes of text that the tokens spell
	skipped   int64  // files that were passed over
	kinds     uint64 // of rows, see chunk; 0 in files of before there were several
	key       cacheKey
	sum       uint32 // CRC-32C of head, tokens, starts and mask
}

// encode writes the foot; the version comes first and the magic last.
func (f *foot) encode() []byte {
	b := make([]byte, 0, footSize)
	b = binary.LittleEndian.AppendUint32(b, cacheVersion)
	flags := uint32(f.width)
	if f.masked {
		flags |= 1 << 8
	}
	b = binary.LittleEndian.AppendUint32(b, flags)
	for _, n := range []int64{f.tokens, f.documents, f.text, f.skipped} {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	b = append(b, f.key[:]...)
	b = binary.LittleEndian.AppendUint64(b, f.kinds)
	b = binary.LittleEndian.AppendUint32(b, f.sum)
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, cacheMagic...)
}

// errDamaged says why a cache file cannot be used; the cache is then made anew.
type errDamaged string

func (e errDamaged) Error() string { return string(e) }

// decodeFoot reads a foot and refuses counts that no file can have.
func decodeFoot(b []byte) (*foot, error) {
	if len(b) != footSize || string(b[footSize-8:]) != cacheMagic {
		return nil, errDamaged("the file is truncated")
	}
	if crc32.Checksum(b[:footSize-12], castagnoli) != binary.LittleEndian.Uint32(b[footSize-12:]) {
		return nil, errDamaged("its last part is damaged")
	}
	if v := binary.LittleEndian.Uint32(b); v != cacheVersion {
		return nil, errDamaged("it has a version that this binary does not know")
	}
	flags := binary.LittleEndian.Uint32(b[4:])
	f := &foot{width: int(flags & 0xff), masked: flags>>8 == 1}
	for i, n := range []*int64{&f.tokens, &f.documents, &f.text, &f.skipped} {
		v := binary.LittleEndian.Uint64(b[8+8*i:])
		if v > math.MaxInt64/16 {
			return nil, errDamaged("its counts cannot be")
		}
		*n = int64(v)
	}
	copy(f.key[:], b[40:])
	f.kinds = binary.LittleEndian.Uint64(b[72:])
	f.sum = binary.LittleEndian.Uint32(b[footSize-16:])
	if f.width != 2 && f.width != 4 || flags>>9 != 0 || f.documents > f.tokens ||
		f.tokens > 0 && f.documents == 0 {
		return nil, errDamaged("its counts cannot be")
	}
	return f, nil
}

// sizes gives the bytes of the tokens, of the starts, which equal the hashes' bytes, and of the
// mask.
func (f *foot) sizes() (tokens, starts, mask int64) {
	if f.masked {
		mask = (f.tokens + 7) / 8
	}
	return f.tokens * int64(f.width), f.documents * 8, mask
}

// A cache is the tokens of a source, mapped from a file. It does not change.
type cache struct {
	foot
	ids, starts, hashes, mask []byte
	release                   func() error
}

// openCache maps a cache file and checks all of it. The error is an errDamaged if the file is there
// but not whole, and fs.ErrNotExist if it is not there.
func openCache(path string, key cacheKey) (*cache, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errDamaged("it is not a file")
	}
	if info.Size() > math.MaxInt {
		return nil, errDamaged("it is too large for this machine")
	}
	raw, release, err := contents(f, int(info.Size()))
	if err != nil {
		return nil, err
	}
	c, err := parseCache(raw)
	if err == nil && c.key != key {
		err = errDamaged("it was made from other data")
	}
	if err != nil {
		return nil, errors.Join(err, release())
	}
	c.release = release
	return c, nil
}

// contents maps a file, or reads it where that cannot be done.
func contents(f *os.File, size int) ([]byte, func() error, error) {
	if size > 0 {
		if raw, err := plainfile.Map(f, size); err == nil {
			return raw, func() error { return unix.Munmap(raw) }, nil
		}
	}
	raw := make([]byte, size)
	_, err := io.ReadFull(f, raw)
	return raw, func() error { return nil }, err
}

// parseCache checks a mapped file's foot and slices it into its parts, without a copy.
func parseCache(raw []byte) (*cache, error) {
	if len(raw) < len(cacheMagic)+footSize || string(raw[:len(cacheMagic)]) != cacheMagic {
		return nil, errDamaged("it is not a token cache")
	}
	end := len(raw) - footSize
	f, err := decodeFoot(raw[end:])
	if err != nil {
		return nil, err
	}
	tokens, starts, mask := f.sizes()
	if rest := int64(end - len(cacheMagic)); tokens+2*starts+mask != rest {
		return nil, errDamaged("its size is not what its counts say")
	}
	if crc32.Checksum(raw[:end], castagnoli) != f.sum {
		return nil, errDamaged("its checksum is another one")
	}
	body := raw[len(cacheMagic):end]
	c := &cache{foot: *f, ids: body[:tokens], starts: body[tokens : tokens+starts],
		hashes: body[tokens+starts : tokens+2*starts], mask: body[tokens+2*starts:]}
	last := int64(-1)
	for d := range c.documents {
		at := int64(binary.LittleEndian.Uint64(c.starts[8*d:]))
		if at <= last || at >= c.tokens || d == 0 && at != 0 {
			return nil, errDamaged("its documents are out of order")
		}
		last = at
	}
	return c, nil
}

// token returns the i-th token, from 2 or 4 bytes.
func (c *cache) token(i int64) int32 {
	if c.width == 2 {
		return int32(binary.LittleEndian.Uint16(c.ids[2*i:]))
	}
	return int32(binary.LittleEndian.Uint32(c.ids[4*i:]))
}

// start returns the index of a document's first token; one past the last document it is the end.
func (c *cache) start(document int64) int64 {
	if document >= c.documents {
		return c.tokens
	}
	return int64(binary.LittleEndian.Uint64(c.starts[8*document:]))
}

// hash gives the hash of a document's contents.
func (c *cache) hash(document int64) uint64 {
	return binary.LittleEndian.Uint64(c.hashes[8*document:])
}

// documentAt gives the document that a token belongs to.
func (c *cache) documentAt(token int64) int64 {
	return int64(sort.Search(int(c.documents), func(d int) bool {
		return c.start(int64(d)) > token
	})) - 1
}

// learned reports whether a token is one to learn.
func (c *cache) learned(token int64) bool {
	return !c.masked || c.mask[token/8]>>(token%8)&1 == 1
}

// learnedIn counts the tokens to learn from token from up to token to.
func (c *cache) learnedIn(from, to int64) int64 {
	if !c.masked {
		return to - from
	}
	n := int64(0)
	for ; from < to && from%64 != 0; from++ {
		if c.learned(from) {
			n++
		}
	}
	for ; from+64 <= to; from += 64 {
		n += int64(bits.OnesCount64(binary.LittleEndian.Uint64(c.mask[from/8:])))
	}
	for ; from < to; from++ {
		if c.learned(from) {
			n++
		}
	}
	return n
}

// writeCache makes a cache file: fill adds the documents. The file appears whole or not at all.
func writeCache(path string, width int, key cacheKey, fill func(*cacheWriter) error) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return cacheError(dir, err)
	}
	var inner error // an error of fill has its own words
	err := atomicfile.WriteFunc(path, 0o644, func(out io.Writer) error {
		w, err := newCacheWriter(out, dir, width, key)
		if err != nil {
			return err
		}
		defer w.close()
		if inner = fill(w); inner != nil {
			return inner
		}
		return w.finish()
	})
	if inner != nil {
		return inner
	}
	if err != nil {
		return cacheError(dir, err)
	}
	return nil
}

// cacheError is the error of a cache that cannot be written: no permission, or no room.
func cacheError(dir string, err error) error {
	e := diag.New(diag.DataCache, "the token cache cannot be written").At("%s", dir).Wrap(err)
	if errors.Is(err, fs.ErrPermission) {
		return e.Try("set DEEPWELL_CACHE to a folder that you may write")
	}
	return e.Try("make room, or set DEEPWELL_CACHE to a folder on a larger disk")
}

// A cacheWriter writes tokens as they come; starts, hashes and mask wait in files of their own, so
// that memory does not grow with the data.
type cacheWriter struct {
	foot
	out    *bufio.Writer
	crc    hash.Hash32
	starts *spool
	hashes *spool
	bits   *spool
	tail   byte // the bits that are not in the spool yet
	within bool // the document that was begun goes on
	buf    []byte
}

// newCacheWriter begins a cache. Tokens go to out at once; starts, hashes and mask are spooled to
// temporary files, since they come after all tokens.
func newCacheWriter(out io.Writer, dir string, width int, key cacheKey) (*cacheWriter, error) {
	w := &cacheWriter{crc: crc32.New(castagnoli)}
	w.width, w.key = width, key
	w.out = bufio.NewWriterSize(io.MultiWriter(out, w.crc), 1<<18)
	for _, s := range []**spool{&w.starts, &w.hashes, &w.bits} {
		var err error
		if *s, err = newSpool(dir); err != nil {
			w.close()
			return nil, err
		}
	}
	_, err := w.out.WriteString(cacheMagic)
	return w, err
}

// close removes the temporary files.
func (w *cacheWriter) close() {
	for _, s := range []*spool{w.starts, w.hashes, w.bits} {
		if s != nil {
			s.close()
		}
	}
}

// add writes a document, or the next tokens of one that is not ended yet; learned says which of
// them to learn, nil all.
func (w *cacheWriter) add(tokens []int32, learned []bool) error {
	if len(tokens) == 0 {
		return nil
	}
	if !w.within {
		w.within = true
		w.documents++
		w.buf = binary.LittleEndian.AppendUint64(w.buf[:0], uint64(w.tokens))
		if _, err := w.starts.Write(w.buf); err != nil {
			return err
		}
	}
	w.buf = w.buf[:0]
	for _, id := range tokens {
		if w.width == 2 {
			w.buf = binary.LittleEndian.AppendUint16(w.buf, uint16(id))
		} else {
			w.buf = binary.LittleEndian.AppendUint32(w.buf, uint32(id))
		}
	}
	if _, err := w.out.Write(w.buf); err != nil {
		return err
	}
	for i := range tokens {
		if learned == nil || learned[i] {
			w.tail |= 1 << (w.tokens % 8)
		} else {
			w.masked = true
		}
		if w.tokens++; w.tokens%8 == 0 {
			if err := w.bits.WriteByte(w.tail); err != nil {
				return err
			}
			w.tail = 0
		}
	}
	return nil
}

// end ends the document whose tokens were added, if there were any.
func (w *cacheWriter) end(hash uint64) error {
	if !w.within {
		return nil
	}
	w.within = false
	w.buf = binary.LittleEndian.AppendUint64(w.buf[:0], hash)
	_, err := w.hashes.Write(w.buf)
	return err
}

// finish appends the spooled parts and the foot.
func (w *cacheWriter) finish() error {
	for _, s := range []*spool{w.starts, w.hashes} {
		if err := s.copyTo(w.out); err != nil {
			return err
		}
	}
	if w.masked {
		if err := w.bits.copyTo(w.out); err != nil {
			return err
		}
		if w.tokens%8 != 0 {
			if err := w.out.WriteByte(w.tail); err != nil {
				return err
			}
		}
	}
	if err := w.out.Flush(); err != nil {
		return err
	}
	w.sum = w.crc.Sum32()
	if _, err := w.out.Write(w.encode()); err != nil {
		return err
	}
	return w.out.Flush()
}

// A spool is a file without a name that is written and then read once.
type spool struct {
	*bufio.Writer
	file *os.File
}

// newSpool makes a temporary file that has no name.
func newSpool(dir string) (*spool, error) {
	f, err := os.CreateTemp(dir, ".spool.*")
	if err != nil {
		return nil, err
	}
	_ = os.Remove(f.Name()) // a system that keeps open files removes it in close
	return &spool{bufio.NewWriter(f), f}, nil
}

// copyTo appends what was spooled.
func (s *spool) copyTo(w io.Writer) error {
	if err := s.Flush(); err != nil {
		return err
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err := io.Copy(w, s.file)
	return err
}

func (s *spool) close() {
	_ = s.file.Close()
	_ = os.Remove(s.file.Name())
}

// sumsSuffix ends the names of files that remember the sums of a source's files.
const sumsSuffix = ".sums"

// sumsHead begins such a file; the checksum of the lines that follow stands behind it. A line is a
// stamp and a sum.
const sumsHead = "deepwell sums 1 "

// readSums gives the sums that are known, by stamp. A file that is missing or damaged knows none.
func readSums(path string) map[string][sha256.Size]byte {
	raw, err := os.ReadFile(path)
	head, lines, _ := bytes.Cut(raw, []byte("\n"))
	if err != nil || string(head) != sumsTitle(lines) {
		return nil
	}
	known := make(map[string][sha256.Size]byte)
	for line := range bytes.Lines(lines) {
		stamp, text, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		var sum [sha256.Size]byte
		if len(text) != hex.EncodedLen(len(sum)) {
			return nil
		}
		if _, err := hex.Decode(sum[:], text); err != nil {
			return nil
		}
		known[string(stamp)] = sum
	}
	return known
}

// sumsTitle is the first line of a file of remembered hashes; it has the checksum of the other
// lines.
func sumsTitle(lines []byte) string {
	return fmt.Sprintf("%s%08x", sumsHead, crc32.Checksum(lines, castagnoli))
}

// writeSums remembers the sums of files. If it cannot, they are read again the next time.
func writeSums(path string, files []*file) {
	var lines []byte
	for _, f := range files {
		if f.stamp != "" {
			lines = fmt.Appendf(lines, "%s %x\n", f.stamp, f.sum)
		}
	}
	if len(lines) > 0 && os.MkdirAll(filepath.Dir(path), 0o777) == nil {
		_ = atomicfile.Write(path, append([]byte(sumsTitle(lines)+"\n"), lines...), 0o644)
	}
}
