package tokenizer

import (
	"slices"
	"unicode/utf8"
)

// A scanner finds the matches of one of the patterns that published tokenizers split words with.
// The patterns need look-ahead and backtracking in few places, all spelled out below, so that a
// scan is one pass without allocation.
type scanner struct {
	table  *classTable
	how    func(s *scanner, b []byte, i int) int
	some   bool  // most of a text is no match
	digits int   // the longest run of digits that is one match
	word   class // what a word is made of
	suffix bool  // an English contraction belongs to the word before it
}

const (
	gpt2Pattern   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
	llama3Pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|` +
		` ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

	capitals     = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
	smalls       = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
	contractions = `(?i:'s|'t|'re|'ve|'m|'ll|'d)?`
	o200kTail    = ` ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// patterns are recognized by their exact text. Two texts may mean the same: the second pattern
// below (tiktoken's spelling) has possessive repeats where nothing could be given back.
var patterns = []struct {
	text string
	scan scanner
}{
	{gpt2Pattern, scanner{how: (*scanner).gpt2, word: letters}},
	{llama3Pattern, scanner{how: (*scanner).cl100k, digits: 3, word: letters}},
	{`'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|` +
		`\s*[\r\n]|\s+(?!\S)|\s+`, scanner{how: (*scanner).cl100k, digits: 3, word: letters}},
	// Qwen 2 and 3.
	{`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|` +
		` ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
		scanner{how: (*scanner).cl100k, digits: 1, word: letters}},
	// Qwen 3.5.
	{`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|` +
		` ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
		scanner{how: (*scanner).cl100k, digits: 1, word: letters | mark}},
	// GPT-4o, Llama 4.
	{capitals + `*` + smalls + `+` + contractions + `|` + capitals + `+` + smalls + `*` +
		contractions + `|\p{N}{1,3}|` + o200kTail,
		scanner{how: (*scanner).o200k, digits: 3, word: letters, suffix: true}},
	// Mistral's tekken.
	{capitals + `*` + smalls + `+|` + capitals + `+` + smalls + `*|\p{N}|` + o200kTail,
		scanner{how: (*scanner).o200k, digits: 1, word: letters}},
	// DeepSeek 3; its file has the two line ends as themselves.
	{"[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?" +
		"[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
		scanner{how: (*scanner).deepSeek, word: letters | mark}},
	{`[一-龥぀-ゟ゠-ヿ]+`, scanner{how: (*scanner).kana, some: true}},
	{`\p{N}{1,3}`, scanner{how: (*scanner).number, some: true, digits: 3}},
	{`\p{N}`, scanner{how: (*scanner).number, some: true, digits: 1}},
}

// findScanner gives the scanner for a pattern, or nil.
func findScanner(text string) *scanner {
	for _, p := range patterns {
		if p.text == text {
			s := p.scan
			s.table = classes()
			return &s
		}
	}
	return nil
}

// match gives the end of the match that begins at b[i], or 0 if none does.
func (s *scanner) match(b []byte, i int) int { return s.how(s, b, i) }

func (s *scanner) gpt2(b []byte, i int) int {
	if b[i] == '\'' {
		if end := contraction(b, i, false); end > 0 {
			return end
		}
	}
	j := i
	if b[i] == ' ' {
		j++
	}
	if j < len(b) {
		c, n := s.table.at(b, j)
		switch {
		case c&letters != 0:
			return s.table.run(b, j+n, letters)
		case c&number != 0:
			return s.table.run(b, j+n, number)
		case c&space == 0:
			return s.table.until(b, j+n, space|letters|number)
		}
	}
	return s.spaces(b, i, false)
}

func (s *scanner) cl100k(b []byte, i int) int {
	if b[i] == '\'' {
		if end := contraction(b, i, true); end > 0 {
			return end
		}
	}
	c, n := s.table.at(b, i)
	if c&s.word != 0 {
		return s.table.run(b, i+n, s.word)
	}
	if c&number != 0 {
		return s.numbers(b, i)
	}
	if end := s.prefixed(b, i, n); end > 0 {
		return end
	}
	if end := s.marks(b, i, c, n, ""); end > 0 {
		return end
	}
	return s.spaces(b, i, true)
}

// prefixed matches a word after one character that is neither letter, number nor line end: the
// character at b[i], which has n bytes and is known not to be a letter or a number.
func (s *scanner) prefixed(b []byte, i, n int) int {
	if b[i] == '\n' || b[i] == '\r' || i+n == len(b) {
		return 0
	}
	if c, m := s.table.at(b, i+n); c&s.word != 0 {
		return s.table.run(b, i+n+m, s.word)
	}
	return 0
}

// marks matches a run of what is neither space, word nor number, perhaps after a blank, and the
// line ends (or the characters of also) that follow it. The character at b[i] has class c.
func (s *scanner) marks(b []byte, i int, c class, n int, also string) int {
	if b[i] == ' ' {
		i += n
		if i == len(b) {
			return 0
		}
		c, n = s.table.at(b, i)
	}
	if c&(space|s.word|number) != 0 {
		return 0
	}
	i = s.table.until(b, i+n, space|s.word|number)
	return lineEnds(b, i, also)
}

func lineEnds(b []byte, i int, also string) int {
	for i < len(b) && (b[i] == '\n' || b[i] == '\r' || also != "" && b[i] == also[0]) {
		i++
	}
	return i
}

