package data

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"github.com/deepwell/deepwell/chat"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/tokenizer"
)

func pack(t testing.TB, text string) (gz, zst string) {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write([]byte(text))
	w.Close()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return b.String(), string(z.EncodeAll([]byte(text), nil))
}

// documents gives the documents of a source as text, with brackets around what is not learned.
func documents(t testing.TB, s Source, template string) (docs []string, err error) {
	t.Helper()
	tok := newTokenizer(t, special...)
	l, err := tryOpen(t, Options{Sources: []Source{s}, Tokenizer: tok, Seq: 1, End: "<|endoftext|>", Template: template})
	if err != nil {
		return nil, err
	}
	c := l.sources[0].cache
	for d := range c.documents {
		var b strings.Builder
		var part []int32
		for i := c.start(d); i < c.start(d+1); i++ {
			part = append(part, c.token(i))
			if i+1 == c.start(d+1) || c.learned(i) != c.learned(i+1) {
				text := tok.Text(part, tokenizer.Options{KeepSpecial: true})
				if !c.learned(i) {
					text = "[" + text + "]"
				}
				b.WriteString(text)
				part = nil
			}
		}
		docs = append(docs, b.String())
	}
	return docs, nil
}

func TestLinesInEveryPacking(t *testing.T) {
	text := "\ufeff{\"text\":\"the fox\",\"id\":3}\n\n  {\"id\":4,\"text\":\"\"}\r\n{\"text\":\"a\\u00e9\\n<|endoftext|>\"}\n" +
		`{"messages":null,"text":"dog"}`
	gz, zst := pack(t, text)
	dir := write(t, map[string]string{"a.jsonl": text, "b.jsonl.gz": gz, "c.jsonl.zst": zst, "d.txt": text})
	want := []string{"the fox<|endoftext|>", "aé\n<|endoftext|><|endoftext|>", "dog<|endoftext|>"}
	for _, s := range []Source{
		{Path: filepath.Join(dir, "a.jsonl")}, {Path: filepath.Join(dir, "b.jsonl.gz")},
		{Path: filepath.Join(dir, "c.jsonl.zst")}, {Path: filepath.Join(dir, "d.txt"), Format: JSONL},
	} {
		got, err := documents(t, s, "")
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v", s.Path, got, err)
		}
	}
	got, err := documents(t, Source{Path: filepath.Join(dir, "[ab].jsonl*")}, "")
	if err != nil || !slices.Equal(got, append(want, want...)) {
		t.Errorf("two files: %q, %v", got, err)
	}
}

