package tokenizer

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// FuzzEncodeDecode holds what is true of every text: ids are in the vocabulary, valid text comes
// back from byte-level tokenizers that do not normalize, and broken text comes back mended.
func FuzzEncodeDecode(f *testing.F) {
	for _, text := range texts(f) {
		f.Add(text)
	}
	f.Add("\xff\xe2\x82 \xf0\x9f\x98")
	toks := make(map[string]*Tokenizer)
	for _, name := range families {
		toks[name] = load(f, name)
	}
	exact := []string{"gpt2", "llama3", "nemo", "deepseek", "trained"}
	f.Fuzz(func(t *testing.T, text string) {
		mended := string(appendValid(nil, text))
		if utf8.ValidString(text) && mended != text || !utf8.ValidString(mended) {
			t.Fatalf("%q mended to %q", text, mended)
		}
		for name, tok := range toks {
			for _, o := range []Options{{}, {NoTemplate: true, KeepSpecial: true}, {NoTemplate: true, Literal: true, KeepSpecial: true}} {
				ids := tok.Append(nil, text, o)
				if slices.ContainsFunc(ids, func(id int32) bool { return tok.Token(id) == "" }) {
					t.Fatalf("%s: %q has ids %v", name, text, ids)
				}
				if got := tok.Text(ids, o); !utf8.ValidString(got) || o.NoTemplate && slices.Contains(exact, name) && got != mended {
					t.Fatalf("%s: %q came back as %q from %v", name, text, got, ids)
				}
			}
		}
	})
}

// FuzzLoad holds that a file gives a tokenizer that works or an error that a person can act on.
func FuzzLoad(f *testing.F) {
	for _, name := range families {
		data, err := os.ReadFile(familyPath(name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, c := range refused {
		f.Add([]byte(c.file()))
	}
	f.Add([]byte("\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"))
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := Parse(data)
		if err != nil {
			if e, ok := errors.AsType[*diag.Error](err); !ok || e.Fix == "" || e.Code != diag.BadInput {
				t.Fatalf("%v", err)
			}
			return
		}
		text := "Hello <s> wörld ▁▁ 123\n\n 世界 e\u0301 \xff" + strings.Repeat("ab ", 40)
		ids := tok.Encode(text)
		if slices.ContainsFunc(ids, func(id int32) bool { return id < 0 || int(id) >= tok.Size() }) {
			t.Fatalf("ids %v of %d", ids, tok.Size())
		}
		tok.Decode(ids)
		tok.Decode([]int32{0, 1, 2, 3, -1})
	})
}
