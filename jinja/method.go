package jinja

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode"
)

// A test answers yes or no about a value.
type test func(r *run, v any, a args) (bool, error)

// is makes a test of a function of the value.
func is(f func(v any) bool) test {
	return func(_ *run, v any, a args) (bool, error) { return f(v), a.most(0) }
}

// relation makes a test of a comparison with an argument.
func relation(op string) test {
	return func(r *run, v any, a args) (bool, error) {
		if len(a.list) != 1 {
			return false, failure(a.line, "a test with %s needs one value", op)
		}
		return r.compare(a.line, op, v, a.list[0])
	}
}

// tests is the table of tests.
var tests = map[string]test{
	"defined":   is(func(v any) bool { _, ok := v.(undefined); return !ok }),
	"undefined": is(func(v any) bool { _, ok := v.(undefined); return ok }),
	"none":      is(func(v any) bool { return v == nil }),
	"string":    is(func(v any) bool { _, ok := v.(string); return ok }),
	"mapping":   is(func(v any) bool { _, ok := v.(*Dict); return ok }),
	"boolean":   is(func(v any) bool { _, ok := v.(bool); return ok }),
	"integer":   is(func(v any) bool { _, ok := v.(int64); return ok }),
	"float":     is(func(v any) bool { _, ok := v.(float64); return ok }),
	"number":    is(func(v any) bool { _, _, ok := number(v); return ok }),
	"true":      is(func(v any) bool { b, ok := v.(bool); return ok && b }),
	"false":     is(func(v any) bool { b, ok := v.(bool); return ok && !b }),
	"sequence":  is(isSequence), "iterable": is(isSequence),
	"callable": is(func(v any) bool {
		_, isFunction := v.(function)
		_, isMacro := v.(*macro)
		return isFunction || isMacro
	}),
	"eq": relation("=="), "equalto": relation("=="), "==": relation("=="), "ne": relation("!="),
	"!=": relation("!="), "lt": relation("<"), "lessthan": relation("<"), "<": relation("<"),
	"le": relation("<="), "<=": relation("<="), "gt": relation(">"), "greaterthan": relation(">"),
	">": relation(">"), "ge": relation(">="), ">=": relation(">="), "in": relation("in"),
	"sameas": relation("=="),
	"odd":    func(_ *run, v any, a args) (bool, error) { return divides(v, int64(2), 1, a) },
	"even":   func(_ *run, v any, a args) (bool, error) { return divides(v, int64(2), 0, a) },
	"divisibleby": func(_ *run, v any, a args) (bool, error) {
		return divides(v, a.get(0, "num", nil), 0, a)
	},
	"lower": is(func(v any) bool { s, ok := v.(string); return ok && s == strings.ToLower(s) }),
	"upper": is(func(v any) bool { s, ok := v.(string); return ok && s == strings.ToUpper(s) }),
}

// isSequence reports whether the library can go through a value; an undefined one has no items.
func isSequence(v any) bool {
	switch v.(type) {
	case string, []any, tuple, *Dict, undefined:
		return true
	}
	return false
}

func divides(v, by any, rest int64, a args) (bool, error) {
	n, ok := integer(v)
	m, also := integer(by)
	if !ok || !also || m == 0 {
		return false, failure(a.line, "%s cannot be divided by %s", typeName(v), typeName(by))
	}
	return ((n%m)+m)%m == rest, nil
}

// stringMethods are the methods of strings.
var stringMethods = map[string]func(r *run, s string, a args) (any, error){
	"strip": stripper(true, true), "lstrip": stripper(true, false), "rstrip": stripper(false, true),
	"startswith": affix(strings.HasPrefix), "endswith": affix(strings.HasSuffix),
	"upper": plain(strings.ToUpper), "lower": plain(strings.ToLower), "title": plain(pyTitle),
	"capitalize": plain(capitalize), "replace": replaceMethod, "split": split, "rsplit": rsplit,
	"splitlines": splitlines, "removeprefix": cut(strings.TrimPrefix),
	"removesuffix": cut(strings.TrimSuffix),
	"find":         finder(strings.Index), "rfind": finder(strings.LastIndex),
	"isdigit": every(unicode.IsDigit), "isalpha": every(unicode.IsLetter), "isspace": every(isSpace),
	"isalnum": every(func(c rune) bool { return unicode.IsLetter(c) || unicode.IsNumber(c) }),
	"isupper": func(_ *run, s string, a args) (any, error) {
		return s == strings.ToUpper(s) && s != strings.ToLower(s), a.most(0)
	},
	"islower": func(_ *run, s string, a args) (any, error) {
		return s == strings.ToLower(s) && s != strings.ToUpper(s), a.most(0)
	},
	"count": func(_ *run, s string, a args) (any, error) {
		sub, err := a.one()
		return int64(strings.Count(s, sub)), err
	},
	"partition": func(_ *run, s string, a args) (any, error) {
		by, err := a.one()
		if err != nil || by == "" {
			return nil, failure(a.line, "partition takes one string")
		}
		before, after, found := strings.Cut(s, by)
		if !found {
			by = ""
		}
		return tuple{before, by, after}, nil
	},
	"zfill": func(r *run, s string, a args) (any, error) {
		n, ok := integer(a.get(0, "width", nil))
		if !ok || n > 1024 {
			return nil, failure(a.line, "zfill takes a number")
		}
		return strings.Repeat("0", max(0, int(n)-len(s))) + s, nil
	},
}

