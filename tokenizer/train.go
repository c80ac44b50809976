package tokenizer

import (
	"bytes"
	"cmp"
	"container/heap"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// minCount is how often a pair must be seen to become a token. One that was seen once says nothing
// about other texts.
const minCount = 2

// Train learns a byte-level BPE of at most vocabSize tokens from texts and gives the tokenizer.json
// that [Parse] and the library read. Words are split as in Llama 3. The special tokens have
// the first ids, in their order, then come the 256 bytes, then what was learned; a text too short
// to learn from gives fewer tokens than vocabSize. The same texts give the same bytes.
func Train(texts iter.Seq[string], vocabSize int, special ...string) ([]byte, error) {
	if vocabSize < len(special)+256 || vocabSize > maxID {
		return nil, diag.New(diag.BadInput, "a vocabulary of %d tokens cannot be trained", vocabSize).
			Try("ask for at least %d: the 256 bytes and %d special tokens", len(special)+256, len(special))
	}
	for i, token := range special {
		if utf8.RuneCountInString(token) < 2 || !utf8.ValidString(token) ||
			slices.Contains(special[:i], token) {
			return nil, diag.New(diag.BadInput, "%q cannot be a special token", token).
				Try("give each special token a name of its own, such as <|endoftext|>")
		}
	}
	tr := newTrainer(special)
	tr.count(texts)
	tr.learn(vocabSize)
	return tr.file(special), nil
}

// A trainer merges the pair of tokens that is seen most often, again and again.
type trainer struct {
	names  []string // of the tokens, by id
	ids    map[string]int32
	bytes  [256]int32
	merges [][2]int32

	words  [][]int32 // each word that was seen, as tokens
	counts []int     // how often

	pairs map[uint64]*pairCount
	queue pairQueue
}

// A pairCount is how often two tokens stand side by side, and in which words. A word may be listed
// though the pair is gone from it.
type pairCount struct {
	a, b  int32
	count int
	words []int32
	fresh bool // it is new in the merge at hand
}

func newTrainer(special []string) *trainer {
	tr := &trainer{ids: make(map[string]int32), pairs: make(map[uint64]*pairCount)}
	for _, token := range special {
		tr.name(token)
	}
	// Bytes are in the order of the characters that stand for them, as the library sorts them.
	order := make([]int, 256)
	for c := range order {
		order[c] = c
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(byteChars[a], byteChars[b]) })
	for _, c := range order {
		tr.bytes[c] = tr.name(string(byteChars[c]))
	}
	return tr
}

// name gives the id of a token, which may be new.
func (tr *trainer) name(token string) int32 {
	id, ok := tr.ids[token]
	if !ok {
		id = int32(len(tr.names))
		tr.names = append(tr.names, token)
		tr.ids[token] = id
	}
	return id
}

// count splits the texts into words and counts the pairs in them.
func (tr *trainer) count(texts iter.Seq[string]) {
	scan := findScanner(llama3Pattern)
	counts := make(map[string]int)
	var text []byte
	for t := range texts {
		text = appendValid(text[:0], t)
		for i := 0; i < len(text); {
			end := scan.match(text, i)
			counts[string(text[i:end])]++
			i = end
		}
	}
	for _, word := range slices.Sorted(maps.Keys(counts)) {
		ids := make([]int32, len(word))
		for i := range len(word) {
			ids[i] = tr.bytes[word[i]]
		}
		at := int32(len(tr.words))
		tr.words = append(tr.words, ids)
		tr.counts = append(tr.counts, counts[word])
		for i := range len(ids) - 1 {
			tr.change(ids[i], ids[i+1], at, 1)
		}
	}
}

// change notes that a pair came to stand in a word (by 1) or went away (by -1).
func (tr *trainer) change(a, b, word int32, by int) *pairCount {
	key := pairKey(a, b)
	p := tr.pairs[key]
	if p == nil {
		p = &pairCount{a: a, b: b}
		tr.pairs[key] = p
	}
	p.count += by * tr.counts[word]
	if by > 0 && (len(p.words) == 0 || p.words[len(p.words)-1] != word) {
		p.words = append(p.words, word)
	}
	return p
}

// learn merges until there are size tokens or no pair is left that was seen often enough.
func (tr *trainer) learn(size int) {
	for _, p := range tr.pairs {
		tr.enqueue(p)
	}
	for len(tr.names) < size && len(tr.queue) > 0 {
		top := heap.Pop(&tr.queue).(queued)
		switch p := top.pair; {
		case top.count == p.count:
			tr.merge(p)
		case top.count > p.count: // some of it was merged away since; what grew is queued again
			tr.enqueue(p)
		}
	}
}

