package tokenizer

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Special tokens that a text spells at places which are plain are text; at others they are tokens.
func TestPlainPlaces(t *testing.T) {
	for _, name := range []string{"qwen2", "llama3", "phi3", "gemma", "deepseek", "mistral", "nemo"} {
		tok, err := Load(filepath.Join("testdata", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		special := ""
		for id := range int32(tok.Size()) {
			// Tokens that are looked for in normalized text cannot be kept apart, and Marks says so.
			if tok.Special(id) && tok.raw != nil && slices.ContainsFunc(tok.raw.tokens, func(a addedToken) bool { return a.ID == id }) {
				special = tok.Token(id)
			}
		}
		text := "a" + special + "b" + special + strings.Repeat(" long", 30000) + special
		marks, err := tok.Marks(text)
		if err != nil || len(marks) != 3 || text[marks[1][0]:marks[1][1]] != special {
			t.Fatalf("%s: %q at %v, %v", name, special, marks, err)
		}
		want, _ := tok.ID(special)
		count := func(o Options) (n int) {
			for _, id := range tok.Append(nil, text, o) {
				if id == want {
					n++
				}
			}
			return n
		}
		for plain, n := range map[string]int{"": 3, "0": 2, "1": 2, "2": 2, "012": 0} {
			var o Options
			for _, i := range plain {
				o.Plain = append(o.Plain, marks[i-'0'])
			}
			o.NoTemplate = true
			if got := count(o); got != n {
				t.Errorf("%s: %d tokens with %q plain, want %d", name, got, plain, n)
			}
		}
	}
}

// The places of tokens are where what they spell stands, whatever a vocabulary does with blanks.
func TestOffsets(t *testing.T) {
	for _, name := range []string{"qwen2", "llama3", "phi3", "gemma", "deepseek", "mistral", "nemo", "gpt2", "llama2"} {
		tok, err := Load(filepath.Join("testdata", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{"", "a", " a  b", "hello world\n\nnaïve 日本 👩‍🚀 x", "\n\n  b\n", "12 34\t56"} {
			ids := tok.Append(nil, text, Options{NoTemplate: true})
			places, ok := tok.Offsets(ids, text)
			if !ok || len(places) != len(ids) || !slices.IsSorted(places) || len(places) > 0 && places[0] != 0 {
				t.Errorf("%s: %q: %v, %t", name, text, places, ok)
				continue
			}
			for i, id := range ids {
				to := len(text)
				if i+1 < len(ids) {
					to = places[i+1]
				}
				own := strings.TrimLeft(tok.Text([]int32{id}, Options{KeepSpecial: true}), " ")
				if !strings.Contains(own, "\ufffd") && strings.TrimLeft(text[places[i]:to], " ") != own {
					t.Errorf("%s: token %d of %q is %q, and stands at %q", name, i, text, own, text[places[i]:to])
				}
			}
		}
		if _, ok := tok.Offsets(tok.Append(nil, "other", Options{NoTemplate: true}), "text"); ok {
			t.Errorf("%s: tokens of another text have places", name)
		}
	}
}
