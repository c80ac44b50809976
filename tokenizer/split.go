package tokenizer

import (
	"bytes"
	"encoding/json"
	"slices"
	"unicode/utf8"
)

// A step is one of the pre-tokenizers of a tokenizer.json: it splits a part of a text into smaller
// ones, or changes it.
type step struct {
	kind     stepKind
	scan     *scanner // of stepScan
	text     []byte   // what stepText looks for, or stepPrefix and stepFirst put before a part
	blank    []byte   // what stepMeta puts in the place of each blank
	class    class    // of stepClass
	behavior behavior
	invert   bool // what is not a match is one, and the other way round
}

type stepKind uint8

const (
	stepScan   stepKind = iota // matches of a pattern
	stepText                   // matches of a text
	stepClass                  // matches are characters of a class
	stepPrefix                 // text comes before each part that does not begin with it
	stepFirst                  // the same, only where the whole text begins
	stepMeta                   // each blank becomes another character
)

// A behavior says what becomes of a match.
type behavior uint8

const (
	isolated           behavior = iota // a part of its own
	removed                            // nothing
	contiguous                         // a part with the matches beside it
	mergedWithPrevious                 // the end of the part before it
	mergedWithNext                     // the start of the part after it
)

var behaviorNames = []string{
	isolated: "Isolated", removed: "Removed", contiguous: "Contiguous",
	mergedWithPrevious: "MergedWithPrevious", mergedWithNext: "MergedWithNext",
}

// cutFrom applies the steps from k on to a part of a text and gives what they make of it to the
// model. A part is not empty; first tells that it stands where the whole text begins.
func (s *scratch) cutFrom(k int, part []byte, first bool) {
	if k == len(s.t.steps) {
		s.out = s.t.model.encode(s, s.out, part)
		s.inner = false
		return
	}
	st := &s.t.steps[k]
	switch st.kind {
	case stepScan:
		if st.behavior == isolated && !st.invert {
			s.cutWords(k, st.scan, part, first)
			return
		}
	case stepPrefix, stepFirst:
		if !s.inner && !bytes.HasPrefix(part, st.text) && (first || st.kind == stepPrefix) {
			part = append(append(s.bufs[k][:0], st.text...), part...)
			s.bufs[k] = slices.Grow(part, wordBytes)
			part = s.bufs[k]
		}
		s.cutFrom(k+1, part, first)
		return
	case stepMeta:
		s.bufs[k] = slices.Grow(replace{[]byte(" "), st.blank}.normalize(s.bufs[k][:0], part), wordBytes)
		s.cutFrom(k+1, s.bufs[k], first)
		return
	}
	if st.kind == stepText && bytes.HasPrefix(part, st.text) || st.kind == stepScan {
		s.inner = false
	}
	j := joiner{s: s, step: st, k: k + 1, text: part, first: first}
	j.run()
}

// cutWords is the way of nearly all words: every match is a part, and so is what lies between.
func (s *scratch) cutWords(k int, scan *scanner, part []byte, first bool) {
	last := k+1 == len(s.t.steps)
	start := 0 // of what did not match
	if !scan.some {
		s.inner = false // a piece is split only where the pattern splits
	}
	for i := 0; i < len(part); {
		end := scan.match(part, i)
		if end <= i {
			_, n := scan.table.at(part, i)
			i += n
			continue
		}
		if start < i {
			s.cutFrom(k+1, part[start:i], first && start == 0)
		}
		if last {
			s.out = s.t.model.encode(s, s.out, part[i:end])
		} else {
			s.cutFrom(k+1, part[i:end], first && i == 0)
		}
		start, i = end, end
	}
	if start < len(part) {
		s.cutFrom(k+1, part[start:], first && start == 0)
	}
}

// A joiner splits one part of a text at the matches of a step.
type joiner struct {
	s          *scratch
	step       *step
	k          int // the next step
	text       []byte
	first      bool
	start, end int  // what waits to be put out
	waiting    bool // whether there is any
	match      bool // whether its last piece was a match
}

// find gives the first match from i on; start is negative without a match.
func (j *joiner) find(i int) (start, end int) {
	switch st := j.step; st.kind {
	case stepText:
		if at := bytes.Index(j.text[i:], st.text); at >= 0 {
			return i + at, i + at + len(st.text)
		}
	case stepClass:
		t := classes()
		if i = t.until(j.text, i, st.class); i < len(j.text) {
			_, n := t.at(j.text, i)
			return i, i + n
		}
	default:
		for i < len(j.text) {
			if end := st.scan.match(j.text, i); end > i {
				return i, end
			}
			_, n := st.scan.table.at(j.text, i)
			i += n
		}
	}
	return -1, 0
}

