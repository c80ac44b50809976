package pt2

import (
	"fmt"
	"strconv"
	"strings"
)

const opFloat = "Float"

// maxNesting bounds how deep an expression and a graph within a graph may nest.
const maxNesting = 64

// parseExpr reads what sympy's srepr writes: Mul(Integer(64), Symbol('s72', positive=True)).
func parseExpr(text string) (Expr, error) {
	p := sreprParser{text: text}
	e, err := p.expr(0)
	if err == nil && p.at < len(text) {
		err = p.fail("something follows the expression")
	}
	return e, err
}

type sreprParser struct {
	text string
	at   int
}

func (p *sreprParser) fail(what string) error {
	return fmt.Errorf("byte %d of %.60q: %s", p.at, p.text, what)
}

// take moves over c, and blanks before and after it.
func (p *sreprParser) take(c byte) bool {
	p.blanks()
	if p.at == len(p.text) || p.text[p.at] != c {
		return false
	}
	p.at++
	p.blanks()
	return true
}

func (p *sreprParser) blanks() {
	for p.at < len(p.text) && p.text[p.at] == ' ' {
		p.at++
	}
}

// word reads letters, digits and the signs of numbers; "" if there is no such.
func (p *sreprParser) word() string {
	begin := p.at
	for p.at < len(p.text) {
		switch c := p.text[p.at]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9',
			c == '_', c == '-', c == '+', c == '.':
			p.at++
		default:
			return p.text[begin:p.at]
		}
	}
	return p.text[begin:p.at]
}

// quoted reads a string in single quotes. Names and numbers need no escapes.
func (p *sreprParser) quoted() (string, error) {
	if p.at == len(p.text) || p.text[p.at] != '\'' {
		return "", p.fail("a name in quotes wanted")
	}
	end := strings.IndexByte(p.text[p.at+1:], '\'')
	if end < 0 {
		return "", p.fail("a name has no end")
	}
	begin := p.at + 1
	p.at = begin + end + 1
	name := p.text[begin : begin+end]
	if name == "" || strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r == '\\' || r > '~'
	}) {
		return "", p.fail("not the name of a symbol")
	}
	return name, nil
}

func (p *sreprParser) expr(depth int) (Expr, error) {
	if depth > maxNesting {
		return Expr{}, p.fail(fmt.Sprintf("expressions nest deeper than %d", maxNesting))
	}
	op := p.word()
	switch {
	case op == "":
		return Expr{}, p.fail("an expression wanted")
	case strings.Trim(op, "+-.0123456789eE") == "":
		return p.number(op)
	}
	e := Expr{Op: op}
	if !p.take('(') {
		return e, nil // true, false, oo
	}
	switch op {
	case opInteger:
		n, err := strconv.ParseInt(p.word(), 10, 64)
		if err != nil {
			return e, p.fail("an integer of 64 bits wanted")
		}
		e.Int = n
		if !p.take(')') {
			return e, p.fail("')' wanted")
		}
		return e, nil
	case opSymbol, opFloat:
		var err error
		if e.Name, err = p.quoted(); err != nil {
			return e, err
		}
		if !p.take(',') {
			if !p.take(')') {
				return e, p.fail("')' wanted")
			}
			return e, nil
		}
	}
	return p.list(e, depth)
}

// number reads a plain integer, as Rational(1, 2) has.
func (p *sreprParser) number(word string) (Expr, error) {
	n, err := strconv.ParseInt(word, 10, 64)
	if err != nil {
		return Expr{}, p.fail("an integer of 64 bits wanted")
	}
	return integer(n), nil
}

// list reads arguments up to the bracket. What is written with a name, such as positive=True, says
// what sympy assumes, and is left out.
func (p *sreprParser) list(e Expr, depth int) (Expr, error) {
	if p.take(')') {
		return e, nil
	}
	for {
		a, err := p.expr(depth + 1)
		if err != nil {
			return e, err
		}
		switch {
		case p.take('='):
			if _, err := p.expr(depth + 1); err != nil {
				return e, err
			}
		case e.Op == opSymbol || e.Op == opFloat:
			return e, p.fail("an assumption wanted")
		default:
			e.Args = append(e.Args, a)
		}
		if p.take(')') {
			return e, nil
		}
		if !p.take(',') {
			return e, p.fail("',' or ')' wanted")
		}
	}
}
