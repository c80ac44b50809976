package tokenizer

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/golden"
)

// trainTexts are the texts that make.py gives to the library's trainer.
func trainTexts(t *testing.T) []string {
	license, err := os.ReadFile("../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	return append(texts(t), string(license))
}

// The golden file is among the families that the library encodes with, so it loads what Train
// writes and gives the same ids.
func TestTrainWritesTheGolden(t *testing.T) {
	got, err := Train(slices.Values(trainTexts(t)), 700, "<|endoftext|>", "<|pad|>")
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "testdata/trained.json", got) // after -update run make.py
}

func TestTrainLearnsWhatTheLibraryLearns(t *testing.T) {
	var want struct {
		Trainer struct {
			Vocab  map[string]int32
			Merges []mergePair
		}
	}
	readGzip(t, "testdata/want.json.gz", &want)
	data, err := Train(slices.Values(trainTexts(t)), 700, "<|endoftext|>", "<|pad|>")
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Model struct {
			Vocab  map[string]int32
			Merges []mergePair
		}
	}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(got.Model.Vocab, want.Trainer.Vocab) {
		t.Error("the vocabularies differ")
	}
	if !slices.Equal(got.Model.Merges, want.Trainer.Merges) {
		for i, m := range want.Trainer.Merges {
			if i >= len(got.Model.Merges) || got.Model.Merges[i] != m {
				t.Fatalf("merge %d of %d is not %q", i, len(want.Trainer.Merges), m)
			}
		}
	}
}

// Merging is compared with doing it the slow way: count all pairs again after each merge.
func TestTrainMergesTheMostFrequentPair(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.StringMatching(`[abc]{1,8}`), 1, 12).Draw(t, "words")
		size := 256 + rapid.IntRange(0, 12).Draw(t, "merges")
		data, err := Train(slices.Values(words), size)
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ Model struct{ Merges []mergePair } }
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		want := slowMerges(words, size-256)
		if !slices.Equal(got.Model.Merges, want) {
			t.Fatalf("%q: merges %q, want %q", words, got.Model.Merges, want)
		}
	})
}

// slowMerges gives merges until there are n new tokens. Letters a, b, c stand for themselves and
// have ids in their order.
func slowMerges(words []string, n int) []mergePair {
	ids := map[string]int{"a": 0, "b": 1, "c": 2}
	split := make([][]string, len(words))
	for i, w := range words {
		split[i] = strings.Split(w, "")
	}
	var merges []mergePair
	for made := 0; made < n; {
		counts := make(map[mergePair]int)
		for _, w := range split {
			for i := range len(w) - 1 {
				counts[mergePair{w[i], w[i+1]}]++
			}
		}
		// The library counts a run of one letter as it stands: aaa has aa twice.
		best, most := mergePair{}, 0
		for p, c := range counts {
			if c > most || c == most && (ids[p[0]] < ids[best[0]] || ids[p[0]] == ids[best[0]] && ids[p[1]] < ids[best[1]]) {
				best, most = p, c
			}
		}
		if most < minCount {
			break
		}
		merges = append(merges, best)
		if _, ok := ids[best[0]+best[1]]; !ok {
			ids[best[0]+best[1]] = len(ids)
			made++
		}
		for k, w := range split {
			var out []string
			for i := 0; i < len(w); i++ {
				if i+1 < len(w) && w[i] == best[0] && w[i+1] == best[1] {
					out = append(out, w[i]+w[i+1])
					i++
				} else {
					out = append(out, w[i])
				}
			}
			split[k] = out
		}
	}
	return merges
}

func TestTrainIsDeterministic(t *testing.T) {
	one, err := Train(slices.Values(trainTexts(t)), 1000)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if two, _ := Train(slices.Values(trainTexts(t)), 1000); !bytes.Equal(one, two) {
			t.Fatal("the same texts gave other bytes")
		}
	}
}

func TestTrainRefuses(t *testing.T) {
	none := slices.Values([]string(nil))
	for _, c := range []struct {
		size    int
		special []string
	}{{255, nil}, {256, []string{"<s>"}}, {1 << 30, nil}, {300, []string{""}}, {300, []string{"x"}}, {300, []string{"é"}},
		{300, []string{"<s>", "<s>"}}, {300, []string{"\xff<s>"}}} {
		if _, err := Train(none, c.size, c.special...); diag.From(err) == nil || diag.From(err).Fix == "" {
			t.Errorf("Train(%d, %q): %v", c.size, c.special, err)
		}
	}
	data, err := Train(none, 256)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := Parse(data)
	if err != nil || tok.Size() != 256 {
		t.Errorf("nothing to learn from: %v", err)
	}
}