func (tr *trainer) enqueue(p *pairCount) {
	if p.count >= minCount {
		heap.Push(&tr.queue, queued{p.count, p})
	}
}

// merge makes a token of a pair wherever it stands.
func (tr *trainer) merge(p *pairCount) {
	id := tr.name(tr.names[p.a] + tr.names[p.b])
	tr.merges = append(tr.merges, [2]int32{p.a, p.b})
	var fresh []*pairCount
	for _, w := range p.words {
		ids := tr.words[w]
		out := ids[:0]
		for i := 0; i < len(ids); i++ {
			if i+1 == len(ids) || ids[i] != p.a || ids[i+1] != p.b {
				out = append(out, ids[i])
				continue
			}
			if len(out) > 0 {
				last := out[len(out)-1]
				tr.change(last, p.a, w, -1)
				fresh = tr.appear(fresh, last, id, w)
			}
			out = append(out, id)
			i++
			if i+1 < len(ids) {
				tr.change(p.b, ids[i+1], w, -1)
				fresh = tr.appear(fresh, id, ids[i+1], w)
			}
		}
		tr.words[w] = out
	}
	p.count, p.words = 0, nil
	for _, q := range fresh {
		q.fresh = false
		tr.enqueue(q)
	}
}

// appear notes a pair with a new token.
func (tr *trainer) appear(fresh []*pairCount, a, b, word int32) []*pairCount {
	p := tr.change(a, b, word, 1)
	if !p.fresh {
		p.fresh = true
		fresh = append(fresh, p)
	}
	return fresh
}

// A queued is a pair with its count when it was put in the queue.
type queued struct {
	count int
	pair  *pairCount
}

// A pairQueue is a heap: the pair that was seen most often first, and of several the one with the
// lowest ids, as in the library.
type pairQueue []queued

// Len is for the heap, like the other methods.
func (q pairQueue) Len() int      { return len(q) }
func (q pairQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q pairQueue) Less(i, j int) bool {
	if q[i].count != q[j].count {
		return q[i].count > q[j].count
	}
	a, b := q[i].pair, q[j].pair
	return pairKey(a.a, a.b) < pairKey(b.a, b.b)
}

// Push is for the heap.
func (q *pairQueue) Push(x any) { *q = append(*q, x.(queued)) }

// Pop is for the heap.
func (q *pairQueue) Pop() any {
	old := *q
	p := old[len(old)-1]
	*q = old[:len(old)-1]
	return p
}

// fileHead and fileModel are what Train always writes, before and after the special tokens.
const (
	fileHead = `{
"version": "1.0",
"truncation": null,
"padding": null,
"added_tokens": [`
	fileSplit = `
],
"normalizer": null,
"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
{"type": "Split", "pattern": {"Regex": `
	fileBytes = `{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, ` +
		`"use_regex": false}`
	fileModel = `}, "behavior": "Isolated", "invert": false},
` + fileBytes + `]},
"post_processor": null,
"decoder": ` + fileBytes + `,
"model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
"end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
"vocab": {`
)

// file writes a tokenizer.json, with a token or a merge on each line.
func (tr *trainer) file(special []string) []byte {
	var b bytes.Buffer
	b.WriteString(fileHead)
	for i, token := range special {
		line(&b, i, addedToken{ID: int32(i), Content: token, Special: true})
	}
	b.WriteString(fileSplit)
	quote(&b, llama3Pattern)
	b.WriteString(fileModel)
	for id, token := range tr.names {
		line(&b, id, token)
		fmt.Fprintf(&b, ": %d", id)
	}
	b.WriteString("\n},\n\"merges\": [")
	for i, m := range tr.merges {
		line(&b, i, []string{tr.names[m[0]], tr.names[m[1]]})
	}
	b.WriteString("\n]}\n}\n")
	return b.Bytes()
}

// line writes the i-th of several values.
func line(b *bytes.Buffer, i int, v any) {
	if i > 0 {
		b.WriteByte(',')
	}
	b.WriteByte('\n')
	quote(b, v)
}

func quote(b *bytes.Buffer, v any) {
	e := json.NewEncoder(b)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // strings, numbers and flags always encode
	b.Truncate(b.Len() - 1)
}
