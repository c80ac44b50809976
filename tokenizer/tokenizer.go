package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/safedir"
)

// A Tokenizer is a vocabulary and the rules to spell text with it. It does not change, and any
// number of goroutines may use it at once.
type Tokenizer struct {
	tokens  []string // by id; "" where an id is not used
	ids     map[string]int32
	special []bool // by id

	raw, cooked *addedSet // added tokens of the text as given, and of the normalized text; or nil
	normal      []normalizer
	steps       []step
	model       model
	before      []int32 // what the template puts around a text
	after       []int32
	decode      decoder

	bos, eos int32 // -1 if not known
	piece    int   // PieceBytes, but in tests

	// free keeps what encoders work with, so that their caches outlive a call.
	free chan *scratch
}

// maxFree is how many encoders at once find a warm cache; a cache has 3 MB.
const maxFree = 64

// Options change what the methods of a Tokenizer do. The zero value does what the libraries do if
// they are asked for nothing special.
type Options struct {
	// NoTemplate leaves out the tokens that the file puts around every text, such as the one that
	// begins a text. A SentencePiece model has none in any case.
	NoTemplate bool
	// Literal reads the names of special tokens in a text as plain text, as one wants for text
	// that strangers wrote.
	Literal bool
	// Plain are places in the text at which no special token begins, although its name stands there.
	// Each is a range of bytes; they are sorted.
	Plain [][2]int
	// KeepSpecial keeps special tokens when ids become text.
	KeepSpecial bool
	// Part says that a text is a piece of a longer one, see [Tokenizer.PieceEnd].
	Part *Part
}

// A Part goes from one piece of a text to the next. The zero value is for the first.
type Part struct {
	More    bool // another piece follows
	begun   bool
	score   float32 // of the best path so far, in a unigram model
	unknown bool    // whether the last token was unknown
}

// maxFile bounds a tokenizer's file; Gemma's, the largest that is known, has 34 MB.
const maxFile = 256 << 20

// Load reads a tokenizer.json or a tokenizer.model; of a folder it reads the first of these that
// is there. If a tokenizer_config.json lies beside a tokenizer.json, it says which tokens begin
// and end a text.
func Load(path string) (*Tokenizer, error) {
	path, err := Find(path)
	if err != nil {
		return nil, err
	}
	data, err := safedir.ReadPlain(path, maxFile)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read the tokenizer").At("%s", path).Wrap(err).
			Try("name a tokenizer.json, a tokenizer.model or a folder that has one")
	}
	t, err := Parse(data)
	if err != nil {
		if e, ok := errors.AsType[*diag.Error](err); ok {
			if e.Where == "" {
				return nil, e.At("%s", path)
			}
			return nil, e.At("%s: %s", path, e.Where)
		}
		return nil, err
	}
	if !isPieceModel(data) {
		config := filepath.Join(filepath.Dir(path), "tokenizer_config.json")
		if err := t.readConfig(config); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Find gives the file that Load reads: path itself if it is no folder.
func Find(path string) (string, error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return path, nil
	}
	for _, name := range []string{"tokenizer.json", "tokenizer.model"} {
		file := filepath.Join(path, name)
		if info, err := os.Stat(file); err == nil && !info.IsDir() {
			return file, nil
		}
	}
	return "", diag.New(diag.FileError, "the folder has no tokenizer").At("%s", path).
		Try("put the model's tokenizer.json or tokenizer.model there")
}

// Parse reads the contents of a tokenizer.json or a tokenizer.model.
func Parse(data []byte) (*Tokenizer, error) {
	if isPieceModel(data) {
		return parseModel(data)
	}
	return parseJSON(data)
}

// isPieceModel tells the two formats apart. A SentencePiece model begins with the tag of a piece,
// which is a line feed; JSON begins with a brace. A model whose first piece has 123 bytes has both,
// but no quote or brace after that.
func isPieceModel(data []byte) bool {
	rest := bytes.TrimLeft(data, " \t\r\n")
	if len(rest) == 0 || rest[0] != '{' {
		return len(data) > 0 && (len(rest) == 0 || data[0] == '\n')
	}
	rest = bytes.TrimLeft(rest[1:], " \t\r\n")
	return len(rest) > 0 && rest[0] != '"' && rest[0] != '}' && data[0] == '\n'
}

