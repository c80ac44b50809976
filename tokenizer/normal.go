package tokenizer

import (
	"bytes"
	"encoding/json"
	"slices"
	"unicode/utf8"
)

// A normalizer is one step of the normalizer in a tokenizer.json. It appends what it makes of src,
// which is not empty, to dst.
type normalizer interface {
	normalize(dst, src []byte) []byte
}

// prepend puts text before all else.
type prepend struct{ text []byte }

func (p prepend) normalize(dst, src []byte) []byte { return append(append(dst, p.text...), src...) }

// replace puts to in the place of each from.
type replace struct{ from, to []byte }

func (r replace) normalize(dst, src []byte) []byte {
	for {
		i := bytes.Index(src, r.from)
		if i < 0 {
			return append(dst, src...)
		}
		dst = append(append(dst, src[:i]...), r.to...)
		src = src[i+len(r.from):]
	}
}

// A form is a normal form of Unicode: NFC, NFD, NFKC or NFKD.
type form struct {
	table      *formTable
	compatible bool // replace compatibility characters
	compose    bool

	// open has a bit for each character that may change, or join the one before it.
	open [(utf8.MaxRune + 1) / 64]uint64
}

func newForm(compatible, compose bool) *form {
	f := &form{table: forms(), compatible: compatible, compose: compose}
	t := f.table
	set := func(r rune) { f.open[r/64] |= 1 << (r % 64) }
	for r := range t.order {
		set(r)
	}
	for r, parts := range t.canonical {
		// A composed character stays composed, but for those that the standard excludes.
		if whole := t.join(slices.Clone(parts)); !compose || len(whole) != 1 || whole[0] != r {
			set(r)
		}
	}
	if compatible {
		for r := range t.compatible {
			set(r)
		}
	}
	if compose {
		for r := range t.second {
			set(r)
		}
		for r := rune(vBase); r < tBase+tCount; r++ {
			if r < vBase+vCount || r > tBase {
				set(r)
			}
		}
	} else {
		for r := rune(sBase); r < sBase+sCount; r++ {
			set(r)
		}
	}
	return f
}

// normalize copies the characters that are already in the form and that join nothing, which is
// nearly all of most texts, and works on the others together with the one before them.
func (f *form) normalize(dst, src []byte) []byte {
	done, before := 0, 0 // src[:done] is in dst; before is where the last settled character begins
	for i := 0; i < len(src); {
		if src[i] < utf8.RuneSelf {
			before, i = i, i+1
			continue
		}
		r, n := utf8.DecodeRune(src[i:])
		if f.settled(r) {
			before, i = i, i+n
			continue
		}
		for i += n; i < len(src); i += n {
			if r, n = utf8.DecodeRune(src[i:]); f.settled(r) {
				break
			}
		}
		before = max(before, done)
		dst = f.work(append(dst, src[done:before]...), src[before:i])
		done = i
	}
	return append(dst, src[done:]...)
}

func (f *form) settled(r rune) bool { return f.open[r/64]>>(r%64)&1 == 0 }

// work appends the normal form of a short text.
func (f *form) work(dst, src []byte) []byte {
	var buf [32]rune
	parts := buf[:0]
	for i := 0; i < len(src); {
		r, n := utf8.DecodeRune(src[i:])
		parts = f.split(parts, r)
		i += n
	}
	f.table.sort(parts)
	if f.compose {
		parts = f.table.join(parts)
	}
	for _, r := range parts {
		dst = utf8.AppendRune(dst, r)
	}
	return dst
}

// split appends the full decomposition of r.
func (f *form) split(parts []rune, r rune) []rune {
	if f.compatible {
		if p, ok := f.table.compatible[r]; ok {
			return append(parts, p...)
		}
	}
	if isSyllable(r) {
		return splitSyllable(parts, r)
	}
	if p, ok := f.table.canonical[r]; ok {
		return append(parts, p...)
	}
	return append(parts, r)
}

// sort brings each run of marks into canonical order.
func (t *formTable) sort(parts []rune) {
	for i := 0; i < len(parts); {
		if t.order[parts[i]] == 0 {
			i++
			continue
		}
		end := i
		for end < len(parts) && t.order[parts[end]] != 0 {
			end++
		}
		slices.SortStableFunc(parts[i:end], func(a, b rune) int {
			return int(t.order[a]) - int(t.order[b])
		})
		i = end
	}
}