// joinMethod puts a string between others. It is no row of stringMethods, which it uses itself.
func joinMethod(r *run, s string, a args) (any, error) {
	if len(a.list) != 1 {
		return nil, failure(a.line, "join takes one list")
	}
	items, err := r.items(a.line, a.list[0])
	if err != nil {
		return nil, err
	}
	for _, item := range items {
		if _, err := a.text(item); err != nil {
			return nil, err
		}
	}
	return joinFilter(r, items, args{line: a.line, list: []any{s}})
}

// one gives the only argument, a string.
func (a args) one() (string, error) {
	if len(a.list) != 1 || len(a.named) > 0 {
		return "", failure(a.line, "one string is needed, and there are %d values", len(a.list))
	}
	return a.text(a.list[0])
}

func plain(f func(string) string) func(*run, string, args) (any, error) {
	return func(r *run, s string, a args) (any, error) {
		s = f(s)
		if err := r.made(a.line, len(s)); err != nil {
			return nil, err
		}
		return s, a.most(0)
	}
}

// pyTitle is Python's: a letter is large behind what is no letter.
func pyTitle(s string) string {
	letter := false
	return strings.Map(func(c rune) rune {
		was := letter
		if letter = unicode.IsLetter(c); !was {
			return unicode.ToUpper(c)
		}
		return unicode.ToLower(c)
	}, s)
}

func every(f func(rune) bool) func(*run, string, args) (any, error) {
	return func(_ *run, s string, a args) (any, error) {
		return s != "" && strings.IndexFunc(s, func(c rune) bool { return !f(c) }) < 0, a.most(0)
	}
}

// stripper takes blanks, or the letters that are given, off one end or both.
func stripper(left, right bool) func(*run, string, args) (any, error) {
	return func(_ *run, s string, a args) (any, error) {
		gone := isSpace
		if chars := a.get(0, "chars", nil); chars != nil {
			set, err := a.text(chars)
			if err != nil {
				return nil, err
			}
			gone = func(c rune) bool { return strings.ContainsRune(set, c) }
		}
		if left {
			s = strings.TrimLeftFunc(s, gone)
		}
		if right {
			s = strings.TrimRightFunc(s, gone)
		}
		return s, a.most(1)
	}
}

// affix is startswith or endswith, of a string or one of several.
func affix(f func(s, affix string) bool) func(*run, string, args) (any, error) {
	return func(_ *run, s string, a args) (any, error) {
		if err := a.most(1); err != nil {
			return nil, err
		}
		list, ok := plainList(a.get(0, "", nil)).([]any)
		if !ok {
			list = a.list
		}
		for _, v := range list {
			text, err := a.text(v)
			if err != nil || f(s, text) {
				return true, err
			}
		}
		return false, nil
	}
}

func cut(f func(s, affix string) string) func(*run, string, args) (any, error) {
	return func(_ *run, s string, a args) (any, error) {
		affix, err := a.one()
		return f(s, affix), err
	}
}

// finder is find or rfind, counted in letters.
func finder(f func(s, sub string) int) func(*run, string, args) (any, error) {
	return func(_ *run, s string, a args) (any, error) {
		sub, err := a.one()
		if i := f(s, sub); i >= 0 {
			return runes(s[:i]), err
		}
		return int64(-1), err
	}
}

