package data

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"math/bits"
	"slices"
	"sort"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// rounds of the Feistel network. Four make a pseudorandom permutation if the halves are wide (Luby
// and Rackoff 1988); a small source has short halves, so there are twice as many rounds.
const rounds = 8

// A permutation puts the numbers below n into an order that depends on a key, without memory: a
// Feistel network permutes the next power of four, and numbers that fall outside walk on along
// their cycle until they are inside.
type permutation struct {
	n    uint64
	half uint
	keys [rounds]uint64
}

// newPermutation gives the order of the rows of a source in an epoch.
func newPermutation(n int64, seed uint64, epoch int64, source string) *permutation {
	p := &permutation{n: uint64(n), half: uint(bits.Len64(uint64(n-1))+1) / 2}
	var in []byte
	in = append(in, "deepwell order 1\n"...)
	in = binary.LittleEndian.AppendUint64(in, seed)
	in = binary.LittleEndian.AppendUint64(in, uint64(epoch))
	sum := sha256.Sum256(append(in, source...))
	for i := range p.keys {
		word := binary.LittleEndian.Uint64(sum[i%4*8:])
		p.keys[i] = mix(word + uint64(i/4))
	}
	return p
}

// at gives the number that stands at place i.
func (p *permutation) at(i int64) int64 {
	x := uint64(i)
	for {
		if x = p.step(x); x < p.n {
			return int64(x)
		}
	}
}

// step is one pass of the Feistel network over 2·half bits.
func (p *permutation) step(x uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	left, right := x>>p.half, x&mask
	for _, key := range p.keys {
		left, right = right, left^mix(right+key)&mask
	}
	return left<<p.half | right
}

// mix spreads the bits of x: the finalizer of MurmurHash3, with the constants that David Stafford
// found best ("Mix13", 2011).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// whole is the sum of the shares of a mixture. A share times a number of rows stays
// within 63 bits for maxRows.
const (
	whole   = 1 << 24
	maxRows = 1 << 38
)

// newShares makes integers of weights, so that no rounding depends on the machine. Every source
// has at least the smallest share.
func newShares(weights []float64) ([]int64, error) {
	sum := 0.0
	for _, w := range weights {
		if !(w > 0) || math.IsInf(w, 0) {
			return nil, diag.New(diag.BadInput, "%v is not a weight", w).
				Try("give every source a weight above 0, or none of them one")
		}
		sum += w
	}
	if math.IsInf(sum, 0) || len(weights) > whole/2 {
		return nil, diag.New(diag.BadInput, "the weights of the sources are too large").
			Try("give weights that add up to 1")
	}
	shares := make([]int64, len(weights))
	left, largest := int64(whole), 0
	for i, w := range weights {
		shares[i] = max(1, int64(math.Round(w/sum*whole)))
		left -= shares[i]
		if shares[i] > shares[largest] {
			largest = i
		}
	}
	if shares[largest] += left; shares[largest] < 1 {
		return nil, diag.New(diag.BadInput, "the weights of the sources are too far apart").
			Try("leave out sources with a weight near 0")
	}
	return shares, nil
}

// next chooses the source of the row that follows when taken[i] rows were taken from source i, and
// total from all.
//
// The k-th row of a source of share s may be taken once k·whole < s·(total+1), and must be taken
// before row ⌈(k+1)·whole/s⌉ of all: then the source is never a whole row ahead of its share nor a
// whole row behind it. Of the sources that may be taken, the one with the nearest deadline is,
// which meets all deadlines that can be met (Baruah and others 1996, proportionate progress); a tie
// goes to the first.
func next(shares, taken []int64, total int64) int {
	best, nearest := 0, int64(math.MaxInt64)
	for i, s := range shares {
		if taken[i]*whole >= s*(total+1) {
			continue
		}
		if deadline := ((taken[i]+1)*whole + s - 1) / s; deadline < nearest {
			best, nearest = i, deadline
		}
	}
	return best
}

// How documents are held out has versions, since a run must go on with the one that it began with:
// splitRows held out the last rows of a source, which could split a document;
// splitDocuments holds out whole documents.
const (
	splitRows      = 1
	splitDocuments = 2
)

// A stream is documents of a cache one after the other: all of them, those to train on, or those
// that were held out.
type stream struct {
	*cache
	runs   []run
	length int64 // tokens
}

// A run is documents of a stream that are neighbours in the cache. There are at most two for each
// document that was held out.
type run struct {
	at       int64 // its first token in the stream
	token    int64 // the same in the cache
	document int64 // its first document
}

// add puts the documents from first up to last behind the stream's.
func (s *stream) add(first, last int64) {
	if first < last {
		s.runs = append(s.runs, run{s.length, s.start(first), first})
		s.length += s.start(last) - s.start(first)
	}
}

