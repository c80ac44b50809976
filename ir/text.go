package ir

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"text/scanner"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// String writes the graph as text that [Parse] reads back, or [Table.Parse] if it has operations of
// another table. The text has everything but the meanings of inputs and results ([Value.Means]),
// and with them which results replace which inputs (donation).
func (g *Graph) String() string {
	var b strings.Builder
	g.print(&b, "")
	return b.String()
}

// print writes a graph, or the body of a loop.
func (g *Graph) print(b *strings.Builder, indent string) {
	fmt.Fprintf(b, "%sgraph %s", indent, g.Name)
	if len(g.Mesh) > 0 {
		axes := lists.Map(g.Mesh, func(a Axis) string { return fmt.Sprintf("%s=%d", a.Name, a.Size) })
		fmt.Fprintf(b, " mesh(%s)", strings.Join(axes, ", "))
	}
	b.WriteString(" {\n")
	for _, v := range g.Inputs {
		fmt.Fprintf(b, "%s  %s %s : %s", indent, v.Role, v, v.Type)
		if v.Source != "" {
			fmt.Fprintf(b, " from %s", strconv.Quote(v.Source))
		}
		b.WriteByte('\n')
	}
	for _, op := range g.Ops {
		op.print(b, indent+"  ")
	}
	end := strings.TrimRight(indent+"  return "+values(g.Results), " ")
	fmt.Fprintf(b, "%s\n%s}\n", end, indent)
}

// print writes one operation, and its body indented.
func (op *Op) print(b *strings.Builder, indent string) {
	fmt.Fprintf(b, "%s%s = %s(%s)", indent, values(op.Out), op.Kind, values(op.In))
	b.WriteString(op.Attrs.String())
	if op.Tag != "" {
		fmt.Fprintf(b, " @%s", op.Tag)
	}
	types := lists.Map(op.Out, func(v *Value) string { return v.Type.String() })
	fmt.Fprintf(b, " : %s", strings.Join(types, ", "))
	if op.Body != nil {
		b.WriteString(" body\n")
		op.Body.print(b, indent+"  ")
		return
	}
	b.WriteByte('\n')
}

// String writes the constants as the text of an operation has them, each after a space.
func (a Attrs) String() string {
	var b strings.Builder
	for _, x := range a {
		fmt.Fprintf(&b, " %s=%s", x.Key, attrText(x.Value))
	}
	return b.String()
}

// values spells arguments or results.
func values(list []*Value) string {
	names := lists.Map(list, func(v *Value) string { return v.String() })
	return strings.Join(names, ", ")
}

// attrText spells an attribute so that parsing gives its type back: 1 is an integer, 1.0 a float,
// "1" a string.
func attrText(v any) string {
	switch x := v.(type) {
	case bool:
		return strconv.FormatBool(x)
	case int64:
		return strconv.FormatInt(x, 10)
	case float64:
		text := strconv.FormatFloat(x, 'g', -1, 64)
		if !strings.ContainsAny(text, ".eIN") {
			text += ".0"
		}
		return text
	case string:
		return strconv.Quote(x)
	case []string:
		quoted := lists.Map(x, strconv.Quote)
		return "[" + strings.Join(quoted, ", ") + "]"
	}
	return "?"
}

// Parse reads what [Graph.String] writes, and verifies it.
func Parse(text string) (*Graph, error) { return builtin().Parse(text) }

// Parse reads a graph of the operations of a table, and verifies it.
func (t Table) Parse(text string) (*Graph, error) {
	p := newParser(text)
	p.table = t
	g := p.graph(0)
	if err := p.end("graph"); err != nil {
		return nil, err
	}
	return g, g.Verify()
}

// ParseType reads what [Type.String] writes.
func ParseType(text string) (Type, error) {
	p := newParser(text)
	t := p.typ()
	if err := p.end("type"); err != nil {
		return Type{}, fmt.Errorf("%q is not a type: %w", text, err)
	}
	return t, t.check()
}

// A parser reads the text form of a graph. The first error is remembered, with its line; later
// reads do nothing.
type parser struct {
	s   scanner.Scanner
	tok rune
	err error

	table Table
}

