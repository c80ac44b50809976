package tokenizer

import (
	"compress/gzip"
	_ "embed" // for unicode.txt.gz
	"io"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/deepwell/deepwell/internal/lists"
)

// unicodePacked is unicode.txt, which has one class or mapping a line; testdata/make.py writes it
// by asking the library, and `go test ./tokenizer -update` packs it.
//
//go:embed unicode.txt.gz
var unicodePacked string

// unpack gives the text that gzip has packed; a test reads all of ours.
func unpack(packed string) string {
	var text strings.Builder
	if r, err := gzip.NewReader(strings.NewReader(packed)); err == nil {
		_, _ = io.Copy(&text, r) //nolint:gosec // our own file
	}
	return text.String()
}

// A class is a set of properties of a character.
type class uint16

// The first eight are classes of the library's regular expressions, and no character has two of
// them. The last three belong to parts that follow other versions of Unicode.
const (
	upper       class = 1 << iota // \p{Lu} and \p{Lt}
	lower                         // \p{Ll}
	other                         // \p{Lm} and \p{Lo}
	mark                          // \p{M}
	number                        // \p{N}
	punct                         // \p{P}
	symbol                        // \p{S}
	space                         // \s
	numeric                       // what the pre-tokenizer Digits splits
	punctuation                   // what the pre-tokenizer Punctuation splits
	word                          // \w around an added token that is a single word

	letters = upper | lower | other // \p{L}
)

var classNames = map[string]class{
	"upper": upper, "lower": lower, "letter": other, "mark": mark, "number": number,
	"punct": punct, "symbol": symbol, "space": space, "numeric": numeric,
	"punctuation": punctuation, "word": word,
}

// A classTable finds the class of a character in two steps: its block of 256, then its place.
type classTable struct {
	ascii  [utf8.RuneSelf]class
	index  [(utf8.MaxRune + 1) >> 8]uint16
	blocks [][256]class
}

func (t *classTable) of(r rune) class { return t.blocks[t.index[r>>8]][r&0xff] }

// at gives the class and the width of the character at b[i]; b is valid UTF-8.
func (t *classTable) at(b []byte, i int) (class, int) {
	if c := b[i]; c < utf8.RuneSelf {
		return t.ascii[c], 1
	}
	return t.wide(b[i:])
}

func (t *classTable) wide(b []byte) (class, int) {
	r, n := utf8.DecodeRune(b)
	return t.of(r), n
}

// run gives the end of the longest run from b[i] on of characters that have a class of set.
func (t *classTable) run(b []byte, i int, set class) int {
	for i < len(b) {
		c, n := t.at(b, i)
		if c&set == 0 {
			break
		}
		i += n
	}
	return i
}

// until is run for the characters that have none of the classes.
func (t *classTable) until(b []byte, i int, set class) int {
	for i < len(b) {
		c, n := t.at(b, i)
		if c&set != 0 {
			break
		}
		i += n
	}
	return i
}

// A formTable has what the Unicode normal forms need, but for the syllables of Hangul, which are
// computed.
type formTable struct {
	canonical  map[rune][]rune // full canonical decompositions
	compatible map[rune][]rune // full compatibility decompositions where they differ
	compose    map[[2]rune]rune
	second     map[rune]bool // characters that may join the one before them
	order      map[rune]uint8
}

// unicodeLines calls f for each entry of unicode.txt: the name of its line and one of its words.
func unicodeLines(f func(name, entry string)) {
	for line := range strings.Lines(unpack(unicodePacked)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		for entry := range strings.FieldsSeq(rest) {
			f(name, entry)
		}
	}
}

// hexRune reads a code point; the file is ours and a test reads all of it.
func hexRune(s string) rune {
	n, _ := strconv.ParseUint(s, 16, 21)
	return rune(n)
}

func hexRunes(s string) []rune {
	return lists.Map(strings.Split(s, "+"), hexRune)
}

func eachRune(entry string, f func(rune)) {
	first, last, ok := strings.Cut(entry, "-")
	if !ok {
		last = first
	}
	for r := hexRune(first); r <= hexRune(last); r++ {
		f(r)
	}
}

// classes is the table that every tokenizer shares; it is made once and never changed.
var classes = sync.OnceValue(func() *classTable {
	flat := make([]class, utf8.MaxRune+1)
	unicodeLines(func(name, entry string) {
		if c := classNames[name]; c != 0 {
			eachRune(entry, func(r rune) { flat[r] |= c })
		}
	})
	t := new(classTable)
	copy(t.ascii[:], flat)
	known := make(map[[256]class]uint16)
	for i := range t.index {
		block := [256]class(flat[i<<8 : (i+1)<<8])
		at, ok := known[block]
		if !ok {
			at = uint16(len(t.blocks))
			known[block] = at
			t.blocks = append(t.blocks, block)
		}
		t.index[i] = at
	}
	return t
})

// forms is shared like classes, and made only for a tokenizer that normalizes.
var forms = sync.OnceValue(func() *formTable {
	t := &formTable{
		canonical: map[rune][]rune{}, compatible: map[rune][]rune{},
		compose: map[[2]rune]rune{}, second: map[rune]bool{}, order: map[rune]uint8{},
	}
	unicodeLines(func(name, entry string) {
		from, to, _ := strings.Cut(entry, "=")
		switch {
		case name == "canonical":
			t.canonical[hexRune(from)] = hexRunes(to)
		case name == "compatible":
			t.compatible[hexRune(from)] = hexRunes(to)
		case name == "compose":
			pair := [2]rune(hexRunes(from))
			t.compose[pair] = hexRune(to)
			t.second[pair[1]] = true
		case strings.HasPrefix(name, "class"):
			k, _ := strconv.ParseUint(name[len("class"):], 10, 8)
			eachRune(entry, func(r rune) { t.order[r] = uint8(k) })
		}
	})
	return t
})