// rows counts the rows of a stream; the last label of each is the first token of the next.
func (s *stream) rows(seq int) int64 { return max(0, s.length-1) / int64(seq) }

// end gives the token of the cache at which run i ends.
func (s *stream) end(i int) int64 {
	next := s.length
	if i+1 < len(s.runs) {
		next = s.runs[i+1].at
	}
	return s.runs[i].token + next - s.runs[i].at
}

// find gives the run that has a token of the stream.
func (s *stream) find(at int64) int {
	return sort.Search(len(s.runs), func(i int) bool { return s.runs[i].at > at }) - 1
}

// spans returns the ranges of the cache's tokens that make up the stream from one token to another.
func (s *stream) spans(from, to int64) iter.Seq2[int64, int64] {
	return func(yield func(int64, int64) bool) {
		for i := s.find(from); from < to; i++ {
			begin := s.runs[i].token + from - s.runs[i].at
			end := min(s.end(i), begin+to-from)
			if !yield(begin, end) {
				return
			}
			from += end - begin
		}
	}
}

// mostDocuments counts the documents of the row that has the most.
func (s *stream) mostDocuments(seq int64) (most int64) {
	rows := s.rows(int(seq))
	row, inside := int64(0), int64(0) // documents that begin behind the first token of the row
	for i, r := range s.runs {
		end := s.end(i)
		for d := r.document; s.start(d) < end; d++ {
			at := r.at + s.start(d) - r.token
			if at/seq >= rows {
				return most
			}
			if at/seq != row {
				row, inside = at/seq, 0
			}
			if at%seq > 0 {
				inside++
			}
			most = max(most, inside+1)
		}
	}
	return most
}

// A cursor is a place in a stream.
type cursor struct {
	stream   *stream
	run      int
	token    int64 // in the cache
	document int64
	last     int64 // where the document ends
}

// seek gives the place of a token of the stream.
func (s *stream) seek(at int64) *cursor {
	c := &cursor{stream: s, run: s.find(at)}
	c.token = s.runs[c.run].token + at - s.runs[c.run].at
	c.document = s.documentAt(c.token)
	c.last = s.start(c.document + 1)
	return c
}

// next goes on to the next token and reports whether it is the first of a document.
func (c *cursor) next() bool {
	if c.token++; c.token < c.last {
		return false
	}
	c.document++
	if c.token == c.stream.end(c.run) && c.run+1 < len(c.stream.runs) {
		c.run++
		c.token, c.document = c.stream.runs[c.run].token, c.stream.runs[c.run].document
	}
	c.last = c.stream.start(c.document + 1)
	return true
}

// threshold gives the hash below which a document is held out, for a share of all.
func threshold(share float64) uint64 { return uint64(math.Ldexp(share, 64)) }

// divide finds what is trained on of a source, and what is held out.
func (l *Loader) divide(s *source, split int, shared *claims) error {
	st, seq := &s.stats, l.options.Seq
	if s.tokens == 0 {
		return s.noText()
	}
	all := stream{cache: s.cache}
	all.add(0, s.documents)
	rows := all.rows(seq)
	if rows == 0 {
		return diag.New(diag.DataEmpty, "%s has %d tokens; a sequence of %d needs %d", s.path, s.tokens,
			seq, seq+1).Try("use more text, or a smaller seq")
	}
	switch {
	case !l.holdsOut():
		s.train, s.heldOut = all, stream{}
		st.Sequences, st.HeldOut = rows, 0
	case split == splitRows:
		st.HeldOut = max(l.options.HoldoutSequences,
			int64(math.Ceil(l.options.HoldoutShare*float64(rows))))
		st.Sequences = rows - st.HeldOut
		s.train, s.heldOut = all, stream{}
		if first := st.Sequences * int64(seq); st.Sequences > 0 {
			d := s.documentAt(first)
			s.heldOut = stream{s.cache, []run{{0, first, d}}, s.tokens - first}
		}
	default:
		s.hold(l.bound(s), shared)
		st.Sequences, st.HeldOut = s.train.rows(seq), s.heldOut.rows(seq)
	}
	switch {
	case st.Sequences < 1:
		return diag.New(diag.DataEmpty, "%s has %d rows, and all of them are held out", s.path, rows).
			Try("hold out less, use more text or a smaller seq, or name other text: eval.data = \"PATH\"")
	case rows > maxRows:
		return diag.New(diag.BadInput, "%s has %d sequences, more than %d", s.path, rows,
			int64(maxRows)).Try("split it into several sources")
	}
	return nil
}

// bound is the hash below which documents of a source are held out. If they do not fill the rows
// that there must be, those with the next hashes go with them. A source of one document gives none.
func (l *Loader) bound(s *source) uint64 {
	if s.documents < 2 {
		return 0
	}
	bound := threshold(l.options.HoldoutShare)
	want := max(1, l.options.HoldoutSequences)*int64(l.options.Seq) + 1
	for s.heldOutTokens(bound) < want && bound < math.MaxUint64 {
		bound = s.raised(bound, want)
	}
	return bound
}