// readConfig takes the tokens that begin and end a text from a tokenizer_config.json, if there is
// one. Its other settings belong to another library.
func (t *Tokenizer) readConfig(path string) error {
	data, err := safedir.ReadPlain(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var config struct {
		BOS json.RawMessage `json:"bos_token"`
		EOS json.RawMessage `json:"eos_token"`
	}
	if err == nil {
		err = json.Unmarshal(data, &config)
	}
	if err != nil {
		return diag.New(diag.BadInput, "the tokenizer's settings cannot be read").At("%s", path).
			Wrap(err).Try("correct or remove the file; without it the tokens that begin and end a text " +
			"come from tokenizer.json")
	}
	for _, part := range []struct {
		raw json.RawMessage
		to  *int32
	}{{config.BOS, &t.bos}, {config.EOS, &t.eos}} {
		var name string
		var object struct{ Content string }
		if json.Unmarshal(part.raw, &name) != nil && json.Unmarshal(part.raw, &object) == nil {
			name = object.Content
		}
		if id, ok := t.ids[name]; ok && name != "" {
			*part.to = id
		}
	}
	return nil
}

// newTokenizer makes a tokenizer of tokens and their ids, which are neither negative nor above
// maxID.
func newTokenizer(ids map[string]int32) *Tokenizer {
	t := &Tokenizer{
		ids: ids, bos: -1, eos: -1, free: make(chan *scratch, maxFree), piece: PieceBytes,
	}
	size := int32(0)
	for _, id := range ids {
		size = max(size, id+1)
	}
	t.tokens, t.special = make([]string, size), make([]bool, size)
	for token, id := range ids {
		t.tokens[id] = token
	}
	return t
}

// maxID bounds the memory that a damaged file can ask for. The largest vocabulary in use has some
// 2^18 tokens.
const maxID = 1<<24 - 1

// Size gives the number of ids: one more than the largest.
func (t *Tokenizer) Size() int { return len(t.tokens) }

// Token gives the spelling of an id in the file, or "" if there is no such id. In a byte-level
// vocabulary each character stands for a byte; [Tokenizer.Decode] gives the text.
func (t *Tokenizer) Token(id int32) string {
	if id < 0 || int(id) >= len(t.tokens) {
		return ""
	}
	return t.tokens[id]
}

// ID gives the id of a token that is spelled as in the file.
func (t *Tokenizer) ID(token string) (id int32, ok bool) {
	id, ok = t.ids[token]
	return id, ok
}

// Special reports whether an id stands for something that is not text.
func (t *Tokenizer) Special(id int32) bool {
	return id >= 0 && int(id) < len(t.special) && t.special[id]
}

// BOS gives the token that begins a text, if the file tells it.
func (t *Tokenizer) BOS() (id int32, ok bool) { return t.bos, t.bos >= 0 }

// EOS gives the token that ends a text, if the file tells it.
func (t *Tokenizer) EOS() (id int32, ok bool) { return t.eos, t.eos >= 0 }

// Encode gives the ids of a text, as the library's encode does.
func (t *Tokenizer) Encode(text string) []int32 { return t.Append(nil, text, Options{}) }

// Append appends the ids of a text to dst. It allocates nothing but what dst needs. A long text is
// encoded in the pieces that [Tokenizer.PieceEnd] finds, so that memory does not grow with it.
func (t *Tokenizer) Append(dst []int32, text string, o Options) []int32 {
	s := t.take()
	defer t.put(s)
	s.at = o.Part
	if s.at == nil {
		s.own = Part{}
		s.at = &s.own
	}
	last := !s.at.More
	s.plain, s.base = o.Plain, 0
	s.out = dst
	if !o.NoTemplate && !s.at.begun {
		s.out = append(s.out, t.before...)
	}
	for len(text) > t.piece {
		n := t.PieceEnd(text)
		s.at.More = true
		s.encode(text[:n], o.Literal)
		s.base += n
		text = text[n:]
	}
	s.at.More = !last
	if len(text) > 0 {
		s.encode(text, o.Literal)
	}
	if !o.NoTemplate && last {
		s.out = append(s.out, t.after...)
	}
	out := s.out
	s.out, s.at, s.plain = nil, nil, nil
	return out
}

// A scratch is what one encoder works with.
type scratch struct {
	t     *Tokenizer
	out   []int32
	at    *Part
	own   Part      // what at points at if a text comes as a whole
	plain [][2]int  // see Options.Plain
	base  int       // bytes of the text before the piece
	inner bool      // the current part continues the last one of the piece before
	text  []byte    // the text, or a piece of it
	norms [2][]byte // a part of it while it is normalized
	bufs  [][]byte  // a part of it while a step changes it, by step
	cache wordCache

	ids   []int32 // the tokens of a word
	pairs []pending
	links []link
	heap  rankHeap
	paths []path
}

func (t *Tokenizer) take() *scratch {
	select {
	case s := <-t.free:
		return s
	default:
		return &scratch{t: t, bufs: make([][]byte, len(t.steps))}
	}
}

// maxKeep is the longest text, or word, whose buffers are kept for the next.
const maxKeep = 1 << 17

func (t *Tokenizer) put(s *scratch) {
	if max(cap(s.text), cap(s.links), cap(s.paths)) > maxKeep {
		*s = scratch{t: t, bufs: make([][]byte, len(t.steps)), cache: s.cache}
	}
	select {
	case t.free <- s:
	default:
	}
}

// encode takes a text apart: added tokens of the text as it is, then of the normalized text.
func (s *scratch) encode(text string, literal bool) {
	s.text = slices.Grow(appendValid(s.text[:0], text), wordBytes)
	begins := !s.at.begun
	s.inner = s.at.begun
	s.at.begun = true
	if s.t.raw == nil {
		s.part(s.text, literal, begins, s.at.More)
		return
	}
	s.t.raw.split(s.text, literal, s.isPlain, s.token, func(part []byte, at int) {
		s.part(part, literal, begins && at == 0, s.at.More && at+len(part) == len(s.text))
	})
}

// isPlain reports whether no special token begins at a place of the piece.
func (s *scratch) isPlain(at int) bool {
	if len(s.plain) == 0 {
		return false
	}
	at += s.base
	i := sort.Search(len(s.plain), func(i int) bool { return s.plain[i][1] > at })
	return i < len(s.plain) && s.plain[i][0] <= at
}

// Marks gives the places of special tokens in a text, as [Options.Plain] takes them. The error
// names a token that cannot be kept apart from text, since it is looked for in normalized text.
func (t *Tokenizer) Marks(text string) (list [][2]int, err error) {
	if t.cooked != nil {
		for _, token := range t.cooked.tokens {
			if token.Special && strings.Contains(text, token.Content) {
				return nil, diag.New(diag.DataTokenizer, "the text has %q, which is always read as the "+
					"special token", token.Content).Try("remove it from the text")
			}
		}
	}
	if t.raw == nil {
		return nil, nil
	}
	b := []byte(text)
	for i := 0; ; {
		start, end, at, ok := t.raw.match.find(b, i)
		if !ok {
			return list, nil
		}
		if t.raw.tokens[at].Special {
			list = append(list, [2]int{start, end})
		}
		i = end
	}
}

// Offsets gives the place in a text at which each of its tokens begins, if what the tokens spell is
// the text, but for blanks that a vocabulary puts before words. A token that begins within a
// character begins where that does.
func (t *Tokenizer) Offsets(ids []int32, text string) (places []int, ok bool) {
	stream := t.Stream(Options{KeepSpecial: true})
	at, waiting := 0, 0
	for i, id := range ids {
		piece := stream.Next(id)
		if i+1 == len(ids) {
			piece += stream.End()
		}
		places = append(places, at)
		if piece == "" { // it ends within a character, or is a byte whose end is not known yet
			waiting++
			continue
		}
		rest, piece, ok := t.spelledBy(ids, i, text[at:], piece)
		if !ok {
			return nil, false
		}
		from := len(text) - len(rest)
		at = from + len(piece)
		if waiting > 0 {
			t.placeBytes(ids[i-waiting:i+1], places[i-waiting:i+1], from, text)
		}
		waiting = 0
	}
	return places, strings.TrimSpace(text[at:]) == ""
}

// placeBytes places tokens that are a byte each, and the one behind them, from a place of the text
// on: each begins where its byte's character does.
func (t *Tokenizer) placeBytes(ids []int32, places []int, from int, text string) {
	for i, id := range ids {
		last := i == len(ids)-1
		if t.decode.byteOf(id) < 0 && !last || from >= len(text) {
			continue
		}
		places[i] = from
		for places[i] > 0 && !utf8.RuneStart(text[places[i]]) {
			places[i]--
		}
		from++
	}
}

// spelledBy gives what is left of a text behind blanks that token i does not spell, and what it
// does spell of that: a vocabulary may put a blank before it or take one off, and a special token
// may take the blanks beside it.
func (t *Tokenizer) spelledBy(ids []int32, i int, rest, piece string) (string, string, bool) {
	short := strings.TrimPrefix(piece, " ")
	loose := rest
	if i == 0 {
		loose = strings.TrimPrefix(rest, " ")
	}
	if t.Special(ids[i]) || i > 0 && t.Special(ids[i-1]) {
		loose = strings.TrimLeftFunc(rest, unicode.IsSpace)
	}
	for _, rest := range []string{rest, loose} {
		for _, piece := range []string{piece, short} {
			if strings.HasPrefix(rest, piece) {
				return rest, piece, true
			}
		}
	}
	return rest, piece, false
}

// token puts out an added token.
func (s *scratch) token(id int32) {
	s.inner = false
	s.out = append(s.out, id)
}

// part encodes a part of a text between added tokens; first tells that the text begins with it, and
// more that it goes on in the next piece.
func (s *scratch) part(part []byte, literal, first, more bool) {
	for i, n := range s.t.normal {
		if len(part) == 0 {
			return
		}
		b := s.norms[i%2][:0]
		switch n := n.(type) {
		case prepend:
			if s.inner {
				b = append(b, part...)
				break
			}
			b = n.normalize(b, part)
		case *spmNormal:
			b = n.within(b, part, !s.inner, !more)
		default:
			b = n.normalize(b, part)
		}
		s.norms[i%2] = slices.Grow(b, wordBytes)
		part = s.norms[i%2]
	}
	if len(part) == 0 {
		return
	}
	if s.t.cooked == nil {
		s.cutFrom(0, part, first)
		return
	}
	s.t.cooked.split(part, literal, nil, s.token, func(part []byte, at int) {
		s.cutFrom(0, part, first && at == 0)
	})
}

// appendValid appends text with U+FFFD for each maximal sequence of bytes that is not UTF-8: one
// for the bytes that begin a character and one for each byte that can not begin one.
func appendValid(dst []byte, text string) []byte {
	for len(text) > 0 {
		if utf8.ValidString(text) {
			return append(dst, text...)
		}
		good, broken := validPrefix(text)
		dst = append(append(dst, text[:good]...), "\ufffd"...)
		text = text[good+broken:]
	}
	return dst
}

// validPrefix gives the length of the valid start of text, and of the broken sequence after it.
func validPrefix[T string | []byte](text T) (good, broken int) {
	for i := 0; i < len(text); {
		if text[i] < utf8.RuneSelf {
			i++
			continue
		}
		head := [utf8.UTFMax]byte{}
		n := copy(head[:], text[i:])
		if r, size := utf8.DecodeRune(head[:n]); r != utf8.RuneError || size > 1 {
			i += size
			continue
		}
		return i, brokenLength(head[:n])
	}
	return len(text), 0
}

// brokenLength gives how many bytes at the start of b, which is not UTF-8, could begin a
// character: at least one.
func brokenLength(b []byte) int {
	for n := len(b); n > 1; n-- {
		if !utf8.FullRune(b[:n]) {
			return n
		}
	}
	return 1
}
