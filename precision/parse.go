package precision

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// Parse reads a policy. Errors name path, the file that the text is from. A policy that was read
// has not been checked against a model ([Policy.Check]).
func Parse(data []byte, path string) (*Policy, error) {
	r := &reader{data: data, path: path, d: json.NewDecoder(bytes.NewReader(data))}
	r.d.UseNumber()
	p := r.policy()
	if r.err == nil {
		if _, err := r.d.Token(); err == nil {
			r.fail(diag.PolicyText, "something follows the policy")
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	return p, nil
}

// A reader walks through a document. It keeps the first error.
type reader struct {
	data []byte
	path string
	d    *json.Decoder
	key  string // where it is, such as rules.2.format
	err  *diag.Error
}

// whole is the To of a rule for all layers, until the number of layers has been read.
const whole = -1

func (r *reader) policy() *Policy {
	p, version := &Policy{}, 0
	r.object([]field{
		{"version", true, func() {
			version = r.count()
			if r.err == nil && version != Version {
				r.fail(diag.PolicyVersion, "the policy has version %d; this binary reads %d", version,
					Version)
			}
		}},
		{"layers", true, func() { p.Layers = r.count() }},
		{"rules", true, func() {
			r.list("a list of rules", func(i int) {
				outer := r.key
				r.key = fmt.Sprintf("%s.%d", outer, i+1)
				p.Rules = append(p.Rules, r.rule())
				r.key = outer
			})
		}},
	})
	for i := range p.Rules {
		rule := &p.Rules[i]
		if rule.To == whole {
			rule.To = p.Layers
		}
		if rule.To > p.Layers && r.err == nil {
			r.key = fmt.Sprintf("rules.%d.layers", i+1)
			r.fail(diag.PolicyValue, "layer %d is not one of %d", rule.To-1, p.Layers)
			r.fix("the layers are 0-%d", p.Layers-1)
		}
	}
	return p
}

func (r *reader) rule() (rule Rule) {
	r.object([]field{
		{"linears", true, func() {
			rule.Linears = r.words("a list of linear layers or parts of a block", nil)
			slices.SortFunc(rule.Linears, compareWords)
		}},
		{"layers", true, func() { rule.From, rule.To = r.span() }},
		{"products", false, func() {
			rule.Products = r.words("a list of "+strings.Join(products, ", "), products)
			slices.SortFunc(rule.Products, func(a, b string) int {
				return cmp.Compare(slices.Index(products, a), slices.Index(products, b))
			})
			if len(rule.Products) == len(products) {
				rule.Products = nil
			}
		}},
		{"format", true, func() { rule.Format = Format(r.word(names())) }},
		{"fallen", false, func() {
			t := r.next()
			var ok bool
			if rule.Fallen, ok = t.(bool); !ok {
				r.wrong(t, "true or false")
			}
		}},
		{"why", true, func() {
			rule.Why = r.text()
			if r.err == nil && strings.TrimSpace(rule.Why) == "" {
				r.fail(diag.PolicyValue, "a rule has no reason")
				r.fix("say in a sentence why it is there")
			}
		}},
	})
	return rule
}

// A field is a key of an object: whether it must be there, and what reads its value.
type field struct {
	name string
	must bool
	read func()
}

// object reads an object with some keys, each at most once.
func (r *reader) object(fields []field) {
	if t := r.next(); t != json.Delim('{') {
		r.wrong(t, "an object")
		return
	}
	outer := r.key
	seen := map[string]bool{}
	for r.err == nil && r.d.More() {
		key, _ := r.next().(string)
		r.key = strings.TrimPrefix(outer+"."+key, ".")
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == key })
		switch {
		case r.err != nil:
		case seen[key]:
			r.fail(diag.PolicyKey, "the key %q stands twice", r.key)
		case i < 0:
			r.unknown(key, fields)
		default:
			fields[i].read()
		}
		seen[key] = true
	}
	r.next() // the brace
	r.key = outer
	for _, f := range fields {
		if f.must && !seen[f.name] {
			r.fail(diag.PolicyKey, "the key %q is missing", strings.TrimPrefix(outer+"."+f.name, "."))
		}
	}
}

