package tokenizer

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math"
	"slices"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/wire"
)

// A pieceModel is what matters here of sentencepiece_model.proto.
type pieceModel struct {
	pieces  []piece
	trainer trainerSpec
	normal  normalSpec

	// What check finds among the pieces.
	unknown  int32
	fallback *[256]int32 // the pieces that spell bytes, or nil
	user     *matcher    // the symbols of the model's own, or nil
}

type piece struct {
	text  string
	score float32
	kind  pieceKind
}

type pieceKind uint64

const (
	pieceNormal  pieceKind = 1
	pieceUnknown pieceKind = 2
	pieceControl pieceKind = 3
	pieceUser    pieceKind = 4
	pieceUnused  pieceKind = 5
	pieceByte    pieceKind = 6
)

type trainerSpec struct {
	kind       int64 // 1 unigram, 2 BPE, 3 words, 4 characters
	suffix     bool  // blanks end words
	fallback   bool
	bos, eos   int64
	unkSurface []byte
}

type normalSpec struct {
	charsMap    []byte
	dummyPrefix bool
	squeeze     bool // remove_extra_whitespaces
	escape      bool
	denormal    []byte // the character map of denormalizer_spec
}

// badModel says that a tokenizer.model is damaged.
func badModel(format string, args ...any) *diag.Error {
	return diag.New(diag.BadInput, format, args...).
		Try("fetch the tokenizer.model again; if it is a tokenizer.json, it must begin with a brace")
}

// readModelProto reads the message of a tokenizer.model.
func readModelProto(data []byte) (*pieceModel, error) {
	m := &pieceModel{
		trainer: trainerSpec{kind: 1, bos: 1, eos: 2, unkSurface: []byte(" \u2047 ")},
		normal:  normalSpec{dummyPrefix: true, squeeze: true, escape: true},
	}
	t, s := &m.trainer, &m.normal
	err := wire.Into{
		1: m.readPiece,
		2: wire.Into{3: &t.kind, 24: &t.suffix, 35: &t.fallback, 41: &t.bos, 42: &t.eos,
			44: &t.unkSurface},
		3: wire.Into{2: &s.charsMap, 3: &s.dummyPrefix, 4: &s.squeeze, 5: &s.escape},
		5: wire.Into{2: &s.denormal},
	}.Read(data)
	if err != nil {
		return nil, badModel("this is not a SentencePiece model").Wrap(err)
	}
	return m, nil
}

func (m *pieceModel) readPiece(data []byte) (err error) {
	p := piece{kind: pieceNormal}
	for f := range wire.Fields(data, &err) {
		switch f.Num {
		case 1:
			p.text = string(f.B)
		case 2:
			p.score = math.Float32frombits(uint32(f.U))
		case 3:
			p.kind = pieceKind(f.U)
		}
	}
	m.pieces = append(m.pieces, p)
	return err
}

// parseModel reads a tokenizer.model.
func parseModel(data []byte) (*Tokenizer, error) {
	m, err := readModelProto(data)
	if err != nil {
		return nil, err
	}
	if m.trainer.kind != 1 && m.trainer.kind != 2 {
		return nil, badModel("the SentencePiece model is neither unigram nor BPE").
			At("trainer_spec.model_type %d", m.trainer.kind)
	}
	if len(m.normal.denormal) > 0 {
		return nil, badModel("the SentencePiece model changes text when it decodes").
			At("denormalizer_spec.precompiled_charsmap")
	}
	if err := m.check(); err != nil {
		return nil, err
	}
	t := m.vocabulary()
	normal := &spmNormal{spec: m.normal, suffix: m.trainer.suffix, user: m.user}
	if len(m.normal.charsMap) > 0 {
		if normal.chars, err = readCharsMap(m.normal.charsMap); err != nil {
			return nil, err
		}
	}
	normal.findPlain()
	t.normal = []normalizer{normal}
	if m.trainer.kind == 1 {
		t.model = m.unigram()
		return t, nil
	}
	t.model, err = m.bpe(t.ids)
	return t, err
}

