package pt2

import (
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
)

// A symbol is the name of a symbolic number in an argument, before the graph's values are known.
// [Graph.resolve] replaces it.
type symbol string

// opPending is the same in a list of expressions.
const opPending = "pending"

func truth(b bool) Expr {
	return Expr{Op: strconv.FormatBool(b)}
}

func number(f float64) Expr {
	return Expr{Op: opFloat, Name: strconv.FormatFloat(f, 'g', -1, 64)}
}

func (p *parser) arguments() (list []Argument, err error) {
	err = p.Array(func() error {
		a, err := p.argument()
		list = append(list, a)
		return err
	})
	return list, err
}

// argument reads the union Argument of the schema.
func (p *parser) argument() (a Argument, err error) {
	if p.depth++; p.depth > maxNesting {
		return nil, p.Fail("arguments nest deeper than %d", maxNesting)
	}
	defer func() { p.depth-- }()
	err = p.union("an argument", func(arm string) (err error) {
		a, err = p.arm(arm)
		return err
	})
	return a, err
}

// arm reads the value of one kind of argument.
func (p *parser) arm(arm string) (Argument, error) {
	switch arm {
	case "as_none":
		return nil, p.Skip()
	case "as_tensor":
		return boxed(p.ref())
	case "as_tensors":
		return listed(p, p.ref)
	case "as_nested_tensors":
		return listed(p, func() ([]Ref, error) { return list(p, p.ref) })
	case "as_optional_tensor":
		r, err := p.optional()
		if r == "" {
			return nil, err
		}
		return r, err
	case "as_optional_tensors":
		return listed(p, p.optional)
	case "as_graph":
		return p.subgraph()
	case "as_string_to_argument":
		return p.byName()
	case "as_custom_obj":
		return nil, diag.New(codeFormat, "a node takes an object of a class of its own").
			Because("it is stored as a pickle, which can run code and is not read").
			Try("export a module without custom classes")
	}
	if a, ok, err := p.plain(arm); ok {
		return a, err
	}
	if a, ok, err := p.symbolicArm(arm); ok {
		return a, err
	}
	return nil, unknown("an argument", arm)
}

// plain reads arms that hold what they say.
func (p *parser) plain(arm string) (a Argument, ok bool, err error) {
	switch arm {
	case "as_int":
		a, err = boxed(p.Int())
	case "as_ints":
		a, err = listed(p, p.Int)
	case "as_int_lists":
		a, err = listed(p, func() ([]int64, error) { return list(p, p.Int) })
	case "as_float":
		a, err = boxed(p.float())
	case "as_floats":
		a, err = listed(p, p.float)
	case "as_float_lists":
		a, err = listed(p, func() ([]float64, error) { return list(p, p.float) })
	case "as_bool":
		a, err = boxed(p.Flag())
	case "as_bools":
		a, err = listed(p, p.Flag)
	case "as_string", "as_operator":
		a, err = boxed(p.Text())
	case "as_strings":
		a, err = listed(p, p.Text)
	case "as_complex":
		a, err = boxed(p.complex())
	case "as_scalar_type":
		a, err = boxed(p.scalarType())
	case "as_device":
		a, err = boxed(p.device())
	case "as_layout":
		a, err = p.oneOf(layouts)
	case "as_memory_format":
		a, err = p.oneOf(memoryFormats)
	default:
		return nil, false, nil
	}
	return a, true, err
}

// symbolicArm reads numbers that may be symbolic: a name, or the number itself.
func (p *parser) symbolicArm(arm string) (a Argument, ok bool, err error) {
	plain := map[string]string{"as_sym_int": "as_int", "as_sym_ints": "as_int",
		"as_sym_bool": "as_bool", "as_sym_bools": "as_bool",
		"as_sym_float": "as_float", "as_sym_floats": "as_float"}[arm]
	switch arm {
	case "as_sym_int", "as_sym_bool", "as_sym_float":
		var e Expr
		if e, err = p.named(plain); e.Op == opPending {
			a = symbol(e.Name)
		} else if n, fixed := e.Const(); fixed {
			a = n
		} else {
			a = e
		}
	case "as_sym_ints", "as_sym_bools", "as_sym_floats":
		a, err = listed(p, func() (Expr, error) { return p.named(plain) })
	default:
		return nil, false, nil
	}
	return a, true, err
}

// named reads {"as_name": …} or a plain number.
func (p *parser) named(plain string) (e Expr, err error) {
	err = p.union("a symbolic number", func(arm string) (err error) {
		if arm == "as_name" {
			e.Op = opPending
			e.Name, err = p.name(false)
		} else {
			e, err = p.constant("a symbolic number", arm, plain)
		}
		return err
	})
	return e, err
}

// boxed makes an argument of a value.
func boxed[T any](v T, err error) (Argument, error) { return v, err }

// list reads a list; it is never nil, so that an empty list is not None.
func list[T any](p *parser, item func() (T, error)) ([]T, error) {
	all := []T{}
	err := p.Array(func() error {
		v, err := item()
		all = append(all, v)
		return err
	})
	return all, err
}

func listed[T any](p *parser, item func() (T, error)) (Argument, error) { return list(p, item) }

