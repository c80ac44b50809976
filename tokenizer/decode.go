package tokenizer

import (
	"bytes"
	"encoding/json"
	"slices"
	"unicode/utf8"
)

// A decoder says how the tokens of a tokenizer become text.
type decoder struct {
	kind    decodeKind
	texts   []string // what each id stands for, before the rest is done to it
	pieces  [][]byte // decodePieces: the same with the replacements done
	replace []replace
	bytes   []int16 // the byte that each id spells, or -1; nil if none does
	strip   []byte  // decodePieces: the character that is taken off the start of the text
	stripN  int     // how often
	blank   []byte  // decodeMeta and decodeSPM: what stands for a blank
	prefix  bool    // decodeMeta and decodeSPM: a text begins with a blank that is not its own
	once    bool    // decodeSPM: only one blank is taken off the start
	unknown string  // decodeSPM: the text of the unknown token
	unkID   int32
}

func (d *decoder) byteOf(id int32) int16 {
	if d.bytes == nil {
		return -1
	}
	return d.bytes[id]
}

func (d *decoder) setByte(id int32, c byte) {
	if d.bytes == nil {
		d.bytes = slices.Repeat([]int16{-1}, len(d.texts))
	}
	d.bytes[id] = int16(c)
}

type decodeKind uint8

const (
	decodeJoin   decodeKind = iota // tokens with blanks between them
	decodeBytes                    // each token is bytes
	decodePieces                   // replacements, byte fallback, and something taken off the start
	decodeMeta                     // Metaspace
	decodeSPM                      // a SentencePiece model
)

// Decode gives the text of ids, without special tokens, as the library's decode does. Ids that
// the vocabulary does not have are passed over. Bytes that are not UTF-8 become U+FFFD.
func (t *Tokenizer) Decode(ids []int32) string { return t.Text(ids, Options{}) }

// Text is Decode with options.
func (t *Tokenizer) Text(ids []int32, o Options) string {
	s := t.Stream(o)
	for _, id := range ids {
		s.take(id)
	}
	s.finish()
	return string(s.buf)
}

// A Stream turns ids into text one at a time. All that it gives, put together, is what Decode
// gives for all of the ids.
type Stream struct {
	t       *Tokenizer
	o       Options
	pending []byte // bytes that wait for more: part of a character, or of a run of byte tokens
	buf     []byte
	started bool // a token was seen (decodeSPM: something was written)
	strip   int  // how often the start may still be stripped
	taken   bool // decodeSPM: the last token gave up the blank it began with
	open    bool // decodeSPM: a blank at the start is still to be taken off
}

// Stream begins a text.
func (t *Tokenizer) Stream(o Options) *Stream {
	return &Stream{t: t, o: o, strip: t.decode.stripN, open: true}
}

// Next takes an id and gives the text that is certain from now on, which may be empty.
func (s *Stream) Next(id int32) string {
	s.buf = s.buf[:0]
	s.take(id)
	return string(s.buf)
}

// take appends what Next gives to the buffer.
func (s *Stream) take(id int32) {
	d := &s.t.decode
	if id < 0 || int(id) >= len(d.texts) || s.t.tokens[id] == "" ||
		!s.o.KeepSpecial && d.kind != decodeSPM && s.t.special[id] {
		return
	}
	before := len(s.buf)
	switch d.kind {
	case decodeBytes:
		if text := d.texts[id]; len(s.pending) == 0 && utf8.ValidString(text) {
			s.buf = append(s.buf, text...)
		} else {
			s.pending = append(s.pending, text...)
			s.complete(false)
		}
	case decodePieces:
		if b := d.byteOf(id); b >= 0 {
			s.pending = append(s.pending, byte(b))
			return
		}
		s.run()
		s.piece(d.pieces[id])
	case decodeMeta:
		s.meta(d.texts[id])
	case decodeSPM:
		if b := d.byteOf(id); b >= 0 {
			s.pending = append(s.pending, byte(b))
			s.complete(true)
			break
		}
		s.broken(true)
		s.spm(id, len(s.buf) > before)
	default:
		if s.started {
			s.buf = append(s.buf, ' ')
		}
		s.buf = append(s.buf, d.texts[id]...)
	}
	s.started = s.started || d.kind != decodeSPM || len(s.buf) > before
}

// End gives what was still waiting for more ids.
func (s *Stream) End() string {
	s.buf = s.buf[:0]
	s.finish()
	return string(s.buf)
}

func (s *Stream) finish() {
	switch s.t.decode.kind {
	case decodePieces:
		s.run()
	case decodeBytes, decodeSPM:
		s.broken(s.t.decode.kind == decodeSPM)
	}
}

// complete moves the whole characters of what is pending to the output, and U+FFFD for what can
// not become one: for each byte if single is set, else for each maximal sequence.
func (s *Stream) complete(single bool) {
	p := s.pending
	for len(p) > 0 {
		good, bad := validPrefix(p)
		s.buf = append(s.buf, p[:good]...)
		p = p[good:]
		if bad == 0 || !utf8.FullRune(p) {
			break
		}
		if single {
			bad = 1
		}
		s.buf = append(s.buf, "\ufffd"...)
		p = p[bad:]
	}
	s.pending = append(s.pending[:0], p...)
}

