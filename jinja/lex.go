package jinja

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
)

// A kind is what a token is.
type kind uint8

const (
	tEnd      kind = iota
	tText          // between tags, as it is printed
	tOpen          // {{
	tClose         // }}
	tTag           // {%
	tTagClose      // %}
	tName
	tString
	tInt
	tFloat
	tOp
)

// A token has its place for messages.
type token struct {
	kind kind
	text string
	line int
}

// maxTemplate bounds the text of a template; the longest that is known has 20 KB.
const maxTemplate = 1 << 20

// A lexer splits a template into tokens.
type lexer struct {
	src    string
	at     int
	line   int
	tokens []token
	// starting says that what comes next begins a line: the last tag took its line break.
	starting bool
}

// failure is an error in a template or while it runs.
func failure(line int, format string, args ...any) *diag.Error {
	e := diag.New(diag.DataTemplate, "%s", fmt.Sprintf(format, args...))
	if line > 0 {
		e = e.At("line %d of the template", line)
	}
	return e
}

// lex splits a template as Jinja does with trim_blocks and lstrip_blocks.
func lex(src string) ([]token, error) {
	if len(src) > maxTemplate {
		return nil, failure(0, "the template has %d bytes, more than %d", len(src), maxTemplate)
	}
	if !utf8.ValidString(src) {
		return nil, failure(0, "the template is not UTF-8")
	}
	src = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(src)
	l := &lexer{src: strings.TrimSuffix(src, "\n"), line: 1, starting: true}
	for l.at < len(l.src) {
		if err := l.next(); err != nil {
			return nil, err
		}
	}
	l.put(tEnd, "")
	return l.tokens, nil
}

func (l *lexer) put(k kind, text string) { l.tokens = append(l.tokens, token{k, text, l.line}) }

// skip moves on and counts lines.
func (l *lexer) skip(n int) string {
	text := l.src[l.at : l.at+n]
	l.line += strings.Count(text, "\n")
	l.at += n
	return text
}

// next reads the text up to a tag, and the tag.
func (l *lexer) next() error {
	rest := l.src[l.at:]
	open := -1
	for i := 0; i+1 < len(rest) && open < 0; i++ {
		if rest[i] == '{' && strings.IndexByte("{%#", rest[i+1]) >= 0 {
			open = i
		}
	}
	if open < 0 {
		l.put(tText, l.skip(len(rest)))
		return nil
	}
	what := rest[open+1]
	sign := byte(0)
	if open+2 < len(rest) && strings.IndexByte("-+", rest[open+2]) >= 0 {
		sign = rest[open+2]
	}
	l.text(rest[:open], what, sign)
	l.skip(open + 2)
	if sign != 0 && (what != '{' || sign == '-') {
		l.skip(1)
	}
	switch what {
	case '#':
		end := strings.Index(l.src[l.at:], "#}")
		if end < 0 {
			return failure(l.line, "a comment is not closed")
		}
		l.skip(end)
		l.close(l.src[l.at-1:l.at], 2, true)
		return nil
	case '%':
		if done, err := l.raw(); done || err != nil {
			return err
		}
		l.put(tTag, "{%")
		return l.inside("%}", tTagClose)
	}
	l.put(tOpen, "{{")
	return l.inside("}}", tClose)
}

// text puts out what stands before a tag, with the blanks before a block taken off.
func (l *lexer) text(text string, what, sign byte) {
	kept := text
	switch {
	case sign == '-':
		kept = strings.TrimRightFunc(text, unicode.IsSpace)
	case sign != '+' && what != '{':
		from := strings.LastIndexByte(text, '\n') + 1
		if (from > 0 || l.starting) && strings.TrimSpace(text[from:]) == "" {
			kept = text[:from]
		}
	}
	if kept != "" {
		l.put(tText, kept)
	}
}

// close moves behind the n letters that end a tag, with the blanks or the line break after it.
func (l *lexer) close(sign string, n int, block bool) {
	l.skip(n)
	rest := l.src[l.at:]
	switch {
	case sign == "-":
		l.skip(len(rest) - len(strings.TrimLeftFunc(rest, unicode.IsSpace)))
	case block && sign != "+" && strings.HasPrefix(rest, "\n"):
		l.skip(1)
	}
	l.starting = l.at > 0 && l.src[l.at-1] == '\n'
}

// raw reads {% raw %} … {% endraw %}, whose inside is text.
func (l *lexer) raw() (bool, error) {
	rest := l.src[l.at:]
	name := strings.TrimLeftFunc(rest, unicode.IsSpace)
	word, ok := strings.CutPrefix(name, "raw")
	if !ok {
		return false, nil
	}
	word = strings.TrimLeftFunc(word, unicode.IsSpace)
	sign := word[:min(1, len(word))]
	if sign == "-" || sign == "+" {
		word = word[1:]
	}
	if !strings.HasPrefix(word, "%}") {
		return false, nil
	}
	l.skip(len(rest) - len(word))
	l.close(sign, 2, true)
	rest = l.src[l.at:]
	for i := 0; ; {
		open := strings.Index(rest[i:], "{%")
		if open < 0 {
			return true, failure(l.line, "raw is not closed")
		}
		i += open
		tag := strings.TrimLeft(rest[i+2:], "-+")
		tag, found := strings.CutPrefix(strings.TrimLeftFunc(tag, unicode.IsSpace), "endraw")
		tag = strings.TrimLeftFunc(tag, unicode.IsSpace)
		end := strings.TrimLeft(tag, "-+")
		if !found || !strings.HasPrefix(end, "%}") {
			i += 2
			continue
		}
		l.text(rest[:i], '%', rest[i+2])
		l.skip(len(rest) - len(end))
		l.close(tag[:min(1, len(tag))], 2, true)
		return true, nil
	}
}

