package jinja

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// A filter changes a value.
type filter func(r *run, v any, a args) (any, error)

// get gives an argument by its place or name, or else another value.
func (a args) get(i int, name string, other any) any {
	if i >= 0 && i < len(a.list) {
		return a.list[i]
	}
	if v, ok := a.named[name]; ok {
		return v
	}
	return other
}

// most refuses arguments that a filter, test or method does not know.
func (a args) most(n int, names ...string) error {
	if len(a.list) > n {
		return failure(a.line, "%d arguments are too many", len(a.list))
	}
	for name := range a.named {
		if !slices.Contains(names, name) {
			return failure(a.line, "the argument %q is not supported", name)
		}
	}
	return nil
}

// text refuses what is not a string.
func (a args) text(v any) (string, error) {
	s, ok := v.(string)
	if !ok {
		return "", failure(a.line, "%s stands where a string belongs", typeName(v))
	}
	return s, nil
}

// onText makes a filter of a function of text, which is given str of any value.
func onText(f func(string) string) filter {
	return func(r *run, v any, a args) (any, error) {
		s, err := r.str(a.line, v)
		if err != nil {
			return nil, err
		}
		if err := a.most(0); err != nil {
			return nil, err
		}
		s = f(s)
		return s, r.made(a.line, len(s))
	}
}

// filterTable has the filters but map, which looks filters up itself.
var filterTable = map[string]filter{
	"tojson": tojson, "trim": trimFilter, "length": length, "count": length, "join": joinFilter,
	"upper": onText(strings.ToUpper), "lower": onText(strings.ToLower), "title": onText(title),
	"capitalize": onText(capitalize), "string": onText(func(s string) string { return s }),
	"safe": same, "replace": replaceFilter, "default": defaultFilter, "d": defaultFilter,
	"first": first, "last": last, "list": listFilter, "int": intFilter, "float": floatFilter,
	"abs": absFilter, "round": round, "items": itemsFilter, "dictsort": dictsort,
	"selectattr": selector(true, true), "rejectattr": selector(false, true),
	"select": selector(true, false), "reject": selector(false, false),
	"sort": sortFilter, "reverse": reverse, "unique": unique, "indent": indent, "sum": sum,
	"min": extreme(-1), "max": extreme(1),
}

// findFilter finds a filter by its name.
func findFilter(name string) (filter, bool) {
	if name == "map" {
		return mapFilter, true
	}
	f, ok := filterTable[name]
	return f, ok
}

func same(_ *run, v any, a args) (any, error) { return v, a.most(0) }

// tojson is the filter of transformers: key order is kept, and letters stay what they are.
func tojson(r *run, v any, a args) (any, error) {
	err := a.most(4, "ensure_ascii", "indent", "separators", "sort_keys")
	if err != nil {
		return nil, err
	}
	d := &dump{item: ", ", colon: ": ", ascii: truth(a.get(0, "ensure_ascii", false)),
		sorted: truth(a.get(3, "sort_keys", false))}
	switch n := a.get(1, "indent", nil).(type) {
	case nil:
	case int64:
		d.lines, d.item, d.indent = true, ",", strings.Repeat(" ", int(min(max(n, 0), 64)))
	case string:
		d.lines, d.item, d.indent = true, ",", n[:min(len(n), 64)]
	default:
		return nil, failure(a.line, "an indent that is %s", typeName(n))
	}
	if sep, ok := plainList(a.get(2, "separators", nil)).([]any); ok && len(sep) == 2 {
		var err error
		if d.item, err = a.text(sep[0]); err != nil {
			return nil, err
		}
		if d.colon, err = a.text(sep[1]); err != nil {
			return nil, err
		}
	} else if a.get(2, "separators", nil) != nil {
		return nil, failure(a.line, "separators are two strings")
	}
	if err := r.dump(a.line, d, v, 0); err != nil {
		return nil, err
	}
	return d.b.String(), r.made(a.line, d.b.Len())
}

func trimFilter(r *run, v any, a args) (any, error) {
	if err := a.most(1, "chars"); err != nil {
		return nil, err
	}
	s, err := r.str(a.line, v)
	if err != nil {
		return nil, err
	}
	if chars := a.get(0, "chars", nil); chars != nil {
		cut, err := a.text(chars)
		return strings.Trim(s, cut), err
	}
	return strings.TrimFunc(s, isSpace), nil
}

