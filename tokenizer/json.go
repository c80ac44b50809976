package tokenizer

import (
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// A place is where in a tokenizer.json something stands, spelled as jq spells it.
type place string

func (p place) key(name string) place { return p + "." + place(name) }
func (p place) item(i int) place      { return p + place(fmt.Sprintf("[%d]", i)) }

// refuse says that the file asks for what this package does not do.
func refuse(at place, format string, args ...any) error {
	return diag.New(diag.BadInput, format, args...).At("%s", at).
		Because("it would give other ids than the model was trained with").
		Try("use a tokenizer of a supported family (byte-level BPE, or BPE with byte fallback), or " +
			"the model's SentencePiece tokenizer.model")
}

// damaged says that the file is not what the library would load.
func damaged(at place, format string, args ...any) error {
	return diag.New(diag.BadInput, format, args...).At("%s", at).
		Try("fetch the tokenizer again; this file does not load in the library it was made for either")
}

// read fills v from the JSON of a component. A field that v does not have is refused, because it
// may change what the component does.
func read(raw json.RawMessage, at place, v any) error {
	if err := strictjson.Decode(raw, v); err != nil {
		if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			return refuse(at, "the tokenizer has a setting %s that is not known", name)
		}
		return damaged(at, "the tokenizer cannot be read: %s", err)
	}
	return nil
}

// sequence reads a component that is a list of others, which stand under key, into v; take reads
// each of them.
func sequence(raw json.RawMessage, at place, v any, list *[]json.RawMessage, key string,
	take func(json.RawMessage, place) error) error {
	if err := read(raw, at, v); err != nil {
		return err
	}
	for i, raw := range *list {
		if err := take(raw, at.key(key).item(i)); err != nil {
			return err
		}
	}
	return nil
}

// kind gives the type of a component; "" if it is absent.
func kind(raw json.RawMessage, at place) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	var v struct{ Type string }
	if err := json.Unmarshal(raw, &v); err != nil {
		return "", damaged(at, "the tokenizer cannot be read: %s", err)
	}
	if v.Type == "" {
		return "", damaged(at, "this part of the tokenizer has no type")
	}
	return v.Type, nil
}

// A jsonFile is a tokenizer.json.
type jsonFile struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"`
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// parseJSON reads a tokenizer.json.
func parseJSON(data []byte) (*Tokenizer, error) {
	var f jsonFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, diag.New(diag.BadInput, "this is not a tokenizer.json").Wrap(err).
			Try("name a tokenizer.json of Hugging Face or a tokenizer.model of SentencePiece")
	}
	if f.Version != "" && f.Version != "1.0" {
		return nil, refuse(".version", "the tokenizer has version %q, not 1.0", f.Version)
	}
	for _, part := range []struct {
		name string
		raw  json.RawMessage
	}{{"truncation", f.Truncation}, {"padding", f.Padding}} {
		if len(part.raw) > 0 && string(part.raw) != "null" {
			return nil, diag.New(diag.BadInput, "the tokenizer asks for %s of every text", part.name).
				At(".%s", part.name).Try("set %q to null in the file", part.name)
		}
	}
	b := &builder{bpe: &bpe{unknown: -1}}
	var config modelFile
	for _, build := range []func() error{
		func() error { return readModel(f.Model, &config) },
		func() error { return b.normalizers(f.Normalizer, ".normalizer") },
		func() error { return b.preTokenizers(f.PreTokenizer, ".pre_tokenizer") },
		func() error { return b.vocabulary(&config, f.AddedTokens) },
		func() error { return b.bpe.build(&config) },
		func() error { return b.decoders(f.Decoder, ".decoder") },
		func() error { return b.postProcessors(f.PostProcessor, ".post_processor") },
	} {
		if err := build(); err != nil {
			return nil, err
		}
	}
	b.finish(f.AddedTokens)
	return b.t, nil
}

// A builder makes a tokenizer of the parts of a tokenizer.json.
type builder struct {
	t      *Tokenizer
	bpe    *bpe
	normal []normalizer
	steps  []step
	one    bool    // a template was seen
	growth float64 // how many times as long replacements may make a text; 0 is 1

	fallback, fused bool // decoders that were seen
}

// finish puts the parts together, and guesses what the file does not say outright: the token that
// begins a text is the one the template puts first; the one that ends it is the one the template
// puts last, or the only special token that there is.
func (b *builder) finish(added []addedToken) {
	t := b.t
	t.normal, t.steps, t.model = b.normal, b.steps, b.bpe
	if len(t.before) > 0 {
		t.bos = t.before[0]
	}
	if len(t.after) > 0 {
		t.eos = t.after[len(t.after)-1]
		return
	}
	specials := slices.DeleteFunc(slices.Clone(added), func(a addedToken) bool { return !a.Special })
	if len(specials) == 1 {
		t.eos = specials[0].ID
	}
}

