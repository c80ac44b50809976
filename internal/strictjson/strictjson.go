// Package strictjson turns JSON into values, and believes it in nothing. A [Reader] is for
// documents that people write: its errors name the line and the key; a key that there is not or
// that stands twice, and a value of another kind, are refused. A [Scanner] is for large ones of
// programs.
package strictjson

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// Decode fills v from a document that a program wrote: v has a field for every key, and nothing
// follows the document.
func Decode(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows its end")
	}
	return nil
}

// Encode writes a document as people read it: by lines, with < and & as they are.
func Encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return b.Bytes(), err
}

// A Format names a kind of document, and the codes of its errors.
type Format struct {
	Name             string // such as "plan"
	Text, Key, Value diag.Code
	// Inner maps keys of inner objects to their full names, for people who write them at the top.
	Inner map[string]string
}

// A Reader walks through a document. It keeps the first error, after which it reads nothing; what
// its methods return then has no meaning.
type Reader struct {
	Key string // where it is, such as fsdp.zero

	format Format
	data   []byte
	path   string
	d      *json.Decoder
	err    *diag.Error
	usual  string // fix of the error, if none is given
}

// New reads a document of some format; errors name path, the file that it is from.
func New(format Format, data []byte, path string) *Reader {
	r := &Reader{format: format, data: data, path: path, d: json.NewDecoder(bytes.NewReader(data))}
	r.d.UseNumber()
	return r
}

// OK says that nothing has been wrong so far.
func (r *Reader) OK() bool { return r.err == nil }

// End gives the first error; that something follows the document is one.
func (r *Reader) End() error {
	if r.err == nil {
		if _, err := r.d.Token(); err != io.EOF {
			r.Fail(r.format.Text, "something follows the %s", r.format.Name)
		}
	}
	if r.err == nil {
		return nil
	}
	if r.usual != "" {
		r.Fix("%s", r.usual)
	}
	return r.err
}

// Fail keeps the first error, with the line that the reader has come to.
func (r *Reader) Fail(code diag.Code, format string, args ...any) {
	if r.err != nil {
		return
	}
	at := min(int(r.d.InputOffset()), len(r.data))
	line := 1 + bytes.Count(bytes.TrimRight(r.data[:at], " \t\r\n"), []byte("\n"))
	r.err = diag.New(code, format, args...).At("%s:%d %s", r.path, line, r.Key)
}

// Fix says what to do about the error, if nothing has been said yet.
func (r *Reader) Fix(format string, args ...any) {
	if r.err != nil && r.err.Fix == "" {
		r.err = r.err.Try(format, args...)
	}
}

// Next reads one token; nil after an error.
func (r *Reader) Next() json.Token {
	if r.err != nil {
		return nil
	}
	t, err := r.d.Token()
	if err != nil {
		r.Fail(r.format.Text, "the %s is not JSON: %v", r.format.Name, err)
	}
	return t
}

// Wrong says that a value is not what it should be.
func (r *Reader) Wrong(got json.Token, want string) {
	shown := fmt.Sprint(got)
	switch x := got.(type) {
	case string:
		shown = strconv.Quote(x)
	case json.Delim:
		shown = "an object or a list"
	case nil:
		shown = "null"
	}
	if r.err == nil {
		r.usual = "write " + want
	}
	r.Fail(r.format.Value, "%s is %s, not %s", cmp.Or(r.Key, "the "+r.format.Name), shown, want)
}

// A Field is a key of an object: what reads its value, and whether it must be there.
type Field struct {
	Name string
	Read func()
	Must bool
}

// Object reads an object with some keys, each at most once.
func (r *Reader) Object(fields ...Field) {
	if t := r.Next(); t != json.Delim('{') {
		r.Wrong(t, "an object")
		return
	}
	r.Members(fields...)
}

