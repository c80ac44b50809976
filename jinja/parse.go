package jinja

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A Template is a program that was read. It does not change, and any number of goroutines may use
// it at once.
type Template struct {
	body  []node
	marks bool
}

// Marks reports whether the template marks what an assistant says with {% generation %}.
func (t *Template) Marks() bool { return t.marks }

// maxDepth bounds how deep statements, expressions and calls nest.
const maxDepth = 100

// A parser reads tokens; the first error ends it.
type parser struct {
	tokens []token
	at     int
	depth  int
	loops  int // for statements around
	scopes int // macros and captures around, in which generation cannot stand
	marks  bool
}

// parseError carries an error out of nested calls; Parse recovers it.
type parseError struct{ err *diag.Error }

// Parse reads a template, and refuses one with statements, filters or tests that are not known.
func Parse(text string) (t *Template, err error) {
	tokens, err := lex(text)
	if err != nil {
		return nil, err
	}
	p := &parser{tokens: tokens}
	defer func() {
		if r := recover(); r != nil {
			bad, ok := r.(parseError)
			if !ok {
				panic(r)
			}
			t, err = nil, bad.err
		}
	}()
	body := p.statements()
	if p.peek().kind != tEnd {
		p.fail("there is nothing that %q ends", p.tokens[min(p.at+1, len(p.tokens)-1)].text)
	}
	return &Template{body: body, marks: p.marks}, nil
}

func (p *parser) fail(format string, args ...any) {
	panic(parseError{failure(p.peek().line, format, args...)})
}

func (p *parser) peek() token { return p.tokens[p.at] }

func (p *parser) next() token {
	t := p.tokens[p.at]
	if t.kind != tEnd {
		p.at++
	}
	return t
}

// is reports whether the next token is an operator or a word.
func (p *parser) is(text string) bool {
	t := p.peek()
	return (t.kind == tOp || t.kind == tName) && t.text == text
}

// accept takes the next token if it is the one.
func (p *parser) accept(text string) bool {
	if p.is(text) {
		p.at++
		return true
	}
	return false
}

func (p *parser) expect(text string) {
	if !p.accept(text) {
		p.fail("%q stands where %q belongs", p.peek().text, text)
	}
}

func (p *parser) name() string {
	if p.peek().kind != tName {
		p.fail("%q stands where a name belongs", p.peek().text)
	}
	return p.next().text
}

// nest counts nesting; the result ends it.
func (p *parser) nest() func() {
	if p.depth++; p.depth > maxDepth {
		p.fail("the template nests deeper than %d", maxDepth)
	}
	return func() { p.depth-- }
}

// endTag closes the tag that is being read.
func (p *parser) endTag() {
	if p.peek().kind != tTagClose {
		p.fail("%q is too much in a tag", p.peek().text)
	}
	p.at++
}

// ends are the words that end the statements of another one.
var ends = []string{"elif", "else", "endif", "endfor", "endset", "endmacro", "endcall", "endfilter",
	"endgeneration", "endwith"}

// statements reads up to the end, or a tag with one of the words that end statements.
func (p *parser) statements() (list []node) {
	defer p.nest()()
	for {
		switch t := p.peek(); t.kind {
		case tText:
			p.at++
			list = append(list, &textNode{t.text})
		case tOpen:
			p.at++
			e := p.expression(true)
			if p.peek().kind != tClose {
				p.fail("%q is too much in an expression", p.peek().text)
			}
			p.at++
			list = append(list, &printNode{t.line, e})
		case tTag:
			if word := p.tokens[p.at+1]; word.kind == tName && slices.Contains(ends, word.text) {
				return list
			}
			p.at++
			list = append(list, p.statement(t.line))
		default:
			return list
		}
	}
}

// until reads statements up to the tag that ends them, and the word of it.
func (p *parser) until(words ...string) ([]node, string) {
	body := p.statements()
	if p.peek().kind != tTag {
		p.fail("%q is missing", words[len(words)-1])
	}
	p.at++
	word := p.name()
	if !slices.Contains(words, word) {
		p.fail("%q stands where %q belongs", word, words[len(words)-1])
	}
	return body, word
}