func TestPackedText(t *testing.T) {
	gz, zst := pack(t, "the fox")
	dir := write(t, map[string]string{"a.txt.gz": gz, "b.txt.zst": zst, "c.md": "dog"})
	got, err := documents(t, Source{Path: dir}, "")
	if want := []string{"the fox<|endoftext|>", "the fox<|endoftext|>", "dog<|endoftext|>"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestLongLinesAndManyChunks(t *testing.T) {
	var b strings.Builder
	for i := range 3000 {
		fmt.Fprintf(&b, `{"text":"%d%s"}`+"\n", i, strings.Repeat("x", 400_000/(i+1)))
	}
	dir := write(t, map[string]string{"a.jsonl": b.String()})
	got, err := documents(t, Source{Path: dir}, "")
	if err != nil || len(got) != 3000 {
		t.Fatalf("%d documents, %v", len(got), err)
	}
	for i, d := range got {
		if !strings.HasPrefix(d, fmt.Sprintf("%dx", i)) {
			t.Fatalf("document %d is %.20s", i, d)
		}
	}
}

func TestBadLinesAreNamed(t *testing.T) {
	gz, zst := pack(t, strings.Repeat(`{"text":"x"}`+"\n", 1000))
	for _, tt := range []struct{ name, text, want string }{
		{"truncated", `{"text":"a"}` + "\n" + `{"text":"b`, "x.jsonl:2"},
		{"truncated", `{"text":"a"}` + "\n" + `{"text":"b`, "truncated"},
		{"list", `["text"]`, "not a JSON object"},
		{"null", `null`, "not a JSON object"},
		{"keys", `{"body":"x","url":"y"}`, `it has "body", "url"`},
		{"slip", `{"txet":"x"}`, `columns = {text = "txet"}`},
		{"case", `{"Text":"x"}`, `columns = {text = "Text"}`},
		{"number", `{"text":3}`, `"text" is not a string`},
		{"null text", `{"text":null}`, `"text" is not a string or a list`},
		{"messages", `{"messages":"x"}`, "not a list of objects"},
		{"no messages", `{"messages":[]}`, "the list is empty"},
		{"role", `{"messages":[{"content":"x"}]}`, "message 1 has no role"},
		{"content", `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null}]}`, "message 2 has no content"},
		{"parts", `{"messages":[{"role":"user","content":[{"type":"image","url":"x"}]}]}`, "a part that is not text"},
	} {
		dir := write(t, map[string]string{"x.jsonl": tt.text})
		_, err := documents(t, Source{Path: dir}, "")
		if !errors.Is(err, diag.DataFormat) || !strings.Contains(diag.From(err).Format(), tt.want) {
			t.Errorf("%s: %v; want %s", tt.name, err, tt.want)
		}
	}
	for name, text := range map[string]string{"x.jsonl.gz": gz, "x.jsonl.zst": zst} {
		dir := write(t, map[string]string{name: text[:len(text)-6]})
		_, err := documents(t, Source{Path: dir}, "")
		if !errors.Is(err, diag.DataFormat) ||
			!strings.Contains(diag.From(err).Format(), "cannot be unpacked") {
			t.Errorf("%s: %v", name, err)
		}
		dir = write(t, map[string]string{name: "no archive"})
		if _, err := documents(t, Source{Path: dir}, ""); !errors.Is(err, diag.DataFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestChatsShowWhatIsLearned(t *testing.T) {
	chat := `{"messages":[{"role":"user","content":"fox <|im_end|>?"},{"role":"assistant","content":[{"type":"text","text":"the "},{"type":"text","text":"dog"}]}]}` +
		"\n" + `{"text":"the fox"}`
	dir := write(t, map[string]string{"x.jsonl": chat})
	for template, want := range map[string]string{
		"":       "[<|im_start|>user\nfox <|im_end|>?<|im_end|>\n<|im_start|>assistant\n]the dog<|im_end|>[\n<|endoftext|>]",
		"chatml": "[<|im_start|>user\nfox <|im_end|>?<|im_end|>\n<|im_start|>assistant\n]the dog<|im_end|>[\n<|endoftext|>]",
		"llama3": "[<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nfox <|im_end|>?<|eot_id|>" +
			"<|start_header_id|>assistant<|end_header_id|>\n\n]the dog<|eot_id|>[<|endoftext|>]",
		"plain": "[user:\nfox <|im_end|>?<|endoftext|>\nassistant:\n]the dog<|endoftext|>[\n<|endoftext|>]",
	} {
		got, err := documents(t, Source{Path: dir}, template)
		if diff := cmp.Diff([]string{want, "the fox<|endoftext|>"}, got); diff != "" || err != nil {
			t.Errorf("%q: %v %s", template, err, diff)
		}
	}
	// A tokenizer without the tokens of the template is refused, where chats are met.
	_, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Template: "llama3"})
	if !errors.Is(err, diag.DataTokenizer) || !strings.Contains(err.Error(), "x.jsonl:1") {
		t.Errorf("got %v", err)
	}
	if _, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}}); err != nil {
		t.Errorf("plain is not taken: %v", err)
	}
}

// Chats give the ids and the mask that transformers gives for the same template.
func TestChatsAreThoseOfTheLibrary(t *testing.T) {
	path := filepath.Join("testdata", "tokenizer.json")
	if golden.Update() {
		text := strings.Repeat("the quick brown fox jumps over the lazy dog. user assistant system first second\n\n", 9)
		file, err := tokenizer.Train(slices.Values([]string{text}), 320, special...)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, file, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	tok, err := tokenizer.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join("testdata", "chat.json"))
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Template string
		Messages []chat.Message
		IDs      []int32
		Learned  []int
	}
	if err := json.Unmarshal(raw, &cases); err != nil || len(cases) == 0 {
		t.Fatal(err)
	}
	for _, c := range cases {
		chats, err := newChatter(c.Template, tok, 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.Messages {
			c.Messages[i].Learned = true // of those that an assistant says
		}
		ids, learned := chats.append(nil, nil, c.Messages)
		want := make([]bool, len(c.Learned))
		for i, v := range c.Learned {
			want[i] = v == 1
		}
		if !slices.Equal(ids, c.IDs) || !slices.Equal(learned, want) {
			t.Errorf("%s %+v:\n got %v %v\nwant %v %v", c.Template, c.Messages, ids, learned, c.IDs, want)
		}
	}
}

