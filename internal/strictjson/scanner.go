package strictjson

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A Scanner reads JSON that a program wrote, from left to right. encoding/json takes doubled keys,
// keys in another case, arrays of the wrong length and broken UTF-8 without a word (tried on Go
// 1.26), and makes five allocations for an object of three; with this one the caller decides, and
// strings share the text.
type Scanner struct {
	text string // valid UTF-8
	at   int
}

// Scan begins with text, which must be valid UTF-8.
func Scan(text string) Scanner { return Scanner{text: text} }

// MaxDepth bounds the nesting of values that are skipped.
const MaxDepth = 64

// Rest is what has not been read yet.
func (s *Scanner) Rest() string { return s.text[s.at:] }

// End demands that only blanks follow, after what was read.
func (s *Scanner) End(what string) error {
	if s.Next() != 0 || s.at < len(s.text) {
		return s.Fail("something follows %s", what)
	}
	return nil
}

// Fail is an error that names the place.
func (s *Scanner) Fail(format string, args ...any) error {
	return fmt.Errorf("byte %d: %s", s.at, fmt.Sprintf(format, args...))
}

func (s *Scanner) space() {
	for s.at < len(s.text) {
		switch s.text[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// Next skips blanks and gives the byte that follows; at the end 0, which starts no JSON token.
func (s *Scanner) Next() byte {
	s.space()
	if s.at == len(s.text) {
		return 0
	}
	return s.text[s.at]
}

func (s *Scanner) want(c byte) error {
	if s.Next() != c {
		return s.Fail("%q wanted, %s found", c, s.found())
	}
	s.at++
	return nil
}

func (s *Scanner) found() string {
	if s.at == len(s.text) {
		return "the end"
	}
	r, _ := utf8.DecodeRuneInString(s.text[s.at:])
	return strconv.QuoteRune(r)
}

// Object calls field for every key; field must read the value.
func (s *Scanner) Object(field func(key string) error) error {
	return s.list('{', '}', func() error {
		key, err := s.Text()
		if err != nil {
			return err
		}
		if err := s.want(':'); err != nil {
			return err
		}
		return field(key)
	})
}

// Unique is [Scanner.Object] for an object whose keys are each there once.
func (s *Scanner) Unique(field func(key string) error) error {
	var buffer [8]string // most objects then need no map
	seen, many := buffer[:0], map[string]bool(nil)
	return s.Object(func(key string) error {
		if slices.Contains(seen, key) || many[key] {
			return s.Fail("the key %.100q stands twice", key)
		}
		if len(seen) < cap(buffer[:]) {
			seen = append(seen, key)
		} else {
			if many == nil {
				many = map[string]bool{}
			}
			many[key] = true
		}
		return field(key)
	})
}

// Array calls item for every element; item must read it.
func (s *Scanner) Array(item func() error) error { return s.list('[', ']', item) }

func (s *Scanner) list(begin, end byte, item func() error) error {
	if err := s.want(begin); err != nil {
		return err
	}
	if s.Next() == end {
		s.at++
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if s.Next() == end {
			s.at++
			return nil
		}
		if err := s.want(','); err != nil {
			return err
		}
	}
}

// Text reads a string; one without escapes shares the text.
func (s *Scanner) Text() (string, error) {
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
			return "", s.Fail("a string holds the raw control character %s", s.found())
		}
	}
	return "", s.Fail("a string has no end")
}

// escaped goes on with a string that began at begin, from its first escape.
func (s *Scanner) escaped(begin int) (string, error) {
	var b strings.Builder
	b.WriteString(s.text[begin:s.at])
	for s.at < len(s.text) {
		c := s.text[s.at]
		switch {
		case c == '"':
			s.at++
			return b.String(), nil
		case c < ' ':
			return "", s.Fail("a string holds the raw control character %s", s.found())
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
	return "", s.Fail("a string has no end")
}

// escape reads one escape sequence, both halves of a surrogate pair included.
func (s *Scanner) escape() (rune, error) {
	if s.at+1 == len(s.text) {
		return 0, s.Fail("a string ends within an escape")
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
			return 0, s.Fail("half of a surrogate pair")
		}
		return r, nil
	}
	// Each letter of the first string stands for the character at its place in the second.
	i := strings.IndexByte(`"\/bfnrt`, c)
	if i < 0 {
		return 0, s.Fail("an unknown escape")
	}
	s.at += 2
	return rune("\"\\/\b\f\n\r\t"[i]), nil
}

func (s *Scanner) hex() (rune, error) {
	if len(s.text)-s.at < 6 || s.text[s.at:s.at+2] != `\u` {
		return 0, s.Fail("half of a surrogate pair, or a truncated escape")
	}
	digits := s.text[s.at+2 : s.at+6]
	for i := range digits {
		if !strings.ContainsRune("0123456789abcdefABCDEF", rune(digits[i])) {
			return 0, s.Fail("an escape without four digits")
		}
	}
	n, err := strconv.ParseUint(digits, 16, 16)
	s.at += 6
	return rune(n), err
}

// Integer reads a number from 0 to 2⁶³-1, written as digits only.
func (s *Scanner) Integer() (int64, error) {
	s.space()
	begin := s.at
	for s.at < len(s.text) && '0' <= s.text[s.at] && s.text[s.at] <= '9' {
		s.at++
	}
	digits := s.text[begin:s.at]
	switch {
	case digits == "":
		return 0, s.Fail("a whole number wanted, %s found", s.found())
	case len(digits) > 1 && digits[0] == '0':
		return 0, s.Fail("a number starts with 0")
	case s.at < len(s.text) && strings.IndexByte(".eE", s.text[s.at]) >= 0:
		return 0, s.Fail("a number is not written as a whole number")
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return 0, s.Fail("the number %.30s is larger than 2^63-1", digits)
	}
	return n, nil
}

// Int reads an integer of 64 bits, written without a point or an exponent.
func (s *Scanner) Int() (int64, error) {
	word, err := s.number()
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(word, 10, 64)
	if err != nil {
		return 0, s.Fail("an integer of 64 bits wanted, %.30s found", word)
	}
	return n, nil
}

// Float reads a number.
func (s *Scanner) Float() (float64, error) {
	word, err := s.number()
	if err != nil {
		return 0, err
	}
	f, err := strconv.ParseFloat(word, 64)
	if err != nil {
		return 0, s.Fail("the number %.30s is out of range", word)
	}
	return f, nil
}

// isNumber is JSON's grammar of numbers.
var isNumber = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$`)

func (s *Scanner) number() (string, error) {
	s.space()
	rest := s.Rest()
	word := rest[:len(rest)-len(strings.TrimLeft(rest, "+-.0123456789eE"))]
	if !isNumber.MatchString(word) {
		return "", s.Fail("a number wanted, %s found", s.found())
	}
	s.at += len(word)
	return word, nil
}

// Flag reads true or false.
func (s *Scanner) Flag() (bool, error) {
	switch {
	case s.literal("true"):
		return true, nil
	case s.literal("false"):
		return false, nil
	}
	return false, s.Fail("true or false wanted, %s found", s.found())
}

// Null reads null, if it is next.
func (s *Scanner) Null() bool { return s.literal("null") }

func (s *Scanner) literal(word string) bool {
	s.space()
	if !strings.HasPrefix(s.Rest(), word) {
		return false
	}
	s.at += len(word)
	return true
}

// Skip reads any value and forgets it.
func (s *Scanner) Skip() error { return s.skip(0) }

func (s *Scanner) skip(depth int) error {
	if depth > MaxDepth {
		return s.Fail("values nest deeper than %d", MaxDepth)
	}
	switch s.Next() {
	case '{':
		return s.Object(func(string) error { return s.skip(depth + 1) })
	case '[':
		return s.Array(func() error { return s.skip(depth + 1) })
	case '"':
		_, err := s.Text()
		return err
	}
	rest := s.text[s.at:]
	n := len(rest) - len(strings.TrimLeft(rest, "+-.0123456789abcdefghijklmnopqrstuvwxyzE"))
	word := rest[:n]
	_, err := strconv.ParseFloat(word, 64)
	if n == 0 || err != nil && word != "true" && word != "false" && word != "null" {
		return s.Fail("a value wanted, %s found", s.found())
	}
	s.at += n
	return nil
}
