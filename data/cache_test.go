package data

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/tokenizer"
)

// A document as the tests have it.
type document struct {
	tokens  []int32
	learned []bool
}

// cacheOf writes documents and opens what was written.
func cacheOf(t testing.TB, path string, width int, docs []document) *cache {
	t.Helper()
	err := writeCache(path, width, cacheKey{1, 2}, func(w *cacheWriter) error {
		for _, d := range docs {
			if err := errors.Join(w.add(d.tokens, d.learned), w.end(uint64(len(d.tokens)))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := openCache(path, cacheKey{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCacheGivesBackWhatItWasGiven(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		width := rapid.SampledFrom([]int{2, 4}).Draw(r, "width")
		limit := int32(1)<<(8*width-1) - 1
		if width == 2 {
			limit = 1<<16 - 1
		}
		docs := rapid.SliceOfN(rapid.Custom(func(r *rapid.T) document {
			d := document{tokens: rapid.SliceOfN(rapid.Int32Range(0, limit), 1, 150).Draw(r, "tokens")}
			if rapid.Bool().Draw(r, "masked") {
				d.learned = rapid.SliceOfN(rapid.Bool(), len(d.tokens), len(d.tokens)).Draw(r, "learned")
			}
			return d
		}), 0, 8).Draw(r, "docs")
		c := cacheOf(t, filepath.Join(dir, "x.tokens"), width, docs)
		defer c.release()
		at, learned := int64(0), int64(0)
		for n, d := range docs {
			if c.start(int64(n)) != at {
				r.Fatalf("document %d starts at %d, want %d", n, c.start(int64(n)), at)
			}
			for i, id := range d.tokens {
				want := d.learned == nil || d.learned[i]
				if c.token(at) != id || c.learned(at) != want || c.documentAt(at) != int64(n) {
					r.Fatalf("token %d is %d, learned %t, of document %d", at, c.token(at), c.learned(at), c.documentAt(at))
				}
				if want {
					learned++
				}
				at++
			}
		}
		if c.tokens != at || c.documents != int64(len(docs)) || c.learnedIn(0, at) != learned {
			r.Fatalf("%d tokens of %d documents, %d to learn", c.tokens, c.documents, c.learnedIn(0, at))
		}
		from := rapid.Int64Range(0, at).Draw(r, "from")
		to := rapid.Int64Range(from, at).Draw(r, "to")
		want := int64(0)
		for i := from; i < to; i++ {
			if c.learned(i) {
				want++
			}
		}
		if got := c.learnedIn(from, to); got != want {
			r.Fatalf("%d to learn from %d to %d, want %d", got, from, to, want)
		}
	})
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("files left behind: %v, %v", left, err)
	}
}

// The tokens are made once. A cache that any byte of was changed in, or that was truncated anywhere,
// is made again and said to be.
func TestDamagedCacheIsMadeAgain(t *testing.T) {
	dir := write(t, map[string]string{"a.txt": strings.Repeat("the lazy dog ", 9), "b.txt": "the fox"})
	o := Options{Sources: []Source{{Path: dir}}, Tokenizer: newTokenizer(t, "<|endoftext|>"), Cache: t.TempDir()}
	load := func() (*Loader, string) {
		r := &event.Recorder{}
		o.Events = r
		l, err := tryOpen(t, o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return l, lines(r)
	}
	first, lines := load()
	if first.sources != nil || lines != "" {
		t.Fatalf("the first run says %q", lines)
	}
	files, err := filepath.Glob(filepath.Join(o.Cache, "*.tokens"))
	if err != nil || len(files) != 1 {
		t.Fatalf("caches: %v, %v", files, err)
	}
	whole, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	for i := range len(whole) {
		for _, broken := range [][]byte{whole[:i], slices.Concat(whole[:i], []byte{whole[i] ^ 0x40}, whole[i+1:])} {
			if c, err := parseCache(broken); err == nil && c.key == ([32]byte)(whole[len(whole)-footSize+40:]) {
				t.Fatalf("damage at byte %d of %d is not seen", i, len(whole))
			}
		}
	}
	for _, broken := range [][]byte{nil, whole[:len(whole)/2], append(slices.Clone(whole), 0)} {
		if err := os.WriteFile(files[0], broken, 0o666); err != nil {
			t.Fatal(err)
		}
		if _, lines := load(); !strings.Contains(lines, "is damaged") || !strings.Contains(lines, "made again") {
			t.Errorf("damage is not reported: %q", lines)
		}
		if again, err := os.ReadFile(files[0]); err != nil || !bytes.Equal(again, whole) {
			t.Errorf("the cache was not made again: %v", err)
		}
		if _, lines := load(); lines != "" {
			t.Errorf("a whole cache is not taken: %q", lines)
		}
	}
}

// Only what changes the tokens changes the cache.
func TestCacheIsKeyedByContents(t *testing.T) {
	text := strings.Repeat("the lazy dog ", 30)
	dir := write(t, map[string]string{"a/x.txt": text, "b/x.txt": text, "c/y.txt": text, "d/x.txt": text + "!"})
	base := Options{Tokenizer: newTokenizer(t, special...), Cache: t.TempDir(), End: "<|eot_id|>"}
	cached := func(path string, change func(*Options)) bool {
		o := base
		o.Sources = []Source{{Path: filepath.Join(dir, path)}}
		if change != nil {
			change(&o)
		}
		return open(t, o).Stats()[0].Cached
	}
	if cached("a", nil) {
		t.Error("a cache of nothing")
	}
	same := func(o *Options) { o.Seq, o.Seed, o.Shuffle, o.Joined = 32, 9, true, true }
	if !cached("a", nil) || !cached("b", same) || !cached("b/*", nil) {
		t.Error("the same contents are tokenized twice")
	}
	if cached("c", nil) || cached("d", nil) ||
		cached("a", func(o *Options) { o.End = "<|endoftext|>" }) ||
		cached("a", func(o *Options) { o.Template = "llama3" }) ||
		cached("a", func(o *Options) { o.Tokenizer = newTokenizer(t, append(special, "<|more|>")...) }) ||
		cached("a", func(o *Options) { o.Sources[0].Format = Text; o.Sources[0].Path += "/../d" }) != true {
		t.Error("other contents share a cache")
	}
}

// Tokenizers with the same vocabulary and other rules do not share caches.
func TestTokenizersAreDistinguished(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join("testdata", "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[[32]byte]string{}
	for _, change := range [][2]string{
		{"", ""},
		{`"add_prefix_space": false`, `"add_prefix_space": true`},
		{`"normalizer": null`, `"normalizer": {"type": "NFC"}`},
		{`"normalizer": null`, `"normalizer": {"type": "NFKC"}`},
		{`"post_processor": null`, `"post_processor": {"type": "TemplateProcessing", "single": [` +
			`{"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],` +
			`"pair": [], "special_tokens": {"<|eot_id|>": {"id": "<|eot_id|>", "ids": [6], "tokens": ["<|eot_id|>"]}}}`},
		{"[\"h\",\"e\"],\n", ""},
		{`"ignore_merges": false`, `"ignore_merges": true`},
	} {
		text := strings.Replace(string(raw), change[0], change[1], 1)
		tok, err := tokenizer.Parse([]byte(text))
		if err != nil {
			t.Fatalf("%q: %v", change, err)
		}
		if text == string(raw) && change[0] != "" {
			t.Errorf("%q is not in the file", change[0])
		}
		sum := fingerprint(tok)
		if other, ok := seen[sum]; ok && !strings.Contains(change[0], "ignore_merges") {
			t.Errorf("%q gives what %q gives", change, other)
		}
		seen[sum] = change[1]
	}
}

func TestCacheIsTheSameBytesEveryTime(t *testing.T) {
	files := map[string]string{}
	for i := range 200 {
		files[string(rune('a'+i%26))+strings.Repeat("x", i)] = strings.Repeat("the quick brown fox ", i)
	}
	dir := write(t, files)
	var all [][]byte
	for range 2 {
		o := Options{Sources: []Source{{Path: dir}}, Cache: t.TempDir()}
		open(t, o)
		names, _ := filepath.Glob(filepath.Join(o.Cache, "*"+cacheSuffix))
		if len(names) != 1 {
			t.Fatalf("the cache has %v", names)
		}
		b, err := os.ReadFile(names[0])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
	if !bytes.Equal(all[0], all[1]) {
		t.Error("two runs give two caches")
	}
}

func TestCacheThatCannotBeWritten(t *testing.T) {
	dir := write(t, map[string]string{"x": "the fox", "file": ""})
	_, err := tryOpen(t, Options{Sources: []Source{{Path: filepath.Join(dir, "x")}}, Seq: 2, Cache: filepath.Join(dir, "file")})
	if !errors.Is(err, diag.DataCache) || !strings.Contains(diag.From(err).Fix, "DEEPWELL_CACHE") {
		t.Errorf("got %v", err)
	}
}

// A cache that is truncated while it is mapped gives an error, not the end of the process.
func TestCacheThatIsCutOffInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.tokens")
	c := cacheOf(t, path, 2, []document{{tokens: make([]int32, 1<<20)}})
	defer c.release()
	l := &Loader{sources: []*source{{cache: c, stats: Stats{Name: "x"}}}, options: Options{Seq: 1024}}
	if err := l.divide(l.sources[0], splitDocuments, &claims{}); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Row("x", 90); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Row("x", 90); !errors.Is(err, diag.DataCache) {
		t.Errorf("got %v", err)
	}
}

func TestProgressIsReported(t *testing.T) {
	dir := write(t, map[string]string{"a": strings.Repeat("the fox ", 50_000), "b": strings.Repeat("a dog ", 50_000)})
	r := &event.Recorder{}
	open(t, Options{Sources: []Source{{Path: dir}}, Events: r})
	last := map[string]event.Progress{}
	for _, e := range r.Events() {
		if p, ok := e.(event.Progress); ok {
			if p.Done < last[p.Task].Done {
				t.Errorf("%s goes back from %d to %d", p.Task, last[p.Task].Done, p.Done)
			}
			last[p.Task] = p
		}
	}
	want := map[string]event.Progress{
		"read data":     {Task: "read data", Done: 700_000, Total: 700_000, Unit: "B"},
		"tokenize data": {Task: "tokenize data", Done: 700_000, Total: 700_000, Unit: "B"},
	}
	if diff := cmp.Diff(want, last); diff != "" {
		t.Error(diff)
	}
}

// FuzzCache feeds the reader damaged files with right checksums, so that what stands behind them is
// reached.
func FuzzCache(f *testing.F) {
	path := filepath.Join(f.TempDir(), "x.tokens")
	c := cacheOf(f, path, 2, []document{{tokens: []int32{1, 2, 3}}, {[]int32{4, 5}, []bool{false, true}}})
	c.release()
	raw, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add(raw[:len(raw)/2])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		if n := len(raw) - footSize; n >= len(cacheMagic) {
			foot := raw[n:]
			binary.LittleEndian.PutUint32(foot[footSize-16:], crc32.Checksum(raw[:n], castagnoli))
			binary.LittleEndian.PutUint32(foot[footSize-12:], crc32.Checksum(foot[:footSize-12], castagnoli))
		}
		c, err := parseCache(raw)
		if err != nil {
			return
		}
		c.release = func() error { return nil }
		l := &Loader{options: Options{Seq: 2}}
		if len(raw)%2 == 0 {
			l.options.HoldoutShare = 0.5
		}
		s := &source{cache: c}
		if l.sources = append(l.sources, s); l.divide(s, splitDocuments, &claims{}) != nil {
			return
		}
		for row := range min(s.stats.Sequences+s.stats.HeldOut, 100) {
			b, err := l.Row("", row)
			if err != nil {
				t.Fatal(err)
			}
			n := int64(0)
			for _, label := range b.Labels {
				if label != Ignored {
					n++
				}
			}
			// A token of 4 bytes can be any number, and so look like a label that does not count.
			if n != b.Count && c.width == 2 {
				t.Fatalf("%d labels count, %d are reported", n, b.Count)
			}
		}
	})
}

func TestNoCacheFile(t *testing.T) {
	if _, err := openCache(filepath.Join(t.TempDir(), "x"), cacheKey{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if _, err := openCache(t.TempDir(), cacheKey{}); err == nil {
		t.Error("a folder is a cache")
	}
}