// maxNesting bounds bodies within bodies.
const maxNesting = 8

// newParser begins with the first token.
func newParser(text string) *parser {
	p := &parser{}
	p.s.Init(strings.NewReader(text))
	p.s.Mode = scanner.ScanIdents | scanner.ScanFloats | scanner.ScanInts | scanner.ScanStrings
	p.s.IsIdentRune = func(ch rune, i int) bool {
		return ch == '_' || ch >= 'a' && ch <= 'z' || ch >= 'A' && ch <= 'Z' ||
			i > 0 && (ch >= '0' && ch <= '9' || ch == '.')
	}
	p.s.Error = func(_ *scanner.Scanner, msg string) { p.fail("%s", msg) }
	p.next()
	return p
}

// next reads a token.
func (p *parser) next() {
	if p.err != nil {
		p.tok = scanner.EOF
		return
	}
	p.tok = p.s.Scan()
}

// fail remembers the first error, with its line.
func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = diag.New(diag.GraphText, format, args...).At("line %d, column %d", p.s.Line, p.s.Column)
		p.tok = scanner.EOF
	}
}

// end gives the first error, or says that something follows.
func (p *parser) end(what string) error {
	if p.err == nil && p.tok != scanner.EOF {
		p.fail("something follows the %s", what)
	}
	return p.err
}

// accept takes a token if it is the one.
func (p *parser) accept(tok string) bool {
	if p.err == nil && p.tok != scanner.EOF && p.s.TokenText() == tok {
		p.next()
		return true
	}
	return false
}

// list reads items with commas between, up to what closes them.
func (p *parser) list(end string, item func()) {
	for first := true; p.err == nil && !p.accept(end); first = false {
		if !first {
			p.expect(",")
		}
		item()
	}
}

// sized reads a name and its size: heads=8.
func (p *parser) sized() (name string, size int64) {
	name = p.name()
	p.expect("=")
	return name, p.whole()
}

// expect reads one given token.
func (p *parser) expect(tok string) {
	if !p.accept(tok) {
		p.fail("want %q, found %q", tok, p.s.TokenText())
	}
}

// name reads an identifier; a value's may have dots and digits.
func (p *parser) name() string {
	return token(p, scanner.Ident, "a name", func(text string) (string, error) { return text, nil })
}

// whole reads an integer.
func (p *parser) whole() int64 {
	return token(p, scanner.Int, "a whole number", func(text string) (int64, error) {
		return strconv.ParseInt(text, 10, 64)
	})
}

// quoted reads a string literal.
func (p *parser) quoted() string { return token(p, scanner.String, "a string", strconv.Unquote) }

// token takes a token of a kind, as read makes of it.
func token[T any](p *parser, kind rune, what string, read func(string) (T, error)) (none T) {
	text := p.s.TokenText()
	v, err := read(text)
	if p.tok != kind || err != nil {
		p.fail("want %s, found %q", what, text)
		return none
	}
	p.next()
	return v
}

// graph reads graph NAME [mesh(...)] { inputs, operations, return }.
func (p *parser) graph(depth int) *Graph {
	if depth > maxNesting {
		p.fail("bodies are nested too deep")
	}
	p.expect("graph")
	g := &Graph{Name: p.name()}
	if p.accept("mesh") {
		p.expect("(")
		p.list(")", func() {
			name, size := p.sized()
			g.Mesh = append(g.Mesh, Axis{Name: name, Size: size})
		})
	}
	p.expect("{")
	known := map[string]*Value{}
	for p.err == nil && !p.accept("return") {
		if p.tok == '%' {
			p.op(g, known, depth)
		} else {
			p.input(g, known)
		}
	}
	if p.tok == '%' {
		g.Results = p.uses(known)
	}
	p.expect("}")
	return g
}

// input reads an input with its role, type and source.
func (p *parser) input(g *Graph, known map[string]*Value) {
	v := &Value{Role: Role(p.name())}
	if !slices.Contains([]Role{Data, Param, Residual}, v.Role) {
		p.fail("no input is a %q", v.Role)
	}
	p.expect("%")
	v.Name = p.name()
	p.expect(":")
	v.Type = p.typ()
	if p.accept("from") {
		v.Source = p.quoted()
	}
	p.define(v, known)
	g.Inputs = append(g.Inputs, v)
}