// check looks at each piece as SentencePiece does when it loads a model.
func (m *pieceModel) check() error {
	seen := make(map[string]bool, len(m.pieces))
	m.unknown = -1
	spelled := 0
	for i, p := range m.pieces {
		bad := func(what string) error {
			return badModel("the piece %q %s", p.text, what).At("pieces[%d]", i)
		}
		if seen[p.text] || p.text == "" || !utf8.ValidString(p.text) || i > maxID {
			return bad("is empty, broken or there twice")
		}
		seen[p.text] = true
		switch p.kind {
		case pieceUnknown:
			if m.unknown >= 0 {
				return bad("is a second unknown piece")
			}
			m.unknown = int32(i)
		case pieceUser:
			if m.user == nil {
				m.user = newMatcher()
			}
			m.user.add(p.text, int32(i))
		case pieceByte:
			c, _ := tokenByte(p.text)
			if byteToken(c) != p.text || !m.trainer.fallback {
				return bad("is not a byte of this model")
			}
			if m.fallback == nil {
				m.fallback = new([256]int32)
			}
			m.fallback[c] = int32(i)
			spelled++
		case pieceNormal, pieceControl:
			if math.IsNaN(float64(p.score)) || math.IsInf(float64(p.score), 0) {
				return bad("has no score")
			}
		default:
			return bad("is of a kind that is not known")
		}
	}
	if m.unknown < 0 || m.trainer.fallback && spelled != 256 {
		return badModel("the model lacks its unknown piece or some of its 256 bytes")
	}
	return nil
}

// vocabulary makes a tokenizer that can decode.
func (m *pieceModel) vocabulary() *Tokenizer {
	ids := make(map[string]int32, len(m.pieces))
	for i, p := range m.pieces {
		ids[p.text] = int32(i)
	}
	t := newTokenizer(ids)
	for i, p := range m.pieces {
		t.special[i] = p.kind == pieceControl
	}
	t.bos, t.eos = m.known(m.trainer.bos), m.known(m.trainer.eos)
	t.decode = decoder{
		kind: decodeSPM, texts: t.tokens, blank: []byte(metaspace),
		prefix: m.normal.dummyPrefix || m.normal.squeeze, once: !m.normal.squeeze,
		unknown: string(m.trainer.unkSurface), unkID: m.unknown,
	}
	if m.fallback != nil {
		for c, id := range m.fallback {
			t.decode.setByte(id, byte(c))
		}
	}
	return t
}

func (m *pieceModel) known(id int64) int32 {
	if id < 0 || id >= int64(len(m.pieces)) {
		return -1
	}
	return int32(id)
}

// An spmNormal is the normalizer of a SentencePiece model: a map of characters, what is done to
// blanks, and the symbols that nothing is done to.
type spmNormal struct {
	spec   normalSpec
	suffix bool
	chars  *charsMap
	user   *matcher
	plain  [utf8.RuneSelf]bool // characters that stay as they are whatever follows
}

// findPlain fills plain.
func (s *spmNormal) findPlain() {
	for c := range s.plain {
		s.plain[c] = c != ' ' && (s.user == nil || !s.user.begins(byte(c))) &&
			(s.chars == nil || !s.chars.begins(byte(c)))
	}
}

func (s *spmNormal) normalize(dst, src []byte) []byte { return s.within(dst, src, true, true) }

// within normalizes a piece of a text: head tells that it is the first, and tail that it is the
// last.
func (s *spmNormal) within(dst, src []byte, head, tail bool) []byte {
	base := len(dst)
	blank := []byte(" ")
	if s.spec.escape {
		blank = []byte(metaspace)
	}
	if s.spec.squeeze && head {
		for len(src) > 0 {
			text, n := s.prefix(src)
			if string(text) != " " {
				break
			}
			src = src[n:]
		}
	}
	if len(src) == 0 {
		return dst
	}
	if s.spec.dummyPrefix && !s.suffix && head {
		dst = append(dst, blank...)
	}
	after := s.spec.squeeze && head // whether the last character was a blank that may stand alone
	for len(src) > 0 {
		if n := s.plainRun(src); n > 0 {
			dst, src, after = append(dst, src[:n]...), src[n:], false
			continue
		}
		text, n := s.prefix(src)
		src = src[n:]
		for after && len(text) > 0 && text[0] == ' ' {
			text = text[1:]
		}
		for _, c := range text {
			if c == ' ' {
				dst = append(dst, blank...)
			} else {
				dst = append(dst, c)
			}
		}
		if len(text) > 0 {
			after = s.spec.squeeze && text[len(text)-1] == ' '
		}
	}
	if s.spec.squeeze && tail {
		for bytes.HasSuffix(dst[base:], blank) {
			dst = dst[:len(dst)-len(blank)]
		}
	}
	if s.spec.dummyPrefix && s.suffix && tail {
		dst = append(dst, blank...)
	}
	return dst
}

