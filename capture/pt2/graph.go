package pt2

import (
	"path"
	"regexp"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
)

// graph reads a graph, which may hold others.
func (p *parser) graph() (*Graph, error) {
	g := &Graph{Values: map[string]Value{}}
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "inputs":
			g.Inputs, err = p.arguments()
		case "outputs":
			g.Outputs, err = p.arguments()
		case "nodes":
			err = p.Array(func() error {
				n, err := p.node()
				g.Nodes = append(g.Nodes, n)
				return err
			})
		case "tensor_values":
			err = p.values(g, p.tensorValue)
		case "sym_int_values":
			err = p.values(g, func() (Value, error) { return p.symValue(dtype.S64, "as_int") })
		case "sym_bool_values":
			err = p.values(g, func() (Value, error) { return p.symValue(dtype.Pred, "as_bool") })
		case "sym_float_values":
			err = p.values(g, func() (Value, error) { return p.symValue(dtype.F64, "as_float") })
		default:
			err = p.Skip()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return g, g.check()
}

// values reads an object of values by name.
func (p *parser) values(g *Graph, value func() (Value, error)) error {
	return p.Object(func(name string) error {
		if err := p.checkName(name, false); err != nil {
			return err
		}
		if _, twice := g.Values[name]; twice {
			return damaged("value %s stands twice", human.Quote(name))
		}
		v, err := value()
		if err != nil {
			return within(err, "value "+human.Quote(name))
		}
		g.Values[name] = v
		return nil
	})
}

// tensorMeta is what is said of a tensor. Strides of activations hold expressions that depend on
// how the exporter ran, and are not read.
type tensorMeta struct {
	Value
	strides []Expr
	offset  Expr
	layout  int64
	device  Word
}

func (p *parser) tensorValue() (Value, error) {
	m, err := p.meta(false)
	if err != nil {
		return Value{}, err
	}
	return m.Value, nil
}

func (p *parser) meta(placed bool) (*tensorMeta, error) {
	m := &tensorMeta{offset: integer(0)}
	sized := false
	err := p.Unique(func(key string) (err error) {
		switch {
		case key == "dtype":
			m.Type, err = p.scalarType()
		case key == "sizes":
			sized = true
			m.Dims, err = p.sizes()
		case key == "requires_grad":
			m.Grad, err = p.Flag()
		case key == "strides" && placed:
			m.strides, err = p.sizes()
		case key == "storage_offset" && placed:
			m.offset, err = p.size()
		case key == "layout" && placed:
			m.layout, err = p.word(layouts)
		case key == "device" && placed:
			m.device, err = p.device()
		default:
			err = p.Skip()
		}
		return err
	})
	if err == nil && (m.Type == dtype.Invalid || !sized) {
		err = damaged("dtype or sizes are missing")
	}
	return m, err
}

func (p *parser) sizes() (list []Expr, err error) {
	err = p.Array(func() error {
		e, err := p.size()
		list = append(list, e)
		return err
	})
	return list, err
}

// size reads a SymInt: {"as_int": 8} or {"as_expr": {"expr_str": …, "hint": …}}.
func (p *parser) size() (Expr, error) { return p.symbolic("as_int") }

func (p *parser) symbolic(plain string) (e Expr, err error) {
	err = p.union("a size", func(arm string) (err error) {
		if arm == "as_expr" {
			e, err = p.expression()
		} else {
			e, err = p.constant("a size", arm, plain)
		}
		return err
	})
	return e, err
}

// constant reads a number that is not symbolic, of the one arm that may hold it.
func (p *parser) constant(what, arm, plain string) (Expr, error) {
	switch {
	case arm != plain:
		return Expr{}, unknown(what, arm)
	case arm == "as_int":
		n, err := p.Int()
		return integer(n), err
	case arm == "as_bool":
		b, err := p.Flag()
		return truth(b), err
	}
	f, err := p.float()
	return number(f), err
}

// expression reads a SymExpr. The hint is the size that the example had, and means nothing else.
func (p *parser) expression() (e Expr, err error) {
	found := false
	err = p.Unique(func(key string) error {
		if key != "expr_str" {
			return p.Skip()
		}
		found = true
		text, err := p.Text()
		if err != nil {
			return err
		}
		known := false
		if e, known = p.exprs[text]; known {
			return nil
		}
		if e, err = parseExpr(text); err != nil {
			return damaged("an expression is not well formed").Because("%s", err)
		}
		p.exprs[text] = e
		return nil
	})
	if err == nil && !found {
		err = p.Fail("an expression has no expr_str")
	}
	return e, err
}

func (p *parser) symValue(t dtype.DType, plain string) (Value, error) {
	e, err := p.symbolic(plain)
	return Value{Type: t, Sym: &e}, err
}

