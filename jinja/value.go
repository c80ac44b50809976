package jinja

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Values are nil, bool, int64, float64, string, []any, *Dict, and what only templates make: tuple,
// undefined, *namespace, *loop, *macro and function.

// A tuple is a list that prints in parentheses.
type tuple []any

// plainList makes a list of a tuple, and leaves other values as they are.
func plainList(v any) any {
	if t, ok := v.(tuple); ok {
		return []any(t)
	}
	return v
}

// An undefined value is what a name has that nobody gave a value.
type undefined struct{ name string }

// A namespace has variables that a loop may change for what comes after it.
type namespace struct{ vars *Dict }

// A loop is where a for statement is.
type loop struct {
	items []any
	at    int
	last  []any // the arguments of changed
}

// A Dict is a dictionary that keeps the order of its keys.
type Dict struct {
	keys   []string
	values map[string]any
}

// NewDict makes a dictionary of keys and values in turn.
func NewDict(pairs ...any) *Dict {
	d := &Dict{values: map[string]any{}}
	for i := 0; i+1 < len(pairs); i += 2 {
		d.set(fmt.Sprint(pairs[i]), pairs[i+1])
	}
	return d
}

// Get gives the value of a key.
func (d *Dict) Get(key string) (any, bool) { v, ok := d.values[key]; return v, ok }

func (d *Dict) set(key string, v any) {
	if _, ok := d.values[key]; !ok {
		d.keys = append(d.keys, key)
	}
	d.values[key] = v
}

// typeName names a value for messages.
func typeName(v any) string {
	switch v := v.(type) {
	case nil:
		return "none"
	case bool:
		return "a bool"
	case int64, float64:
		return "a number"
	case string:
		return "a string"
	case []any:
		return "a list"
	case tuple:
		return "a tuple"
	case *Dict:
		return "a dictionary"
	case undefined:
		return v.name + ", which is not defined,"
	}
	return "an object"
}

// truth is Python's bool.
func truth(v any) bool {
	switch v := plainList(v).(type) {
	case nil, undefined:
		return false
	case bool:
		return v
	case int64:
		return v != 0
	case float64:
		return v != 0
	case string:
		return v != ""
	case []any:
		return len(v) > 0
	case *Dict:
		return len(v.keys) > 0
	}
	return true
}

// str is Python's str, counted.
func (r *run) str(line int, v any) (string, error) {
	if text, ok := v.(string); ok {
		return text, r.made(line, len(text))
	}
	if _, ok := v.(undefined); ok {
		return "", nil
	}
	var b strings.Builder
	if err := r.repr(line, &b, v, 0); err != nil {
		return "", err
	}
	return b.String(), r.made(line, b.Len())
}

// repr is Python's repr.
func (r *run) repr(line int, b *strings.Builder, v any, depth int) error {
	if err := r.step(line); err != nil {
		return err
	}
	if depth > maxDepth {
		return failure(line, "a value nests deeper than %d", maxDepth)
	}
	switch v := v.(type) {
	case nil:
		b.WriteString("None")
	case bool:
		b.WriteString(map[bool]string{true: "True", false: "False"}[v])
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		b.WriteString(pyFloat(v))
	case string:
		quoteString(b, v)
	case []any:
		return r.reprList(line, b, "[", v, "]", depth)
	case tuple:
		shut := ")"
		if len(v) == 1 {
			shut = ",)"
		}
		return r.reprList(line, b, "(", v, shut, depth)
	case *Dict:
		b.WriteByte('{')
		for i, key := range v.keys {
			if i > 0 {
				b.WriteString(", ")
			}
			quoteString(b, key)
			b.WriteString(": ")
			if err := r.repr(line, b, v.values[key], depth+1); err != nil {
				return err
			}
		}
		b.WriteByte('}')
	default:
		return failure(line, "%s cannot be printed", typeName(v))
	}
	return r.made(line, 0)
}

func (r *run) reprList(line int, b *strings.Builder, open string, list []any, shut string,
	depth int) error {
	b.WriteString(open)
	for i, item := range list {
		if i > 0 {
			b.WriteString(", ")
		}
		if err := r.repr(line, b, item, depth+1); err != nil {
			return err
		}
	}
	b.WriteString(shut)
	return nil
}

