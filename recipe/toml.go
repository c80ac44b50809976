package recipe

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
)

// A tomlError is where a text stops being TOML, and why.
type tomlError struct {
	line, column int
	what         string
}

func (e *tomlError) Error() string { return e.what }

// A moment is a date or a time, which no key has.
type moment string

// parseTOML reads a document: strings, int64, float64, bool, moments, []any and map[string]any. It
// is the library's parser with the rules of TOML for what may stand twice; the library's own
// decoder fills any type by reflection, which costs the binary a quarter of a megabyte.
func parseTOML(data []byte) (map[string]any, error) {
	d := &document{root: &tomlTable{values: map[string]any{}}}
	d.parser.Reset(data)
	d.now = d.root
	for d.parser.NextExpression() {
		e := d.parser.Expression()
		var err error
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			err = d.header(e)
		case unstable.KeyValue:
			err = d.pair(d.now, e)
		}
		if err != nil {
			return nil, err
		}
	}
	switch err := d.parser.Error().(type) { //nolint:errorlint // the parser wraps nothing
	case nil:
		return d.root.plain(), nil
	case *unstable.ParserError:
		return nil, d.located(err.Highlight, "%s", err.Message)
	default:
		return nil, err
	}
}

// A document is what was read so far.
type document struct {
	parser unstable.Parser
	root   *tomlTable
	now    *tomlTable // that keys go to
}

// A tomlTable is a table while it is read: its values may be tables and lists of tables, too.
type tomlTable struct {
	values map[string]any
	headed bool // it has a header, or stands in braces: there is no second
	dotted bool // it was made by a dotted key, which a header may not add to
	closed bool // it stands in braces
}

// A tomlList is the tables under equal headers [[name]].
type tomlList struct{ tables []*tomlTable }

// plain gives the values without marks.
func (t *tomlTable) plain() map[string]any {
	out := make(map[string]any, len(t.values))
	for name, v := range t.values {
		switch v := v.(type) {
		case *tomlTable:
			out[name] = v.plain()
		case *tomlList:
			list := make([]any, len(v.tables))
			for i, one := range v.tables {
				list[i] = one.plain()
			}
			out[name] = list
		default:
			out[name] = v
		}
	}
	return out
}

// located is the error at a place of the text.
func (d *document) located(at []byte, format string, args ...any) error {
	e := &tomlError{what: fmt.Sprintf(format, args...)}
	if len(at) > 0 {
		start := d.parser.Shape(d.parser.Range(at)).Start
		e.line, e.column = start.Line, start.Column
	}
	return e
}

func (d *document) at(n *unstable.Node, format string, args ...any) error {
	return d.located(d.parser.Raw(n.Raw), format, args...)
}

// header opens the table that a header names.
func (d *document) header(e *unstable.Node) error {
	t := d.root
	for parts := e.Key(); parts.Next(); {
		part := parts.Node()
		name, last := string(part.Data), parts.IsLast()
		switch v := t.values[name].(type) {
		case nil:
			one := &tomlTable{values: map[string]any{}, headed: last}
			if t.values[name] = one; last && e.Kind == unstable.ArrayTable {
				t.values[name] = &tomlList{[]*tomlTable{one}}
			}
			t = one
		case *tomlList:
			if last && e.Kind != unstable.ArrayTable {
				return d.at(part, "%s is a list of tables: [[%s]]", name, name)
			}
			if last {
				v.tables = append(v.tables, &tomlTable{values: map[string]any{}, headed: true})
			}
			t = v.tables[len(v.tables)-1]
		case *tomlTable:
			if v.closed || last && (e.Kind == unstable.ArrayTable || v.headed || v.dotted) {
				return d.at(part, "the table %s is there already", name)
			}
			v.headed = v.headed || last
			t = v
		default:
			return d.at(part, "the key %s is there already", name)
		}
	}
	d.now = t
	return nil
}

// pair puts a key and its value into a table.
func (d *document) pair(t *tomlTable, e *unstable.Node) error {
	for parts := e.Key(); parts.Next(); {
		part := parts.Node()
		name := string(part.Data)
		old, there := t.values[name]
		if parts.IsLast() {
			if there {
				return d.at(part, "the key %s is there already", name)
			}
			v, err := d.value(e.Value())
			t.values[name] = v
			return err
		}
		inner, isTable := old.(*tomlTable)
		switch {
		case !there:
			inner = &tomlTable{values: map[string]any{}, dotted: true}
			t.values[name] = inner
		case !isTable || inner.closed || !inner.dotted:
			return d.at(part, "the key %s is there already", name)
		}
		t = inner
	}
	return nil
}

// value reads a value.
func (d *document) value(n *unstable.Node) (any, error) {
	text := strings.ReplaceAll(string(n.Data), "_", "")
	switch n.Kind {
	case unstable.String:
		return string(n.Data), nil
	case unstable.Bool:
		return text == "true", nil
	case unstable.Integer:
		i, err := strconv.ParseInt(text, 0, 64)
		if err != nil {
			return nil, d.at(n, "%s is not a whole number of 64 bits", n.Data)
		}
		return i, nil
	case unstable.Float:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, d.at(n, "%s is not a number of 64 bits", n.Data)
		}
		return f, nil
	case unstable.Array:
		list := []any{}
		for items := n.Children(); items.Next(); {
			v, err := d.value(items.Node())
			if err != nil {
				return nil, err
			}
			if t, ok := v.(*tomlTable); ok {
				v = t.plain()
			}
			list = append(list, v)
		}
		return list, nil
	case unstable.InlineTable:
		t := &tomlTable{values: map[string]any{}}
		for items := n.Children(); items.Next(); {
			if err := d.pair(t, items.Node()); err != nil {
				return nil, err
			}
		}
		t.close()
		return t, nil
	}
	return moment(n.Data), nil
}

// close forbids additions to a table in braces, and to those in it.
func (t *tomlTable) close() {
	t.closed = true
	for _, v := range t.values {
		if inner, ok := v.(*tomlTable); ok {
			inner.close()
		}
	}
}
