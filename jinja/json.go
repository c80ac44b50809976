package jinja

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// Decode reads JSON into values: objects are Dicts, which keep the order of their keys, numbers are
// int64 or float64.
func Decode(text []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	v, err := decode(d, 0)
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, fmt.Errorf("more follows the value")
	}
	return v, nil
}

func decode(d *json.Decoder, depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("JSON nests deeper than %d", maxDepth)
	}
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case json.Number:
		if n, err := strconv.ParseInt(t.String(), 10, 64); err == nil {
			return n, nil
		}
		if !strings.ContainsAny(t.String(), ".eE") {
			return nil, fmt.Errorf("the number %s is too large", t)
		}
		return strconv.ParseFloat(t.String(), 64)
	case json.Delim:
		if t == '[' {
			list := []any{}
			for d.More() {
				v, err := decode(d, depth+1)
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
			_, err := d.Token()
			return list, err
		}
		dict := NewDict()
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, err
			}
			v, err := decode(d, depth+1)
			if err != nil {
				return nil, err
			}
			dict.set(key.(string), v)
		}
		_, err := d.Token()
		return dict, err
	}
	return t, nil // a string, a bool or nil
}

// A dump is how tojson writes: Python's json.dumps.
type dump struct {
	b           strings.Builder
	ascii       bool
	indent      string // "" for one line
	lines       bool
	item, colon string
	sorted      bool
}

func (d *dump) newline(depth int) {
	if d.lines {
		d.b.WriteByte('\n')
		d.b.WriteString(strings.Repeat(d.indent, depth))
	}
}

func (r *run) dump(line int, d *dump, v any, depth int) error {
	if err := r.step(line); err != nil {
		return err
	}
	if depth > maxDepth {
		return failure(line, "a value nests deeper than %d", maxDepth)
	}
	switch v := plainList(v).(type) {
	case nil:
		d.b.WriteString("null")
	case bool:
		d.b.WriteString(strconv.FormatBool(v))
	case int64:
		d.b.WriteString(strconv.FormatInt(v, 10))
	case float64:
		switch {
		case math.IsNaN(v):
			d.b.WriteString("NaN")
		case math.IsInf(v, 0):
			d.b.WriteString(map[bool]string{true: "Infinity", false: "-Infinity"}[v > 0])
		default:
			d.b.WriteString(pyFloat(v))
		}
	case string:
		d.quote(v)
	case []any:
		return r.dumpMany(line, d, "[", "]", len(v), depth, func(i int) error {
			return r.dump(line, d, v[i], depth+1)
		})
	case *Dict:
		keys := v.keys
		if d.sorted {
			keys = sortedKeys(v)
		}
		return r.dumpMany(line, d, "{", "}", len(keys), depth, func(i int) error {
			d.quote(keys[i])
			d.b.WriteString(d.colon)
			return r.dump(line, d, v.values[keys[i]], depth+1)
		})
	default:
		return failure(line, "%s cannot be written as JSON", typeName(v))
	}
	return nil
}

// dumpMany writes the items of a list or dictionary.
func (r *run) dumpMany(line int, d *dump, open, shut string, n, depth int,
	one func(int) error) error {
	d.b.WriteString(open)
	for i := range n {
		if i > 0 {
			d.b.WriteString(d.item)
		}
		d.newline(depth + 1)
		if err := one(i); err != nil {
			return err
		}
		if d.b.Len() > maxBytes {
			return r.made(line, maxBytes+1)
		}
	}
	if n > 0 {
		d.newline(depth)
	}
	d.b.WriteString(shut)
	return nil
}

// short are the escapes of JSON that have a letter.
var short = map[rune]string{'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`,
	'\f': `\f`}

func (d *dump) quote(s string) {
	d.b.WriteByte('"')
	for _, c := range s {
		switch text, ok := short[c]; {
		case ok:
			d.b.WriteString(text)
		case c < ' ' || d.ascii && c > 0x7e && c <= 0xffff:
			fmt.Fprintf(&d.b, `\u%04x`, c)
		case d.ascii && c > 0xffff:
			c -= 0x10000
			fmt.Fprintf(&d.b, `\u%04x\u%04x`, 0xd800+c>>10, 0xdc00+c&0x3ff)
		default:
			d.b.WriteRune(c)
		}
	}
	d.b.WriteByte('"')
}

// MapStrings gives a value in which each string has become another one. Keys stay.
func MapStrings(v any, f func(string) (string, error)) (out any, err error) {
	switch v := v.(type) {
	case string:
		return f(v)
	case []any:
		list := make([]any, len(v))
		for i, item := range v {
			if list[i], err = MapStrings(item, f); err != nil {
				return nil, err
			}
		}
		return list, nil
	case *Dict:
		d := NewDict()
		for _, key := range v.keys {
			item, err := MapStrings(v.values[key], f)
			if err != nil {
				return nil, err
			}
			d.set(key, item)
		}
		return d, nil
	}
	return v, nil
}