// Members reads what follows the brace that begins an object.
func (r *Reader) Members(fields ...Field) {
	outer := r.Key
	under := func(key string) string { return strings.TrimPrefix(outer+"."+key, ".") }
	seen := map[string]bool{}
	for r.err == nil && r.d.More() {
		key, _ := r.Next().(string)
		r.Key = under(visible(key))
		i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == key })
		switch {
		case r.err != nil:
		case seen[key]:
			r.Fail(r.format.Key, "the key %q stands twice", r.Key)
		case i < 0:
			r.unknown(key, fields)
		default:
			fields[i].Read()
		}
		seen[key] = true
	}
	r.Next() // the brace
	r.Key = outer
	for _, f := range fields {
		if f.Must && !seen[f.Name] {
			r.Fail(r.format.Key, "the key %q is missing", under(f.Name))
		}
	}
}

// visible writes control characters of a key as Go does, for messages.
func visible(key string) string {
	if !strings.ContainsFunc(key, unicode.IsControl) {
		return key
	}
	return strings.Trim(strconv.Quote(key), `"`)
}

func (r *Reader) unknown(key string, fields []Field) {
	names := lists.Map(fields, func(f Field) string { return f.Name })
	r.Fail(r.format.Key, "there is no key %q", r.Key)
	if inner := r.format.Inner[r.Key]; inner != "" {
		r.Fix("it is %s", inner)
	}
	r.near(key, names)
	r.Fix("the keys here are %s", strings.Join(names, ", "))
}

func (r *Reader) near(typed string, known []string) {
	if near := diag.Nearest(typed, known); near != "" {
		r.Fix("did you mean %q?", near)
	}
}

// List reads a list; item reads the i-th of its values.
func (r *Reader) List(want string, item func(i int)) { r.asList(r.Next(), want, item) }

func (r *Reader) asList(t json.Token, want string, item func(i int)) {
	if t != json.Delim('[') {
		r.Wrong(t, want)
		return
	}
	for i := 0; r.err == nil && r.d.More(); i++ {
		item(i)
	}
	r.Next() // the bracket
}

// Whole reads a whole number of a range, which want spells; "" if its ends do.
func (r *Reader) Whole(low, high int64, want string) int64 {
	return r.AsWhole(r.Next(), low, high, want)
}

// AsWhole is [Reader.Whole] for a token that has been read.
func (r *Reader) AsWhole(t json.Token, low, high int64, want string) int64 {
	n, ok := t.(json.Number)
	v, err := strconv.ParseInt(string(n), 10, 64)
	if !ok || err != nil || v < low || v > high {
		r.Wrong(t, cmp.Or(want, fmt.Sprintf("a whole number from %d to %d", low, high)))
	}
	return v
}

// Text reads a string. Control characters, which would reach a terminal, are refused, but for tabs
// and ends of lines.
func (r *Reader) Text() string {
	s := scalar[string](r, "a text")
	if r.err == nil && strings.ContainsFunc(s, func(c rune) bool {
		return unicode.IsControl(c) && c != '\t' && c != '\n'
	}) {
		r.Wrong(s, "a text without control characters")
	}
	return s
}

// Flag reads true or false.
func (r *Reader) Flag() bool { return scalar[bool](r, "true or false") }

func scalar[T any](r *Reader, want string) T {
	t := r.Next()
	v, ok := t.(T)
	if !ok {
		r.Wrong(t, want)
	}
	return v
}

// Word reads one of the known words; any if known is nil.
func (r *Reader) Word(known []string) string {
	t := r.Next()
	s, ok := t.(string)
	switch {
	case ok && (known == nil || slices.Contains(known, s)):
	case known == nil:
		r.Wrong(t, "a word")
	default:
		r.Wrong(t, "one of "+strings.Join(known, ", "))
		r.near(s, known)
	}
	return s
}

// Words reads a list of different words, which want spells; "" if the known words do.
func (r *Reader) Words(want string, known []string) (list []string) {
	return r.AsWords(r.Next(), want, known)
}

// AsWords is [Reader.Words] after its first token has been read.
func (r *Reader) AsWords(t json.Token, want string, known []string) (list []string) {
	r.asList(t, cmp.Or(want, "a list of "+strings.Join(known, ", ")), func(int) {
		s := r.Word(known)
		if slices.Contains(list, s) {
			r.Fail(r.format.Value, "%s has %q twice", r.Key, s)
		}
		list = append(list, s)
	})
	return list
}