func (r *reader) unknown(key string, fields []field) {
	var names []string
	for _, f := range fields {
		names = append(names, f.name)
	}
	r.fail(diag.PolicyKey, "there is no key %q", r.key)
	r.suggest(key, names, "the keys here are")
}

func (r *reader) suggest(typed string, names []string, otherwise string) {
	if near := diag.Nearest(typed, names); near != "" {
		r.fix("did you mean %q?", near)
		return
	}
	r.fix("%s %s", otherwise, strings.Join(names, ", "))
}

// fail keeps the first error, with the line that the reader has come to.
func (r *reader) fail(code diag.Code, format string, args ...any) {
	if r.err != nil {
		return
	}
	at := min(int(r.d.InputOffset()), len(r.data))
	line := 1 + bytes.Count(bytes.TrimRight(r.data[:at], " \t\r\n"), []byte("\n"))
	r.err = diag.New(code, format, args...).At("%s:%d %s", r.path, line, r.key)
}

func (r *reader) fix(format string, args ...any) {
	if r.err != nil && r.err.Fix == "" {
		r.err = r.err.Try(format, args...)
	}
}

// next reads one token; nil after an error.
func (r *reader) next() json.Token {
	if r.err != nil {
		return nil
	}
	t, err := r.d.Token()
	if err != nil {
		r.fail(diag.PolicyText, "the policy is not JSON: %v", err)
	}
	return t
}

// wrong says that a value is not of the kind that it should be.
func (r *reader) wrong(got json.Token, want string) {
	shown := fmt.Sprint(got)
	switch x := got.(type) {
	case string:
		shown = strconv.Quote(x)
	case json.Delim:
		shown = "an object or a list"
	case nil:
		shown = "null"
	}
	r.fail(diag.PolicyValue, "%s is %s, not %s", cmp.Or(r.key, "the policy"), shown, want)
}

// maxLayers bounds what is read; [model.Config] has no more either.
const maxLayers = 1 << 12

func (r *reader) count() int {
	t := r.next()
	n, ok := t.(json.Number)
	v, err := strconv.Atoi(string(n))
	if !ok || err != nil || v < 1 || v > maxLayers {
		r.wrong(t, fmt.Sprintf("a whole number from 1 to %d", maxLayers))
	}
	return v
}

func (r *reader) text() string {
	t := r.next()
	s, ok := t.(string)
	if !ok {
		r.wrong(t, "a text")
	}
	return s
}

func (r *reader) word(known []string) string {
	t := r.next()
	s, ok := t.(string)
	if !ok || known != nil && !slices.Contains(known, s) {
		want := "a word"
		if known != nil {
			want = "one of " + strings.Join(known, ", ")
		}
		r.wrong(t, want)
		if near := diag.Nearest(s, known); near != "" {
			r.fix("did you mean %q?", near)
		}
	}
	return s
}

func (r *reader) list(want string, item func(i int)) {
	if t := r.next(); t != json.Delim('[') {
		r.wrong(t, want)
		return
	}
	for i := 0; r.err == nil && r.d.More(); i++ {
		item(i)
	}
	r.next()
}

// words reads a list of different words, at least one.
func (r *reader) words(want string, known []string) (list []string) {
	r.list(want, func(int) {
		s := r.word(known)
		if slices.Contains(list, s) {
			r.fail(diag.PolicyValue, "%s has %q twice", r.key, s)
		}
		list = append(list, s)
	})
	if len(list) == 0 {
		r.fail(diag.PolicyValue, "%s names nothing", r.key)
	}
	return list
}

// span reads layers: "all", "3" or "0-27", where the last one belongs to them.
func (r *reader) span() (from, to int) {
	s := r.text()
	if s == "all" {
		return 0, whole
	}
	first, second, two := strings.Cut(s, "-")
	if !two {
		second = first
	}
	from, err1 := layerNumber(first)
	to, err2 := layerNumber(second)
	if err1 != nil || err2 != nil || from > to {
		r.fail(diag.PolicyValue, "%s is %q, not layers", r.key, s)
		r.fix(`write "all", one layer as "3", or the first and the last as "0-27"`)
	}
	return from, to + 1
}

// layerNumber reads a number that is spelled in one way only.
func layerNumber(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err == nil && (n < 0 || n >= maxLayers || strconv.Itoa(n) != s) {
		err = strconv.ErrRange
	}
	return n, err
}