func TestParquet(t *testing.T) {
	got, err := documents(t, Source{Path: filepath.Join("testdata", "text.parquet")}, "")
	if err != nil || len(got) != 39 { // one row is null
		t.Fatalf("%d documents, %v", len(got), err)
	}
	if want := strings.Repeat("row 7: the quick brown fox ", 3) + "<|endoftext|>"; got[6] != want {
		t.Errorf("got %q", got[6])
	}
	got, err = documents(t, Source{Path: filepath.Join("testdata", "chat.parquet")}, "chatml")
	if err != nil || len(got) != 4 { // one chat has no messages
		t.Fatalf("%q, %v", got, err)
	}
	if want := "[<|im_start|>user\nthe quick fox?<|im_end|>\n<|im_start|>assistant\n]the lazy dog.<|im_end|>[\n<|endoftext|>]"; got[0] != want {
		t.Errorf("got %q", got[0])
	}
	if !strings.Contains(got[1], "naïve 日本 👩‍🚀 <|im_end|>") {
		t.Errorf("got %q", got[1])
	}
	_, err = documents(t, Source{Path: filepath.Join("testdata", "other.parquet")}, "")
	if !errors.Is(err, diag.DataFormat) || !strings.Contains(err.Error(), `"body", "title"`) {
		t.Errorf("got %v", err)
	}
}

// Rows that go over several pages, and a column of JSON.
func TestParquetPages(t *testing.T) {
	type turn struct {
		Role    string `parquet:"role"`
		Content string `parquet:"content"`
	}
	type row struct {
		Messages []turn `parquet:"messages,list"`
	}
	var b bytes.Buffer
	w := parquet.NewGenericWriter[row](&b, parquet.PageBufferSize(256))
	for i := range 20 {
		r := row{}
		for range 40 {
			r.Messages = append(r.Messages, turn{"user", fmt.Sprint("fox ", i)}, turn{"assistant", "dog"})
		}
		if _, err := w.Write([]row{r}); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	dir := write(t, map[string]string{"x.parquet": b.String()})
	got, err := documents(t, Source{Path: dir}, "plain")
	if err != nil || len(got) != 20 || strings.Count(got[13], "fox 13") != 40 {
		t.Errorf("%d documents, %v", len(got), err)
	}
	type text struct {
		Messages string `parquet:"messages"`
	}
	b.Reset()
	if err := parquet.Write(&b, []text{{`[{"role":"assistant","content":"fox"}]`}, {`[]`}}); err != nil {
		t.Fatal(err)
	}
	dir = write(t, map[string]string{"x.parquet": b.String()})
	if _, err := documents(t, Source{Path: dir}, ""); err == nil || !strings.Contains(err.Error(), "x.parquet:2") {
		t.Errorf("got %v", err)
	}
}

func TestDamagedParquet(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "text.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	for _, damaged := range [][]byte{nil, raw[:10], raw[:len(raw)/2], append([]byte("PAR1"), raw[len(raw)/2:]...)} {
		dir := write(t, map[string]string{"x.parquet": string(damaged)})
		if _, err := documents(t, Source{Path: dir}, ""); !errors.Is(err, diag.DataFormat) {
			t.Errorf("%d bytes: %v", len(damaged), err)
		}
	}
}

// A sinkFunc is a sink.
type sinkFunc func(event.Event)

func (f sinkFunc) Emit(e event.Event) { f(e) }

// longProse is prose of some mebibytes with a few places that are hard to split at.
func longProse(size int) string {
	hard := []string{strings.Repeat("日本", 300), strings.Repeat(" ", 5000), "<|endoftext|> ", "é e\u0301\n\n\u0301 ", strings.Repeat("x", 9000)}
	var b strings.Builder
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, "the quick brown fox %d jumps over the lazy dog.\n", i)
		if i%97 == 0 {
			b.WriteString(hard[i/97%len(hard)])
		}
	}
	return b.String()
}