// broken ends what is pending: it will not become a character.
func (s *Stream) broken(single bool) {
	if len(s.pending) == 0 {
		return
	}
	n := 1
	if single {
		n = len(s.pending)
	}
	for range n {
		s.buf = append(s.buf, "\ufffd"...)
	}
	s.pending = s.pending[:0]
}

// run ends a run of byte tokens. If it is not UTF-8 as a whole, each of its bytes is U+FFFD.
func (s *Stream) run() {
	p := s.pending
	s.pending = s.pending[:0]
	if utf8.Valid(p) {
		s.piece(p)
		return
	}
	for range p {
		s.piece([]byte("\ufffd"))
	}
}

// piece puts a text out, less what is stripped off the start of the whole.
func (s *Stream) piece(text []byte) {
	for s.strip > 0 && len(text) > 0 {
		rest, ok := bytes.CutPrefix(text, s.t.decode.strip)
		if !ok {
			s.strip = 0
			break
		}
		s.strip--
		text = rest
	}
	s.buf = append(s.buf, text...)
}

func (d *decoder) replaced(text string) []byte {
	b := []byte(text)
	for _, r := range d.replace {
		b = r.normalize(nil, b)
	}
	return b
}

func (s *Stream) meta(text string) {
	d := &s.t.decode
	to := []byte(" ")
	if !s.started && d.prefix {
		to = nil
	}
	s.buf = replace{d.blank, to}.normalize(s.buf, []byte(text))
}

// spm is one token of a SentencePiece model. A text's first token begins with a blank that the
// encoder put there; with extra whitespace removed, so may those after it. bytesBefore
// tells that broken bytes were written just before.
func (s *Stream) spm(id int32, bytesBefore bool) {
	d := &s.t.decode
	if s.taken || s.started || bytesBefore {
		s.open = false
	}
	if s.t.special[id] {
		return
	}
	if id == d.unkID {
		s.buf = append(s.buf, d.unknown...)
		return
	}
	text := []byte(d.texts[id])
	if s.open && d.prefix {
		rest, ok := bytes.CutPrefix(text, d.blank)
		text, s.taken = rest, ok && d.once
	}
	s.buf = replace{d.blank, []byte(" ")}.normalize(s.buf, text)
}

// decoders reads the decoder of a tokenizer.json. Of the sequences that could be written, those are
// taken whose order the published files have: replacements, bytes, fuse, strip.
func (b *builder) decoders(raw json.RawMessage, at place) error {
	d := &b.t.decode
	d.texts = b.t.tokens
	if err := b.decoder(raw, at, true); err != nil {
		return err
	}
	if b.t.cooked != nil {
		d.texts = append([]string(nil), d.texts...)
		for _, a := range b.t.cooked.tokens {
			d.texts[a.ID] = b.normalized(a.Content)
		}
	}
	switch d.kind {
	case decodeBytes:
		texts := make([]string, len(d.texts))
		for id, token := range d.texts {
			texts[id] = token
			if text, ok := charsToBytes(token); ok {
				texts[id] = text
			}
		}
		d.texts = texts
	case decodePieces:
		for id, token := range d.texts {
			text := d.replaced(token)
			d.pieces = append(d.pieces, text)
			if c, ok := tokenByte(string(text)); ok && b.fallback {
				d.setByte(int32(id), c)
			}
		}
	}
	return nil
}

// decoder reads one decoder; alone tells that it is not part of a sequence of several.
func (b *builder) decoder(raw json.RawMessage, at place, alone bool) error {
	name, err := kind(raw, at)
	if err != nil || name == "" {
		return err
	}
	d := &b.t.decode
	late := refuse(at, "the tokenizer's decoder %s stands where it is not known", name)
	switch name {
	case "Sequence":
		var v struct {
			Type     string
			Decoders []json.RawMessage
		}
		d.kind = decodePieces
		return sequence(raw, at, &v, &v.Decoders, "decoders", func(r json.RawMessage, at place) error {
			return b.decoder(r, at, alone && len(v.Decoders) == 1)
		})
	case "ByteLevel", "Metaspace":
		if !alone {
			return late
		}
		if d.kind = decodeBytes; name == "ByteLevel" {
			return nil
		}
		v, err := readMetaspace(raw, at)
		d.kind, d.blank, d.prefix = decodeMeta, []byte(v.Replacement), v.Scheme != "never"
		return err
	case "Replace":
		if b.fallback || b.fused {
			return late
		}
		r, err := readReplace(raw, at)
		d.replace = append(d.replace, r)
		d.kind = decodePieces
		return err
	case "ByteFallback":
		if b.fused {
			return late
		}
		b.fallback = true
	case "Fuse":
		b.fused = true
	case "Strip":
		return b.strip(raw, at, late)
	default:
		return refuse(at, "the tokenizer's decoder %s is not known", name)
	}
	d.kind = decodePieces
	return nil
}

// strip reads what is taken off the start of a text, once that is in one piece.
func (b *builder) strip(raw json.RawMessage, at place, late error) error {
	var v struct {
		Type        string
		Content     string
		Start, Stop int
	}
	if err := read(raw, at, &v); err != nil {
		return err
	}
	d := &b.t.decode
	if !b.fused || v.Stop != 0 || v.Start < 0 || d.stripN > 0 ||
		utf8.RuneCountInString(v.Content) != 1 {
		return late
	}
	d.kind, d.strip, d.stripN = decodePieces, []byte(v.Content), v.Start
	return nil
}
