package safetensors

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A scanner reads JSON from left to right. encoding/json takes doubled keys, keys in another
// case, arrays of the wrong length and broken UTF-8 without a word (tried on Go 1.26), and makes
// five allocations a tensor; this one refuses them and gives strings that share the text.
type scanner struct {
	text string // valid UTF-8
	at   int
}

// maxDepth bounds the nesting of values that are skipped.
const maxDepth = 64

func (s *scanner) fail(format string, args ...any) error {
	return fmt.Errorf("byte %d: %s", s.at, fmt.Sprintf(format, args...))
}

func (s *scanner) space() {
	for s.at < len(s.text) {
		switch s.text[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// next skips blanks and gives the byte that follows; at the end 0, which starts no JSON token.
func (s *scanner) next() byte {
	s.space()
	if s.at == len(s.text) {
		return 0
	}
	return s.text[s.at]
}

func (s *scanner) want(c byte) error {
	if s.next() != c {
		return s.fail("%q wanted, %s found", c, s.found())
	}
	s.at++
	return nil
}

func (s *scanner) found() string {
	if s.at == len(s.text) {
		return "the end"
	}
	r, _ := utf8.DecodeRuneInString(s.text[s.at:])
	return strconv.QuoteRune(r)
}

// object calls field for every key; field must read the value.
func (s *scanner) object(field func(key string) error) error {
	return s.list('{', '}', func() error {
		key, err := s.str()
		if err != nil {
			return err
		}
		if err := s.want(':'); err != nil {
			return err
		}
		return field(key)
	})
}

// array calls item for every element; item must read it.
func (s *scanner) array(item func() error) error { return s.list('[', ']', item) }

func (s *scanner) list(begin, end byte, item func() error) error {
	if err := s.want(begin); err != nil {
		return err
	}
	if s.next() == end {
		s.at++
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if s.next() == end {
			s.at++
			return nil
		}
		if err := s.want(','); err != nil {
			return err
		}
	}
}

// str reads a string; one without escapes shares the text.
func (s *scanner) str() (string, error) {
	if err := s.want('"'); err != nil {
		return "", err
	}
	begin := s.at
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			return s.text[begin : s.at-1], nil
		case c == '\\':
			return s.escaped(begin)
		case c < ' ':
			return "", s.fail("a string holds the raw control character %s", s.found())
		}
	}
	return "", s.fail("a string has no end")
}

// escaped goes on with a string that began at begin, from its first escape.
func (s *scanner) escaped(begin int) (string, error) {
	var b strings.Builder
	b.WriteString(s.text[begin:s.at])
	for s.at < len(s.text) {
		c := s.text[s.at]
		switch {
		case c == '"':
			s.at++
			return b.String(), nil
		case c < ' ':
			return "", s.fail("a string holds the raw control character %s", s.found())
		case c != '\\':
			b.WriteByte(c)
			s.at++
			continue
		}
		r, err := s.escape()
		if err != nil {
			return "", err
		}
		b.WriteRune(r)
	}
	return "", s.fail("a string has no end")
}

// escape reads one escape sequence, both halves of a surrogate pair included.
func (s *scanner) escape() (rune, error) {
	if s.at+1 == len(s.text) {
		return 0, s.fail("a string ends within an escape")
	}
	c := s.text[s.at+1]
	if c == 'u' {
		r, err := s.hex()
		if err != nil || !utf16.IsSurrogate(r) {
			return r, err
		}
		low, err := s.hex()
		if err != nil {
			return 0, err
		}
		if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
			return 0, s.fail("half of a surrogate pair")
		}
		return r, nil
	}
	// Each letter of the first string stands for the character at its place in the second.
	i := strings.IndexByte(`"\/bfnrt`, c)
	if i < 0 {
		return 0, s.fail("an unknown escape")
	}
	s.at += 2
	return rune("\"\\/\b\f\n\r\t"[i]), nil
}

func (s *scanner) hex() (rune, error) {
	if len(s.text)-s.at < 6 || s.text[s.at:s.at+2] != `\u` {
		return 0, s.fail("half of a surrogate pair, or a truncated escape")
	}
	digits := s.text[s.at+2 : s.at+6]
	for i := range digits {
		if !strings.ContainsRune("0123456789abcdefABCDEF", rune(digits[i])) {
			return 0, s.fail("an escape without four digits")
		}
	}
	n, err := strconv.ParseUint(digits, 16, 16)
	s.at += 6
	return rune(n), err
}

// integer reads a number from 0 to 2⁶³-1, written as digits only.
func (s *scanner) integer() (int64, error) {
	s.space()
	begin := s.at
	for s.at < len(s.text) && '0' <= s.text[s.at] && s.text[s.at] <= '9' {
		s.at++
	}
	digits := s.text[begin:s.at]
	switch {
	case digits == "":
		return 0, s.fail("a whole number wanted, %s found", s.found())
	case len(digits) > 1 && digits[0] == '0':
		return 0, s.fail("a number starts with 0")
	case s.at < len(s.text) && strings.IndexByte(".eE", s.text[s.at]) >= 0:
		return 0, s.fail("a number is not written as a whole number")
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return 0, s.fail("the number %.30s is larger than 2^63-1", digits)
	}
	return n, nil
}

// skip reads any value and forgets it.
func (s *scanner) skip(depth int) error {
	if depth > maxDepth {
		return s.fail("values nest deeper than %d", maxDepth)
	}
	switch s.next() {
	case '{':
		return s.object(func(string) error { return s.skip(depth + 1) })
	case '[':
		return s.array(func() error { return s.skip(depth + 1) })
	case '"':
		_, err := s.str()
		return err
	}
	rest := s.text[s.at:]
	n := len(rest) - len(strings.TrimLeft(rest, "+-.0123456789abcdefghijklmnopqrstuvwxyzE"))
	word := rest[:n]
	_, err := strconv.ParseFloat(word, 64)
	if n == 0 || err != nil && word != "true" && word != "false" && word != "null" {
		return s.fail("a value wanted, %s found", s.found())
	}
	s.at += n
	return nil
}