// A text that is longer than the limit is one document with the tokens and the hash that it has as
// a whole, packed or not, beside others.
func TestLongTextIsOneDocument(t *testing.T) {
	text := longProse(5 << 20)
	gz, zst := pack(t, text)
	dir := write(t, map[string]string{"a.txt": "the fox", "b.txt": text, "c.txt.gz": gz, "d.txt.zst": zst,
		"e.jsonl": `{"messages":[{"role":"user","content":"fox"},{"role":"assistant","content":"dog"}]}`, "f.txt": text + "é", "g.txt": "dog"})
	at := func(limit int64) *cache {
		l := open(t, Options{Sources: []Source{{Path: dir}}, Tokenizer: newTokenizer(t, special...), End: special[0], Document: limit})
		return l.sources[0].cache
	}
	chunks, whole := at(1<<20), at(64<<20)
	if chunks.documents != 7 || chunks.documents != whole.documents || chunks.text != whole.text {
		t.Fatalf("%d and %d documents of %d and %d bytes", chunks.documents, whole.documents, chunks.text, whole.text)
	}
	if !slices.Equal(chunks.ids, whole.ids) || !slices.Equal(chunks.starts, whole.starts) ||
		!slices.Equal(chunks.hashes, whole.hashes) || !slices.Equal(chunks.mask, whole.mask) {
		t.Error("tokens, places or hashes differ")
	}
	if chunks.hash(1) != chunks.hash(2) || chunks.hash(1) != chunks.hash(3) || chunks.hash(1) == chunks.hash(5) {
		t.Error("the hash does not match the contents")
	}
	got := strings.Builder{}
	for text, err := range Texts(t.Context(), []Source{{Path: filepath.Join(dir, "b.txt")}}) {
		if err != nil {
			t.Fatal(err)
		}
		got.WriteString(text)
	}
	if got.String() != text {
		t.Errorf("%d bytes to train on, of %d", got.Len(), len(text))
	}
}

// What a long file is shows only at its end: nothing of it is taken if that is not text.
func TestLongFilesThatAreNotText(t *testing.T) {
	text := longProse(2 << 20)
	gz, _ := pack(t, text)
	for name, raw := range map[string]string{"late.txt": text + "\xff" + text, "zero.txt": text + "\x00", "truncated.txt": text + "é"[:1],
		"odd.txt": text + "\x80\x80\x80\x80\x80\x80" + text} {
		dir := write(t, map[string]string{name: raw, "x.txt": "the quick brown fox"})
		l := open(t, Options{Sources: []Source{{Path: dir}}, Seq: 1, Document: 1 << 20})
		if s := l.Stats()[0]; s.Documents != 1 || s.Skipped != 1 {
			t.Errorf("%s: %+v", name, s)
		}
	}
	dir := write(t, map[string]string{"truncated.txt.gz": gz[:len(gz)-20]})
	if _, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Document: 1 << 20}); err == nil || !strings.Contains(err.Error(), "cannot be unpacked") {
		t.Errorf("a truncated file: %v", err)
	}
}