// pyFloat is Python's repr of a float.
func pyFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 0):
		return strings.ToLower(strings.TrimPrefix(strconv.FormatFloat(f, 'g', -1, 64), "+"))
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// quoteString is Python's repr of a string.
func quoteString(b *strings.Builder, s string) {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	b.WriteByte(quote)
	for _, c := range s {
		switch {
		case c == '\\' || c == rune(quote):
			b.WriteByte('\\')
			b.WriteRune(c)
		case c == '\n':
			b.WriteString(`\n`)
		case c == '\r':
			b.WriteString(`\r`)
		case c == '\t':
			b.WriteString(`\t`)
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(b, `\x%02x`, c)
		case !strconv.IsPrint(c) && c <= 0xff:
			fmt.Fprintf(b, `\x%02x`, c)
		case !strconv.IsPrint(c) && c <= 0xffff:
			fmt.Fprintf(b, `\u%04x`, c)
		case !strconv.IsPrint(c):
			fmt.Fprintf(b, `\U%08x`, c)
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte(quote)
}

// number reads an int, float or bool as a float; whole says that it is not a float.
func number(v any) (f float64, whole, ok bool) {
	switch v := v.(type) {
	case int64:
		return float64(v), true, true
	case bool:
		if v {
			return 1, true, true
		}
		return 0, true, true
	case float64:
		return v, false, true
	}
	return 0, false, false
}

// integer reads an int or bool.
func integer(v any) (int64, bool) {
	switch v := v.(type) {
	case int64:
		return v, true
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// equal is Python's ==.
func (r *run) equal(line int, a, b any, depth int) (bool, error) {
	if err := r.step(line); err != nil {
		return false, err
	}
	if depth > maxDepth {
		return false, failure(line, "a value nests deeper than %d", maxDepth)
	}
	if x, ok := integer(a); ok {
		if y, ok := integer(b); ok {
			return x == y, nil
		}
	}
	if x, _, ok := number(a); ok {
		y, _, also := number(b)
		return also && x == y, nil
	}
	if _, ok := a.(tuple); ok {
		if _, ok := b.(tuple); !ok {
			return false, nil
		}
		a, b = plainList(a), plainList(b)
	}
	switch a := a.(type) {
	case []any:
		list, ok := b.([]any)
		if !ok || len(list) != len(a) {
			return false, nil
		}
		for i := range a {
			if same, err := r.equal(line, a[i], list[i], depth+1); err != nil || !same {
				return false, err
			}
		}
		return true, nil
	case *Dict:
		d, ok := b.(*Dict)
		if !ok || len(d.keys) != len(a.keys) {
			return false, nil
		}
		for key, v := range a.values {
			other, ok := d.values[key]
			if !ok {
				return false, nil
			}
			if same, err := r.equal(line, v, other, depth+1); err != nil || !same {
				return false, err
			}
		}
		return true, nil
	case undefined:
		_, ok := b.(undefined)
		return ok, nil
	case string, nil, *namespace, *loop, *macro:
		if _, ok := b.(function); ok {
			return false, nil
		}
		switch b.(type) {
		case []any, tuple:
			return false, nil
		}
		return a == b, nil
	}
	return false, nil
}

// compare is one of Python's comparisons.
func (r *run) compare(line int, op string, a, b any) (bool, error) {
	switch op {
	case "==", "!=":
		same, err := r.equal(line, a, b, 0)
		return same == (op == "=="), err
	case "in", "not in":
		has, err := r.contains(line, b, a)
		return has == (op == "in"), err
	}
	c, err := order(line, a, b)
	switch op {
	case "<":
		return c < 0, err
	case "<=":
		return c <= 0, err
	case ">":
		return c > 0, err
	}
	return c >= 0, err
}

// order compares numbers or strings.
func order(line int, a, b any) (int, error) {
	x, _, isNumber := number(a)
	y, _, also := number(b)
	if isNumber && also {
		switch {
		case x < y:
			return -1, nil
		case x > y:
			return 1, nil
		}
		return 0, nil
	}
	s, isString := a.(string)
	t, also := b.(string)
	if isString && also {
		return strings.Compare(s, t), nil
	}
	return 0, failure(line, "%s and %s have no order", typeName(a), typeName(b))
}

// contains is Python's in.
func (r *run) contains(line int, in, what any) (bool, error) {
	switch in := plainList(in).(type) {
	case string:
		text, ok := what.(string)
		if !ok {
			return false, failure(line, "%s cannot be in a string", typeName(what))
		}
		return strings.Contains(in, text), r.made(line, len(in)/64)
	case []any:
		for _, item := range in {
			if same, err := r.equal(line, item, what, 0); err != nil || same {
				return same, err
			}
		}
		return false, nil
	case *Dict:
		key, ok := what.(string)
		_, has := in.values[key]
		return ok && has, nil
	case undefined:
		return false, nil
	}
	return false, failure(line, "nothing can be in %s", typeName(in))
}

// items lists what a loop goes through.
func (r *run) items(line int, v any) ([]any, error) {
	switch v := plainList(v).(type) {
	case []any:
		return v, nil
	case *Dict:
		return anys(v.keys), r.made(line, 16*len(v.keys))
	case string:
		return anys(strings.Split(v, "")), r.made(line, 16*len(v))
	case undefined:
		return nil, nil
	}
	return nil, failure(line, "%s cannot be gone through", typeName(v))
}

func anys(list []string) []any {
	out := make([]any, len(list))
	for i, s := range list {
		out[i] = s
	}
	return out
}

// attribute is v.name: an attribute or method, or else an item.
func (r *run) attribute(line int, v any, name string) (any, error) {
	switch v := v.(type) {
	case undefined:
		return nil, failure(line, "%s is not defined, and %q of it is asked for", v.name, name)
	case *namespace:
		if value, ok := v.vars.values[name]; ok {
			return value, nil
		}
		return undefined{name}, nil
	case *loop:
		return v.attribute(line, name)
	case *Dict:
		if f, ok := dictMethods[name]; ok {
			return function(func(r *run, a args) (any, error) { return f(r, v, a) }), nil
		}
		if value, ok := v.values[name]; ok {
			return value, nil
		}
	case string:
		if name == "join" {
			return function(func(r *run, a args) (any, error) { return joinMethod(r, v, a) }), nil
		}
		if f, ok := stringMethods[name]; ok {
			return function(func(r *run, a args) (any, error) { return f(r, v, a) }), nil
		}
	case []any:
		if f, ok := listMethods[name]; ok {
			return function(func(r *run, a args) (any, error) { return f(r, v, a) }), nil
		}
	}
	if slices.Contains(unsupported, name) {
		return nil, failure(line, "the method %q is not supported", name)
	}
	return undefined{name}, nil
}

// unsupported are methods of Python's strings, lists and dictionaries that are not known here, or
// that change a value, which the sandbox of the library refuses.
var unsupported = []string{"format", "format_map", "encode", "translate", "maketrans", "expandtabs",
	"center", "ljust", "rjust", "swapcase", "casefold", "append", "extend", "insert", "pop", "remove",
	"clear", "sort", "reverse", "update", "setdefault", "popitem", "fromkeys", "isidentifier",
	"isdecimal", "isnumeric", "isprintable", "istitle", "isascii"}

// item is v[key]: an item, or else an attribute.
func (r *run) item(line int, v, key any) (any, error) {
	if err := r.step(line); err != nil {
		return nil, err
	}
	name, isName := key.(string)
	at, isInt := integer(key)
	switch v := plainList(v).(type) {
	case undefined:
		return nil, failure(line, "%s is not defined, and an item of it is asked for", v.name)
	case *Dict:
		if value, ok := v.values[name]; ok && isName {
			return value, nil
		}
	case []any:
		if isInt {
			if at < 0 {
				at += int64(len(v))
			}
			if at >= 0 && at < int64(len(v)) {
				return v[at], nil
			}
			return undefined{fmt.Sprintf("item %v of a list", key)}, nil
		}
	case string:
		if isInt {
			chars := []rune(v)
			if err := r.made(line, 4*len(chars)); err != nil {
				return nil, err
			}
			if at < 0 {
				at += int64(len(chars))
			}
			if at >= 0 && at < int64(len(chars)) {
				return string(chars[at]), nil
			}
			return undefined{fmt.Sprintf("letter %v of a string", key)}, nil
		}
	}
	if isName {
		return r.attribute(line, v, name)
	}
	return undefined{"an item"}, nil
}

// slice is v[a:b:c].
func (r *run) slice(line int, v any, at [3]any) (any, error) {
	var list []any
	var chars []rune
	switch v := plainList(v).(type) {
	case []any:
		list = v
	case string:
		chars = []rune(v)
	case undefined:
		return nil, failure(line, "%s is not defined, and a part of it is asked for", v.name)
	default:
		return nil, failure(line, "%s has no parts", typeName(v))
	}
	n := int64(len(list) + len(chars))
	if err := r.made(line, 16*int(n)); err != nil {
		return nil, err
	}
	step := int64(1)
	if at[2] != nil {
		var ok bool
		if step, ok = integer(at[2]); !ok || step == 0 {
			return nil, failure(line, "a slice has a step of %s", typeName(at[2]))
		}
	}
	first, last := int64(0), n
	if step < 0 {
		first, last = n-1, -1
	}
	for i, p := range []*int64{&first, &last} {
		if at[i] == nil {
			continue
		}
		x, ok := integer(at[i])
		if !ok {
			return nil, failure(line, "a slice has a bound that is %s", typeName(at[i]))
		}
		if x < 0 {
			x += n
		}
		if step > 0 {
			*p = min(max(x, 0), n)
		} else {
			*p = min(max(x, -1), n-1)
		}
	}
	var out []any
	var text strings.Builder
	for i := first; step > 0 && i < last || step < 0 && i > last; i += step {
		if list != nil {
			out = append(out, list[i])
		} else {
			text.WriteRune(chars[i])
		}
		if step > n || step < -n {
			break // the next one is beyond, and the sum might overflow
		}
	}
	if _, ok := v.(string); ok {
		return text.String(), nil
	}
	if _, ok := v.(tuple); ok {
		return tuple(out), nil
	}
	return out, nil
}

// operate is one of Python's operators.
func (r *run) operate(line int, op string, a, b any) (any, error) {
	if op == "~" {
		s, err := r.str(line, a)
		if err != nil {
			return nil, err
		}
		t, err := r.str(line, b)
		return s + t, err
	}
	switch s := a.(type) {
	case string:
		if t, ok := b.(string); ok && op == "+" {
			return s + t, r.made(line, len(s)+len(t))
		}
		if n, ok := integer(b); ok && op == "*" {
			n = max(n, 0)
			if n > maxBytes {
				return nil, r.made(line, maxBytes+1)
			}
			if err := r.made(line, int(n)*len(s)); err != nil {
				return nil, err
			}
			return strings.Repeat(s, int(n)), nil
		}
	case []any:
		if t, ok := b.([]any); ok && op == "+" {
			return slices.Concat(s, t), r.made(line, 16*(len(s)+len(t)))
		}
	}
	x, whole, isNumber := number(a)
	y, also, isToo := number(b)
	if !isNumber || !isToo {
		return nil, failure(line, "%s %s %s is not supported", typeName(a), op, typeName(b))
	}
	if whole && also {
		m, _ := integer(a)
		n, _ := integer(b)
		return integers(line, op, m, n)
	}
	return floats(line, op, x, y)
}

// integers computes with ints, and refuses what has no room.
func integers(line int, op string, m, n int64) (any, error) {
	if (op == "/" || op == "//" || op == "%") && n == 0 {
		return nil, failure(line, "a division by zero")
	}
	const most = 1 << 31 // so that no result overflows
	if m > most || m < -most || n > most || n < -most {
		return nil, failure(line, "%d %s %d is too large", m, op, n)
	}
	switch op {
	case "+":
		return m + n, nil
	case "-":
		return m - n, nil
	case "*":
		return m * n, nil
	case "/":
		return float64(m) / float64(n), nil
	case "//":
		return int64(math.Floor(float64(m) / float64(n))), nil
	case "%":
		return ((m % n) + n) % n, nil
	}
	if f := math.Pow(float64(m), float64(n)); n >= 0 && math.Abs(f) < 1<<53 {
		return int64(f), nil
	}
	return nil, failure(line, "%d ** %d is not supported", m, n)
}

func floats(line int, op string, x, y float64) (any, error) {
	if (op == "/" || op == "//" || op == "%") && y == 0 {
		return nil, failure(line, "a division by zero")
	}
	switch op {
	case "+":
		return x + y, nil
	case "-":
		return x - y, nil
	case "*":
		return x * y, nil
	case "/":
		return x / y, nil
	case "//":
		return math.Floor(x / y), nil
	case "%":
		return x - y*math.Floor(x/y), nil
	}
	return math.Pow(x, y), nil
}

// runes counts letters.
func runes(s string) int64 { return int64(utf8.RuneCountInString(s)) }
