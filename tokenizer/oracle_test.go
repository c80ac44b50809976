package tokenizer

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"flag"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// randomFile lets a longer file of testdata/make.py --random be compared.
var randomFile = flag.String("random", "testdata/random.json.gz", "random texts and what the libraries make of them")

// The tokenizers of testdata, each made like the tokenizers of the family it is named after.
var (
	jsonFamilies  = []string{"gpt2", "llama3", "qwen2", "nemo", "deepseek", "flags", "llama2", "mistral", "phi3", "gemma", "metaspace", "fused", "trained"}
	modelFamilies = []string{"spm_bpe", "spm_gemma", "spm_unigram", "spm_unigram_bytes"}
	families      = slices.Concat(jsonFamilies, modelFamilies)
)

func familyPath(name string) string {
	if slices.Contains(modelFamilies, name) {
		return filepath.Join("testdata", name+".model")
	}
	return filepath.Join("testdata", name+".json")
}

func load(t testing.TB, name string) *Tokenizer {
	t.Helper()
	tok, err := Load(familyPath(name))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func readGzip(t testing.TB, path string, v any) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(z).Decode(v); err != nil {
		t.Fatal(err)
	}
}

// texts are the texts that were thought up to be hard.
func texts(t testing.TB) []string {
	t.Helper()
	data, err := os.ReadFile("testdata/texts.json")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestLibrariesGiveTheSameIDs(t *testing.T) {
	var want struct {
		Families map[string]struct {
			Size  int
			Texts []struct {
				IDs, Bare, Literal []int32
				Text, Whole        string
			}
			Decode [][2]json.RawMessage
			Keep   []string
		}
	}
	readGzip(t, "testdata/want.json.gz", &want)
	all := texts(t)
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok, w := load(t, name), want.Families[name]
			if tok.Size() != w.Size {
				t.Errorf("%d tokens, want %d", tok.Size(), w.Size)
			}
			for i, text := range all {
				for _, c := range []struct {
					o    Options
					want []int32
				}{
					{Options{}, w.Texts[i].IDs},
					{Options{NoTemplate: true}, w.Texts[i].Bare},
					{Options{NoTemplate: true, Literal: true}, w.Texts[i].Literal},
				} {
					if got := tok.Append(nil, text, c.o); !slices.Equal(got, c.want) {
						t.Errorf("%q %+v:\n got %v %q\nwant %v %q", text, c.o, got, names(tok, got), c.want, names(tok, c.want))
					}
				}
				if got := tok.Decode(w.Texts[i].IDs); got != w.Texts[i].Text {
					t.Errorf("text of %q:\n got %q\nwant %q", text, got, w.Texts[i].Text)
				}
				if got := tok.Text(w.Texts[i].IDs, Options{KeepSpecial: true}); len(w.Keep) > 0 && got != w.Texts[i].Whole {
					t.Errorf("text of %q with special tokens:\n got %q\nwant %q", text, got, w.Texts[i].Whole)
				}
			}
			for i, row := range w.Decode {
				var ids []int32
				var text string
				if err := json.Unmarshal(row[0], &ids); err != nil {
					t.Fatal(err)
				}
				if err := json.Unmarshal(row[1], &text); err != nil {
					t.Fatal(err)
				}
				if got := tok.Decode(ids); got != text {
					t.Errorf("text of %v %q:\n got %q\nwant %q", ids, names(tok, ids), got, text)
				}
				if len(w.Keep) > 0 {
					if got := tok.Text(ids, Options{KeepSpecial: true}); got != w.Keep[i] {
						t.Errorf("text of %v %q with special tokens:\n got %q\nwant %q", ids, names(tok, ids), got, w.Keep[i])
					}
				}
			}
		})
	}
}

func names(t *Tokenizer, ids []int32) []string {
	var out []string
	for _, id := range ids {
		out = append(out, t.Token(id))
	}
	return out
}

// blocks calls f with each ten texts and the CRC-32 that make.py found for them.
func blocks(t *testing.T, texts []string, sums []uint32, row func([]byte, string) []byte) {
	t.Helper()
	bad := 0
	for i, sum := range sums {
		block := texts[i*10 : min(len(texts), i*10+10)]
		var b []byte
		for _, text := range block {
			b = row(b, text)
		}
		if crc32.ChecksumIEEE(b) != sum {
			if bad++; bad <= 5 {
				t.Errorf("one of these differs: %q", block)
			}
		}
	}
	if bad > 0 {
		t.Errorf("%d of %d blocks differ", bad, len(sums))
	}
}

func appendNumbers(b []byte, numbers ...int32) []byte {
	for _, n := range numbers {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return binary.LittleEndian.AppendUint32(b, 0xffffffff)
}

type randomTexts struct {
	Texts              []string
	IDs, Splits, Norms map[string][]uint32
}

var readRandom = sync.OnceValue(func() (r randomTexts) {
	f, err := os.Open(*randomFile)
	if err != nil {
		return r
	}
	defer f.Close()
	if z, err := gzip.NewReader(f); err == nil {
		_ = json.NewDecoder(z).Decode(&r)
	}
	return r
})

func TestLibrariesAgreeOnRandomTexts(t *testing.T) {
	r := readRandom()
	if len(r.Texts) < 3000 {
		t.Fatalf("%s has %d texts", *randomFile, len(r.Texts))
	}
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := load(t, name)
			blocks(t, r.Texts, r.IDs[name], func(b []byte, text string) []byte {
				ids := tok.Encode(text)
				return append(append(appendNumbers(b, ids...), tok.Decode(ids)...), 0xff)
			})
		})
	}
}

func TestScannersMatchTheirPatterns(t *testing.T) {
	r := readRandom()
	index := map[string]int{"gpt2": 0, "llama3": 1, "cl100k": 2, "qwen2": 3, "qwen35": 4, "o200k": 5, "tekken": 6, "deepseek2": 7,
		"deepseek1": 8, "deepseek0": 9, "digit": 10}
	if len(index) != len(patterns) || len(r.Splits) < len(index) {
		t.Fatalf("%d patterns, %d named, %d in the file", len(patterns), len(index), len(r.Splits))
	}
	for key, sums := range r.Splits {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			words := strings.Fields(key)
			st := step{scan: findScanner(patterns[index[words[0]]].text), invert: len(words) > 2}
			st.behavior = behavior(slices.Index(behaviorNames, words[1]))
			var lengths lengthModel
			tok := &Tokenizer{steps: []step{st}, model: &lengths, free: make(chan *scratch, 1), piece: PieceBytes}
			blocks(t, r.Texts, sums, func(b []byte, text string) []byte {
				return appendNumbers(b, tok.Encode(text)...)
			})
		})
	}
}

// A lengthModel gives the length of each word.
type lengthModel struct{}

func (*lengthModel) encode(_ *scratch, dst []int32, word []byte) []int32 {
	return append(dst, int32(len(word)))
}

func TestNormalForms(t *testing.T) {
	r := readRandom()
	for _, name := range []string{"NFC", "NFD", "NFKC", "NFKD"} {
		f := newForm(name[2] == 'K', strings.HasSuffix(name, "C"))
		blocks(t, r.Texts, r.Norms[name], func(b []byte, text string) []byte {
			return append(f.normalize(b, []byte(text)), 0xff)
		})
		// A normal form is its own normal form.
		for _, text := range r.Texts {
			once := f.normalize(nil, []byte(text))
			if twice := f.normalize(nil, once); !bytes.Equal(once, twice) {
				t.Errorf("%s of %q: %q, and again %q", name, text, once, twice)
			}
		}
	}
}