// plainRun gives the length of the run of plain characters that b begins with.
func (s *spmNormal) plainRun(b []byte) int {
	for i, c := range b {
		if c >= utf8.RuneSelf || !s.plain[c] {
			return i
		}
	}
	return len(b)
}

// prefix gives what the first character of b, or its first few, become, and how many bytes of b
// that takes.
func (s *spmNormal) prefix(b []byte) (text []byte, n int) {
	if s.user != nil {
		if n, _ := s.user.longest(b); n > 0 {
			return b[:n], n
		}
	}
	if s.chars != nil {
		if text, n := s.chars.longest(b); n > 0 {
			return text, n
		}
	}
	_, n = utf8.DecodeRune(b)
	return b[:n], n
}

// A charsMap is the compiled map of characters: a double array, in the layout of Darts-clone, from
// texts to places in a string of texts that end with a zero byte.
type charsMap struct {
	units []uint32
	texts []byte
}

func readCharsMap(b []byte) (*charsMap, error) {
	short := badModel("the map of characters is truncated").At("normalizer_spec.precompiled_charsmap")
	if len(b) < 4 {
		return nil, short
	}
	size := uint64(binary.LittleEndian.Uint32(b))
	b = b[4:]
	if size >= uint64(len(b)) || size%4 != 0 || size == 0 || b[len(b)-1] != 0 {
		return nil, short
	}
	m := &charsMap{texts: b[size:]}
	for chunk := range slices.Chunk(b[:size], 4) {
		m.units = append(m.units, binary.LittleEndian.Uint32(chunk))
	}
	return m, nil
}

// begins reports whether an entry begins with a byte.
func (m *charsMap) begins(c byte) bool {
	at := unitOffset(m.units[0]) ^ uint32(c)
	return uint64(at) < uint64(len(m.units)) && m.units[at]&(1<<31|0xff) == uint32(c)
}

func unitOffset(unit uint32) uint32 { return unit >> 10 << (unit & (1 << 9) >> 6) }

// longest finds the longest entry that b begins with. A unit has in bits 0 to 7 the byte it stands
// for, in bit 8 whether a leaf follows, and from bit 10 on (shifted by 8 if bit 9 is set) the
// distance to what follows; a leaf has bit 31 set and its value below.
func (m *charsMap) longest(b []byte) (text []byte, n int) {
	at := unitOffset(m.units[0])
	for i, c := range b {
		at ^= uint32(c)
		if uint64(at) >= uint64(len(m.units)) {
			break
		}
		unit := m.units[at]
		if unit&(1<<31|0xff) != uint32(c) {
			break
		}
		at ^= unitOffset(unit)
		if unit>>8&1 == 0 {
			continue
		}
		if uint64(at) >= uint64(len(m.units)) {
			break
		}
		start := m.units[at] & (1<<31 - 1)
		if uint64(start) >= uint64(len(m.texts)) {
			break
		}
		rest := m.texts[start:]
		text, n = rest[:bytes.IndexByte(rest, 0)], i+1
	}
	return text, n
}

// A userSplit splits off the symbols that a model has of its own before the rest goes to it.
type userSplit struct {
	user *matcher
	rest model
}

func (u *userSplit) encode(s *scratch, dst []int32, text []byte) []int32 {
	done := 0
	for {
		start, end, id, ok := u.user.find(text, done)
		if !ok {
			break
		}
		if done < start {
			dst = u.rest.encode(s, dst, text[done:start])
		}
		dst = append(dst, id)
		done = end
	}
	if done < len(text) {
		dst = u.rest.encode(s, dst, text[done:])
	}
	return dst
}

// bpe makes the merges of a BPE model: two pieces merge if they are a piece together, and the
// better its score the sooner.
func (m *pieceModel) bpe(ids map[string]int32) (model, error) {
	b := &bpe{unknown: m.unknown, fuse: true, fallback: m.fallback}
	normal := make(map[string]int32, len(m.pieces))
	for i, p := range m.pieces {
		if p.kind == pieceNormal {
			normal[p.text] = int32(i)
		}
	}
	b.setChars(maps.All(normal))
	if err := m.merge(b, ids); err != nil {
		return nil, err
	}
	b.buildBoundary(maps.Keys(normal))
	if m.user == nil {
		return b, nil
	}
	return &userSplit{m.user, b}, nil
}

