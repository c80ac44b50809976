package recipe

import (
	"fmt"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

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
			p.nested(&parser, p.key(&parser, section, e.Key()), e.Value())
		}
	}
}

// nested notes the keys of inline tables in a value.
func (p *reader) nested(parser *unstable.Parser, name string, value *unstable.Node) {
	children, i := value.Children(), 0
	switch value.Kind {
	case unstable.InlineTable:
		for children.Next() {
			e := children.Node()
			p.nested(parser, p.key(parser, name, e.Key()), e.Value())
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
			return name // an unknown key, whatever follows
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

// exact is the most exact name with a known line: a key within a source, a source, or the key.
func (p *reader) exact(name string) string {
	if name != "data.sources" || p.set[name] != "" {
		return name
	}
	item := fmt.Sprintf("%s.%d", name, p.item)
	for _, inner := range []string{item + "." + p.part, item} {
		if p.at[inner] > 0 {
			return inner
		}
	}
	return name
}

// fail notes an error at the place of a key.
func (p *reader) fail(code diag.Code, name, what, fix string) {
	e := diag.New(code, "%s", what).Try("%s", fix)
	line := p.at[name]
	override := p.set[name]
	if override == "" && line == 0 { // a default meets a value of the document
		e = e.At("%s", p.path)
	} else if override != "" {
		e = e.At("--set %s", override)
	} else {
		e = e.At("%s:%d %s", p.path, line, p.line(line))
	}
	p.errs = append(p.errs, found{line, e})
}

// report gives the first error in the order of the document; it mentions the others.
func (p *reader) report() error {
	if len(p.errs) == 0 {
		return nil
	}
	lists.Sort(p.errs, func(a, b found) int { return a.line - b.line })
	others := lists.Map(p.errs[1:], func(f found) string {
		return fmt.Sprintf("also %s: %s; %s", f.err.Where, f.err.What, f.err.Fix)
	})
	e := p.errs[0].err
	if len(others) > 0 {
		e = e.Because("%s", strings.Join(others, "\n"))
	}
	return e
}
