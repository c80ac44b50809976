package data

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/tokenizer"
)

var update = flag.Bool("update", false, "write testdata/tokenizer.json")

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
		{"cut off", `{"text":"a"}` + "\n" + `{"text":"b`, "x.jsonl:2"},
		{"cut off", `{"text":"a"}` + "\n" + `{"text":"b`, "cut off"},
		{"list", `["text"]`, "not a JSON object"},
		{"null", `null`, "not a JSON object"},
		{"keys", `{"body":"x","url":"y"}`, `it has "body", "url"`},
		{"slip", `{"txet":"x"}`, `rename "txet"`},
		{"case", `{"Text":"x"}`, `rename "Text"`},
		{"number", `{"text":3}`, `"text" is not a string`},
		{"null text", `{"text":null}`, `"text" is not a string`},
		{"messages", `{"messages":"x"}`, "not a list of objects"},
		{"no messages", `{"messages":[]}`, "there are none"},
		{"role", `{"messages":[{"content":"x"}]}`, "message 1 has no role"},
		{"content", `{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null}]}`, "message 2 has no content"},
		{"parts", `{"messages":[{"role":"user","content":[{"type":"image","url":"x"}]}]}`, "a part that is not text"},
	} {
		dir := write(t, map[string]string{"x.jsonl": tt.text})
		_, err := documents(t, Source{Path: dir}, "")
		if !errors.Is(err, diag.New(diag.DataFormat, "")) || !strings.Contains(diag.From(err).Format(), tt.want) {
			t.Errorf("%s: %v; want %s", tt.name, err, tt.want)
		}
	}
	for name, text := range map[string]string{"x.jsonl.gz": gz, "x.jsonl.zst": zst} {
		dir := write(t, map[string]string{name: text[:len(text)-6]})
		_, err := documents(t, Source{Path: dir}, "")
		if !errors.Is(err, diag.New(diag.DataFormat, "")) || !strings.Contains(diag.From(err).Format(), "cannot be unpacked") {
			t.Errorf("%s: %v", name, err)
		}
		dir = write(t, map[string]string{name: "no archive"})
		if _, err := documents(t, Source{Path: dir}, ""); !errors.Is(err, diag.New(diag.DataFormat, "")) {
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
	if !errors.Is(err, diag.New(diag.DataTokenizer, "")) || !strings.Contains(err.Error(), "x.jsonl:1") {
		t.Errorf("got %v", err)
	}
	if _, err := tryOpen(t, Options{Sources: []Source{{Path: dir}}}); err != nil {
		t.Errorf("plain is not taken: %v", err)
	}
}

// Chats give the ids and the mask that transformers gives for the same template.
func TestChatsAreThoseOfTheLibrary(t *testing.T) {
	path := filepath.Join("testdata", "tokenizer.json")
	if *update {
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
		Messages []message
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
	if !errors.Is(err, diag.New(diag.DataFormat, "")) || !strings.Contains(err.Error(), `"body", "title"`) {
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
		if _, err := documents(t, Source{Path: dir}, ""); !errors.Is(err, diag.New(diag.DataFormat, "")) {
			t.Errorf("%d bytes: %v", len(damaged), err)
		}
	}
}

func FuzzLine(f *testing.F) {
	f.Add(`{"text":"the fox"}`)
	f.Add(`{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"text":"y"}]}]}`)
	f.Add(`{"messages":[{"role":"","content":""}]}`)
	f.Add(`{"text":"\ud800"}`)
	f.Add(`[[[`)
	f.Fuzz(func(t *testing.T, line string) {
		it := item{line: []byte(line), where: place{"x.jsonl", 1}}
		err := it.parse()
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
		chat := []message{{r1, c1}, {r2, c2}}
		ids, learned := chats.append(nil, nil, chat)
		if len(ids) != len(learned) {
			t.Fatalf("%d ids, %d flags", len(ids), len(learned))
		}
		// What is learned is what assistants said, and an end for each; nobody's words make a mark.
		want := ""
		ends, marks := 0, 0
		end, _ := cutMark(chats.shape.after)
		for _, m := range chat {
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
			if id == chats.marks[end] {
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