func (p *parser) statement(line int) node {
	switch word := p.name(); word {
	case "if":
		return p.ifs()
	case "for":
		return p.fors(line)
	case "set":
		return p.set(line)
	case "macro":
		return p.macro(line)
	case "generation":
		if p.scopes > 0 {
			p.fail("generation stands in a macro, a call or a set, where its place is not known")
		}
		p.marks = true
		p.endTag()
		body, _ := p.until("endgeneration")
		p.endTag()
		return &generationNode{body}
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s stands outside of a loop", word)
		}
		p.endTag()
		return &jumpNode{word == "break"}
	case "filter":
		f := &filterNode{line: line, base: &constant{}, name: p.name()}
		p.filterArgs(f)
		p.endTag()
		p.scopes++
		defer func() { p.scopes-- }()
		body, _ := p.until("endfilter")
		p.endTag()
		return &captureNode{line: line, body: body, filter: f}
	case "call":
		return p.call(line)
	default:
		p.fail("the statement %q is not supported", word)
		return nil
	}
}

func (p *parser) ifs() node {
	n := &ifNode{}
	word := "if"
	for word != "endif" {
		var test expr = &constant{true}
		if word != "else" {
			test = p.expression(false)
		}
		p.endTag()
		words := []string{"elif", "else", "endif"}
		if word == "else" {
			words = words[2:]
		}
		var body []node
		body, word = p.until(words...)
		n.arms = append(n.arms, arm{test, body})
	}
	p.endTag()
	return n
}

// targets reads the names that a loop or a set gives values to.
func (p *parser) targets() (names []string) {
	closing := p.accept("(")
	names = append(names, p.name())
	for p.accept(",") {
		names = append(names, p.name())
	}
	if closing {
		p.expect(")")
	}
	return names
}

func (p *parser) fors(line int) node {
	n := &forNode{line: line, names: p.targets()}
	p.expect("in")
	n.over = p.tuple(false)
	if p.accept("if") {
		n.test = p.expression(true)
	}
	if p.is("recursive") {
		p.fail("a recursive loop is not supported")
	}
	p.endTag()
	p.loops++
	body, word := p.until("else", "endfor")
	p.loops--
	n.body = body
	if word == "else" {
		p.endTag()
		n.other, _ = p.until("endfor")
	}
	p.endTag()
	return n
}

func (p *parser) set(line int) node {
	n := &setNode{line: line, names: p.targets()}
	if len(n.names) == 1 && p.accept(".") {
		n.field = p.name()
	}
	if p.accept("=") {
		n.value = p.tuple(true)
		p.endTag()
		return n
	}
	if len(n.names) > 1 {
		p.fail("a set of several names needs a value")
	}
	c := &captureNode{line: line, to: n}
	for p.accept("|") {
		f := &filterNode{line: line, base: &constant{}, name: p.name()}
		p.filterArgs(f)
		if c.filter != nil {
			f.base = c.filter
			p.fail("a block set with several filters is not supported")
		}
		c.filter = f
	}
	p.endTag()
	p.scopes++
	c.body, _ = p.until("endset")
	p.scopes--
	p.endTag()
	return c
}

// params reads the parameters of a macro, with defaults.
func (p *parser) params() (list []param) {
	p.expect("(")
	for !p.accept(")") {
		one := param{name: p.name()}
		if p.accept("=") {
			one.other = p.expression(true)
		} else if len(list) > 0 && list[len(list)-1].other != nil {
			p.fail("a parameter without a default stands behind one that has it")
		}
		list = append(list, one)
		if !p.is(")") {
			p.expect(",")
		}
	}
	return list
}

func (p *parser) macro(line int) node {
	m := &macroNode{line: line, name: p.name(), params: p.params()}
	p.endTag()
	loops := p.loops
	p.loops = 0
	p.scopes++
	m.body, _ = p.until("endmacro")
	p.scopes--
	p.loops = loops
	p.endTag()
	return m
}

// call reads {% call f(x) %} … {% endcall %}: the body is what caller() gives in the macro.
func (p *parser) call(line int) node {
	caller := &macroNode{line: line, name: "caller"}
	if p.is("(") {
		caller.params = p.params()
	}
	e, ok := p.expression(true).(*callNode)
	if !ok {
		p.fail("call needs a macro and its arguments")
	}
	p.endTag()
	loops := p.loops
	p.loops = 0
	p.scopes++
	caller.body, _ = p.until("endcall")
	p.scopes--
	p.loops = loops
	p.endTag()
	e.caller = caller
	return &printNode{line, e}
}

