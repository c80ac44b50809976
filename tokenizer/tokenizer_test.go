package tokenizer

import (
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/golden"
)

func Example() {
	corpus := []string{"the cat sat on the mat", "the rat sat on the cat"}
	data, err := Train(slices.Values(corpus), 270, "<|endoftext|>")
	if err != nil {
		fmt.Println(err)
		return
	}
	t, err := Parse(data) // or Load a file that has these bytes
	if err != nil {
		fmt.Println(err)
		return
	}
	ids := t.Encode("the cat<|endoftext|>")
	fmt.Printf("%q\n", names(t, ids))
	fmt.Printf("%q %q\n", t.Decode(ids), t.Text(ids, Options{KeepSpecial: true}))
	// Output:
	// ["the" "Ġcat" "<|endoftext|>"]
	// "the cat" "the cat<|endoftext|>"
}

func ExampleTokenizer_Stream() {
	data, err := Train(slices.Values([]string(nil)), 256)
	if err != nil {
		fmt.Println(err)
		return
	}
	t, err := Parse(data)
	if err != nil {
		fmt.Println(err)
		return
	}
	s := t.Stream(Options{})
	for _, id := range t.Encode("a€!") { // every token is a byte here
		fmt.Printf("%q ", s.Next(id))
	}
	fmt.Printf("%q\n", s.End())
	// Output:
	// "a" "" "" "€" "!" ""
}

func TestBrokenTextIsReadAsPythonReadsIt(t *testing.T) {
	var want struct{ Broken [][2]string }
	readGzip(t, "testdata/want.json.gz", &want)
	if len(want.Broken) < 500 {
		t.Fatal("too few")
	}
	tok := load(t, "llama3")
	for _, row := range want.Broken {
		raw, err := hex.DecodeString(row[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := string(appendValid(nil, string(raw))); got != row[1] {
			t.Errorf("%x: %q, want %q", raw, got, row[1])
		}
		if got, want := tok.Encode(string(raw)), tok.Encode(row[1]); !slices.Equal(got, want) {
			t.Errorf("%x: ids %v, want %v", raw, got, want)
		}
		// The bytes as tokens decode alike.
		var ids []int32
		for _, c := range raw {
			id, _ := tok.ID(string(byteChars[c]))
			ids = append(ids, id)
		}
		if got := tok.Decode(ids); got != row[1] {
			t.Errorf("%x: decoded %q, want %q", raw, got, row[1])
		}
	}
}

func TestTokensAndIDs(t *testing.T) {
	for _, name := range families {
		tok := load(t, name)
		for id := range int32(tok.Size()) {
			if back, ok := tok.ID(tok.Token(id)); !ok || back != id {
				t.Errorf("%s: token %d is %q, which is %d", name, id, tok.Token(id), back)
			}
		}
		for _, id := range []int32{-1, int32(tok.Size()), 1 << 30} {
			if tok.Token(id) != "" || tok.Special(id) || tok.Decode([]int32{id}) != "" {
				t.Errorf("%s: there is a token %d", name, id)
			}
		}
		if _, ok := tok.ID("no such token"); ok {
			t.Errorf("%s has no such token", name)
		}
	}
}

func TestTokensThatBeginAndEndATexts(t *testing.T) {
	for _, c := range []struct{ name, bos, eos string }{
		{"gpt2", "", "<|endoftext|>"}, {"llama3", "<|begin_of_text|>", ""}, {"nemo", "<s>", "</s>"}, {"qwen2", "", ""},
		{"llama2", "<s>", ""}, {"gemma", "<bos>", ""}, {"spm_bpe", "<s>", "</s>"}, {"spm_gemma", "<bos>", "<eos>"}, {"spm_unigram", "", "</s>"},
	} {
		tok := load(t, c.name)
		bos, okBOS := tok.BOS()
		eos, okEOS := tok.EOS()
		if tok.Token(bos) != c.bos || okBOS != (c.bos != "") || tok.Token(eos) != c.eos || okEOS != (c.eos != "") {
			t.Errorf("%s: begins with %q, ends with %q", c.name, tok.Token(bos), tok.Token(eos))
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		config   string
		bos, eos string
		fails    bool
	}{
		{config: `{"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": false}}`, bos: "<|im_start|>", eos: "<|im_end|>"},
		{config: `{"bos_token": null, "eos_token": "no such token", "other": 1}`},
		{config: `{}`}, {config: ``, fails: true}, {config: `[`, fails: true},
	} {
		data, err := os.ReadFile("testdata/qwen2.json")
		if err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string][]byte{"tokenizer.json": data, "tokenizer_config.json": []byte(c.config)} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		tok, err := Load(dir)
		if c.fails {
			if e := diag.From(err); e == nil || e.Fix == "" || !strings.Contains(e.Where, "tokenizer_config.json") {
				t.Errorf("%s: %v", c.config, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		bos, _ := tok.BOS()
		eos, _ := tok.EOS()
		if tok.Token(bos) != c.bos || tok.Token(eos) != c.eos {
			t.Errorf("%s: begins with %q, ends with %q", c.config, tok.Token(bos), tok.Token(eos))
		}
	}
	model, err := os.ReadFile("testdata/spm_bpe.model")
	if err != nil {
		t.Fatal(err)
	}
	only := t.TempDir()
	for _, path := range []string{only, filepath.Join(only, "tokenizer.json")} {
		if _, err := Load(path); diag.From(err) == nil || diag.From(err).Code != diag.FileError || diag.From(err).Fix == "" {
			t.Errorf("nothing is there, but %v", err)
		}
	}
	if err := os.WriteFile(filepath.Join(only, "tokenizer.model"), model, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(only); err != nil {
		t.Error(err)
	}
}

// All that a stream gives is what Decode gives, whatever the ids.
func TestStreamIsDecode(t *testing.T) {
	for _, name := range families {
		tok := load(t, name)
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				ids := rapid.SliceOfN(rapid.Int32Range(-1, int32(tok.Size())), 0, 12).Draw(t, "ids")
				o := Options{KeepSpecial: rapid.Bool().Draw(t, "keep")}
				s := tok.Stream(o)
				var parts strings.Builder
				for _, id := range ids {
					part := s.Next(id)
					if !utf8.ValidString(part) {
						t.Fatalf("%q is not UTF-8", part)
					}
					parts.WriteString(part)
				}
				parts.WriteString(s.End())
				if got, want := parts.String(), tok.Text(ids, o); got != want {
					t.Fatalf("stream %q, decode %q", got, want)
				}
			})
		})
	}
}

func TestEncodersRunAtOnce(t *testing.T) {
	all := texts(t)
	for _, name := range families {
		tok := load(t, name)
		want := make([][]int32, len(all))
		for i, text := range all {
			want[i] = tok.Encode(text)
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for i, text := range all {
					if !slices.Equal(tok.Encode(text), want[i]) {
						t.Errorf("%s: %q has other ids beside other texts", name, text)
					}
				}
			})
		}
		wg.Wait()
	}
}