// operators, the longest first.
var operators = []string{"//", "**", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">",
	"=", ".", ":", "|", ",", "(", ")", "[", "]", "{", "}"}

// inside reads the expression or statement of a tag up to its end.
func (l *lexer) inside(end string, close kind) error {
	depth := 0
	for l.at < len(l.src) {
		rest := l.src[l.at:]
		c := rest[0]
		switch {
		case depth == 0 && strings.HasPrefix(rest, end):
			l.put(close, end)
			l.close("", 2, close == tTagClose)
			return nil
		case depth == 0 && (c == '-' || c == '+' && close == tTagClose) &&
			strings.HasPrefix(rest[1:], end):
			l.put(close, end)
			l.close(rest[:1], 3, close == tTagClose)
			return nil
		case c == ' ' || c == '\t' || c == '\n':
			l.skip(1)
		case c == '\'' || c == '"':
			if err := l.quoted(); err != nil {
				return err
			}
		case c >= '0' && c <= '9':
			l.number()
		case c == '_' || unicode.IsLetter(rune(c)) || c >= utf8.RuneSelf:
			n := strings.IndexFunc(rest, func(r rune) bool {
				return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
			})
			if n < 0 {
				n = len(rest)
			}
			if n == 0 {
				return failure(l.line, "%q does not belong here", []rune(rest)[0])
			}
			l.put(tName, rest[:n])
			l.skip(n)
		default:
			i := slices.IndexFunc(operators, func(op string) bool { return strings.HasPrefix(rest, op) })
			if i < 0 {
				return failure(l.line, "%q does not belong here", c)
			}
			switch op := operators[i]; op {
			case "(", "[", "{":
				depth++
			case ")", "]", "}":
				depth--
			}
			l.put(tOp, operators[i])
			l.skip(len(operators[i]))
		}
	}
	return failure(l.line, "a tag is not closed with %s", end)
}

// number reads 12, 1_000, 1.5 or 1e3.
func (l *lexer) number() {
	rest := l.src[l.at:]
	digits := func(i int) int {
		for i < len(rest) && (rest[i] >= '0' && rest[i] <= '9' || rest[i] == '_') {
			i++
		}
		return i
	}
	n, k := digits(0), tInt
	if n+1 < len(rest) && rest[n] == '.' && rest[n+1] >= '0' && rest[n+1] <= '9' {
		n, k = digits(n+1), tFloat
	}
	if n < len(rest) && (rest[n] == 'e' || rest[n] == 'E') {
		m := n + 1
		if m < len(rest) && (rest[m] == '+' || rest[m] == '-') {
			m++
		}
		if end := digits(m); end > m {
			n, k = end, tFloat
		}
	}
	l.put(k, strings.ReplaceAll(rest[:n], "_", ""))
	l.skip(n)
}

// escapes are the letters behind a backslash that stand for one character.
var escapes = map[byte]string{'n': "\n", 't': "\t", 'r': "\r", 'b': "\b", 'f': "\f", 'v': "\v",
	'a': "\a", '\\': "\\", '\'': "'", '"': "\"", '\n': ""}

// quoted reads a string with Python's escapes.
func (l *lexer) quoted() error {
	rest := l.src[l.at:]
	var b strings.Builder
	for i := 1; i < len(rest); i++ {
		c := rest[i]
		if c == rest[0] {
			l.put(tString, b.String())
			l.skip(i + 1)
			return nil
		}
		if c != '\\' || i+1 == len(rest) {
			b.WriteByte(c)
			continue
		}
		i++
		if s, ok := escapes[rest[i]]; ok {
			b.WriteString(s)
			continue
		}
		size := map[byte]int{'x': 2, 'u': 4, 'U': 8}[rest[i]]
		if size == 0 {
			if rest[i] >= '0' && rest[i] <= '7' || rest[i] == 'N' {
				return failure(l.line, "the escape \\%c is not supported", rest[i])
			}
			b.WriteString(rest[i-1 : i+1])
			continue
		}
		var r rune
		if i+size >= len(rest) {
			break
		}
		if _, err := fmt.Sscanf(rest[i+1:i+1+size], "%x", &r); err != nil || !utf8.ValidRune(r) {
			return failure(l.line, "\\%s is no character", rest[i:i+1+size])
		}
		b.WriteRune(r)
		i += size
	}
	return failure(l.line, "a string is not closed")
}