// An error beside a long text, or a caller who has enough, ends all that wait for its chunks.
func TestErrorsBesideLongTexts(t *testing.T) {
	text := longProse(8 << 20)
	for name, files := range map[string]map[string]string{
		"before": {"a.jsonl": "{\"text\":\"fox\"}\n{", "b.txt": text},
		"after":  {"a.txt": text, "b.jsonl": "{"},
	} {
		dir := write(t, files)
		_, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}, Document: 1 << 20})
		if err == nil || !strings.Contains(err.Error(), "not a JSON object") {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := write(t, map[string]string{"a.txt": text})
	ctx, cancel := context.WithCancel(t.Context())
	events := sinkFunc(func(e event.Event) {
		if p, ok := e.(event.Progress); ok && strings.HasPrefix(p.Task, "tokenize") {
			cancel()
		}
	})
	_, err := Open(ctx, Options{Sources: []Source{{Path: dir}}, Tokenizer: newTokenizer(t, special...), End: special[0], Seq: 16, Document: 1 << 20, Events: events})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

func TestLinesThatAreTooLong(t *testing.T) {
	line := `{"text":"` + strings.Repeat("x", 1<<20) + `"}`
	for _, c := range []struct {
		text, want string
	}{
		{"{\"text\":\"fox\"}\n" + line + "\n{\"text\":\"dog\"}\n",
			fmt.Sprintf("a document has %d bytes or more; the limit is 1 MiB", len(line))},
		{"{\"text\":\"fox\"}\n" + line, "data.document_mib = 2"},
		{"\n" + strings.Repeat("x", 3<<20), "data.document_mib = 4"},
		{"\n" + strings.Repeat("\n", 3<<20) + `{"text":"` + strings.Repeat("fox ", 20) + `"}`, ""},
		{"\r\n" + line[:1<<20-2] + "\"}\r\n", ""},
	} {
		path := filepath.Join(write(t, map[string]string{"x.jsonl": c.text}), "x.jsonl")
		_, err := tryOpen(t, Options{Sources: []Source{{Path: path}}, Document: 1 << 20})
		if c.want == "" {
			if err != nil {
				t.Errorf("%v", err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path+":2") {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
	for _, n := range []int64{-1, 2 << 30} {
		if _, err := tryOpen(t, Options{Sources: []Source{{Path: "x"}}, Document: n}); err == nil || !strings.Contains(err.Error(), "cannot have up to") {
			t.Errorf("%d: %v", n, err)
		}
	}
}

// endless is a line without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// A line that is not read to its end is too long, and no damage.
func TestALineWithoutEndIsTooLong(t *testing.T) {
	line, size, err := readLine(bufio.NewReaderSize(endless{}, 1<<18), 1<<20)
	if line != nil || size <= 1<<30 || err != nil {
		t.Errorf("%d bytes of %d, %v", len(line), size, err)
	}
}

// A .zst may ask for a window of gigabytes; zstd itself wants a flag for more than 128 MiB.
func TestWindowsOfZstdAreBounded(t *testing.T) {
	frame := func(log byte) string { // magic, a window, one block as it is
		return "\x28\xb5\x2f\xfd\x00" + string([]byte{(log - 10) << 3}) + "\xa1\x00\x00" + strings.Repeat("fox ", 5)
	}
	for log, want := range map[byte]string{20: "", 27: "", 28: "without --long", 31: "without --long", 41: "without --long"} {
		dir := write(t, map[string]string{"x.txt.zst": frame(log)})
		var err error
		n := allocated(func() { _, err = tryOpen(t, Options{Sources: []Source{{Path: dir}}, Seq: 4}) })
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || n > 2*maxWindow {
			t.Errorf("2^%d: %d bytes, %v", log, n, err)
		}
	}
}

// allocated tells how many bytes a function allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// Parsing a chat takes memory that grows with the line alone: it was 57 times the line, and time
// that grew with its square (finding A9).
func TestChatsOfManyPartsTakeLittle(t *testing.T) {
	line := `{"messages":[{"role":"user","content":[{"text":"a"}` + strings.Repeat(`,{"text":"a"}`, 100000) + `]}]}`
	n := allocated(func() {
		it := item{line: []byte(line)}
		if err := it.parse(nil); err != nil || len(it.chat) != 1 || it.chat[0].Content != strings.Repeat("a", 100001) {
			t.Errorf("%v", err)
		}
	})
	if most := uint64(100 * len(line)); n > most { // of which nearly all is free again at once
		t.Errorf("%d bytes allocate %d", len(line), n)
	}
}

// FuzzPacked holds that no short .gz or .zst takes much memory, and that errors have their code.
func FuzzPacked(f *testing.F) {
	dir := f.TempDir()
	for _, text := range []string{"the fox", "{\"text\":\"fox\"}\n", strings.Repeat("x", 3<<20)} {
		gz, zst := pack(f, text)
		for kind := range uint8(4) {
			f.Add([]byte(gz), kind)
			f.Add([]byte(zst), kind)
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte, kind uint8) {
		if len(raw) > 1<<12 {
			return
		}
		kind %= 4
		name := []string{"x.txt.gz", "x.txt.zst", "x.jsonl.gz", "x.jsonl.zst"}[kind]
		file := &file{name: name, path: filepath.Join(dir, name), size: int64(len(raw)), limit: 1 << 20, split: splitBlank}
		if err := os.WriteFile(file.path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		file.format = formatOf(name)
		var err error
		n := allocated(func() {
			size := 0
			err = readers[file.format](t.Context(), file, func(it item) error {
				if size += it.size(); size > 4<<20 {
					return errEnough
				}
				if err := it.parse(nil); err != nil {
					return err
				}
				return nil
			})
		})
		_, isBinary := errors.AsType[errNoText](err)
		if err != nil && !errors.Is(err, errEnough) && !isBinary && diag.From(err).Code != diag.DataFormat {
			t.Fatalf("an error without its code: %v", err)
		}
		if n > 3*maxWindow {
			t.Fatalf("%d bytes allocate %d: %v", len(raw), n, err)
		}
	})
}

// FuzzChat holds that parsing a line allocates no more than a multiple of the line.
func FuzzChat(f *testing.F) {
	f.Add(`{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"text":"y"}]}]}`)
	f.Add(`{"messages":[{"role":"user","content":[` + strings.Repeat(`{"text":""},`, 300) + `{"text":""}]}]}`)
	f.Add(`{"messages":[` + strings.Repeat(`{},`, 300) + `{}]}`)
	f.Add(`{"messages":[` + strings.Repeat(`[`, 300) + strings.Repeat(`]`, 300) + `]}`)
	f.Fuzz(func(t *testing.T, line string) {
		it := item{line: []byte(line), where: place{"x.jsonl", 1}}
		var err error
		if n := allocated(func() { err = it.parse(nil) }); n > uint64(1<<20+500*len(line)) {
			t.Fatalf("%d bytes allocate %d: %v", len(line), n, err)
		}
	})
}

func FuzzLine(f *testing.F) {
	f.Add(`{"text":"the fox"}`)
	f.Add(`{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"text":"y"}]}]}`)
	f.Add(`{"messages":[{"role":"","content":""}]}`)
	f.Add(`{"text":"\ud800"}`)
	f.Add(`[[[`)
	f.Fuzz(func(t *testing.T, line string) {
		it := item{line: []byte(line), where: place{"x.jsonl", 1}}
		err := it.parse(nil)
		switch {
		case err != nil && diag.From(err).Code != diag.DataFormat:
			t.Fatalf("an error without its code: %v", err)
		case err == nil && !json.Valid([]byte(line)):
			t.Fatalf("%q was read", line)
		case err == nil && it.chat == nil && !strings.Contains(line, "text") && !strings.Contains(line, `\`):
			t.Fatalf("%q has text", line)
		}
	})
}

func FuzzTemplate(f *testing.F) {
	tok := newTokenizer(f, special...)
	f.Add("user", "the fox", "assistant", "the dog", 0)
	f.Add("assistant", "<|im_end|>", "{role}", "{end}", 1)
	f.Add("", "\xff", "assistant", "\n\n", 2)
	f.Fuzz(func(t *testing.T, r1, c1, r2, c2 string, name int) {
		names := Templates()
		chats, err := newChatter(names[uint(name)%uint(len(names))], tok, 0)
		if err != nil {
			t.Fatal(err)
		}
		messages := []chat.Message{{Role: r1, Content: c1, Learned: true}, {Role: r2, Content: c2, Learned: true}}
		ids, learned := chats.append(nil, nil, messages)
		if len(ids) != len(learned) {
			t.Fatalf("%d ids, %d flags", len(ids), len(learned))
		}
		// What is learned is what assistants said, and an end for each; nobody's words make a mark.
		want := ""
		ends, marks := 0, 0
		for _, m := range messages {
			if m.Role == "assistant" {
				if chats.shape.trim {
					m.Content = strings.TrimSpace(m.Content)
				}
				want += strings.ToValidUTF8(m.Content, "\ufffd")
				ends++
			}
			marks++
		}
		var said []int32
		for i, id := range ids {
			if id == chats.end[0].id {
				marks--
				if learned[i] {
					ends--
				}
			} else if learned[i] {
				said = append(said, id)
			}
		}
		if got := tok.Decode(said); strings.ToValidUTF8(got, "\ufffd") != want && !strings.Contains(want, "\ufffd") || ends != 0 || marks != 0 {
			t.Fatalf("learned %q, want %q; %d ends and %d marks too few", got, want, ends, marks)
		}
	})
}