func (j *joiner) run() {
	for i := 0; i < len(j.text); {
		start, end := j.find(i)
		if start < 0 {
			j.piece(i, len(j.text), false)
			break
		}
		if i < start {
			j.piece(i, start, false)
		}
		j.piece(start, end, true)
		i = end
	}
	j.flush()
}

// piece takes the next match, or what lies before one.
func (j *joiner) piece(start, end int, match bool) {
	match = match != j.step.invert
	joins := false // whether it belongs to what waits
	switch j.step.behavior {
	case removed:
		if match {
			j.flush()
			return
		}
	case contiguous:
		joins = match == j.match
	case mergedWithPrevious:
		joins = match && !j.match
	case mergedWithNext:
		joins = !match && j.match
	}
	if joins && j.waiting {
		j.end = end
	} else {
		j.flush()
		j.start, j.end, j.waiting = start, end, true
	}
	j.match = match
}

func (j *joiner) flush() {
	if j.waiting {
		j.waiting = false
		j.s.cutFrom(j.k, j.text[j.start:j.end], j.first && j.start == 0)
	}
}

// preTokenizers reads the pre-tokenizer of a tokenizer.json.
func (b *builder) preTokenizers(raw json.RawMessage, at place) error {
	name, err := kind(raw, at)
	if err != nil || name == "" {
		return err
	}
	if b.bpe.byteLevel {
		return refuse(at, "the tokenizer splits words after it has converted them to bytes")
	}
	switch name {
	case "Sequence":
		var v struct {
			Type          string
			Pretokenizers []json.RawMessage
		}
		return sequence(raw, at, &v, &v.Pretokenizers, "pretokenizers", b.preTokenizers)
	case "ByteLevel":
		return b.byteLevel(raw, at)
	case "Metaspace":
		return b.metaspace(raw, at)
	case "Split":
		return b.split(raw, at)
	case "Digits":
		var v struct {
			Type       string
			Individual bool `json:"individual_digits"`
		}
		err = read(raw, at, &v)
		st := step{kind: stepClass, class: numeric, behavior: contiguous}
		if v.Individual {
			st.behavior = isolated
		}
		b.steps = append(b.steps, st)
		return err
	case "Punctuation":
		v := struct{ Type, Behavior string }{Behavior: behaviorNames[isolated]}
		if err := read(raw, at, &v); err != nil {
			return err
		}
		how, err := readBehavior(v.Behavior, at.key("behavior"))
		b.steps = append(b.steps, step{kind: stepClass, class: punctuation, behavior: how})
		return err
	}
	return refuse(at, "the tokenizer's pre-tokenizer %s is not known", name)
}

func readBehavior(name string, at place) (behavior, error) {
	i := slices.Index(behaviorNames, name)
	if i < 0 {
		return 0, refuse(at, "the behavior %q is not known", name)
	}
	return behavior(i), nil
}

func (b *builder) byteLevel(raw json.RawMessage, at place) error {
	v := struct {
		Type     string
		Prefix   bool  `json:"add_prefix_space"`
		Trim     *bool `json:"trim_offsets"` // moves offsets only
		UseRegex bool  `json:"use_regex"`
	}{Prefix: true, UseRegex: true}
	if err := read(raw, at, &v); err != nil {
		return err
	}
	b.bpe.byteLevel = true
	if v.Prefix {
		b.steps = append(b.steps, step{kind: stepPrefix, text: []byte(" ")})
	}
	if v.UseRegex {
		b.steps = append(b.steps, step{kind: stepScan, scan: findScanner(gpt2Pattern)})
	}
	return nil
}

// A metaspaceFile is a Metaspace, which is a pre-tokenizer and a decoder.
type metaspaceFile struct {
	Type        string
	Replacement string
	Scheme      string  `json:"prepend_scheme"`
	Prefix      *bool   `json:"add_prefix_space"` // of older files
	StrRep      *string `json:"str_rep"`          // of older files
	Split       bool
}

func readMetaspace(raw json.RawMessage, at place) (v metaspaceFile, err error) {
	v = metaspaceFile{Scheme: "always", Split: true}
	if err := read(raw, at, &v); err != nil {
		return v, err
	}
	if utf8.RuneCountInString(v.Replacement) != 1 {
		return v, damaged(at.key("replacement"), "a blank becomes %q, not one character", v.Replacement)
	}
	if v.Prefix != nil && !*v.Prefix && v.Scheme != "never" {
		return v, damaged(at.key("add_prefix_space"), "add_prefix_space contradicts prepend_scheme")
	}
	if !slices.Contains([]string{"always", "first", "never"}, v.Scheme) {
		return v, refuse(at.key("prepend_scheme"), "the prepend_scheme %q is not known", v.Scheme)
	}
	return v, nil
}