// A modelFile is the model of a tokenizer.json; older files do not name its type.
type modelFile struct {
	Type         *string          `json:"type"`
	Dropout      *float64         `json:"dropout"`
	UnkToken     *string          `json:"unk_token"`
	Prefix       *string          `json:"continuing_subword_prefix"`
	Suffix       *string          `json:"end_of_word_suffix"`
	FuseUnk      *bool            `json:"fuse_unk"`
	ByteFallback *bool            `json:"byte_fallback"`
	IgnoreMerges *bool            `json:"ignore_merges"`
	Vocab        map[string]int32 `json:"vocab"`
	Merges       []mergePair      `json:"merges"`
}

// A mergePair is two tokens, written as a list of two or, in older files, with a blank between.
type mergePair [2]string

// UnmarshalJSON reads either form.
func (m *mergePair) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '[' {
		var list []string
		if err := json.Unmarshal(data, &list); err != nil {
			return err
		}
		if len(list) != 2 {
			return fmt.Errorf("a merge of %d tokens", len(list))
		}
		*m = mergePair(list)
		return nil
	}
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	a, b, ok := strings.Cut(text, " ")
	if !ok || strings.Contains(b, " ") {
		return fmt.Errorf("a merge %q that is not two tokens", text)
	}
	*m = mergePair{a, b}
	return nil
}

func readModel(raw json.RawMessage, m *modelFile) error {
	const at = place(".model")
	if len(raw) == 0 || string(raw) == "null" {
		return damaged(at, "the tokenizer has no model")
	}
	if err := read(raw, at, m); err != nil || m.Type != nil && *m.Type != "BPE" {
		// The settings of another model are not known either, but its name says more.
		var head struct{ Type string }
		if json.Unmarshal(raw, &head) == nil && head.Type != "" && head.Type != "BPE" {
			return refuse(at.key("type"), "the tokenizer's model is %s, not BPE", head.Type)
		}
		return err
	}
	for _, s := range []struct {
		name  string
		value *string
	}{{"continuing_subword_prefix", m.Prefix}, {"end_of_word_suffix", m.Suffix}} {
		if s.value != nil && *s.value != "" {
			return refuse(at.key(s.name), "the tokenizer marks parts of words with %q", *s.value)
		}
	}
	if m.Dropout != nil && *m.Dropout != 0 {
		return diag.New(diag.BadInput, "the tokenizer drops merges at random").
			At("%s", at.key("dropout")).Try("set \"dropout\" to null in the file")
	}
	for token, id := range m.Vocab {
		if id < 0 || id > maxID {
			return damaged(at.key("vocab"), "token %q has the id %d", token, id)
		}
	}
	return nil
}

// vocabulary gives ids to the added tokens as the library does: by their content, and to new ones
// the next free id. A file that says otherwise is refused.
func (b *builder) vocabulary(m *modelFile, added []addedToken) error {
	ids := make(map[string]int32, len(m.Vocab)+len(added))
	seen := make(map[int32]string, len(m.Vocab))
	for token, id := range m.Vocab {
		if twin, ok := seen[id]; ok {
			return damaged(".model.vocab", "tokens %q and %q both have the id %d",
				min(token, twin), max(token, twin), id)
		}
		seen[id] = token
		ids[token] = id
	}
	next := int32(len(m.Vocab))
	once := make(map[string]addedToken, len(added))
	for i, a := range added {
		if a.Content == "" {
			continue
		}
		if twin, ok := once[a.Content]; ok && twin != a {
			return refuse(place(".added_tokens").item(i), "added token %q is there twice", a.Content)
		}
		once[a.Content] = a
		id, ok := ids[a.Content]
		if !ok {
			id = next
			next++
			if twin, ok := seen[id]; ok {
				return refuse(place(".added_tokens").item(i), "the id %d of added token %q belongs to %q",
					id, a.Content, twin)
			}
			ids[a.Content], seen[id] = id, a.Content
		}
		if id != a.ID {
			return refuse(place(".added_tokens").item(i),
				"added token %q has the id %d, but the library would give it %d", a.Content, a.ID, id)
		}
	}
	b.t = newTokenizer(ids)
	return b.added(added)
}