// splitArgs gives the separator, "" for blanks, and how often to split.
func splitArgs(a args) (by string, n int, err error) {
	if err := a.most(2, "sep", "maxsplit"); err != nil {
		return "", 0, err
	}
	n = -1
	if most, ok := integer(a.get(1, "maxsplit", nil)); ok {
		n = int(min(max(most, -1), math.MaxInt32))
	}
	if sep := a.get(0, "sep", nil); sep != nil {
		if by, err = a.text(sep); err == nil && by == "" {
			err = failure(a.line, "a text cannot be split at nothing")
		}
	}
	return by, n, err
}

func split(r *run, s string, a args) (any, error) {
	by, n, err := splitArgs(a)
	if err != nil {
		return nil, err
	}
	if err := r.made(a.line, len(s)); err != nil {
		return nil, err
	}
	if by == "" {
		if n >= 0 {
			return nil, failure(a.line, "a split at blanks that is limited is not supported")
		}
		list := anys(strings.FieldsFunc(s, isSpace))
		return list, r.made(a.line, 16*len(list))
	}
	if n >= 0 {
		n++
	}
	list := anys(strings.SplitN(s, by, n))
	return list, r.made(a.line, 16*len(list))
}

func rsplit(r *run, s string, a args) (any, error) {
	by, n, err := splitArgs(a)
	if err != nil || n < 0 || by == "" {
		if err != nil {
			return nil, err
		}
		return split(r, s, a)
	}
	parts := strings.Split(s, by)
	if err := r.made(a.line, len(s)+16*len(parts)); err != nil {
		return nil, err
	}
	if extra := len(parts) - 1 - n; extra > 0 {
		parts = append([]string{strings.Join(parts[:extra+1], by)}, parts[extra+1:]...)
	}
	return anys(parts), nil
}

func splitlines(r *run, s string, a args) (any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n", "\v", "\n", "\f", "\n", "\x1c", "\n", "\x1d",
		"\n", "\x1e", "\n", "\u0085", "\n", "\u2028", "\n", "\u2029", "\n").Replace(s)
	if s = strings.TrimSuffix(s, "\n"); s == "" {
		return []any{}, nil
	}
	list := anys(strings.Split(s, "\n"))
	return list, r.made(a.line, len(s)+16*len(list))
}

// dictMethods are the methods of dictionaries.
var dictMethods = map[string]func(r *run, d *Dict, a args) (any, error){
	"items": dictItems,
	"keys": func(r *run, d *Dict, a args) (any, error) {
		return anys(d.keys), r.made(a.line, 16*len(d.keys))
	},
	"values": func(r *run, d *Dict, a args) (any, error) {
		list := make([]any, len(d.keys))
		for i, key := range d.keys {
			list[i] = d.values[key]
		}
		return list, r.made(a.line, 16*len(list))
	},
	"get": func(_ *run, d *Dict, a args) (any, error) {
		if len(a.list) == 0 {
			return nil, failure(a.line, "get needs a key")
		}
		key, ok := a.list[0].(string)
		if v, has := d.values[key]; ok && has {
			return v, a.most(2)
		}
		return a.get(1, "", nil), a.most(2)
	},
	"copy": func(_ *run, d *Dict, a args) (any, error) { return d, a.most(0) },
}

func dictItems(r *run, d *Dict, a args) (any, error) {
	list := make([]any, len(d.keys))
	for i, key := range d.keys {
		list[i] = tuple{key, d.values[key]}
	}
	return list, r.made(a.line, 64*len(list))
}

// listMethods are the methods of lists.
var listMethods = map[string]func(r *run, list []any, a args) (any, error){
	"count": func(r *run, list []any, a args) (any, error) {
		n := int64(0)
		for _, item := range list {
			same, err := r.equal(a.line, item, a.get(0, "", nil), 0)
			if err != nil {
				return nil, err
			}
			if same {
				n++
			}
		}
		return n, a.most(1)
	},
	"index": func(r *run, list []any, a args) (any, error) {
		for i, item := range list {
			same, err := r.equal(a.line, item, a.get(0, "", nil), 0)
			if err != nil || same {
				return int64(i), err
			}
		}
		return nil, failure(a.line, "the value is not in the list")
	},
	"copy": func(_ *run, list []any, a args) (any, error) { return list, a.most(0) },
}

