package data

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/plainfile"
	"github.com/deepwell/deepwell/tokenizer"
)

// DefaultDocument is how many bytes a document may have by default: some five thousand pages. All
// of it is in memory at once, several times over; see [Options.Document].
const DefaultDocument = 16 << 20

// maxWindow bounds the memory of unpacking .zst; it is what zstd itself takes without --long=28.
const maxWindow = 128 << 20

// tooLong refuses a document.
func (f *file) tooLong(at place, size int) error {
	e := diag.New(diag.DataFormat, "a document has %d bytes or more; the limit is %d MiB", size,
		f.limit>>20).At("%s", at)
	if size > maxDocument/2 {
		return e.Try("split it into several documents, each in a line or row of its own")
	}
	return e.Try("split it into several documents, or raise the limit: data.document_mib = %d",
		min(max(2*f.limit, size+size/2), maxDocument)>>20)
}

// An item is a document as a reader finds it. What costs time, such as parsing a line, is left to
// those who take items, since they are many.
type item struct {
	text   string
	prompt int             // bytes at the start of the text that are not learned
	line   []byte          // a line of JSON that was not parsed yet
	row    chat.Row        // a row of a table that was not parsed yet
	chat   []chat.Message  // the messages of a chat
	tools  json.RawMessage // what its assistant may call
	kind   chat.Kind       // of the row, once it is parsed
	ids    []int32         // tokens, if the file has them already
	where  place
	read   int64 // bytes of the file that were read so far
	long   *link // set if the text is a chunk of a long one
}

// A link is the position of a chunk in a long text. Chunks are encoded one after the other, as each
// needs to know how the one before it ended.
type link struct {
	*longText
	turn <-chan struct{} // closed when the chunk before is done; nil for the first
	done chan struct{}
	more bool // another chunk follows
}

// A longText is the state that goes from one chunk of a document to the next.
type longText struct {
	part tokenizer.Part
	hash hash.Hash // of the text so far
	any  bool      // whether it has tokens yet
	last int32     // the last of them
}

// size tells how much work an item is, in bytes.
func (it *item) size() int {
	return len(it.text) + len(it.line) + 4*len(it.ids) + chat.Spoken(it.chat) + it.row.Size()
}

// hash names the contents of a document that was parsed: the words, whatever file, format or
// tokenizer they went through. The split of held-out documents rests on it, so that it must never
// change.
func (it *item) hash() uint64 {
	h := sha256.New()
	switch {
	case it.long != nil: // as below, over all chunks
		return binary.LittleEndian.Uint64(it.long.hash.Sum(nil))
	case it.chat != nil:
		for _, m := range it.chat {
			fmt.Fprintf(h, "%d %d ", len(m.Role), len(m.Content))
			_, _ = io.WriteString(h, m.Role+m.Content)
			if m.Calls {
				_, _ = h.Write(m.Raw)
			}
		}
	case it.ids != nil:
		_ = binary.Write(h, binary.LittleEndian, it.ids) // a hash takes all
	default:
		_, _ = io.WriteString(h, it.text)
	}
	return binary.LittleEndian.Uint64(h.Sum(nil))
}

// A place is where a document stands: a file, and the line or row in it, if it has several.
type place struct {
	file string
	line int64
}

// String is file:line, or the file alone.
func (p place) String() string {
	if p.line == 0 {
		return p.file
	}
	return fmt.Sprintf("%s:%d", p.file, p.line)
}

// A reader finds the documents of a file.
type reader func(ctx context.Context, f *file, emit func(item) error) error

// errNoText says why a file is not text; it is passed over and counted.
type errNoText struct{ why string }

func (e errNoText) Error() string { return e.why }

// noText finds what is not text in b, which stands behind some bytes and line breaks; "" if all is.
func noText(b []byte, offset, lines int64) string {
	if isText(b) {
		return ""
	}
	for i := 0; i < len(b); {
		r, n := utf8.DecodeRune(b[i:])
		at := fmt.Sprintf("in line %d, at offset %d", lines+1, offset+int64(i))
		switch {
		case r == 0:
			return "there is a zero byte " + at
		case r == utf8.RuneError && n == 1:
			return fmt.Sprintf("byte 0x%02X %s is not UTF-8", b[i], at)
		case r == '\n':
			lines++
		}
		i += n
	}
	return "it is not UTF-8"
}

