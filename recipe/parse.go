package recipe

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A reader checks one document and fills in one recipe.
type reader struct {
	path, dir string
	getenv    func(string) string
	r         *Recipe
	lines     []string          // of the document
	at        map[string]int    // key → its line, from 1
	set       map[string]string // key → the override that gave it
	errs      []found
	hasMinLR  bool // optimizer.lr is a pair
	saved     bool // stored by a run: renamed keys are read, model and data.sources may be missing

	// Where in data.sources a problem was seen: the element and the key in it.
	item int
	part string
}

// found is an error with its place in the order in which a person reads the document.
type found struct {
	line int
	err  *diag.Error
}

// Parse reads a recipe. Errors name path, the file that the text is from; relative paths are taken
// from its folder, and getenv fills in $NAME. Overrides, such as "optimizer.lr=3e-4", replace
// values of the document and meet the same checks.
func Parse(data []byte, path string, overrides []string,
	getenv func(string) string) (*Recipe, error) {
	return parse(data, path, overrides, getenv, false)
}

func parse(data []byte, path string, overrides []string, getenv func(string) string,
	saved bool) (*Recipe, error) {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")) // the byte order mark of some editors
	p := &reader{path: path, dir: filepath.Dir(path), getenv: getenv, r: Default(),
		saved: saved, lines: strings.Split(string(data), "\n"),
		at: map[string]int{}, set: map[string]string{}}
	p.r.written = map[spelling]string{}
	doc := map[string]any{}
	if err := toml.Unmarshal(data, &doc); err != nil {
		return nil, p.malformed(err)
	}
	p.locate(data)
	for _, o := range overrides {
		if err := p.override(doc, o); err != nil {
			return nil, err
		}
	}
	values := p.flatten(doc)
	p.fill(values)
	p.check()
	if err := p.report(); err != nil {
		return nil, err
	}
	return p.r, nil
}

// malformed tells where the text stops being TOML.
func (p *reader) malformed(err error) error {
	e := diag.New(diag.RecipeText, "%s is not TOML: %s", filepath.Base(p.path),
		strings.TrimPrefix(err.Error(), "toml: ")).At("%s", p.path)
	if at, ok := errors.AsType[*toml.DecodeError](err); ok {
		line, column := at.Position()
		e = e.At("%s:%d:%d %s", p.path, line, column, p.line(line))
	}
	return e.Try("a value is a number, a \"string\", true, or a [list]; " +
		"deepwell train --example prints a whole recipe")
}

// line is the text of a line, short enough to be quoted.
func (p *reader) line(n int) string {
	if n < 1 || n > len(p.lines) {
		return ""
	}
	text := []rune(strings.TrimSpace(p.lines[n-1]))
	if len(text) > 60 {
		text = append(text[:59], '…')
	}
	return string(text)
}

// locate notes the line of every key and section. The document is known to be TOML.
func (p *reader) locate(data []byte) {
	var parser unstable.Parser
	parser.Reset(data)
	section, count := "", map[string]int{}
	for parser.NextExpression() {
		switch e := parser.Expression(); e.Kind {
		case unstable.Table, unstable.ArrayTable:
			section = p.key(&parser, "", e.Key())
			if e.Kind == unstable.ArrayTable { // the elements of a list, each under a header
				n := count[section]
				count[section]++
				section = fmt.Sprintf("%s.%d", section, n)
				p.note(section, parser.Shape(e.Child().Raw).Start.Line)
			}
		case unstable.KeyValue:
			p.keyValue(&parser, section, e)
		}
	}
}

// keyValue notes a key and, where its value is an inline table, the keys in it.
func (p *reader) keyValue(parser *unstable.Parser, section string, e *unstable.Node) {
	p.nested(parser, p.key(parser, section, e.Key()), e.Value())
}

func (p *reader) nested(parser *unstable.Parser, name string, value *unstable.Node) {
	children, i := value.Children(), 0
	switch value.Kind {
	case unstable.InlineTable:
		for children.Next() {
			p.keyValue(parser, name, children.Node())
		}
	case unstable.Array:
		for children.Next() {
			p.nested(parser, fmt.Sprintf("%s.%d", name, i), children.Node())
			i++
		}
	}
}

// maxDepth bounds the parts of a key whose lines are noted; our own keys have two.
const maxDepth = 8

// key joins the parts of a key and notes the line of each of them.
func (p *reader) key(parser *unstable.Parser, name string, parts unstable.Iterator) string {
	for depth := 0; parts.Next(); depth++ {
		if depth == maxDepth {
			return name // no key has so many parts; the name so far is told as unknown
		}
		if name != "" {
			name += "."
		}
		name += string(parts.Node().Data)
		p.note(name, parser.Shape(parts.Node().Raw).Start.Line)
	}
	return name
}