// tuple reads an expression, or several with commas between.
func (p *parser) tuple(conditional bool) expr {
	first := p.expression(conditional)
	if !p.is(",") {
		return first
	}
	list := []expr{first}
	for p.accept(",") {
		if k := p.peek().kind; k == tTagClose || k == tClose || p.is(")") {
			break
		}
		list = append(list, p.expression(conditional))
	}
	return &listNode{items: list, fixed: true}
}

// expression reads an expression; conditional ones have the form a if b else c.
func (p *parser) expression(conditional bool) expr {
	defer p.nest()()
	e := p.or()
	for conditional && p.accept("if") {
		c := &condNode{yes: e, test: p.or()}
		if p.accept("else") {
			c.no = p.expression(true)
		}
		e = c
	}
	return e
}

func (p *parser) or() expr {
	e := p.and()
	for p.accept("or") {
		e = &logicNode{e, p.and(), true}
	}
	return e
}

func (p *parser) and() expr {
	e := p.not()
	for p.accept("and") {
		e = &logicNode{e, p.not(), false}
	}
	return e
}

func (p *parser) not() expr {
	defer p.nest()()
	if p.accept("not") {
		return &notNode{p.not()}
	}
	return p.compare()
}

func (p *parser) compare() expr {
	e := p.sum()
	var chain *compareNode
	for {
		line := p.peek().line
		op := p.peek().text
		switch {
		case p.peek().kind == tOp && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, op):
			p.at++
		case p.is("in"):
			p.at++
		case p.is("not") && p.tokens[p.at+1].kind == tName && p.tokens[p.at+1].text == "in":
			p.at += 2
			op = "not in"
		default:
			if chain != nil {
				return chain
			}
			return e
		}
		if chain == nil {
			chain = &compareNode{line: line, first: e}
		}
		chain.ops = append(chain.ops, op)
		chain.rest = append(chain.rest, p.sum())
	}
}

// binary reads operands with operators between them, which bind alike.
func (p *parser) binary(operand func() expr, ops ...string) expr {
	e := operand()
	for p.peek().kind == tOp && slices.Contains(ops, p.peek().text) {
		t := p.next()
		e = &binaryNode{t.line, t.text, e, operand()}
	}
	return e
}

func (p *parser) sum() expr     { return p.binary(p.concat, "+", "-") }
func (p *parser) concat() expr  { return p.binary(p.product, "~") }
func (p *parser) product() expr { return p.binary(p.power, "*", "/", "//", "%") }
func (p *parser) power() expr   { return p.binary(func() expr { return p.unary(true) }, "**") }

// unary reads a sign, then a value with what is done to it.
func (p *parser) unary(filters bool) expr {
	defer p.nest()()
	var e expr
	switch t := p.peek(); {
	case t.kind == tOp && t.text == "-":
		p.at++
		e = &binaryNode{t.line, "-", &constant{int64(0)}, p.unary(false)}
	case t.kind == tOp && t.text == "+":
		p.at++
		e = p.unary(false)
	default:
		e = p.primary()
	}
	e = p.postfix(e)
	if filters {
		e = p.filters(e)
	}
	return e
}

// literals are the names of constants.
var literals = map[string]any{"true": true, "True": true, "false": false, "False": false,
	"none": nil, "None": nil}

func (p *parser) primary() expr {
	t := p.next()
	switch {
	case t.kind == tName:
		if v, ok := literals[t.text]; ok {
			return &constant{v}
		}
		return &nameNode{t.text}
	case t.kind == tString:
		parts := []string{t.text}
		for p.peek().kind == tString {
			parts = append(parts, p.next().text)
		}
		return &constant{strings.Join(parts, "")}
	case t.kind == tInt:
		n, err := strconv.ParseInt(t.text, 10, 64)
		if err != nil {
			p.fail("%s is too large", t.text)
		}
		return &constant{n}
	case t.kind == tFloat:
		f, err := strconv.ParseFloat(t.text, 64)
		if err != nil || math.IsInf(f, 0) {
			p.fail("%s is not finite", t.text)
		}
		return &constant{f}
	case t.kind == tOp && t.text == "(":
		if p.accept(")") {
			return &listNode{fixed: true}
		}
		e := p.tuple(true)
		p.expect(")")
		return e
	case t.kind == tOp && t.text == "[":
		n := &listNode{}
		for !p.accept("]") {
			n.items = append(n.items, p.expression(true))
			if !p.is("]") {
				p.expect(",")
			}
		}
		return n
	case t.kind == tOp && t.text == "{":
		n := &dictNode{line: t.line}
		for !p.accept("}") {
			n.keys = append(n.keys, p.expression(true))
			p.expect(":")
			n.values = append(n.values, p.expression(true))
			if !p.is("}") {
				p.expect(",")
			}
		}
		return n
	}
	p.at--
	p.fail("%q stands where a value belongs", t.text)
	return nil
}