// readers is the table of formats.
var readers = map[Format]reader{
	Text: readText, JSONL: readLines, CSV: readTable, TSV: readTable, Parquet: readParquet,
	Megatron: readMegatron,
}

// A counted file tells how much of it was read.
type counted struct {
	*os.File
	n int64
}

// Read counts the bytes taken from the file, before they are decompressed: progress is in file
// bytes.
func (c *counted) Read(b []byte) (int, error) {
	n, err := c.File.Read(b)
	c.n += int64(n)
	return n, err
}

// unpack opens a file and takes it out of the form that its ending tells.
func unpack(ctx context.Context, f *file) (in *counted, r io.Reader, done func(), err error) {
	opened, err := os.Open(f.path)
	if err != nil {
		return nil, nil, nil, readError(f.path, err)
	}
	in = &counted{File: opened}
	done = func() { opened.Close() }
	r = plainfile.Until(ctx, in)
	switch {
	case strings.HasSuffix(f.path, ".gz"):
		r, err = gzip.NewReader(bufio.NewReaderSize(r, 1<<16))
	case strings.HasSuffix(f.path, ".zst"):
		var z *zstd.Decoder
		z, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err == nil {
			r, done = z, func() { z.Close(); opened.Close() }
		}
	}
	if err != nil {
		done()
		return nil, nil, nil, packed(f, err)
	}
	return in, r, done, nil
}

// packed explains an error that came up while a file was unpacked.
func packed(f *file, err error) error {
	if unpackedName(f.path) == f.path {
		return readError(f.path, err)
	}
	e := diag.New(diag.DataFormat, "%s cannot be unpacked", f.name).At("%s", f.path).Wrap(err)
	if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		return e.Try("pack it again without --long: unpacking takes more than %d MiB", maxWindow>>20)
	}
	return e.Try("fetch the file again: it is damaged or truncated")
}

// readText takes a file as one document. One that is longer than the limit comes in chunks.
func readText(ctx context.Context, f *file, emit func(item) error) error {
	_, r, done, err := unpack(ctx, f)
	if err != nil {
		return err
	}
	defer done()
	var b bytes.Buffer
	b.Grow(int(min(f.size, int64(f.limit))) + bytes.MinRead)
	if _, err := b.ReadFrom(io.LimitReader(r, int64(f.limit)+1)); err != nil {
		return packed(f, err)
	}
	if b.Len() <= f.limit {
		if why := noText(b.Bytes(), 0, 0); why != "" {
			return errNoText{why}
		}
		return emit(item{text: b.String(), where: place{file: f.path}, read: f.size})
	}
	// Whether it is text must be known before its first chunk is passed on.
	if err := checkText(f, io.MultiReader(&b, r)); err != nil {
		return err
	}
	done()
	return readChunks(ctx, f, emit)
}

// isText reports whether bytes are UTF-8 without zeros.
func isText(b []byte) bool { return utf8.Valid(b) && bytes.IndexByte(b, 0) < 0 }

// checkText reads to the end, and gives an errNoText if that is not text.
func checkText(f *file, r io.Reader) error {
	in := &window{in: r, most: 1 << 16}
	offset, lines := int64(0), int64(0)
	for {
		more, err := in.fill()
		if err != nil {
			return packed(f, err)
		}
		end := len(in.buf)
		for more && end > len(in.buf)-utf8.UTFMax && !utf8.RuneStart(in.buf[end-1]) {
			end--
		}
		if more {
			end-- // where the last character begins, which may be incomplete
		}
		if why := noText(in.buf[:end], offset, lines); why != "" {
			return errNoText{why}
		}
		if !more {
			return nil
		}
		offset += int64(end)
		lines += int64(bytes.Count(in.buf[:end], []byte("\n")))
		in.take(end)
	}
}