// added sorts the added tokens into the two passes.
func (b *builder) added(added []addedToken) error {
	done := make(map[string]bool, len(added))
	for i, a := range added {
		if a.Content == "" || done[a.Content] {
			continue
		}
		done[a.Content] = true
		b.t.special[a.ID] = a.Special
		set, text := &b.t.raw, a.Content
		if a.Normalized {
			set, text = &b.t.cooked, b.normalized(a.Content)
		}
		if *set == nil {
			*set = &addedSet{match: newMatcher(), table: classes()}
		}
		s := *set
		if text == "" || !s.match.add(text, int32(len(s.tokens))) {
			return refuse(place(".added_tokens").item(i),
				"added token %q is normalized to %q, which is nothing or another one", a.Content, text)
		}
		s.tokens = append(s.tokens, a)
	}
	return nil
}

func (b *builder) normalized(text string) string {
	out := appendValid(nil, text)
	for _, n := range b.normal {
		if len(out) > 0 {
			out = n.normalize(nil, out)
		}
	}
	return string(out)
}

// build makes the tables of a model.
func (m *bpe) build(f *modelFile) error {
	m.fuse = f.FuseUnk != nil && *f.FuseUnk
	if err := m.buildMerges(f); err != nil {
		return err
	}
	if f.IgnoreMerges != nil && *f.IgnoreMerges {
		m.whole = make(map[string]int32, len(f.Vocab))
		for token, id := range f.Vocab {
			if text, ok := m.spelling(token); ok {
				m.whole[text] = id
			}
		}
	}
	complete := false // whether no character is unknown
	if m.byteLevel {
		if complete = m.buildBytes(f); !complete && f.ByteFallback != nil && *f.ByteFallback {
			return refuse(".model.byte_fallback", "the vocabulary lacks bytes, and spells them otherwise")
		}
	} else {
		m.buildChars(f)
	}
	if f.UnkToken != nil && !complete {
		id, ok := f.Vocab[*f.UnkToken]
		if !ok {
			return damaged(".model.unk_token", "the unknown token %q is not in the vocabulary", *f.UnkToken)
		}
		m.unknown = id
	}
	if !m.byteLevel && !m.mergesSpelled(f) {
		m.buildBoundary(func(yield func(string) bool) {
			for _, p := range f.Merges {
				if !yield(p[0] + p[1]) {
					return
				}
			}
		})
	}
	return nil
}

// buildChars finds the tokens that are characters, and those that spell bytes.
func (m *bpe) buildChars(f *modelFile) {
	m.setChars(maps.All(f.Vocab))
	if f.ByteFallback == nil || !*f.ByteFallback {
		return
	}
	m.fallback = new([256]int32)
	for c := range m.fallback {
		m.fallback[c] = -1
		if id, ok := f.Vocab[byteToken(byte(c))]; ok {
			m.fallback[c] = id
		}
	}
}

// setChars finds the tokens that are one character.
func (m *bpe) setChars(tokens iter.Seq2[string, int32]) {
	m.chars = make(map[rune]int32)
	for i := range m.ascii {
		m.ascii[i] = -1
	}
	for token, id := range tokens {
		if r, n := utf8.DecodeRuneInString(token); n > 0 && n == len(token) {
			if m.chars[r] = id; r < utf8.RuneSelf {
				m.ascii[r] = id
			}
		}
	}
}

// mergesSpelled reports whether a merge has a token that does not stand for its own characters.
func (m *bpe) mergesSpelled(f *modelFile) bool {
	return slices.ContainsFunc(f.Merges, func(p mergePair) bool {
		return slices.ContainsFunc(p[:], func(token string) bool {
			_, spelled := tokenByte(token)
			return m.fallback != nil && spelled || m.unknown >= 0 && f.Vocab[token] == m.unknown
		})
	})
}

// buildBoundary finds out where a text can be split, from the tokens that merges give.
func (m *bpe) buildBoundary(tokens iter.Seq[string]) {
	const blank = '▁'
	if _, ok := m.chars[blank]; !ok {
		return
	}
	m.boundary, m.joined = []byte(metaspace), make(map[rune]bool)
	for token := range tokens {
		last := blank
		for _, r := range token {
			if r == blank && last != blank {
				m.joined[last] = true
			}
			last = r
		}
	}
}

func (m *bpe) buildMerges(f *modelFile) error {
	m.merges = newPairTable(len(f.Merges))
	var whole []byte
	for i, p := range f.Merges {
		a, okA := f.Vocab[p[0]]
		b, okB := f.Vocab[p[1]]
		whole = append(append(whole[:0], p[0]...), p[1]...)
		id, ok := f.Vocab[string(whole)]
		if !okA || !okB || !ok {
			return damaged(place(".model.merges").item(i),
				"the merge of %q and %q has a token that is not in the vocabulary", p[0], p[1])
		}
		m.merges.put(a, b, int32(i), id)
	}
	return nil
}