// postfix reads attributes, items and calls behind a value.
func (p *parser) postfix(e expr) expr {
	for {
		t := p.peek()
		if t.kind != tOp {
			return e
		}
		switch t.text {
		case ".":
			p.at++
			if name := p.next(); name.kind == tInt {
				i, err := strconv.ParseInt(name.text, 10, 64)
				if err != nil {
					p.fail("%s is too large", name.text)
				}
				e = &itemNode{t.line, e, &constant{i}}
			} else if name.kind == tName {
				e = &attrNode{t.line, e, name.text}
			} else {
				p.fail("%q stands where a name belongs", name.text)
			}
		case "[":
			p.at++
			e = p.subscript(e, t.line)
		case "(":
			e = p.arguments(&callNode{line: t.line, what: e})
		default:
			return e
		}
	}
}

// subscript reads [i] or [a:b:c].
func (p *parser) subscript(e expr, line int) expr {
	var parts [3]expr
	n, slice := 0, false
	for !p.is("]") {
		if p.accept(":") {
			slice = true
			if n++; n > 2 {
				p.fail("a slice has two colons at most")
			}
			continue
		}
		if parts[n] != nil {
			p.fail("%q is too much in brackets", p.peek().text)
		}
		parts[n] = p.expression(true)
	}
	p.expect("]")
	switch {
	case slice:
		return &sliceNode{line, e, parts}
	case parts[0] == nil:
		p.fail("an index is missing")
	}
	return &itemNode{line, e, parts[0]}
}

// arguments reads what stands in the parentheses of a call.
func (p *parser) arguments(c *callNode) *callNode {
	defer p.nest()()
	p.expect("(")
	for !p.accept(")") {
		if p.is("*") || p.is("**") {
			p.fail("arguments that are unpacked are not supported")
		}
		if p.peek().kind == tName && p.tokens[p.at+1].kind == tOp && p.tokens[p.at+1].text == "=" {
			c.names = append(c.names, p.name())
			p.at++
			c.named = append(c.named, p.expression(true))
		} else {
			if len(c.names) > 0 {
				p.fail("an argument without a name stands behind one that has it")
			}
			c.args = append(c.args, p.expression(true))
		}
		if !p.is(")") {
			p.expect(",")
		}
	}
	return c
}

// filterArgs reads the arguments of a filter, and refuses one that is not known.
func (p *parser) filterArgs(f *filterNode) {
	if _, ok := findFilter(f.name); !ok {
		p.fail("the filter %q is not supported", f.name)
	}
	if p.is("(") {
		f.call = p.arguments(&callNode{line: f.line})
	} else {
		f.call = &callNode{line: f.line}
	}
}

// filters reads filters, tests and calls behind a value.
func (p *parser) filters(e expr) expr {
	for {
		t := p.peek()
		switch {
		case p.accept("|"):
			f := &filterNode{line: t.line, base: e, name: p.name()}
			p.filterArgs(f)
			e = f
		case p.accept("is"):
			e = p.test(e, t.line)
		case p.is("("):
			e = p.arguments(&callNode{line: t.line, what: e})
		default:
			return e
		}
	}
}

// test reads what stands behind "is".
func (p *parser) test(e expr, line int) expr {
	n := &testNode{line: line, base: e, negate: p.accept("not"), name: p.name(),
		call: &callNode{line: line}}
	if _, ok := tests[n.name]; !ok {
		p.fail("the test %q is not supported", n.name)
	}
	switch t := p.peek(); {
	case p.is("("):
		n.call = p.arguments(n.call)
	case t.kind == tString || t.kind == tInt || t.kind == tFloat || t.kind == tOp &&
		strings.Contains("[{", t.text) || t.kind == tName &&
		!slices.Contains([]string{"else", "or", "and"}, t.text):
		if t.text == "is" {
			p.fail("a test of a test is not supported")
		}
		n.call.args = []expr{p.postfix(p.primary())}
	}
	return n
}