// define records a value under its name, which must be new.
func (p *parser) define(v *Value, known map[string]*Value) {
	if known[v.Name] != nil {
		p.fail("%s stands twice", v)
	}
	known[v.Name] = v
}

// uses reads %a, %b, … of values that are known.
func (p *parser) uses(known map[string]*Value) []*Value {
	var list []*Value
	p.names(func(name string) {
		if p.err == nil && known[name] == nil {
			p.fail("%%%s is not made before it is used", name)
		}
		list = append(list, known[name])
	})
	return list
}

// names reads %a, %b and so on.
func (p *parser) names(each func(name string)) {
	for more := true; more; more = p.accept(",") {
		p.expect("%")
		each(p.name())
	}
}

// op reads %a, %b = kind(%c) key=value @tag : type, type [body graph].
func (p *parser) op(g *Graph, known map[string]*Value, depth int) {
	op := &Op{}
	p.names(func(name string) { op.Out = append(op.Out, &Value{Name: name, def: op}) })
	p.expect("=")
	op.Kind = p.name()
	if op.table = p.table; p.table[op.Kind] == nil {
		p.fail("there is no operation %q", op.Kind)
	}
	p.expect("(")
	if p.tok == '%' {
		op.In = p.uses(known)
	}
	p.expect(")")
	for p.tok == scanner.Ident {
		key := p.name()
		p.expect("=")
		op.Attrs = append(op.Attrs, Attr{key, p.attr()})
	}
	if !slices.IsSortedFunc(op.Attrs, func(a, b Attr) int { return strings.Compare(a.Key, b.Key) }) {
		p.fail("attributes are not in order")
	}
	if p.accept("@") {
		op.Tag = Tag(p.name())
		if !slices.Contains(tags, op.Tag) {
			p.fail("there is no tag %q", op.Tag)
		}
	}
	p.expect(":")
	for i, v := range op.Out {
		if i > 0 {
			p.expect(",")
		}
		v.Type = p.typ()
		p.define(v, known)
	}
	if p.accept("body") {
		op.Body = p.graph(depth + 1)
	}
	g.Ops = append(g.Ops, op)
}

// attr reads an attribute's value.
func (p *parser) attr() any {
	switch {
	case p.tok == scanner.String:
		return p.quoted()
	case p.accept("true"):
		return true
	case p.accept("["):
		list := []string{}
		p.list("]", func() { list = append(list, p.quoted()) })
		return list
	}
	negative := p.accept("-")
	text := p.s.TokenText()
	if negative {
		text = "-" + text
	}
	if n, err := strconv.ParseInt(text, 10, 64); p.tok == scanner.Int && err == nil {
		p.next()
		return n
	}
	f, err := strconv.ParseFloat(text, 64)
	if p.tok != scanner.Float || err != nil {
		p.fail("want a constant, found %q", text)
		return nil
	}
	p.next()
	return f
}

// typ reads f32[batch=2, seq=16]{dp: batch}.
func (p *parser) typ() Type {
	elem, err := dtype.Parse(p.name())
	if err != nil {
		p.fail("%v", err)
	}
	t := Type{Elem: elem}
	p.expect("[")
	p.list("]", func() {
		name, size := p.sized()
		t.Dims = append(t.Dims, Dim{name, size})
	})
	// A brace after a type in a list of inputs begins a placement: bodies are announced by a word.
	if p.tok == '{' {
		p.next()
		p.list("}", func() {
			s := AxisSharding{Axis: p.name()}
			p.expect(":")
			if p.accept(Partial) {
				s.Dim = Partial
			} else {
				s.Dim = p.name()
			}
			t.Place = append(t.Place, s)
		})
		byAxis := func(a, b AxisSharding) int { return strings.Compare(a.Axis, b.Axis) }
		if !slices.IsSortedFunc(t.Place, byAxis) {
			p.fail("axes are not in order")
		}
	}
	return t
}