// buildBytes finds the tokens of the bytes and reports whether each has one.
func (m *bpe) buildBytes(f *modelFile) bool {
	complete := true
	for c := range m.bytes {
		id, ok := f.Vocab[string(byteChars[c])]
		if !ok {
			id, complete = -1, false
		}
		m.bytes[c] = id
	}
	return complete
}

// spelling gives the text that a token of the vocabulary stands for; a byte-level token that has a
// character which is no byte stands for none.
func (m *bpe) spelling(token string) (string, bool) {
	if !m.byteLevel {
		return token, true
	}
	return charsToBytes(token)
}

// byteChars are the characters that stand for bytes in a byte-level vocabulary: printable ones for
// themselves, and for the rest those from U+0100 on.
var byteChars = func() (chars [256]rune) {
	next := rune(0x100)
	for c := range chars {
		if '!' <= c && c <= '~' || 0xa1 <= c && c <= 0xac || 0xae <= c {
			chars[c] = rune(c)
			continue
		}
		chars[c] = next
		next++
	}
	return chars
}()

// charBytes is the inverse of byteChars.
var charBytes = func() map[rune]byte {
	m := make(map[rune]byte, 256)
	for c, r := range byteChars {
		m[r] = byte(c)
	}
	return m
}()

// charsToBytes gives the bytes that a byte-level token stands for, if each character is a byte.
func charsToBytes(token string) (string, bool) {
	out := make([]byte, 0, len(token))
	for _, r := range token {
		c, ok := charBytes[r]
		if !ok {
			return "", false
		}
		out = append(out, c)
	}
	return string(out), true
}

// metaspace is the character that stands for a blank in vocabularies made by SentencePiece.
const metaspace = "▁"

// byteToken is the token that spells a byte.
func byteToken(c byte) string { return fmt.Sprintf("<0x%02X>", c) }

// tokenByte is the inverse of byteToken; it takes either case.
func tokenByte(token string) (byte, bool) {
	if len(token) != 6 || !strings.HasPrefix(token, "<0x") || token[5] != '>' {
		return 0, false
	}
	c, err := strconv.ParseUint(token[3:5], 16, 8)
	return byte(c), err == nil
}

// postProcessors reads what is put around a text.
func (b *builder) postProcessors(raw json.RawMessage, at place) error {
	name, err := kind(raw, at)
	if err != nil {
		return err
	}
	switch name {
	case "", "ByteLevel": // which moves offsets only
		return nil
	case "Sequence":
		var v struct {
			Type       string
			Processors []json.RawMessage
		}
		return sequence(raw, at, &v, &v.Processors, "processors", b.postProcessors)
	case "TemplateProcessing":
		return b.template(raw, at)
	}
	return refuse(at, "the tokenizer's post-processor %s is not known", name)
}

// maxTemplate bounds the tokens that a template puts around a text; published ones put one or two.
const maxTemplate = 256

func (b *builder) template(raw json.RawMessage, at place) error {
	type piece struct{ ID string }
	var v struct {
		Single []struct {
			Sequence     *piece
			SpecialToken *piece
		}
		Tokens map[string]struct{ IDs []int32 } `json:"special_tokens"`
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return damaged(at, "the tokenizer cannot be read: %s", err)
	}
	if b.one {
		return refuse(at, "the tokenizer has two templates")
	}
	b.one = true
	text := false
	for i, p := range v.Single {
		switch {
		case p.Sequence != nil && p.Sequence.ID == "A" && !text:
			text = true
		case p.SpecialToken != nil:
			token, ok := v.Tokens[p.SpecialToken.ID]
			if !ok {
				return damaged(at.key("single").item(i), "the template has no ids for %q", p.SpecialToken.ID)
			}
			for _, id := range token.IDs {
				if b.t.Token(id) == "" {
					return damaged(at.key("single").item(i), "the template has the id %d, which is no token's", id)
				}
			}
			if len(b.t.before)+len(b.t.after)+len(token.IDs) > maxTemplate {
				return refuse(at.key("single").item(i), "the template adds more than %d tokens to a text",
					maxTemplate)
			}
			if text {
				b.t.after = append(b.t.after, token.IDs...)
			} else {
				b.t.before = append(b.t.before, token.IDs...)
			}
		default:
			return refuse(at.key("single").item(i), "the template has a part that is not known")
		}
	}
	if !text {
		return refuse(at.key("single"), "the template leaves the text out")
	}
	return nil
}