// spaces matches a run of spaces: as far as its last line end, if lines is set and it has one;
// else without the last space if a word follows, so that the word can have it; else all.
func (s *scanner) spaces(b []byte, i int, lines bool) int {
	end, last, line := i, i, 0
	for end < len(b) {
		c, n := s.table.at(b, end)
		if c&space == 0 {
			break
		}
		last = end
		if b[end] == '\n' || b[end] == '\r' {
			line = end + 1
		}
		end += n
	}
	switch {
	case lines && line > 0:
		return line
	case end == len(b) || last == i:
		return end
	default:
		return last
	}
}

func (s *scanner) numbers(b []byte, i int) int {
	for range s.digits {
		if i == len(b) {
			break
		}
		c, n := s.table.at(b, i)
		if c&number == 0 {
			break
		}
		i += n
	}
	return i
}

func (s *scanner) number(b []byte, i int) int {
	if end := s.numbers(b, i); end > i {
		return end
	}
	return 0
}

// What a word of o200k may have before its first small letter, and from there on. Letters without
// case and marks are in both.
const (
	capital = upper | other | mark
	small   = lower | other | mark
)

func (s *scanner) o200k(b []byte, i int) int {
	c, n := s.table.at(b, i)
	if c&number != 0 {
		return s.numbers(b, i)
	}
	if end := s.cased(b, i, c, n); end > 0 {
		if s.suffix && end < len(b) && b[end] == '\'' {
			return max(end, contraction(b, end, true))
		}
		return end
	}
	if end := s.marks(b, i, c, n, "/"); end > 0 {
		return end
	}
	return s.spaces(b, i, true)
}

// cased tries the four ways in which a word can match, in the pattern's order: capitals and at
// least one small letter, after a prefix and without; then at least one capital, likewise.
func (s *scanner) cased(b []byte, i int, c class, n int) int {
	prefix := c&letters == 0 && b[i] != '\n' && b[i] != '\r'
	if prefix {
		if end := s.mixed(b, i+n); end > 0 {
			return end
		}
	}
	if end := s.mixed(b, i); end > 0 {
		return end
	}
	if prefix {
		if end := s.shouted(b, i+n); end > 0 {
			return end
		}
	}
	return s.shouted(b, i)
}

// mixed matches capitals* smalls+. If no small letter follows the capitals, the last of them that
// is also a small one is given back.
func (s *scanner) mixed(b []byte, i int) int {
	back := 0
	for i < len(b) {
		c, n := s.table.at(b, i)
		if c&capital == 0 {
			if c&small == 0 {
				break
			}
			return s.table.run(b, i+n, small)
		}
		i += n
		if c&small != 0 {
			back = i
		}
	}
	return back
}

// shouted matches capitals+ smalls*.
func (s *scanner) shouted(b []byte, i int) int {
	if end := s.table.run(b, i, capital); end > i {
		return s.table.run(b, end, small)
	}
	return 0
}

func (s *scanner) deepSeek(b []byte, i int) int {
	if asciiPunct(b[i]) {
		end := i + 1
		for end < len(b) && asciiLetter(b[end]) {
			end++
		}
		if end > i+1 {
			return end
		}
	}
	c, n := s.table.at(b, i)
	if c&s.word != 0 {
		return s.table.run(b, i+n, s.word)
	}
	if c&(punct|symbol) == 0 {
		if end := s.prefixed(b, i, n); end > 0 {
			return end
		}
	}
	j := i
	if b[i] == ' ' {
		j++
	}
	if end := s.table.run(b, j, punct|symbol); end > j {
		return lineEnds(b, end, "")
	}
	if c&space != 0 {
		return s.spaces(b, i, true)
	}
	return 0
}

func asciiLetter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

func asciiPunct(c byte) bool {
	return '!' <= c && c <= '~' && !asciiLetter(c) && (c < '0' || c > '9')
}

// kanaRanges are the ranges of DeepSeek's second pattern.
var kanaRanges = [][2]rune{{'一', '龥'}, {'぀', 'ゟ'}, {'゠', 'ヿ'}}

func (s *scanner) kana(b []byte, i int) int {
	end := i
	for end < len(b) {
		r, n := utf8.DecodeRune(b[end:])
		if !slices.ContainsFunc(kanaRanges, func(x [2]rune) bool { return x[0] <= r && r <= x[1] }) {
			break
		}
		end += n
	}
	if end == i {
		return 0
	}
	return end
}

// contraction matches an English contraction at the apostrophe b[i]; if fold is set, in either case
// and with the long s, which folds to s.
func contraction(b []byte, i int, fold bool) int {
	rest := b[i+1:]
	if len(rest) == 0 {
		return 0
	}
	c := foldASCII(rest[0], fold)
	switch c {
	case 's', 't', 'm', 'd':
		return i + 2
	case 'r', 'v', 'l':
		want := byte('e')
		if c == 'l' {
			want = 'l'
		}
		if len(rest) > 1 && foldASCII(rest[1], fold) == want {
			return i + 3
		}
	case "ſ"[0]:
		if fold && len(rest) > 1 && rest[1] == "ſ"[1] {
			return i + 3
		}
	}
	return 0
}

func foldASCII(c byte, fold bool) byte {
	if fold && 'A' <= c && c <= 'Z' {
		return c | 0x20
	}
	return c
}