// isSpace is Python's str.isspace for a letter.
func isSpace(c rune) bool { return unicode.IsSpace(c) || c >= 0x1c && c <= 0x1f }

func length(_ *run, v any, a args) (any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	switch v := plainList(v).(type) {
	case string:
		return runes(v), nil
	case []any:
		return int64(len(v)), nil
	case *Dict:
		return int64(len(v.keys)), nil
	case undefined:
		return int64(0), nil
	}
	return nil, failure(a.line, "%s has no length", typeName(v))
}

func joinFilter(r *run, v any, a args) (any, error) {
	if err := a.most(2, "d", "attribute"); err != nil {
		return nil, err
	}
	by, err := r.str(a.line, a.get(0, "d", ""))
	if err != nil {
		return nil, err
	}
	items, err := r.items(a.line, v)
	if err != nil {
		return nil, err
	}
	attribute := a.get(1, "attribute", nil)
	parts := make([]string, len(items))
	for i, item := range items {
		if attribute != nil {
			if item, err = r.item(a.line, item, attribute); err != nil {
				return nil, err
			}
		}
		if parts[i], err = r.str(a.line, item); err != nil {
			return nil, err
		}
		if err := r.made(a.line, len(by)); err != nil {
			return nil, err
		}
	}
	return strings.Join(parts, by), nil
}

// title is Jinja's: the first letter of every word is large, the others are small.
func title(s string) string {
	begin := true
	return strings.Map(func(c rune) rune {
		was := begin
		begin = unicode.IsSpace(c) || strings.ContainsRune("-([{<", c)
		if was {
			return unicode.ToUpper(c)
		}
		return unicode.ToLower(c)
	}, s)
}

func capitalize(s string) string {
	for i, c := range s {
		return string(unicode.ToUpper(c)) + strings.ToLower(s[i+len(string(c)):])
	}
	return s
}

func replaceFilter(r *run, v any, a args) (any, error) {
	s, err := r.str(a.line, v)
	if err != nil {
		return nil, err
	}
	return replaceMethod(r, s, a)
}

func replaceMethod(r *run, s string, a args) (any, error) {
	if err := a.most(3, "old", "new", "count"); err != nil {
		return nil, err
	}
	old, err := a.text(a.get(0, "old", nil))
	if err != nil {
		return nil, err
	}
	with, err := a.text(a.get(1, "new", nil))
	if err != nil {
		return nil, err
	}
	n := int64(-1)
	if count := a.get(2, "count", nil); count != nil {
		n, _ = integer(count)
	}
	times := strings.Count(s, old)
	if n >= 0 {
		times = min(times, int(min(n, math.MaxInt32)))
	}
	if err := r.made(a.line, len(s)+times*len(with)); err != nil {
		return nil, err
	}
	return strings.Replace(s, old, with, int(max(min(n, math.MaxInt32), -1))), nil
}

func defaultFilter(_ *run, v any, a args) (any, error) {
	if err := a.most(2, "default_value", "boolean"); err != nil {
		return nil, err
	}
	_, missing := v.(undefined)
	if missing || truth(a.get(1, "boolean", false)) && !truth(v) {
		return a.get(0, "default_value", ""), nil
	}
	return v, nil
}

// items gives the items of a filter without arguments.
func (a args) items(r *run, v any) ([]any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	return r.items(a.line, v)
}

func first(r *run, v any, a args) (any, error) {
	items, err := a.items(r, v)
	if err != nil || len(items) == 0 {
		return undefined{"the first of nothing"}, err
	}
	return items[0], nil
}

func last(r *run, v any, a args) (any, error) {
	items, err := a.items(r, v)
	if err != nil || len(items) == 0 {
		return undefined{"the last of nothing"}, err
	}
	return items[len(items)-1], nil
}

func listFilter(r *run, v any, a args) (any, error) {
	items, err := a.items(r, v)
	return slices.Clone(items), err
}

func intFilter(_ *run, v any, a args) (any, error) {
	if err := a.most(1, "default"); err != nil {
		return nil, err
	}
	if s, ok := v.(string); ok {
		if n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64); err == nil {
			return n, nil
		}
		if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil {
			v = f
		}
	}
	if f, _, ok := number(v); ok && math.Abs(f) < 1<<53 {
		return int64(f), nil
	}
	return a.get(0, "default", int64(0)), nil
}