func (b *builder) metaspace(raw json.RawMessage, at place) error {
	v, err := readMetaspace(raw, at)
	if err != nil {
		return err
	}
	blank := []byte(v.Replacement)
	b.steps = append(b.steps, step{kind: stepMeta, blank: blank})
	switch v.Scheme {
	case "always":
		b.steps = append(b.steps, step{kind: stepPrefix, text: blank})
	case "first":
		b.steps = append(b.steps, step{kind: stepFirst, text: blank})
	}
	if v.Split {
		b.steps = append(b.steps, step{kind: stepText, text: blank, behavior: mergedWithNext})
	}
	return nil
}

func (b *builder) split(raw json.RawMessage, at place) error {
	var v struct {
		Type     string
		Pattern  textPattern
		Behavior string
		Invert   bool
	}
	if err := read(raw, at, &v); err != nil {
		return err
	}
	how, err := readBehavior(v.Behavior, at.key("behavior"))
	if err != nil {
		return err
	}
	st := step{behavior: how, invert: v.Invert}
	switch {
	case v.Pattern.String != nil && *v.Pattern.String != "":
		st.kind, st.text = stepText, []byte(*v.Pattern.String)
	case v.Pattern.Regex != nil:
		if st.scan = findScanner(*v.Pattern.Regex); st.scan == nil {
			return refuse(at.key("pattern"), "the tokenizer splits words with an unknown pattern: %s",
				*v.Pattern.Regex)
		}
	default:
		return damaged(at.key("pattern"), "the tokenizer splits words with no pattern")
	}
	b.steps = append(b.steps, st)
	return nil
}

// PieceBytes is the longest piece of a text that is encoded at once. Encoding takes up to some 50
// times as much memory.
const PieceBytes = 1 << 20

// PieceEnd returns the length of the first piece of a text that is longer than PieceBytes. It looks
// at no more than these. The pieces have the tokens of the whole text: a piece ends where the
// tokenizer splits in any case. Only a text that has no such place in half of PieceBytes, such as
// one of blanks alone, is split elsewhere.
func (t *Tokenizer) PieceEnd(text string) int {
	n, _ := t.pieceEnd(text)
	return n
}

// maxTries bounds the places that are looked at.
const maxTries = 4096

// pieceEnd is PieceEnd, and reports whether the tokens stay the same.
func (t *Tokenizer) pieceEnd(text string) (n int, safe bool) {
	margin := min(t.piece/4, 2048)
	tries := 0
	for at := t.piece - margin; at > t.piece/2 && tries < maxTries; at-- {
		if text[at] == ' ' && text[at-1] > ' ' || text[at-1] == '\n' && text[at] > ' ' {
			if tries++; t.splitsAt(text, at, margin) {
				return at, true
			}
		}
	}
	for n = t.piece; n > t.piece-utf8.UTFMax && !utf8.RuneStart(text[n]); {
		n--
	}
	if !utf8.RuneStart(text[n]) {
		n = t.piece
	}
	return n, false
}

// splitsAt reports whether the tokens of a text are the tokens of what stands before a place and of
// what stands behind. It looks at margin bytes on either side.
func (t *Tokenizer) splitsAt(text string, at, margin int) bool {
	left, right := text[at-margin:at], text[at:at+margin]
	for len(left) > 0 && !utf8.RuneStart(left[0]) {
		left = left[1:]
	}
	for len(right) > 0 && !validEnd(right) {
		right = right[:len(right)-1]
	}
	if !utf8.ValidString(left) || !utf8.ValidString(right) || left == "" || right == "" {
		return false
	}
	l, r := []byte(left), []byte(right)
	// Blanks on both sides of a place could go together, and an added token could take them.
	before, _ := utf8.DecodeLastRune(l)
	behind, _ := utf8.DecodeRune(r)
	if before != '\n' && classes().of(before)&space != 0 ||
		behind != ' ' && classes().of(behind)&space != 0 {
		return false
	}
	if t.raw != nil && t.raw.match.touches(l, r) {
		return false
	}
	var ok bool
	if l, r, ok = t.normalSides(l, r); !ok || t.cooked != nil && t.cooked.match.touches(l, r) {
		return false
	}
	for i := range t.steps {
		var split bool
		if l, r, split, ok = t.steps[i].sides(l, r); split || !ok {
			return split && ok
		}
	}
	return cutsModel(t.model, l, r)
}

