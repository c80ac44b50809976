package data

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"

	"github.com/deepwell/deepwell/diag"
)

// maxDocument bounds the memory that one document takes, and what a packed file may unpack to in
// one piece. It is more than a hundred thousand pages, and little beside the memory of a host that
// trains.
const maxDocument = 1 << 29

// An item is a document as a reader finds it. What costs time, such as parsing a line, is left to
// those who take items, since they are many.
type item struct {
	text  string
	line  []byte    // a line of JSON that was not parsed yet
	chat  []message // the messages of a chat
	ids   []int32   // tokens, if the file has them already
	where place
	read  int64 // bytes of the file that were read so far
}

// size tells how much work an item is, in bytes.
func (it *item) size() int {
	n := len(it.text) + len(it.line) + 4*len(it.ids)
	for _, m := range it.chat {
		n += len(m.Content)
	}
	return n
}

// A place is where a document stands: a file, and the line or row in it, if it has several.
type place struct {
	file string
	line int64
}

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
	r = &stoppable{ctx, in}
	switch {
	case strings.HasSuffix(f.path, ".gz"):
		r, err = gzip.NewReader(bufio.NewReaderSize(r, 1<<16))
	case strings.HasSuffix(f.path, ".zst"):
		var z *zstd.Decoder
		z, err = zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxDocument))
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
	return diag.New(diag.DataFormat, "%s cannot be unpacked", f.name).At("%s", f.path).Wrap(err).
		Try("fetch the file again: it is damaged or cut off")
}

// readText takes a file as one document.
func readText(ctx context.Context, f *file, emit func(item) error) error {
	_, r, done, err := unpack(ctx, f)
	if err != nil {
		return err
	}
	defer done()
	var b bytes.Buffer
	b.Grow(int(min(f.size, maxDocument)) + bytes.MinRead)
	if _, err := b.ReadFrom(io.LimitReader(r, maxDocument+1)); err != nil {
		return packed(f, err)
	}
	if b.Len() > maxDocument {
		return diag.New(diag.DataFormat, "a text file is one document, and %s is too long for one",
			f.name).At("%s", f.path).
			Try("write it as jsonl, with a document in each line, or split it into several files")
	}
	text := b.Bytes()
	if !utf8.Valid(text) || bytes.IndexByte(text, 0) >= 0 {
		return errNoText
	}
	return emit(item{text: string(text), where: place{file: f.path}, read: f.size})
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
		line, err := readLine(lines)
		if err != nil && !errors.Is(err, io.EOF) {
			return packed(f, err)
		}
		at := place{f.path, number}
		if len(line) > maxDocument {
			return diag.New(diag.DataFormat, "a line is longer than %d bytes", maxDocument).
				At("%s", at).Try("put every document in a line of its own")
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

// readLine reads a line of any length up to a byte more than maxDocument.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) || len(line) > maxDocument {
			return line, err
		}
	}
}

// A message is one turn of a chat.
type message struct {
	Role    string
	Content string
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
	return e.Try("repair or remove the line; if it is the last one, the file is cut off")
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
	if near := diag.Nearest("text", keys); near != "" {
		return e.Try("rename %q to \"text\"", near)
	}
	return e.Try(`rename the one with the text to "text"`)
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
// each has text.
func parseChat(raw json.RawMessage) ([]message, error) {
	var list []map[string]json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, errors.New("they are not a list of objects")
	}
	chat := make([]message, 0, len(list))
	for i, m := range list {
		var out message
		if json.Unmarshal(m["role"], &out.Role) != nil || out.Role == "" {
			return nil, fmt.Errorf("message %d has no role", i+1)
		}
		var parts []map[string]json.RawMessage
		switch content := m["content"]; {
		case json.Unmarshal(content, &out.Content) == nil && string(content) != "null":
		case json.Unmarshal(content, &parts) == nil && len(parts) > 0:
			for _, p := range parts {
				var text string
				if json.Unmarshal(p["text"], &text) != nil {
					return nil, fmt.Errorf("message %d has a part that is not text", i+1)
				}
				out.Content += text
			}
		default:
			return nil, fmt.Errorf("message %d has no content", i+1)
		}
		chat = append(chat, out)
	}
	if len(chat) == 0 {
		return nil, errors.New("there are none")
	}
	return chat, nil
}