func TestAppendKeepsWhatIsThere(t *testing.T) {
	tok := load(t, "llama3")
	got := tok.Append([]int32{-7}, "hi", Options{NoTemplate: true})
	if want := append([]int32{-7}, tok.Append(nil, "hi", Options{NoTemplate: true})...); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestAppendAllocatesNothing(t *testing.T) {
	text := strings.Repeat("func main() { fmt.Println(\"héllo\") } // 世界 ", 50)
	for _, name := range families {
		tok := load(t, name)
		ids := tok.Encode(text)
		if n := testing.AllocsPerRun(20, func() { ids = tok.Append(ids[:0], text, Options{}) }); n > 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// What is embedded is unicode.txt.
func TestUnicodeIsPacked(t *testing.T) {
	text, err := os.ReadFile("unicode.txt")
	if err != nil {
		t.Fatal(err)
	}
	if golden.Update() {
		var b bytes.Buffer
		w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(text); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("unicode.txt.gz", b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	packed, err := os.ReadFile("unicode.txt.gz")
	if err != nil {
		t.Fatal(err)
	}
	if unpack(string(packed)) != string(text) {
		t.Error("unicode.txt.gz is not unicode.txt; go test ./tokenizer -update packs it")
	}
}

// Each line of unicode.txt is of the form that the reader takes for granted.
func TestUnicodeTableIsWellFormed(t *testing.T) {
	seen := make(map[string]bool)
	code := func(s string) bool {
		n, err := strconv.ParseUint(s, 16, 32)
		return err == nil && n <= utf8.MaxRune
	}
	unicodeLines(func(name, entry string) {
		seen[name] = true
		parts := strings.FieldsFunc(entry, func(r rune) bool { return strings.ContainsRune("-+=", r) })
		mapping := slices.Contains([]string{"canonical", "compatible", "compose"}, name)
		if !slices.ContainsFunc(parts, func(s string) bool { return !code(s) }) && mapping == strings.Contains(entry, "=") &&
			(name != "compose" || strings.Count(entry, "+") == 1) {
			return
		}
		t.Errorf("%s: %q", name, entry)
	})
	for name := range classNames {
		if !seen[name] {
			t.Errorf("no line for %s", name)
		}
	}
	table := classes()
	for _, c := range []struct {
		r    rune
		want class
	}{{'a', lower | word}, {'Z', upper | word}, {'5', number | numeric | word}, {' ', space}, {'\n', space}, {'_', punct | punctuation | word},
		{'+', symbol | punctuation}, {'世', other | word}, {'\u0301', mark | word}, {'\U0010ffff', 0}, {'\x85', space}} {
		if got := table.of(c.r); got != c.want {
			t.Errorf("%q has classes %b, want %b", c.r, got, c.want)
		}
	}
}

// The two ways to merge give what merging by the definition gives.
func TestMergesAreThoseOfTheDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Tokens are strings of a and b; every pair may merge, in a random order.
		m := &bpe{unknown: -1}
		ids := map[string]int32{"a": 0, "b": 1}
		names := []string{"a", "b"}
		type rule struct{ a, b string }
		var rules []rule
		for range rapid.IntRange(0, 12).Draw(t, "merges") {
			r := rule{rapid.SampledFrom(names).Draw(t, "left"), rapid.SampledFrom(names).Draw(t, "right")}
			if slices.Contains(rules, r) {
				continue
			}
			rules = append(rules, r)
			if _, ok := ids[r.a+r.b]; !ok {
				ids[r.a+r.b] = int32(len(names))
				names = append(names, r.a+r.b)
			}
		}
		m.merges = newPairTable(len(rules))
		for i, r := range rules {
			m.merges.put(ids[r.a], ids[r.b], int32(i), ids[r.a+r.b])
		}
		text := rapid.StringMatching(`[ab]{2,40}`).Draw(t, "text")
		want := strings.Split(text, "")
		for {
			best, at := len(rules), -1
			for i := range len(want) - 1 {
				if k := slices.Index(rules, rule{want[i], want[i+1]}); k >= 0 && k < best {
					best, at = k, i
				}
			}
			if at < 0 {
				break
			}
			want = slices.Replace(want, at, at+2, want[at]+want[at+1])
		}
		for name, merge := range map[string]func(*scratch, []int32) []int32{"short": m.mergeShort, "long": m.mergeLong} {
			var start []int32
			for _, c := range text {
				start = append(start, ids[string(c)])
			}
			var got []string
			for _, id := range merge(new(scratch), start) {
				got = append(got, names[id])
			}
			if !slices.Equal(got, want) {
				t.Fatalf("%s: %q of %q, want %q", name, got, text, want)
			}
		}
	})
}

// A text is split before blanks only where that changes nothing.
func TestCuttingChangesNothing(t *testing.T) {
	for _, name := range []string{"llama2", "mistral", "gemma", "spm_bpe", "spm_gemma"} {
		tok, whole := load(t, name), load(t, name)
		m := whole.model
		if u, ok := m.(*userSplit); ok {
			m = u.rest
		}
		if m.(*bpe).boundary == nil {
			t.Errorf("%s is not split", name)
		}
		m.(*bpe).boundary = nil
		for _, text := range append(texts(t), readRandom().Texts[:1000]...) {
			if got, want := tok.Encode(text), whole.Encode(text); !slices.Equal(got, want) {
				t.Errorf("%s: %q: %v, want %v", name, text, got, want)
			}
		}
	}
	// A token that has a letter before its blank forbids the split there, and only there.
	b := &bpe{chars: map[rune]int32{'▁': 0, 'a': 1, 'b': 2}}
	b.buildBoundary(slices.Values([]string{"▁▁", "▁a", "a▁", "b"}))
	if !maps.Equal(b.joined, map[rune]bool{'a': true}) {
		t.Errorf("joined %v", b.joined)
	}
}
