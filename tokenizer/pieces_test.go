package tokenizer

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// pieceTexts are texts of some thousand bytes: of the hard ones and of random ones, joined by what
// stands at split points, and some that have no good place for one.
func pieceTexts(t testing.TB, tok *Tokenizer, r *rand.Rand, n int) []string {
	t.Helper()
	hard := texts(t)
	joints := []string{
		" ", "  ", "\n", "\n\n", "\r\n", "\t", "", "", "▁", " ▁", "\u00a0", "\u00a0 ", "\u3000 ", "\n\u3000", "a", "e\u0301",
		" \u0301", "\n\u0301", "7", " 7", "\n7", "!", " !", "!\n", "'s", " 's", "日本", " 日本", "\nかな", "\u1112\u1161", "\xff", " \xe2\x82",
		"\x00", "ﬁ ", "…\n", ". \n", "\n ", " \n", "x\n", "word ", "ſ", "\u200b ", "\u0085 ", "_ ", "</ ", "/\n", "//\nx",
	}
	for id := range int32(tok.Size()) {
		if s := tok.Text([]int32{id}, Options{KeepSpecial: true, NoTemplate: true}); tok.Special(id) || r.IntN(40) == 0 {
			joints = append(joints, s, s+" ", " "+s, s+"\n", "\n"+s, s+"\u00a0 x", s+"\n\u00a0", s+" \n\u3000")
		}
	}
	letters := []rune("abcdefghij ABC  \n\n.,'12 9éβ日本語한글▁\u00a0\u3000\u0301\u200d😀")
	var out []string
	for range n {
		var b strings.Builder
		some := joints // other texts repeat three of them
		if r.IntN(2) == 0 {
			some = []string{joints[r.IntN(len(joints))], joints[r.IntN(len(joints))], joints[r.IntN(len(joints))]}
		}
		for b.Len() < 600+r.IntN(2000) {
			switch r.IntN(8) {
			case 0:
				b.WriteString(hard[r.IntN(len(hard))])
			case 1, 2, 3, 4:
				for range r.IntN(12) {
					b.WriteRune(letters[r.IntN(len(letters))])
				}
			case 5:
				b.WriteString(strings.Repeat(some[r.IntN(len(some))], 1+r.IntN(6)))
			default:
				b.WriteString(some[r.IntN(len(some))])
			}
		}
		out = append(out, b.String())
	}
	return out
}

// A text has the same tokens in pieces and as a whole, if every split point says that it keeps them.
func TestPiecesHaveTheTokensOfTheWhole(t *testing.T) {
	const rounds = 60 // 20,000 were tried
	for _, name := range families {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, uint64(len(name))))
			whole, split := load(t, name), load(t, name)
			split.piece = 256
			exact := 0
			for _, text := range pieceTexts(t, whole, r, rounds) {
				pieces, safe := piecesOf(t, split, text)
				for _, o := range []Options{{}, {NoTemplate: true}, {Literal: true}} {
					want, got := whole.Append(nil, text, o), split.Append(nil, text, o)
					if safe && !slices.Equal(got, want) {
						i := 0
						for i < min(len(got), len(want)) && got[i] == want[i] {
							i++
						}
						lo := max(0, i-4)
						t.Fatalf("pieces %q\n%+v: from token %d\n got %q\nwant %q", pieces, o, i,
							names(whole, got[lo:min(len(got), i+5)]), names(whole, want[lo:min(len(want), i+5)]))
					}
					if one := oneByOne(split, pieces, o); !slices.Equal(one, got) {
						t.Fatalf("pieces %q\n%+v: one by one %v, together %v", pieces, o, one, got)
					}
				}
				if safe {
					exact++
				}
			}
			if exact < rounds/4 {
				t.Errorf("%d of %d texts had split points that keep the tokens", exact, rounds)
			}
		})
	}
}

// piecesOf splits a text, and reports whether every split point keeps the tokens.
func piecesOf(t *testing.T, tok *Tokenizer, text string) (pieces []string, safe bool) {
	t.Helper()
	safe = true
	for len(text) > tok.piece {
		n, ok := tok.pieceEnd(text)
		if n <= 0 || n > tok.piece {
			t.Fatalf("a piece of %d bytes", n)
		}
		// No more of the text is looked at than the longest piece, and a byte.
		if m, again := tok.pieceEnd(text[:tok.piece+1]); m != n || again != ok {
			t.Fatalf("a piece of %d bytes, or %d if the text ends", n, m)
		}
		safe = safe && ok
		pieces, text = append(pieces, text[:n]), text[n:]
	}
	return append(pieces, text), safe
}

// oneByOne encodes pieces as one does who never has them all.
func oneByOne(tok *Tokenizer, pieces []string, o Options) []int32 {
	var out []int32
	o.Part = new(Part)
	for i, piece := range pieces {
		o.Part.More = i < len(pieces)-1
		out = append(out, tok.Append(nil, piece, o)...)
	}
	return out
}

// What has no good split point is split all the same, between characters: nothing is lost.
func TestHostileTextsAreCut(t *testing.T) {
	for _, name := range []string{"gpt2", "llama3", "nemo", "deepseek", "trained"} {
		tok := load(t, name)
		tok.piece = 256
		for _, one := range []string{"x", " ", "\n", "日", "\u0301", "😀", "1", " \n", "<|x|>", "\u00a0"} {
			text := strings.Repeat(one, 3000)
			piecesOf(t, tok, text)
			if got := tok.Decode(tok.Append(nil, text, Options{NoTemplate: true, Literal: true})); got != text {
				t.Errorf("%s: %q: %d bytes came back of %d", name, one, len(got), len(text))
			}
		}
	}
	for _, name := range families {
		tok := load(t, name)
		tok.piece = 256
		for _, text := range []string{
			strings.Repeat("\xff", 3000), strings.Repeat("\x80", 3000), strings.Repeat("a\xe2\x82", 1000),
			strings.Repeat("\xf0\x9f\x98", 1000), strings.Repeat(" ", 3000), strings.Repeat("▁", 1000),
		} {
			pieces, _ := piecesOf(t, tok, text)
			if got := oneByOne(tok, pieces, Options{}); !slices.Equal(got, tok.Encode(text)) {
				t.Errorf("%s: %q…: pieces have other tokens", name, text[:8])
			}
		}
	}
}

// Prose is split where the tokens stay the same, at the size of pieces that is used.
func TestLongProseHasTheTokensOfTheWhole(t *testing.T) {
	text := strings.Repeat("It's the 3rd of May, and nobody knows why.\n\nIn 1984 (say) 日本 was\tfar. ", 20000)
	for _, name := range []string{"gpt2", "llama2", "spm_unigram"} {
		whole, split := load(t, name), load(t, name)
		whole.piece = len(text)
		if _, safe := piecesOf(t, split, text); !safe {
			t.Errorf("%s: prose has no split point", name)
		}
		if len(text) < PieceBytes+PieceBytes/4 || !slices.Equal(whole.Encode(text), split.Encode(text)) {
			t.Errorf("%s: %d bytes have other tokens in pieces", name, len(text))
		}
	}
}