func floatFilter(_ *run, v any, a args) (any, error) {
	if err := a.most(1, "default"); err != nil {
		return nil, err
	}
	if s, ok := v.(string); ok {
		if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil {
			return f, nil
		}
	}
	if f, _, ok := number(v); ok {
		return f, nil
	}
	return a.get(0, "default", 0.0), nil
}

func absFilter(r *run, v any, a args) (any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	if c, err := order(a.line, v, int64(0)); err != nil || c >= 0 {
		return v, err
	}
	return r.operate(a.line, "-", int64(0), v)
}

func round(_ *run, v any, a args) (any, error) {
	if err := a.most(1, "precision"); err != nil {
		return nil, err
	}
	f, _, ok := number(v)
	n, whole := integer(a.get(0, "precision", int64(0)))
	if !ok || !whole || n < 0 || n > 15 {
		return nil, failure(a.line, "round of %s is not supported", typeName(v))
	}
	f, err := strconv.ParseFloat(strconv.FormatFloat(f, 'f', int(n), 64), 64)
	return f, err
}

func itemsFilter(r *run, v any, a args) (any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	if _, ok := v.(undefined); ok {
		return []any{}, nil
	}
	d, ok := v.(*Dict)
	if !ok {
		return nil, failure(a.line, "%s has no items", typeName(v))
	}
	return dictItems(r, d, a)
}

func sortedKeys(d *Dict) []string { return slices.Sorted(maps.Keys(d.values)) }

// dictsort sorts by keys, small and large letters alike unless asked otherwise.
func dictsort(r *run, v any, a args) (any, error) {
	if err := a.most(1, "case_sensitive"); err != nil {
		return nil, err
	}
	d, ok := v.(*Dict)
	if !ok {
		return nil, failure(a.line, "%s has no keys", typeName(v))
	}
	keys := slices.Clone(d.keys)
	slices.SortStableFunc(keys, func(x, y string) int {
		if truth(a.get(0, "case_sensitive", false)) {
			return strings.Compare(x, y)
		}
		return strings.Compare(strings.ToLower(x), strings.ToLower(y))
	})
	var list []any
	for _, key := range keys {
		list = append(list, tuple{key, d.values[key]})
	}
	return list, r.made(a.line, 64*len(keys))
}

// selector is select, reject, selectattr or rejectattr: a test of every item, or of its attribute.
func selector(keep, attribute bool) filter {
	return func(r *run, v any, a args) (any, error) {
		items, err := r.items(a.line, v)
		if err != nil {
			return nil, err
		}
		rest := a.list
		var path string
		if attribute {
			if len(rest) == 0 {
				return nil, failure(a.line, "the name of an attribute is missing")
			}
			if path, err = a.text(rest[0]); err != nil {
				return nil, err
			}
			rest = rest[1:]
		}
		test := func(_ *run, v any, _ args) (bool, error) { return truth(v), nil }
		if len(rest) > 0 {
			name, err := a.text(rest[0])
			if err != nil {
				return nil, err
			}
			var ok bool
			if test, ok = tests[name]; !ok {
				return nil, failure(a.line, "the test %q is not supported", name)
			}
			rest = rest[1:]
		}
		out := []any{}
		for _, item := range items {
			what := item
			if attribute {
				if what, err = r.path(a.line, item, path); err != nil {
					return nil, err
				}
			}
			ok, err := test(r, what, args{line: a.line, list: rest, named: a.named})
			if err != nil {
				return nil, err
			}
			if ok == keep {
				out = append(out, item)
			}
		}
		return out, r.made(a.line, 16*len(out))
	}
}