// ref reads {"name": …}.
func (p *parser) ref() (r Ref, err error) {
	err = p.Unique(func(key string) error {
		if key != "name" {
			return p.Skip()
		}
		name, err := p.name(false)
		r = Ref(name)
		return err
	})
	if err == nil && r == "" {
		err = p.Fail("a reference has no name")
	}
	return r, err
}

func (p *parser) optional() (r Ref, err error) {
	err = p.union("an optional tensor", func(arm string) (err error) {
		switch arm {
		case "as_tensor":
			r, err = p.ref()
		case "as_none":
			err = p.Skip()
		default:
			err = unknown("an optional tensor", arm)
		}
		return err
	})
	return r, err
}

// float reads a number, or one of the words that stand for what JSON cannot write.
func (p *parser) float() (float64, error) {
	if p.Next() != '"' {
		return p.Float()
	}
	word, err := p.Text()
	if err != nil {
		return 0, err
	}
	switch word {
	case "Infinity":
		return math.Inf(1), nil
	case "-Infinity":
		return math.Inf(-1), nil
	case "NaN":
		return math.NaN(), nil
	}
	return 0, p.Fail("a number wanted, %s found", human.Quote(word))
}

func (p *parser) complex() (complex128, error) {
	var parts [2]float64
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "real":
			parts[0], err = p.float()
		case "imag":
			parts[1], err = p.float()
		default:
			err = p.Skip()
		}
		return err
	})
	return complex(parts[0], parts[1]), err
}

// device reads {"type": "cuda", "index": 0} as cuda:0.
func (p *parser) device() (Word, error) {
	kind, index := "", ""
	err := p.Unique(func(key string) (err error) {
		switch {
		case key == "type":
			kind, err = p.name(false)
		case key == "index" && !p.Null():
			var n int64
			n, err = p.Int()
			index = ":" + strconv.FormatInt(n, 10)
		case key != "index":
			err = p.Skip()
		}
		return err
	})
	if err == nil && kind == "" {
		err = p.Fail("a device has no type")
	}
	return Word(kind + index), err
}

func (p *parser) oneOf(words []Word) (Argument, error) {
	n, err := p.word(words)
	if err != nil {
		return nil, err
	}
	return words[n], nil
}

// subgraph reads {"name": …, "graph": …}.
func (p *parser) subgraph() (Argument, error) {
	var g *Graph
	name := ""
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "name":
			name, err = p.name(false)
		case "graph":
			g, err = p.graph()
		default:
			err = p.Skip()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if g == nil {
		return nil, p.Fail("the graph %s is missing", human.Quote(name))
	}
	g.Name = name
	return g, nil
}

func (p *parser) byName() (Argument, error) {
	all := map[string]Argument{}
	err := p.Object(func(key string) error {
		if _, twice := all[key]; twice {
			return p.Fail("the key %s stands twice", human.Quote(key))
		}
		a, err := p.argument()
		all[key] = a
		return err
	})
	return all, err
}

// results reads one output of a node and appends the names that it gives.
func (p *parser) results(list []Ref) ([]Ref, error) {
	a, err := p.argument()
	if err != nil {
		return nil, err
	}
	switch a := a.(type) {
	case nil:
		return append(list, ""), nil
	case Ref:
		return append(list, a), nil
	case symbol:
		return append(list, Ref(a)), nil
	case []Ref:
		return append(list, a...), nil
	case [][]Ref:
		return append(list, slices.Concat(a...)...), nil
	case []Expr:
		for _, e := range a {
			if e.Op != opPending {
				return nil, p.Fail("a node gives the number %s", e)
			}
			list = append(list, Ref(e.Name))
		}
		return list, nil
	}
	return nil, p.Fail("a node gives %v, which is no value", a)
}

// resolve writes names of symbolic numbers as the expressions that they stand for.
func (g *Graph) resolve(a *Argument) error {
	find := func(name string) (Expr, error) {
		v, ok := g.Values[name]
		if !ok || v.Sym == nil {
			return Expr{}, damaged("%s is not a symbolic number", human.Quote(name))
		}
		return *v.Sym, nil
	}
	switch v := (*a).(type) {
	case symbol:
		e, err := find(string(v))
		*a = e
		return err
	case []Expr:
		for i, e := range v {
			if e.Op != opPending {
				continue
			}
			var err error
			if v[i], err = find(e.Name); err != nil {
				return err
			}
		}
	case map[string]Argument:
		for key, inner := range v {
			if err := g.resolve(&inner); err != nil {
				return err
			}
			v[key] = inner
		}
	}
	return nil
}

// refs lists the names that an argument refers to.
func refs(a Argument) iter.Seq[Ref] {
	switch a := a.(type) {
	case Ref:
		return slices.Values([]Ref{a})
	case []Ref:
		return slices.Values(a)
	case [][]Ref:
		return slices.Values(slices.Concat(a...))
	case map[string]Argument:
		return func(yield func(Ref) bool) {
			for _, key := range slices.Sorted(maps.Keys(a)) {
				for r := range refs(a[key]) {
					if !yield(r) {
						return
					}
				}
			}
		}
	}
	return func(func(Ref) bool) {}
}