// claims are documents whose side is decided by another source than the one that they are in, by
// their hashes: sources have bounds of their own, and a document may be in several.
type claims struct {
	heldOut map[uint64]bool // by a source with a higher bound
	train   map[uint64]bool // the only document of a source, which cannot be held out
}

// claim finds them. Only documents beyond the share are kept in memory, which are few: a source's
// bound is raised to fill some rows, not more.
func (l *Loader) claim() *claims {
	c := &claims{heldOut: map[uint64]bool{}, train: map[uint64]bool{}}
	if len(l.sources) < 2 {
		return c
	}
	least := threshold(l.options.HoldoutShare)
	for _, s := range l.sources {
		if s.documents == 1 {
			c.train[s.hash(0)] = true
			continue
		}
		bound := l.bound(s)
		for d := int64(0); bound > least && d < s.documents; d++ {
			if h := s.hash(d); h >= least && h < bound {
				c.heldOut[h] = true
			}
		}
	}
	return c
}

// hold holds out the documents whose hash is below a bound, or that another source holds out.
func (s *source) hold(bound uint64, shared *claims) {
	s.train, s.heldOut = stream{cache: s.cache}, stream{cache: s.cache}
	from := int64(0) // of the run at hand
	for d := int64(0); s.documents > 1 && d < s.documents; d++ {
		if h := s.hash(d); h >= bound && !shared.heldOut[h] || shared.train[h] {
			continue
		}
		s.train.add(from, d)
		if n := len(s.heldOut.runs); n > 0 && from == d {
			s.heldOut.length += s.start(d+1) - s.start(d) // the neighbour was held out too
		} else {
			s.heldOut.add(d, d+1)
		}
		from = d + 1
	}
	s.train.add(from, s.documents)
}

// heldOutTokens counts the tokens of the documents whose hash is below a bound.
func (s *source) heldOutTokens(bound uint64) int64 {
	n := int64(0)
	for d := range s.documents {
		if s.hash(d) < bound {
			n += s.start(d+1) - s.start(d)
		}
	}
	return n
}

// raised gives the least bound with which at least want tokens are held out, or a larger bound
// than the one given under which there are still too few. Only as many hashes are looked at as lie
// below twice the bound, so that memory does not grow with the documents.
func (s *source) raised(bound uint64, want int64) uint64 {
	top := max(2*bound, math.MaxUint64/uint64(s.documents))
	if bound > math.MaxUint64/2 {
		top = math.MaxUint64
	}
	type weighed struct {
		hash   uint64
		tokens int64
	}
	var list []weighed
	have := int64(0)
	for d := range s.documents {
		switch h, n := s.hash(d), s.start(d+1)-s.start(d); {
		case h < bound:
			have += n
		case h < top:
			list = append(list, weighed{h, n})
		}
	}
	slices.SortFunc(list, func(a, b weighed) int { return cmp.Compare(a.hash, b.hash) })
	for i, w := range list {
		have += w.tokens
		// A document that is there twice is on one side.
		if have >= want && (i+1 == len(list) || list[i+1].hash != w.hash) {
			return w.hash + 1
		}
	}
	return top
}

// noText is the error of a source in which no text was found.
func (s *source) noText() error {
	e := diag.New(diag.DataEmpty, "no text was found in %s", s.path).
		Because("%d files, of which %d are not text", s.stats.Files, s.stats.Skipped)
	if len(s.stats.Passed) > 0 {
		return e.Because("%s", strings.Join(s.stats.Passed, "; ")).
			Try("convert text to UTF-8: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW; name other files")
	}
	return e.
		Try("name a file, a folder, or a pattern such as 'corpus/**/*.txt'")
}

// nothingHeldOut says that no document could be held out.
func (l *Loader) nothingHeldOut() error {
	return diag.New(diag.DataEmpty, "no document can be held out").At("%s", l.sources[0].path).
		Because("whole documents are, and the data is a single one, or all but one are too short").
		Try("name other text to validate on: eval.data = \"PATH\"; or write each document into a file, " +
			"or a line of jsonl, of its own")
}

// warnHeldOut says that more is held out than was asked for, as in data of few documents.
func (l *Loader) warnHeldOut() {
	share := l.options.HoldoutShare
	for _, s := range l.sources {
		held := float64(s.heldOut.length) / float64(s.tokens)
		if share > 0 && held > 0.1 && held > 3*share {
			l.options.Events.Emit(event.Warning{Code: string(diag.DataEmpty), Text: fmt.Sprintf(
				"%s: %.0f%% of the tokens are held out, not %.3g%%: whole documents are, and there are %d; "+
					"eval.data = \"PATH\" validates on other text",
				s.stats.Name, 100*held, 100*share, s.documents)})
		}
	}
}
