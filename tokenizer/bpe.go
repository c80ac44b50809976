package tokenizer

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"unicode/utf8"
)

// A model turns a word into tokens.
type model interface {
	encode(s *scratch, dst []int32, word []byte) []int32
}

// A bpe merges the characters of a word, or its bytes, into tokens: again and again the pair whose
// rank is lowest, and of several the leftmost.
type bpe struct {
	merges    pairTable
	byteLevel bool             // words are bytes, not characters
	bytes     [256]int32       // of a byte-level model: the token of each byte, or -1
	chars     map[rune]int32   // of the others: the token of each character
	ascii     [128]int32       // the same for the first 128, or -1
	fallback  *[256]int32      // the tokens that spell unknown characters, or -1; nil without them
	unknown   int32            // what an unknown character becomes; -1 drops it
	fuse      bool             // a run of unknown characters is one token
	whole     map[string]int32 // words that are tokens whatever the merges say

	// boundary is the character that words begin with in a text that is not split into words, and
	// joined are the characters that some token has right before it. No merge crosses a boundary after
	// any other character, so the parts can be merged by themselves, with the same result.
	boundary []byte
	joined   map[rune]bool
}

// noRank is the rank of a pair that does not merge.
const noRank = math.MaxInt32

// A pairTable is a hash table from two tokens to the rank of their merge and its result.
type pairTable struct {
	slots []pairSlot
	shift uint
}

type pairSlot struct {
	key      uint64
	rank, id int32
}

// noPair is not a key: tokens are not negative.
const noPair = math.MaxUint64

func newPairTable(n int) pairTable {
	bits := uint(4)
	for 1<<bits < 2*n {
		bits++
	}
	t := pairTable{slots: make([]pairSlot, 1<<bits), shift: 64 - bits}
	for i := range t.slots {
		t.slots[i] = pairSlot{key: noPair, rank: noRank}
	}
	return t
}

func pairKey(a, b int32) uint64 { return uint64(uint32(a))<<32 | uint64(uint32(b)) }

// The multiplier is 2^64 divided by the golden ratio (Knuth 6.4).
func (t *pairTable) slot(key uint64) *pairSlot {
	for i := key * 0x9e3779b97f4a7c15 >> t.shift; ; i = (i + 1) & uint64(len(t.slots)-1) {
		if s := &t.slots[i]; s.key == key || s.key == noPair {
			return s
		}
	}
}

// put sets the merge of a pair; a later one replaces an earlier one.
func (t *pairTable) put(a, b, rank, id int32) {
	*t.slot(pairKey(a, b)) = pairSlot{pairKey(a, b), rank, id}
}

// encode appends the tokens of a word, or of a text that is not split into words.
func (m *bpe) encode(s *scratch, dst []int32, text []byte) []int32 {
	if m.boundary == nil {
		return m.word(s, dst, text)
	}
	if id, ok := m.whole[string(text)]; ok {
		return append(dst, id)
	}
	start := 0
	for i := 0; ; {
		skip := bytes.Index(text[i:], m.boundary)
		if skip < 0 {
			break
		}
		at := i + skip
		i = at + len(m.boundary)
		if at == start || bytes.HasSuffix(text[:at], m.boundary) {
			continue
		}
		if r, _ := utf8.DecodeLastRune(text[:at]); !m.joined[r] {
			dst = m.word(s, dst, text[start:at])
			start = at
		}
	}
	return m.word(s, dst, text[start:])
}

func (m *bpe) word(s *scratch, dst []int32, word []byte) []int32 {
	key, ok := makeKey(word)
	if !ok {
		return append(dst, m.compute(s, word)...)
	}
	if s.cache == nil {
		s.cache = make(wordCache, 1<<cacheBits)
	}
	e := s.cache.entry(key)
	if e.key != key {
		ids := m.compute(s, word)
		if len(ids) > len(e.ids) {
			return append(dst, ids...)
		}
		e.key, e.n = key, uint8(len(ids))
		copy(e.ids[:], ids)
	}
	return append(dst, e.ids[:e.n]...)
}