// attribute is loop.name.
func (l *loop) attribute(line int, name string) (any, error) {
	n, i := int64(len(l.items)), int64(l.at)
	switch name {
	case "index":
		return i + 1, nil
	case "index0":
		return i, nil
	case "revindex":
		return n - i, nil
	case "revindex0":
		return n - i - 1, nil
	case "first":
		return i == 0, nil
	case "last":
		return i == n-1, nil
	case "length":
		return n, nil
	case "previtem":
		if i > 0 {
			return l.items[i-1], nil
		}
		return undefined{"the item before the first"}, nil
	case "nextitem":
		if i+1 < n {
			return l.items[i+1], nil
		}
		return undefined{"the item behind the last"}, nil
	case "cycle":
		return function(func(_ *run, a args) (any, error) {
			if len(a.list) == 0 {
				return nil, failure(a.line, "cycle needs values")
			}
			return a.list[i%int64(len(a.list))], nil
		}), nil
	case "changed":
		return function(func(r *run, a args) (any, error) {
			same, err := r.equal(a.line, append([]any{}, a.list...), append([]any{}, l.last...), 0)
			first := l.last == nil
			l.last = append([]any{}, a.list...)
			return first || !same, err
		}), nil
	}
	return nil, failure(line, "loop.%s is not supported", name)
}

// globals are the functions that every template has.
var globals = map[string]function{
	"namespace": func(_ *run, a args) (any, error) {
		ns := &namespace{NewDict()}
		for name, v := range a.named {
			ns.vars.set(name, v)
		}
		if d, ok := a.get(0, "", nil).(*Dict); ok {
			for _, key := range d.keys {
				ns.vars.set(key, d.values[key])
			}
		}
		return ns, a.most2(1)
	},
	"dict": func(_ *run, a args) (any, error) {
		if len(a.named) > 1 {
			return nil, failure(a.line, "dict with several names is not supported: write {…}")
		}
		d := NewDict()
		for name, v := range a.named {
			d.set(name, v)
		}
		return d, a.most2(0)
	},
	"range": rangeOf,
	"raise_exception": func(r *run, a args) (any, error) {
		text, err := r.str(a.line, a.get(0, "message", "no reason is given"))
		if err != nil {
			return nil, err
		}
		return nil, raised(a.line, text)
	},
	"strftime_now": func(r *run, a args) (any, error) {
		format, err := a.one()
		if err != nil {
			return nil, err
		}
		return strftime(a.line, r.now, format)
	},
}

// most2 bounds arguments without names.
func (a args) most2(n int) error {
	if len(a.list) > n {
		return failure(a.line, "%d arguments are too many", len(a.list))
	}
	return nil
}

// maxRange is the longest range of the library's sandbox.
const maxRange = 100_000

func rangeOf(r *run, a args) (any, error) {
	var n [3]int64
	for i, v := range a.list {
		x, ok := integer(v)
		if !ok || i > 2 || x > 1<<31 || x < -1<<31 {
			return nil, failure(a.line, "range takes up to three whole numbers")
		}
		n[i] = x
	}
	from, to, step := n[0], n[1], n[2]
	switch len(a.list) {
	case 1:
		from, to, step = 0, n[0], 1
	case 2:
		step = 1
	}
	if step == 0 || len(a.named) > 0 {
		return nil, failure(a.line, "range takes up to three whole numbers, and its step is not 0")
	}
	list := []any{}
	for i := from; step > 0 && i < to || step < 0 && i > to; i += step {
		if len(list) == maxRange {
			return nil, failure(a.line, "a range has more than %d numbers", maxRange)
		}
		list = append(list, i)
	}
	return list, r.made(a.line, 16*len(list))
}

// dates are the letters of strftime that are known, with Go's way to say it.
var dates = map[byte]string{'Y': "2006", 'm': "01", 'd': "02", 'B': "January", 'b': "Jan",
	'A': "Monday", 'a': "Mon", 'H': "15", 'M': "04", 'S': "05", 'I': "03", 'p': "PM", 'y': "06",
	'j': "002", 'F': "2006-01-02", 'T': "15:04:05"}

func strftime(line int, now time.Time, format string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		layout, ok := dates[format[i]]
		switch {
		case format[i] == '%':
			b.WriteByte('%')
		case format[i] == '-' && i+1 < len(format) && (format[i+1] == 'd' || format[i+1] == 'm'):
			i++
			fmt.Fprint(&b, map[byte]int{'d': now.Day(), 'm': int(now.Month())}[format[i]])
		case !ok:
			return "", failure(line, "the date format %%%c is not supported", format[i])
		default:
			b.WriteString(now.Format(layout))
		}
	}
	return b.String(), nil
}