// join composes in place, as the Unicode standard's section 3.11 has it: each mark joins the last
// starter unless a mark of its own class, or a starter, stands between.
func (t *formTable) join(parts []rune) []rune {
	out := parts[:0]
	starter := -1
	last := 0 // class of the last character that was kept after the starter
	for _, r := range parts {
		k := int(t.order[r])
		if starter >= 0 && (last < k || last == 0 && starter == len(out)-1) {
			if whole := t.pair(out[starter], r); whole != 0 {
				out[starter] = whole
				continue
			}
		}
		if k == 0 {
			starter = len(out)
		}
		last = k
		out = append(out, r)
	}
	return out
}

func (t *formTable) pair(a, b rune) rune {
	if whole := pairSyllable(a, b); whole != 0 {
		return whole
	}
	return t.compose[[2]rune{a, b}]
}

// The syllables of Hangul are computed from their parts; the constants are from section 3.12
// of the Unicode standard.
const (
	sBase, lBase, vBase, tBase     = 0xac00, 0x1100, 0x1161, 0x11a7
	lCount, vCount, tCount, sCount = 19, 21, 28, 19 * 21 * 28
)

func isSyllable(r rune) bool { return sBase <= r && r < sBase+sCount }

func splitSyllable(parts []rune, r rune) []rune {
	s := r - sBase
	parts = append(parts, lBase+s/(vCount*tCount), vBase+s%(vCount*tCount)/tCount)
	if t := s % tCount; t != 0 {
		parts = append(parts, tBase+t)
	}
	return parts
}

func pairSyllable(a, b rune) rune {
	if l, v := a-lBase, b-vBase; 0 <= l && l < lCount && 0 <= v && v < vCount {
		return sBase + (l*vCount+v)*tCount
	}
	if s, t := a-sBase, b-tBase; 0 <= s && s < sCount && s%tCount == 0 && 0 < t && t < tCount {
		return a + t
	}
	return 0
}

// A textPattern is what is looked for: a text, or a regular expression.
type textPattern struct {
	String *string
	Regex  *string
}

// normalizers reads the normalizer of a tokenizer.json.
func (b *builder) normalizers(raw json.RawMessage, at place) error {
	name, err := kind(raw, at)
	if err != nil {
		return err
	}
	var n normalizer
	switch name {
	case "":
		return nil
	case "Sequence":
		var v struct {
			Type        string
			Normalizers []json.RawMessage
		}
		return sequence(raw, at, &v, &v.Normalizers, "normalizers", b.normalizers)
	case "NFC", "NFD", "NFKC", "NFKD":
		n = newForm(name[2] == 'K', name[len(name)-1] == 'C')
	case "Prepend":
		var v struct{ Type, Prepend string }
		err = read(raw, at, &v)
		n = prepend{[]byte(v.Prepend)}
	case "Replace":
		var r replace
		if r, err = readReplace(raw, at); err == nil {
			err = b.grow(r, at)
		}
		n = r
	default:
		return refuse(at, "the tokenizer's normalizer %s is not known", name)
	}
	if err != nil {
		return err
	}
	b.normal = append(b.normal, n)
	return nil
}

// maxGrowth is how many times its length a text may become by replacements. Published tokenizers
// put one character of three bytes in the place of a blank.
const maxGrowth = 64

// grow refuses replacements that together could make a short text fill the memory: forty that
// double a letter make a terabyte of it.
func (b *builder) grow(r replace, at place) error {
	b.growth = max(1, b.growth) * max(1, float64(len(r.to))/float64(len(r.from)))
	if b.growth > maxGrowth {
		return refuse(at, "the tokenizer's replacements make a text more than %d times as long",
			maxGrowth)
	}
	return nil
}

// readReplace reads a Replace, which is a normalizer and a decoder.
func readReplace(raw json.RawMessage, at place) (r replace, err error) {
	var v struct {
		Type    string
		Pattern textPattern
		Content string
	}
	if err := read(raw, at, &v); err != nil {
		return r, err
	}
	if v.Pattern.String == nil || *v.Pattern.String == "" {
		return r, refuse(at.key("pattern"), "the tokenizer replaces the matches of a regular expression")
	}
	return replace{[]byte(*v.Pattern.String), []byte(v.Content)}, nil
}