// compute gives the tokens of a word; they stay valid until the next call.
func (m *bpe) compute(s *scratch, word []byte) []int32 {
	if id, ok := m.whole[string(word)]; ok {
		s.ids = append(s.ids[:0], id)
		return s.ids
	}
	if m.byteLevel {
		s.ids = m.fromBytes(s.ids[:0], word)
	} else {
		s.ids = m.fromChars(s.ids[:0], word)
	}
	switch n := len(s.ids); {
	case n < 2:
		return s.ids
	case n <= maxScan:
		return m.mergeShort(s, s.ids)
	default:
		return m.mergeLong(s, s.ids)
	}
}

// fromBytes gives the tokens of the bytes of a word. A byte that the vocabulary lacks is unknown.
func (m *bpe) fromBytes(ids []int32, word []byte) []int32 {
	pending := false
	for _, c := range word {
		id := m.bytes[c]
		if id >= 0 {
			pending = false
			ids = append(ids, id)
			continue
		}
		if m.unknown >= 0 && (!pending || !m.fuse) {
			ids = append(ids, m.unknown)
		}
		pending = true
	}
	return ids
}

// fromChars gives the tokens of the characters of a word. An unknown token waits until the next
// known character, even when bytes come between: the library does so.
func (m *bpe) fromChars(ids []int32, word []byte) []int32 {
	waiting := false
	for i := 0; i < len(word); {
		id, n := m.char(word[i:])
		c := word[i : i+n]
		i += n
		if id >= 0 {
			if waiting {
				ids = append(ids, m.unknown)
				waiting = false
			}
			ids = append(ids, id)
			continue
		}
		if m.spelled(c) {
			for _, b := range c {
				ids = append(ids, m.fallback[b])
			}
			continue
		}
		if m.unknown < 0 {
			continue
		}
		if waiting && !m.fuse {
			ids = append(ids, m.unknown)
		}
		waiting = true
	}
	if waiting {
		ids = append(ids, m.unknown)
	}
	return ids
}

func (m *bpe) char(b []byte) (id int32, n int) {
	if b[0] < utf8.RuneSelf {
		return m.ascii[b[0]], 1
	}
	r, n := utf8.DecodeRune(b)
	if id, ok := m.chars[r]; ok {
		return id, n
	}
	return -1, n
}

// spelled reports whether each byte of a character has a token.
func (m *bpe) spelled(c []byte) bool {
	return m.fallback != nil &&
		!slices.ContainsFunc(c, func(b byte) bool { return m.fallback[b] < 0 })
}

// maxScan is the longest word in which the lowest rank is looked for pair by pair, and not with a
// heap. On the sources of Go the limits from 32 to 256 are equally fast, and 16 is slower.
const maxScan = 64

// A pending is a pair that may be merged: its rank and what it becomes.
type pending struct{ rank, id int32 }

func (m *bpe) pending(a, b int32) pending {
	s := m.merges.slot(pairKey(a, b))
	return pending{s.rank, s.id}
}

// mergeShort merges in place.
func (m *bpe) mergeShort(s *scratch, ids []int32) []int32 {
	pairs := s.pairs[:0]
	for i := range len(ids) - 1 {
		pairs = append(pairs, m.pending(ids[i], ids[i+1]))
	}
	s.pairs = pairs
	for {
		best, rank := -1, int32(noRank)
		for i := range pairs {
			if pairs[i].rank < rank {
				best, rank = i, pairs[i].rank
			}
		}
		if best < 0 {
			return ids
		}
		ids[best] = pairs[best].id
		ids = append(ids[:best+1], ids[best+2:]...)
		pairs = append(pairs[:best], pairs[best+1:]...)
		if best > 0 {
			pairs[best-1] = m.pending(ids[best-1], ids[best])
		}
		if best < len(pairs) {
			pairs[best] = m.pending(ids[best], ids[best+1])
		}
	}
}

// A link is a token in the list that mergeLong works on. A token that was merged into the one
// before it has no pair, so that what the heap still has of it is passed over.
type link struct{ prev, next int32 }