func (p *reader) note(name string, line int) {
	if _, seen := p.at[name]; !seen {
		p.at[name] = line
	}
}

// override puts the value of one --set into the document.
func (p *reader) override(doc map[string]any, text string) error {
	name, value, ok := strings.Cut(text, "=")
	name, value = strings.TrimSpace(name), strings.TrimSpace(value)
	if !ok || name == "" {
		return diag.New(diag.BadUsage, "--set %s has no value", text).
			Try("--set KEY=VALUE, for example --set optimizer.lr=3e-4")
	}
	if !utf8.ValidString(text) {
		return diag.New(diag.BadUsage, "--set %q is not UTF-8", text).Try("use UTF-8")
	}
	var one map[string]any
	err := toml.Unmarshal([]byte("x = "+value), &one)
	v := one["x"]
	if err != nil || len(one) != 1 {
		if strings.ContainsAny(value[:min(1, len(value))], `[{"'`) {
			return diag.New(diag.RecipeText, "the value of --set %s is not TOML", text).Wrap(err).
				Try("quote it for the shell: --set '%s'", text)
		}
		v = value
	} else if r := find(name); r != nil && v != value && slices.Contains(textual, r.Type) {
		if _, isText := v.(string); !isText {
			v = value // a name or path that looks like a number
		}
	}
	section, key, dotted := strings.Cut(name, ".")
	at := doc
	if dotted {
		table, isTable := doc[section].(map[string]any)
		if !isTable {
			table = map[string]any{}
			doc[section] = table
		}
		at = table
	} else {
		key = section
	}
	at[key] = v
	p.set[name] = text
	return nil
}

// textual are the types that have only strings, so that an override needs no quotes.
var textual = []string{"string", "path", "source", "path or share"}

// flatten gives the values by their full names and refuses names that there are not.
func (p *reader) flatten(doc map[string]any) map[string]any {
	values := map[string]any{}
	for _, name := range sorted(doc) {
		inside, isTable := doc[name].(map[string]any)
		switch {
		case isTable && slices.Contains(sections(), name):
			for _, key := range sorted(inside) {
				p.accept(values, name+"."+key, inside[key])
			}
		case slices.Contains(sections(), name):
			p.fail(diag.RecipeKey, name, fmt.Sprintf("%s is a section, not a key", name),
				fmt.Sprintf("write [%s] on a line of its own, and its keys below it", name))
		default:
			p.accept(values, name, doc[name])
		}
	}
	return values
}

func (p *reader) accept(values map[string]any, name string, v any) {
	now := cmp.Or(renamed[name], name)
	switch {
	case now != name && !p.saved:
		p.fail(diag.RecipeKey, name, fmt.Sprintf("%s is now %s", name, now),
			fmt.Sprintf("write %s", now))
		return
	case find(now) != nil:
		values[now] = v
		return
	}
	what := fmt.Sprintf("there is no key %q", name)
	if _, isTable := v.(map[string]any); isTable && !strings.Contains(name, ".") {
		what = fmt.Sprintf("there is no section [%s]", name)
	}
	p.fail(diag.RecipeKey, name, what, suggest(name))
}

// suggest finds what was meant by a name that there is not: a key that is spelled nearly so, a key
// that other programs call so, or the same key in another section.
func suggest(name string) string {
	section, short := "", name
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		section, short = name[:i], name[i+1:]
	}
	var best *row
	for _, r := range table {
		same := r.section() == section
		known := r.short() == short || slices.Contains(strings.Fields(r.also), short)
		if known && (best == nil || same && best.section() != section) {
			best = r
		}
	}
	if best == nil {
		here := lists.Pick(table, func(r *row) (string, bool) { return r.Name, r.section() == section })
		all := lists.Map(table, func(r *row) string { return r.Name })
		near := cmp.Or(diag.Nearest(name, here), diag.Nearest(name, all))
		best = find(near)
	}
	switch {
	case best == nil && slices.Contains(sections(), section):
		keys := lists.Pick(table, func(r *row) (string, bool) {
			return r.short(), r.section() == section
		})
		return fmt.Sprintf("[%s] has %s", section, strings.Join(keys, ", "))
	case best == nil:
		if near := diag.Nearest(name, sections()); near != "" {
			return fmt.Sprintf("did you mean [%s]?", near)
		}
		return "deepwell train --example prints every key"
	case best.section() == section:
		return fmt.Sprintf("did you mean %q?", best.short())
	case best.section() == "":
		return fmt.Sprintf("did you mean %q? It stands above the first [section]", best.short())
	}
	return fmt.Sprintf("did you mean %q in section [%s]?", best.short(), best.section())
}

func sections() []string {
	var all []string
	for _, r := range table {
		if s := r.section(); s != "" && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}

func sorted(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }
