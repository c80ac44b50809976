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
	"maps"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
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
	text  string
	line  []byte    // a line of JSON that was not parsed yet
	chat  []message // the messages of a chat
	ids   []int32   // tokens, if the file has them already
	where place
	read  int64 // bytes of the file that were read so far
	long  *link // set if the text is a chunk of a long one
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
	return len(it.text) + len(it.line) + 4*len(it.ids) + spoken(it.chat)
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

// errNoText says that a file is not text; it is passed over and counted.
var errNoText = errors.New("not text")

// readers is the table of formats.
var readers = map[Format]reader{
	Text: readText, JSONL: readLines, Parquet: readParquet, Megatron: readMegatron,
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
		if text := b.Bytes(); !isText(text) {
			return errNoText
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

// checkText reads to the end, and gives errNoText if that is not text.
func checkText(f *file, r io.Reader) error {
	in := &window{in: r, most: 1 << 16}
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
		if !isText(in.buf[:end]) {
			return errNoText
		}
		if !more {
			return nil
		}
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

// A message is one turn of a chat.
type message struct {
	Role    string
	Content string
}

// spoken counts the bytes of what the messages say.
func spoken(chat []message) int {
	return lists.Sum(chat, func(m message) int { return len(m.Content) })
}

// parse makes text or a chat of a line of JSON.
func (it *item) parse() error {
	if it.line == nil {
		return nil
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(it.line, &keys); err != nil || keys == nil {
		return it.broken(err)
	}
	if raw, ok := keys["messages"]; ok && string(raw) != "null" {
		chat, err := parseChat(raw)
		if err != nil {
			return diag.New(diag.DataFormat, "the messages cannot be read: %v", err).
				At("%s", it.where).
				Try(`write {"messages": [{"role": "user", "content": "…"}, …]}`)
		}
		it.chat = chat
	} else if raw := keys["text"]; json.Unmarshal(raw, &it.text) != nil || string(raw) == "null" {
		return it.noText(slices.Sorted(maps.Keys(keys)))
	}
	it.line = nil
	return nil
}

// broken says what is wrong with a line that is not an object.
func (it *item) broken(err error) error {
	e := diag.New(diag.DataFormat, "the line is not a JSON object").At("%s", it.where)
	if err != nil {
		e = e.Because("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if json.Valid(it.line) {
		return e.Try(`write {"text": "…"} in every line`)
	}
	return e.Try("correct or remove the line; if it is the last one, the file is truncated")
}

// noText names what a document has instead of text.
func (it *item) noText(keys []string) error {
	e := diag.New(diag.DataFormat, `there is neither "text" nor "messages"`).At("%s", it.where)
	switch {
	case slices.Contains(keys, "text"):
		return diag.New(diag.DataFormat, `"text" is not a string`).At("%s", it.where)
	case len(keys) == 0:
		return e.Because("the document is empty")
	}
	e = e.Because("it has %s", strings.Join(shown(keys), ", "))
	return e.Meant("text", keys, `rename %q to "text"`, `rename the one with the text to "text"`)
}

// shown quotes names for a message, and leaves out what would fill the screen.
func shown(names []string) []string {
	const most, longest = 12, 40
	var out []string
	for i, name := range names {
		if i == most {
			return append(out, fmt.Sprintf("and %d more", len(names)-most))
		}
		if len(name) > longest {
			name = name[:longest] + "…"
		}
		out = append(out, fmt.Sprintf("%q", name))
	}
	return out
}

// parseChat reads a list of messages. The content of one is a string, or a list of parts of which
// each has text. Parts are read one by one: a short line can have millions of them.
func parseChat(raw json.RawMessage) ([]message, error) {
	var chat []message
	err := eachObject(raw, func(m map[string]json.RawMessage) error {
		var out message
		if json.Unmarshal(m["role"], &out.Role) != nil || out.Role == "" {
			return fmt.Errorf("message %d has no role", len(chat)+1)
		}
		content := m["content"]
		if json.Unmarshal(content, &out.Content) != nil || string(content) == "null" {
			var b strings.Builder
			parts := 0
			err := eachObject(content, func(p map[string]json.RawMessage) error {
				var text string
				if json.Unmarshal(p["text"], &text) != nil {
					return fmt.Errorf("message %d has a part that is not text", len(chat)+1)
				}
				parts++
				b.WriteString(text)
				return nil
			})
			if errors.Is(err, errNoList) || err == nil && parts == 0 {
				return fmt.Errorf("message %d has no content", len(chat)+1)
			}
			if err != nil {
				return err
			}
			out.Content = b.String()
		}
		chat = append(chat, out)
		return nil
	})
	if errors.Is(err, errNoList) {
		return nil, errors.New("they are not a list of objects")
	}
	if err == nil && len(chat) == 0 {
		err = errors.New("the list is empty")
	}
	return chat, err
}

// errNoList says that JSON is not a list of objects.
var errNoList = errors.New("not a list of objects")

// eachObject calls take for each object of a list, of which it keeps one at a time.
func eachObject(raw json.RawMessage, take func(map[string]json.RawMessage) error) error {
	list := json.NewDecoder(bytes.NewReader(raw))
	if start, err := list.Token(); err != nil || start != json.Delim('[') {
		return errNoList
	}
	for list.More() {
		var object map[string]json.RawMessage
		if list.Decode(&object) != nil {
			return errNoList
		}
		if err := take(object); err != nil {
			return err
		}
	}
	return nil
}