// A window holds the next bytes of a stream.
type window struct {
	in   io.Reader
	buf  []byte
	most int // that are taken at once; it holds one more
}

// fill reads on, and reports whether there is more than is taken at once.
func (p *window) fill() (more bool, err error) {
	p.buf = slices.Grow(p.buf, p.most+1-len(p.buf))
	for len(p.buf) <= p.most {
		n, err := p.in.Read(p.buf[len(p.buf) : p.most+1])
		p.buf = p.buf[:len(p.buf)+n]
		if errors.Is(err, io.EOF) { // not the EOF of a truncated file
			return len(p.buf) > p.most, nil
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

// take removes n bytes from the front of the window.
func (p *window) take(n int) { p.buf = p.buf[:copy(p.buf, p.buf[n:])] }

// readChunks passes a long text on in chunks.
func readChunks(ctx context.Context, f *file, emit func(item) error) error {
	in, r, done, err := unpack(ctx, f)
	if err != nil {
		return err
	}
	defer done()
	text := &longText{hash: sha256.New()}
	p := &window{in: r, most: tokenizer.PieceBytes}
	var turn <-chan struct{}
	for more := true; more; {
		if more, err = p.fill(); err != nil {
			return packed(f, err)
		}
		part := string(p.buf)
		if more {
			part = part[:f.split(part)]
		}
		p.take(len(part))
		l := &link{longText: text, turn: turn, done: make(chan struct{}), more: more}
		turn = l.done
		err := emit(item{text: part, where: place{file: f.path}, read: in.n, long: l})
		if err != nil {
			return err
		}
	}
	return nil
}

// splitBlank splits a text behind a word, where there is no tokenizer yet.
func splitBlank(text string) int {
	n := tokenizer.PieceBytes
	for at := n; at > n/2; at-- {
		if text[at] == ' ' && text[at-1] > ' ' {
			return at
		}
	}
	for n > tokenizer.PieceBytes-utf8.UTFMax && !utf8.RuneStart(text[n]) {
		n--
	}
	return n
}

// readLines takes every line of a file as an item.
func readLines(ctx context.Context, f *file, emit func(item) error) error {
	in, r, done, err := unpack(ctx, f)
	if err != nil {
		return err
	}
	defer done()
	lines := bufio.NewReaderSize(r, 1<<18)
	for number := int64(1); ; number++ {
		line, size, err := readLine(lines, f.limit)
		if err != nil && !errors.Is(err, io.EOF) {
			return packed(f, err)
		}
		at := place{f.path, number}
		if size > f.limit {
			return f.tooLong(at, size)
		}
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff")) // some editors mark UTF-8 so
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			if err := emit(item{line: line, where: at, read: in.n}); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// readLine reads a line. One that is longer than the limit is counted, and not kept.
func readLine(r *bufio.Reader, limit int) (line []byte, size int, err error) {
	const enough = 1 << 30 // to count
	for {
		part, err := r.ReadSlice('\n')
		if size += len(part); size <= limit+len("\r\n") {
			line = append(line, part...)
		} else {
			line = nil
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			if size <= enough {
				continue
			}
			err = nil // the line is too long, and the file is not damaged
		}
		return line, size - len(part) + len(bytes.TrimRight(part, "\r\n")), err
	}
}

// parse makes text or a chat of a line of JSON or a row of a table.
func (it *item) parse(columns chat.Columns) (err error) {
	if it.line != nil {
		if it.row, err = chat.ParseRow(it.line); err != nil {
			return diag.From(err).At("%s", it.where)
		}
	}
	if it.row.Names() == nil {
		return nil
	}
	d, err := columns.Read(it.row)
	if err != nil {
		return diag.From(err).At("%s", it.where)
	}
	it.text, it.prompt, it.chat, it.tools = d.Text, d.Prompt, d.Chat, d.Tools
	it.kind, it.line, it.row = d.Kind, nil, chat.Row{}
	return nil
}