// node reads one call.
func (p *parser) node() (n Node, err error) {
	err = p.Unique(func(key string) (err error) {
		switch key {
		case "target":
			n.Target, err = p.name(false)
			n.Target = strings.TrimPrefix(n.Target, "torch.ops.")
		case "name":
			if !p.Null() {
				n.Name, err = p.name(true)
			}
		case "inputs":
			err = p.Array(func() error {
				a, err := p.namedArgument()
				n.Args = append(n.Args, a)
				return err
			})
		case "outputs":
			err = p.Array(func() (err error) { n.Outputs, err = p.results(n.Outputs); return err })
		case "metadata":
			err = p.metadata(&n)
		default:
			err = p.Skip()
		}
		return err
	})
	if err == nil && n.Target == "" {
		err = p.Fail("a node has no target")
	}
	return n, err
}

func (p *parser) namedArgument() (a Arg, err error) {
	found := false
	err = p.Unique(func(key string) (err error) {
		switch key {
		case "name":
			a.Name, err = p.name(true)
		case "arg":
			found = true
			a.Value, err = p.argument()
		case "kind":
			if !p.Null() {
				var kind int64
				kind, err = p.Int()
				a.Keyword = kind == 2 // ArgumentKind.KEYWORD
			}
		default:
			err = p.Skip()
		}
		return err
	})
	if err == nil && !found {
		err = p.Fail("an argument has no value")
	}
	return a, err
}

// metadata takes the place of a node from what the exporter noted.
func (p *parser) metadata(n *Node) error {
	return p.Unique(func(key string) error {
		if key != "nn_module_stack" && key != "stack_trace" {
			return p.Skip()
		}
		text, err := p.Text()
		if err != nil {
			return err
		}
		if key == "stack_trace" {
			n.Source = sourceOf(text)
			return nil
		}
		n.Modules, err = p.modules(text)
		return err
	})
}

// emptyStack is what torch writes for nodes that belong to no module.
const emptyStack = "_empty_nn_module_stack_from_metadata_hook"

// modules reads key,path,class;key,path,class. Keys may hold commas, paths and classes do not.
func (p *parser) modules(text string) (list []Module, err error) {
	if text == "" || strings.HasPrefix(text, emptyStack) {
		return nil, nil
	}
	list = make([]Module, 0, strings.Count(text, ";")+1)
	for level := range strings.SplitSeq(text, ";") {
		class := strings.LastIndexByte(level, ',') + 1
		path := strings.LastIndexByte(level[:max(0, class-1)], ',') + 1
		if path == 0 || class == len(level) {
			return nil, p.Fail("nn_module_stack holds %s", human.Quote(level))
		}
		if err := p.checkName(level, true); err != nil {
			return nil, err
		}
		list = append(list,
			Module{Key: level[:path-1], Path: level[path : class-1], Class: level[class:]})
	}
	return list, nil
}

var frame = regexp.MustCompile(`(?m)^\s*File "([^"\n]*)", line ([0-9]{1,9}), in `)

// sourceOf gives the innermost line of a stack trace that is in a file other than torch's, without
// folders: paths are the author's own business.
func sourceOf(trace string) string {
	source := ""
	for _, m := range frame.FindAllStringSubmatch(trace, -1) {
		file := strings.ReplaceAll(m[1], `\`, "/")
		if strings.HasPrefix(file, "torch/") || strings.Contains(file, "/torch/") ||
			strings.HasPrefix(file, "<") {
			continue
		}
		if base := path.Base(file); len(base) < 256 && human.Quote(base) == `"`+base+`"` {
			source = base + ":" + m[2]
		}
	}
	return source
}

// check demands that names are given once and before they are used, and writes symbolic numbers as
// expressions.
func (g *Graph) check() error {
	given := map[Ref]bool{}
	give := func(r Ref, what string) error {
		if given[r] {
			return damaged("%s is given twice, the second time by %s", human.Quote(string(r)), what)
		}
		if _, known := g.Values[string(r)]; !known {
			return damaged("nothing is known of value %s, which %s gives", human.Quote(string(r)), what)
		}
		given[r] = true
		return nil
	}
	use := func(a *Argument, what string) error {
		if err := g.resolve(a); err != nil {
			return within(err, what)
		}
		for r := range refs(*a) {
			if r != "" && !given[r] {
				return damaged("%s takes value %s, which is not given before it", what,
					human.Quote(string(r)))
			}
		}
		return nil
	}
	for i, in := range g.Inputs {
		switch in := in.(type) {
		case symbol:
			g.Inputs[i] = Ref(in)
		case []Ref, [][]Ref, []Expr, map[string]Argument, *Graph:
			return damaged("input %d is neither a value nor a constant", i)
		}
		if r, ok := g.Inputs[i].(Ref); ok {
			if err := give(r, "an input"); err != nil {
				return err
			}
		}
	}
	for i := range g.Nodes {
		n := &g.Nodes[i]
		what := "node " + human.Quote(n.Target)
		for j := range n.Args {
			if err := use(&n.Args[j].Value, what); err != nil {
				return err
			}
		}
		for _, r := range n.Outputs {
			if r == "" {
				continue
			}
			if err := give(r, what); err != nil {
				return err
			}
		}
	}
	for i := range g.Outputs {
		if err := use(&g.Outputs[i], "an output"); err != nil {
			return err
		}
	}
	return nil
}