func (m *pieceModel) merge(b *bpe, ids map[string]int32) error {
	var scores []float32
	total := 0
	for _, p := range m.pieces {
		if p.kind == pieceNormal {
			scores = append(scores, p.score)
			total += utf8.RuneCountInString(p.text) - 1
		}
	}
	slices.Sort(scores)
	scores = slices.Compact(scores)
	b.merges = newPairTable(total)
	for i, p := range m.pieces {
		if p.kind != pieceNormal {
			continue
		}
		below, _ := slices.BinarySearch(scores, p.score)
		rank := int32(len(scores) - 1 - below)
		for k, r := range p.text {
			if _, ok := b.chars[r]; !ok {
				return badModel("the piece %q has a character %q that is not a piece", p.text, r).
					At("pieces[%d]", i)
			}
			left, okL := ids[p.text[:k]]
			right, okR := ids[p.text[k:]]
			if k > 0 && okL && okR && m.pieces[left].kind == pieceNormal &&
				m.pieces[right].kind == pieceNormal {
				b.merges.put(left, right, rank, int32(i))
			}
		}
	}
	return nil
}

// A unigram finds the pieces whose scores have the largest sum.
type unigram struct {
	trie     *matcher
	scores   []float32 // by id
	unknown  int32
	penalty  float32 // the score of an unknown character
	fallback *[256]int32
}

// A path is the best way to a place in a text: the piece that ends there, and its start.
type path struct {
	score float32
	start int32 // -1 if there is no way
	id    int32
}

func (m *pieceModel) unigram() *unigram {
	u := &unigram{
		trie: newMatcher(), scores: make([]float32, len(m.pieces)),
		unknown: m.unknown, fallback: m.fallback,
	}
	worst := float32(math.MaxFloat32)
	for i, p := range m.pieces {
		switch p.kind {
		case pieceNormal:
			worst = min(worst, p.score)
			u.trie.add(p.text, int32(i))
			u.scores[i] = p.score
		case pieceUser:
			u.trie.add(p.text, int32(i))
		}
	}
	// A symbol of the model's own scores better than any piece, all of which are below zero. The
	// value is what SentencePiece 0.2.2 was seen to use (older versions: -0.1); it decides which of
	// two paths wins that are equal but for rounding, as in a long run of one character.
	for i, p := range m.pieces {
		if p.kind == pieceUser {
			u.scores[i] = float32(0.1 * float64(len(p.text)-1))
		}
	}
	// An unknown character costs 10 more than the worst piece (kUnkPenalty).
	u.penalty = worst - 10
	return u
}

func (u *unigram) encode(s *scratch, dst []int32, text []byte) []int32 {
	paths := slices.Grow(s.paths[:0], len(text)+1)[:len(text)+1]
	s.paths = paths
	for i := range paths {
		paths[i] = path{start: -1}
	}
	// The sum goes on over the pieces of a text, so that it is rounded as in the whole.
	if !s.inner {
		s.at.score, s.at.unknown = 0, false
	}
	paths[0].score = s.at.score
	for i := 0; i < len(text); {
		_, n := utf8.DecodeRune(text[i:])
		u.extend(paths, text, i, n)
		i += n
	}
	s.ids = s.ids[:0]
	for end := len(text); end > 0; end = int(paths[end].start) {
		s.ids = append(s.ids, int32(end))
	}
	s.at.score = paths[len(text)].score
	unknown := s.at.unknown // whether the last token was unknown; a run of them is one
	start := int32(0)
	for _, end := range slices.Backward(s.ids) {
		id := paths[end].id
		switch {
		case id != u.unknown:
			dst = append(dst, id)
		case u.fallback != nil:
			for _, c := range text[start:end] {
				dst = append(dst, u.fallback[c])
			}
		case !unknown:
			dst = append(dst, id)
		}
		unknown = id == u.unknown
		start = end
	}
	s.at.unknown = unknown
	return dst
}

// extend tries every piece that begins at text[i], where a character of n bytes begins.
func (u *unigram) extend(paths []path, text []byte, i, n int) {
	here := paths[i].score
	single := false
	at := int32(0)
	for k := i; k < len(text); k++ {
		if at = u.trie.next(at, text[k]); at < 0 {
			break
		}
		id := u.trie.nodes[at].value
		if id < 0 {
			continue
		}
		sum := u.scores[id] + here
		if to := &paths[k+1]; to.start < 0 || sum > to.score {
			*to = path{sum, int32(i), id}
		}
		single = single || k+1 == i+n
	}
	if single {
		return
	}
	sum := u.penalty + here
	if to := &paths[i+n]; to.start < 0 || sum > to.score {
		*to = path{sum, int32(i), u.unknown}
	}
}
