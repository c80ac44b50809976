package jinja

import (
	"errors"
	"maps"
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// Bounds of what a template may do to write one chat. Seven messages with tool calls take 1,350
// steps at most in the templates that tests know; some look through all messages for each one.
const (
	maxSteps = 4_000_000
	maxBytes = 1 << 28 // of all strings that are made
)

// Output is a chat as a template writes it.
type Output struct {
	Text string
	// Said are the parts that stand in {% generation %}: where each begins and ends in Text.
	Said [][2]int
}

// Render runs the template. Variables are values as [Decode] gives them; now is the time that
// strftime_now tells.
func (t *Template) Render(vars map[string]any, now time.Time) (Output, error) {
	r := &run{now: now}
	top := &scope{vars: maps.Clone(vars)}
	s := &scope{vars: map[string]any{}, up: top}
	var b strings.Builder
	err := r.all(t.body, s, &b)
	if err != nil {
		return Output{}, err
	}
	return Output{b.String(), r.said}, nil
}

// A run is one rendering.
type run struct {
	now   time.Time
	steps int
	bytes int
	depth int
	said  [][2]int
}

// step counts work, and ends a run that has too much of it.
func (r *run) step(line int) error {
	if r.steps++; r.steps > maxSteps {
		return failure(line, "the template takes more than %d steps", maxSteps)
	}
	return nil
}

// made counts the bytes of a new string or list.
func (r *run) made(line, n int) error {
	if r.bytes += n; n < 0 || r.bytes > maxBytes {
		return failure(line, "the template makes more than %d MiB of text", maxBytes>>20)
	}
	return nil
}

// A scope has the variables of the template, of a turn of a loop, or of a call.
type scope struct {
	vars map[string]any
	up   *scope
}

func (s *scope) inner() *scope { return &scope{vars: map[string]any{}, up: s} }

func (s *scope) get(name string) any {
	for at := s; at != nil; at = at.up {
		if v, ok := at.vars[name]; ok {
			return v
		}
	}
	if f, ok := globals[name]; ok {
		return f
	}
	return undefined{name}
}

// A node is a statement.
type node interface {
	run(r *run, s *scope, out *strings.Builder) error
}

// An expr is an expression.
type expr interface {
	eval(r *run, s *scope) (any, error)
}

// Ways to leave the body of a loop.
var errBreak, errContinue = errors.New("break"), errors.New("continue")

func (r *run) all(list []node, s *scope, out *strings.Builder) error {
	for _, n := range list {
		if err := r.step(0); err != nil {
			return err
		}
		if err := n.run(r, s, out); err != nil {
			return err
		}
	}
	return nil
}

// capture runs statements and gives what they print.
func (r *run) capture(list []node, s *scope) (string, error) {
	var b strings.Builder
	err := r.all(list, s, &b)
	return b.String(), err
}

type textNode struct{ text string }

func (n *textNode) run(r *run, _ *scope, out *strings.Builder) error {
	out.WriteString(n.text)
	return r.made(0, len(n.text))
}

type printNode struct {
	line int
	e    expr
}

func (n *printNode) run(r *run, s *scope, out *strings.Builder) error {
	v, err := n.e.eval(r, s)
	if err != nil {
		return err
	}
	text, err := r.str(n.line, v)
	out.WriteString(text)
	return err
}

type arm struct {
	test expr
	body []node
}

type ifNode struct{ arms []arm }

func (n *ifNode) run(r *run, s *scope, out *strings.Builder) error {
	for _, a := range n.arms {
		v, err := a.test.eval(r, s)
		if err != nil {
			return err
		}
		if truth(v) {
			return r.all(a.body, s, out)
		}
	}
	return nil
}

type forNode struct {
	line        int
	names       []string
	over, test  expr
	body, other []node
}

func (n *forNode) run(r *run, s *scope, out *strings.Builder) error {
	v, err := n.over.eval(r, s)
	if err != nil {
		return err
	}
	items, err := r.items(n.line, v)
	if err != nil {
		return err
	}
	if n.test != nil {
		var kept []any
		for _, item := range items {
			in := s.inner()
			if err := assign(n.line, in, n.names, item); err != nil {
				return err
			}
			ok, err := n.test.eval(r, in)
			if err != nil {
				return err
			}
			if truth(ok) {
				kept = append(kept, item)
			}
		}
		items = kept
	}
	if len(items) == 0 {
		return r.all(n.other, s.inner(), out)
	}
	l := &loop{items: items}
	for l.at = range items {
		if err := r.step(n.line); err != nil {
			return err
		}
		in := s.inner()
		in.vars["loop"] = l
		if err := assign(n.line, in, n.names, items[l.at]); err != nil {
			return err
		}
		err := r.all(n.body, in, out)
		if errors.Is(err, errBreak) {
			break
		}
		if err != nil && !errors.Is(err, errContinue) {
			return err
		}
	}
	return nil
}

// assign gives a value to a name, or the parts of it to several.
func assign(line int, s *scope, names []string, v any) error {
	if len(names) == 1 {
		s.vars[names[0]] = v
		return nil
	}
	list, ok := plainList(v).([]any)
	if !ok || len(list) != len(names) {
		return failure(line, "%s is not %d values", typeName(v), len(names))
	}
	for i, name := range names {
		s.vars[name] = list[i]
	}
	return nil
}

type setNode struct {
	line  int
	names []string
	field string // of a namespace
	value expr
}

func (n *setNode) run(r *run, s *scope, _ *strings.Builder) error {
	v, err := n.value.eval(r, s)
	if err != nil {
		return err
	}
	return n.store(s, v)
}

func (n *setNode) store(s *scope, v any) error {
	if n.field == "" {
		return assign(n.line, s, n.names, v)
	}
	ns, ok := s.get(n.names[0]).(*namespace)
	if !ok {
		return failure(n.line, "%s is not a namespace", n.names[0])
	}
	ns.vars.set(n.field, v)
	return nil
}

// A captureNode is a block whose text is filtered, printed, or given to a name.
type captureNode struct {
	line   int
	to     *setNode
	filter *filterNode
	body   []node
}

func (n *captureNode) run(r *run, s *scope, out *strings.Builder) error {
	text, err := r.capture(n.body, s.inner())
	if err != nil {
		return err
	}
	var v any = text
	if n.filter != nil {
		if v, err = n.filter.apply(r, s, text); err != nil {
			return err
		}
	}
	if n.to != nil {
		return n.to.store(s, v)
	}
	text, err = r.str(n.line, v)
	out.WriteString(text)
	return err
}

type generationNode struct{ body []node }

func (n *generationNode) run(r *run, s *scope, out *strings.Builder) error {
	from := out.Len()
	// The tag is a call in the library, so that what is set in it stays in it.
	if err := r.all(n.body, s.inner(), out); err != nil {
		return err
	}
	r.said = append(r.said, [2]int{from, out.Len()})
	return nil
}

type jumpNode struct{ leave bool }

func (n *jumpNode) run(*run, *scope, *strings.Builder) error {
	if n.leave {
		return errBreak
	}
	return errContinue
}

type param struct {
	name  string
	other expr
}

type macroNode struct {
	line   int
	name   string
	params []param
	body   []node
}

func (n *macroNode) run(_ *run, s *scope, _ *strings.Builder) error {
	s.vars[n.name] = &macro{n, s}
	return nil
}

// A macro is a macro with the scope that it was defined in.
type macro struct {
	*macroNode
	scope *scope
}

// call runs a macro; its value is what it prints.
func (m *macro) call(r *run, a args) (any, error) {
	if r.depth++; r.depth > maxDepth {
		return nil, failure(m.line, "macros call each other deeper than %d", maxDepth)
	}
	defer func() { r.depth-- }()
	in := m.scope.inner()
	if len(a.list) > len(m.params) {
		return nil, failure(m.line, "the macro %s takes %d arguments, not %d", m.name, len(m.params),
			len(a.list))
	}
	for name := range a.named {
		known := name == "caller"
		for _, p := range m.params {
			known = known || p.name == name
		}
		if !known {
			return nil, failure(m.line, "the macro %s has no argument %q", m.name, name)
		}
	}
	if caller, ok := a.named["caller"]; ok {
		in.vars["caller"] = caller
	}
	for i, p := range m.params {
		switch v, ok := a.named[p.name]; {
		case i < len(a.list):
			in.vars[p.name] = a.list[i]
		case ok:
			in.vars[p.name] = v
		case p.other != nil:
			v, err := p.other.eval(r, in)
			if err != nil {
				return nil, err
			}
			in.vars[p.name] = v
		default:
			in.vars[p.name] = undefined{p.name}
		}
	}
	return r.capture(m.body, in)
}

type constant struct{ v any }

func (n *constant) eval(*run, *scope) (any, error) { return n.v, nil }

type nameNode struct{ name string }

func (n *nameNode) eval(r *run, s *scope) (any, error) { return s.get(n.name), r.step(0) }

// A listNode is a list, or a tuple, which is fixed.
type listNode struct {
	items []expr
	fixed bool
}

func (n *listNode) eval(r *run, s *scope) (any, error) {
	list := make([]any, len(n.items))
	for i, e := range n.items {
		var err error
		if list[i], err = e.eval(r, s); err != nil {
			return nil, err
		}
	}
	if n.fixed {
		return tuple(list), r.made(0, 16*len(list))
	}
	return list, r.made(0, 16*len(list))
}

type dictNode struct {
	line         int
	keys, values []expr
}

func (n *dictNode) eval(r *run, s *scope) (any, error) {
	d := NewDict()
	for i := range n.keys {
		k, err := n.keys[i].eval(r, s)
		if err != nil {
			return nil, err
		}
		name, ok := k.(string)
		if !ok {
			return nil, failure(n.line, "a key that is %s is not supported", typeName(k))
		}
		v, err := n.values[i].eval(r, s)
		if err != nil {
			return nil, err
		}
		d.set(name, v)
	}
	return d, r.made(n.line, 64*len(n.keys))
}

type condNode struct{ yes, test, no expr }

func (n *condNode) eval(r *run, s *scope) (any, error) {
	v, err := n.test.eval(r, s)
	switch {
	case err != nil:
		return nil, err
	case truth(v):
		return n.yes.eval(r, s)
	case n.no == nil:
		return undefined{"the value of an if without else"}, nil
	}
	return n.no.eval(r, s)
}

type logicNode struct {
	a, b expr
	or   bool
}

func (n *logicNode) eval(r *run, s *scope) (any, error) {
	v, err := n.a.eval(r, s)
	if err != nil || truth(v) == n.or {
		return v, err
	}
	return n.b.eval(r, s)
}

type notNode struct{ e expr }

func (n *notNode) eval(r *run, s *scope) (any, error) {
	v, err := n.e.eval(r, s)
	return !truth(v), err
}

type compareNode struct {
	line  int
	first expr
	ops   []string
	rest  []expr
}

func (n *compareNode) eval(r *run, s *scope) (any, error) {
	a, err := n.first.eval(r, s)
	if err != nil {
		return nil, err
	}
	for i, op := range n.ops {
		b, err := n.rest[i].eval(r, s)
		if err != nil {
			return nil, err
		}
		ok, err := r.compare(n.line, op, a, b)
		if err != nil || !ok {
			return false, err
		}
		a = b
	}
	return true, nil
}

type binaryNode struct {
	line int
	op   string
	a, b expr
}

func (n *binaryNode) eval(r *run, s *scope) (any, error) {
	if err := r.step(n.line); err != nil {
		return nil, err
	}
	a, err := n.a.eval(r, s)
	if err != nil {
		return nil, err
	}
	b, err := n.b.eval(r, s)
	if err != nil {
		return nil, err
	}
	return r.operate(n.line, n.op, a, b)
}

type attrNode struct {
	line int
	base expr
	name string
}

func (n *attrNode) eval(r *run, s *scope) (any, error) {
	v, err := n.base.eval(r, s)
	if err != nil {
		return nil, err
	}
	if err := r.step(n.line); err != nil {
		return nil, err
	}
	return r.attribute(n.line, v, n.name)
}

type itemNode struct {
	line      int
	base, key expr
}

func (n *itemNode) eval(r *run, s *scope) (any, error) {
	v, err := n.base.eval(r, s)
	if err != nil {
		return nil, err
	}
	k, err := n.key.eval(r, s)
	if err != nil {
		return nil, err
	}
	return r.item(n.line, v, k)
}

type sliceNode struct {
	line  int
	base  expr
	parts [3]expr
}

func (n *sliceNode) eval(r *run, s *scope) (any, error) {
	v, err := n.base.eval(r, s)
	if err != nil {
		return nil, err
	}
	var at [3]any
	for i, e := range n.parts {
		if e == nil {
			continue
		}
		if at[i], err = e.eval(r, s); err != nil {
			return nil, err
		}
	}
	return r.slice(n.line, v, at)
}

// args are the arguments of a call.
type args struct {
	line  int
	list  []any
	named map[string]any
}

type callNode struct {
	line   int
	what   expr
	args   []expr
	names  []string
	named  []expr
	caller *macroNode
}

func (n *callNode) values(r *run, s *scope) (a args, err error) {
	a.line = n.line
	for _, e := range n.args {
		v, err := e.eval(r, s)
		if err != nil {
			return a, err
		}
		a.list = append(a.list, v)
	}
	if len(n.names) > 0 || n.caller != nil {
		a.named = map[string]any{}
	}
	for i, name := range n.names {
		if a.named[name], err = n.named[i].eval(r, s); err != nil {
			return a, err
		}
	}
	if n.caller != nil {
		a.named["caller"] = &macro{n.caller, s}
	}
	return a, nil
}

func (n *callNode) eval(r *run, s *scope) (any, error) {
	if err := r.step(n.line); err != nil {
		return nil, err
	}
	f, err := n.what.eval(r, s)
	if err != nil {
		return nil, err
	}
	a, err := n.values(r, s)
	if err != nil {
		return nil, err
	}
	switch f := f.(type) {
	case function:
		return f(r, a)
	case *macro:
		return f.call(r, a)
	case undefined:
		return nil, failure(n.line, "%s is not defined, and is called", f.name)
	}
	return nil, failure(n.line, "%s cannot be called", typeName(f))
}

// A function is a global or a method bound to its value.
type function func(r *run, a args) (any, error)

type filterNode struct {
	line int
	base expr
	name string
	call *callNode
}

func (n *filterNode) eval(r *run, s *scope) (any, error) {
	v, err := n.base.eval(r, s)
	if err != nil {
		return nil, err
	}
	return n.apply(r, s, v)
}

func (n *filterNode) apply(r *run, s *scope, v any) (any, error) {
	if err := r.step(n.line); err != nil {
		return nil, err
	}
	a, err := n.call.values(r, s)
	if err != nil {
		return nil, err
	}
	f, _ := findFilter(n.name) // the parser has refused others
	return f(r, v, a)
}

type testNode struct {
	line   int
	base   expr
	negate bool
	name   string
	call   *callNode
}

func (n *testNode) eval(r *run, s *scope) (any, error) {
	v, err := n.base.eval(r, s)
	if err != nil {
		return nil, err
	}
	a, err := n.call.values(r, s)
	if err != nil {
		return nil, err
	}
	ok, err := tests[n.name](r, v, a)
	return ok != n.negate, err
}

// raised is the error of raise_exception: what the template says about the chat.
func raised(line int, text string) error {
	return diag.New(diag.DataTemplate, "the template refuses the chat: %s", text).
		At("line %d of the template", line)
}