// mergeLong merges in place with a heap of pairs, for a text that was not split into words.
func (m *bpe) mergeLong(s *scratch, ids []int32) []int32 {
	n := len(ids)
	links, pairs := slices.Grow(s.links[:0], n), slices.Grow(s.pairs[:0], n)
	heap := slices.Grow(s.heap[:0], n)
	for i := range n {
		links = append(links, link{int32(i) - 1, int32(i) + 1})
		p := pending{rank: noRank}
		if i+1 < n {
			p = m.pending(ids[i], ids[i+1])
		}
		pairs = append(pairs, p)
		heap.push(p.rank, i)
	}
	for len(heap) > 0 {
		rank, i := heap.pop()
		if pairs[i].rank != rank {
			continue
		}
		ids[i] = pairs[i].id
		right := links[i].next
		pairs[right].rank = noRank
		after := links[right].next
		links[i].next = after
		pairs[i].rank = noRank
		if int(after) < n {
			links[after].prev = int32(i)
			pairs[i] = m.pending(ids[i], ids[after])
			heap.push(pairs[i].rank, i)
		}
		if before := links[i].prev; before >= 0 {
			pairs[before] = m.pending(ids[before], ids[i])
			heap.push(pairs[before].rank, int(before))
		}
	}
	out := ids[:0]
	for i := int32(0); int(i) < n; i = links[i].next {
		out = append(out, ids[i])
	}
	s.links, s.pairs, s.heap = links, pairs, heap
	return out
}

// A rankHeap has the rank of a pair in the upper half of each element and its place in the lower,
// so that the least is the leftmost of the lowest rank.
type rankHeap []uint64

func (h *rankHeap) push(rank int32, at int) {
	if rank == noRank {
		return
	}
	*h = append(*h, uint64(rank)<<32|uint64(at))
	a := *h
	for i := len(a) - 1; i > 0; {
		up := (i - 1) / 2
		if a[up] <= a[i] {
			break
		}
		a[up], a[i] = a[i], a[up]
		i = up
	}
}

func (h *rankHeap) pop() (rank int32, at int) {
	a := *h
	top, last := a[0], len(a)-1
	a[0] = a[last]
	a = a[:last]
	*h = a
	for i := 0; ; {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && a[child+1] < a[child] {
			child++
		}
		if a[i] <= a[child] {
			break
		}
		a[i], a[child] = a[child], a[i]
		i = child
	}
	return int32(top >> 32), int(uint32(top))
}

// A wordCache keeps the tokens of short words. A word has one place, and a newer word takes it.
type wordCache []cacheEntry

// cacheBits gives 2^16 places of 48 bytes. On the sources of Go with 32,000 tokens 2^14 places give
// 42 MB/s, 2^16 give 61, and 2^17 no more.
const cacheBits = 16

// wordBytes is the longest word that is kept, and maxIDs its most tokens: 99 in 100 words of Go
// source have at most 16 bytes, and they are 97 in 100 of the text.
const (
	wordBytes = 16
	maxIDs    = 5
)

type cacheEntry struct {
	key wordKey
	ids [maxIDs]int32
	n   uint8
}

// A wordKey is a word as two numbers, and its length, which the key of no place shares with a word.
type wordKey struct {
	lo, hi uint64
	n      uint8
}

// makeKey reads a word as numbers. It reads past the word's end, into the space that every buffer
// of words has after its text.
func makeKey(word []byte) (wordKey, bool) {
	n := len(word)
	if n > wordBytes || cap(word) < wordBytes {
		return wordKey{}, false
	}
	wide := word[:wordBytes]
	k := wordKey{n: uint8(n), lo: binary.LittleEndian.Uint64(wide)}
	if n <= 8 {
		k.lo &= 1<<(8*uint(n)) - 1
	} else {
		k.hi = binary.LittleEndian.Uint64(wide[8:]) & (1<<(8*uint(n-8)) - 1)
	}
	return k, true
}

func (c wordCache) entry(k wordKey) *cacheEntry {
	h := (k.lo*0x9e3779b97f4a7c15 ^ k.hi*0xc2b2ae3d27d4eb4f) * 0x9e3779b97f4a7c15
	return &c[h>>(64-cacheBits)]
}