// path is an attribute of an attribute, with points between.
func (r *run) path(line int, v any, path string) (any, error) {
	for part := range strings.SplitSeq(path, ".") {
		var key any = part
		if n, err := strconv.ParseInt(part, 10, 64); err == nil {
			key = n
		}
		var err error
		if v, err = r.item(line, v, key); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// mapFilter applies a filter to every item, or takes an attribute of it.
func mapFilter(r *run, v any, a args) (any, error) {
	items, err := r.items(a.line, v)
	if err != nil {
		return nil, err
	}
	out := make([]any, len(items))
	path, isPath := a.named["attribute"]
	for i, item := range items {
		if err := r.step(a.line); err != nil {
			return nil, err
		}
		switch {
		case isPath:
			name, err := a.text(path)
			if err != nil {
				return nil, err
			}
			if out[i], err = r.path(a.line, item, name); err != nil {
				return nil, err
			}
			if _, missing := out[i].(undefined); missing {
				out[i] = a.get(-1, "default", out[i])
			}
		case len(a.list) > 0:
			name, err := a.text(a.list[0])
			if err != nil {
				return nil, err
			}
			f, ok := findFilter(name)
			if !ok {
				return nil, failure(a.line, "the filter %q is not supported", name)
			}
			if out[i], err = f(r, item, args{a.line, a.list[1:], a.named}); err != nil {
				return nil, err
			}
		default:
			return nil, failure(a.line, "map needs a filter or an attribute")
		}
	}
	return out, r.made(a.line, 16*len(out))
}

// sortFilter sorts numbers or strings, small and large letters alike unless asked otherwise.
func sortFilter(r *run, v any, a args) (any, error) {
	if err := a.most(3, "reverse", "case_sensitive", "attribute"); err != nil {
		return nil, err
	}
	items, err := r.items(a.line, v)
	if err != nil {
		return nil, err
	}
	keys := make([]any, len(items))
	at := make([]int, len(items))
	for i, item := range items {
		at[i], keys[i] = i, item
		if name, ok := a.get(2, "attribute", nil).(string); ok {
			if keys[i], err = r.path(a.line, item, name); err != nil {
				return nil, err
			}
		}
		if s, ok := keys[i].(string); ok && !truth(a.get(1, "case_sensitive", false)) {
			keys[i] = strings.ToLower(s)
		}
	}
	slices.SortStableFunc(at, func(i, j int) int {
		c, bad := order(a.line, keys[i], keys[j])
		if bad != nil {
			err = bad
		}
		if truth(a.get(0, "reverse", false)) {
			return -c
		}
		return c
	})
	out := make([]any, len(items))
	for i, j := range at {
		out[i] = items[j]
	}
	if err != nil {
		return nil, err
	}
	return out, r.made(a.line, 64*len(out))
}

func reverse(r *run, v any, a args) (any, error) {
	if err := a.most(0); err != nil {
		return nil, err
	}
	return r.slice(a.line, v, [3]any{nil, nil, int64(-1)})
}

func unique(r *run, v any, a args) (any, error) {
	items, err := a.items(r, v)
	if err != nil {
		return nil, err
	}
	out := []any{}
	for _, item := range items {
		has, err := r.contains(a.line, out, item)
		if err != nil {
			return nil, err
		}
		if !has {
			out = append(out, item)
		}
	}
	return out, nil
}

// indent puts blanks before every line but the first, and before empty ones only if asked.
func indent(r *run, v any, a args) (any, error) {
	if err := a.most(3, "width", "first", "blank"); err != nil {
		return nil, err
	}
	s, err := r.str(a.line, v)
	if err != nil {
		return nil, err
	}
	by, isText := a.get(0, "width", int64(4)).(string)
	if n, ok := integer(a.get(0, "width", int64(4))); ok {
		by = strings.Repeat(" ", int(min(max(n, 0), 1024)))
	} else if !isText {
		return nil, failure(a.line, "an indent of another kind than a number or text")
	}
	lines := strings.Split(s, "\n")
	if err := r.made(a.line, len(s)+len(by)*len(lines)); err != nil {
		return nil, err
	}
	for i := range lines {
		if (i > 0 || truth(a.get(1, "first", false))) &&
			(lines[i] != "" || truth(a.get(2, "blank", false)) || i == 0) {
			lines[i] = by + lines[i]
		}
	}
	return strings.Join(lines, "\n"), nil
}

func sum(r *run, v any, a args) (any, error) {
	items, err := a.items(r, v)
	var total any = int64(0)
	for _, item := range items {
		if err == nil {
			total, err = r.operate(a.line, "+", total, item)
		}
	}
	return total, err
}

// extreme is min or max.
func extreme(sign int) filter {
	return func(r *run, v any, a args) (any, error) {
		items, err := a.items(r, v)
		if err != nil || len(items) == 0 {
			return undefined{"the extreme of nothing"}, err
		}
		best := items[0]
		for _, item := range items[1:] {
			c, err := order(a.line, item, best)
			if err != nil {
				return nil, err
			}
			if c*sign > 0 {
				best = item
			}
		}
		return best, nil
	}
}