func validEnd(s string) bool {
	r, n := utf8.DecodeLastRuneInString(s)
	return r != utf8.RuneError || n != 1
}

// normalSides normalizes both sides of a place, if that is what it does to them together.
func (t *Tokenizer) normalSides(l, r []byte) (left, right []byte, ok bool) {
	for _, n := range t.normal {
		switch n := n.(type) {
		case prepend: // as a step that puts a prefix before a part
			if l[len(l)-1] == '\n' {
				return nil, nil, false
			}
			continue
		case replace:
			if bytes.IndexByte(n.from[1:], r[0]) >= 0 {
				return nil, nil, false
			}
			l, r = n.normalize(nil, l), n.normalize(nil, r)
		case *form:
			if first, _ := utf8.DecodeRune(r); !n.settled(first) {
				return nil, nil, false
			}
			l, r = n.normalize(nil, l), n.normalize(nil, r)
		case *spmNormal:
			if n.user != nil && n.user.touches(l, r) ||
				n.chars != nil && spans(l, r, func(b []byte) int { _, k := n.chars.longest(b); return k }) {
				return nil, nil, false
			}
			l, r = n.within(nil, l, false, false), n.within(nil, r, false, false)
			if bytes.HasSuffix(l, []byte(" ")) || bytes.HasSuffix(l, []byte(metaspace)) {
				return nil, nil, false
			}
		default:
			return nil, nil, false
		}
		if len(l) == 0 || len(r) == 0 {
			return nil, nil, false
		}
	}
	return l, r, true
}

// sides applies a step to both sides of a place. It reports whether the step surely splits there,
// and whether it does to the sides what it does to them together.
func (st *step) sides(l, r []byte) (left, right []byte, split, ok bool) {
	t := classes()
	last, _ := utf8.DecodeLastRune(l)
	first, _ := utf8.DecodeRune(r)
	switch st.kind {
	case stepPrefix, stepFirst: // a line end that a part begins with could join the prefix
		return l, r, false, last != '\n'
	case stepMeta:
		blank := replace{[]byte(" "), st.blank}
		return blank.normalize(nil, l), blank.normalize(nil, r), false, true
	case stepClass:
		return l, r, false, (t.of(last)|t.of(first))&st.class == 0
	case stepText:
		if st.behavior == mergedWithNext && !st.invert && bytes.HasPrefix(r, st.text) &&
			!bytes.HasSuffix(l, st.text) && utf8.RuneCount(st.text) == 1 {
			return l, r, true, true
		}
		near := slices.Concat(l[max(0, len(l)-len(st.text)):], r[:min(len(r), len(st.text))])
		return l, r, false, !bytes.Contains(near, st.text)
	}
	splits := st.behavior == isolated && !st.invert || st.behavior == removed && st.invert
	if !splits {
		return nil, nil, false, false
	}
	if st.scan.some {
		return l, r, false, st.behavior == isolated && (t.of(last)|t.of(first))&number == 0 &&
			(first == ' ' || last == '\n')
	}
	// No match but one of blanks has a blank that does not begin it; and a line end alone before a
	// letter ends a match.
	if first == ' ' && t.of(last)&space == 0 {
		return l, r, true, true
	}
	before, _ := utf8.DecodeLastRune(l[:len(l)-1])
	return l, r, true, last == '\n' && len(l) > 1 && t.of(before)&space == 0 &&
		t.of(first)&letters != 0 && t.of(first)&mark == 0
}

// cutsModel reports whether a model makes of a text the tokens of both its sides.
func cutsModel(m model, l, r []byte) bool {
	switch m := m.(type) {
	case *bpe:
		last, _ := utf8.DecodeLastRune(l)
		return m.boundary != nil && bytes.HasPrefix(r, m.boundary) &&
			!bytes.HasSuffix(l, m.boundary) && !m.joined[last]
	case *userSplit:
		return !m.user.touches(l, r) && cutsModel(m.rest, l, r)
	case *unigram:
		return !spans(l, r, func(b []byte) int { n, _ := m.trie.longest(b); return n })
	}
	return false
}

// touches reports whether a string of the set stands across a place, or ends or begins there.
func (m *matcher) touches(l, r []byte) bool {
	both := slices.Concat(l, r)
	for i := range len(l) + 1 {
		if n, _ := m.longest(both[i:]); n > 0 && i+n >= len(l) {
			return true
		}
	}
	return false
}

// spans reports whether something that has a length where it begins stands across a place.
func spans(l, r []byte, length func([]byte) int) bool {
	both := slices.Concat(l, r)
	for i := range l {
		if i+length(both[i:]) > len(l) {
			return true
		}
	}
	return false
}
