package pt2

import (
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// Kinds of inputs and outputs that programs seldom have. Only their words are known.
var (
	inputKinds  = []Kind{Parameter, Buffer, TensorConstant, UserInput, ConstantInput, "token"}
	outputKinds = []Kind{UserOutput, BufferMutation, "loss_output", "gradient_to_parameter",
		"gradient_to_user_input", "user_input_mutation", "parameter_mutation", "token"}
)

func (p *parser) signature(prog *Program) error {
	seen := 0
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "input_specs":
			seen++
			prog.Inputs, err = p.specs("an input", inputKinds)
		case "output_specs":
			seen++
			prog.Outputs, err = p.specs("an output", outputKinds)
		default:
			err = p.Skip()
		}
		return err
	})
	if err == nil && seen < 2 {
		err = p.Fail("the signature has no input_specs or no output_specs")
	}
	return err
}

func (p *parser) specs(what string, kinds []Kind) (list []Spec, err error) {
	err = p.Array(func() error {
		var s Spec
		err := p.union(what, func(arm string) error {
			if arm == "custom_obj" {
				return diag.New(codeFormat, "the program has an object of a class of its own").
					Because("it is stored as a pickle, which can run code and is not read").
					Try("export a module without custom classes")
			}
			if s.Kind = Kind(arm); !slices.Contains(kinds, s.Kind) {
				return unknown(what, arm)
			}
			return p.spec(&s)
		})
		list = append(list, s)
		return err
	})
	return list, err
}

// spec reads what stands under a kind: the argument, and the name of what it is.
func (p *parser) spec(s *Spec) error {
	seen := false
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "arg":
			seen = true
			if s.Kind == UserInput || s.Kind == UserOutput {
				s.Arg, err = p.argument()
				if name, ok := s.Arg.(symbol); ok && s.Kind == UserInput {
					s.Arg = Ref(name)
				}
			} else {
				s.Arg, err = boxed(p.ref())
			}
		case "value":
			seen = true
			err = p.union("a constant input", func(arm string) (err error) {
				if !slices.Contains([]string{"as_none", "as_int", "as_float", "as_string", "as_bool"}, arm) {
					return unknown("a constant input", arm)
				}
				s.Arg, err = p.arm(arm)
				return err
			})
		case "persistent":
			s.Persistent, err = p.Flag()
		case "name", "parameter_name", "buffer_name", "tensor_constant_name", "user_input_name":
			s.Name, err = p.name(true)
		default:
			err = p.Skip()
		}
		return err
	})
	named := s.Name != "" || s.Kind != Parameter && s.Kind != Buffer && s.Kind != TensorConstant
	if err == nil && (!seen || !named) {
		err = p.Fail("a %s has no argument or no name", s.Kind)
	}
	if r, ok := s.Arg.(Ref); ok && s.Name == "" && s.Kind == UserInput {
		s.Name = string(r)
	}
	return err
}

// callNames are the names by which a caller knows inputs and outputs.
type callNames struct{ in, out []string }

// calls reads the list of modules, of which only the outermost is of interest.
func (p *parser) calls() (names callNames, err error) {
	err = p.Array(func() error {
		path, outermost := "", callNames{}
		err := p.Unique(func(key string) (err error) {
			switch {
			case key == "fqn":
				path, err = p.name(true)
			case key == "signature" && !p.Null():
				outermost, err = p.callSignature()
			case key != "signature":
				err = p.Skip()
			}
			return err
		})
		if path == "" && names.in == nil && names.out == nil {
			names = outermost
		}
		return err
	})
	return names, err
}

func (p *parser) callSignature() (names callNames, err error) {
	var positional []string
	err = p.Unique(func(key string) (err error) {
		switch {
		case key == "in_spec" || key == "out_spec":
			var text string
			if text, err = p.Text(); err != nil {
				return err
			}
			if key == "in_spec" {
				names.in = leaves(text)
			} else {
				names.out = leaves(text)
			}
		case key == "forward_arg_names" && !p.Null():
			positional, err = list(p, func() (string, error) { return p.name(true) })
		case key != "forward_arg_names":
			err = p.Skip()
		}
		return err
	})
	for i, path := range names.in { // 0.2 is the third positional argument, 1.x a named one
		kind, rest, _ := strings.Cut(path, ".")
		head, tail, _ := strings.Cut(rest, ".")
		if n, err := strconv.Atoi(head); kind == "0" && err == nil && n < len(positional) {
			head = positional[n]
		}
		names.in[i] = strings.TrimSuffix(head+"."+tail, ".")
	}
	return names, err
}

// apply names the user's inputs and outputs, if the lists are as long.
func (c callNames) apply(prog *Program) {
	put := func(specs []Spec, names []string, kinds ...Kind) {
		var places []int
		for i, s := range specs {
			if slices.Contains(kinds, s.Kind) {
				places = append(places, i)
			}
		}
		for i, at := range places {
			switch {
			case len(names) == len(places):
				specs[at].Name = names[i]
			case specs[at].Name == "":
				specs[at].Name = strconv.Itoa(i)
			}
		}
	}
	put(prog.Inputs, c.in, UserInput, ConstantInput)
	put(prog.Outputs, c.out, UserOutput)
}

// leaves lists the paths of the leaves of a pytree, as torch.utils._pytree writes it: keys of
// dictionaries and data classes, places in lists and tuples. It gives nil for a tree of another
// form: names are for people, and a program is complete without them.
func leaves(text string) []string {
	p := parser{Scanner: strictjson.Scan(text)}
	names := []string{}
	place := 0
	err := p.Array(func() error { // [version, tree]
		if place++; place == 2 {
			return p.tree("", &names)
		}
		return p.Skip()
	})
	if err != nil || place != 2 || p.End("the tree") != nil {
		return nil
	}
	return names
}

// Bounds of the names of a tree, which would else be much larger than its text.
const maxPath, maxLeaves = 256, 1 << 16

func (p *parser) tree(path string, names *[]string) error {
	if p.depth++; p.depth > maxNesting {
		return p.Fail("the tree is too deep")
	}
	defer func() { p.depth-- }()
	leaf := false
	var keys []string
	return p.Unique(func(key string) (err error) {
		switch {
		case key == "type":
			if leaf = p.Null(); leaf {
				*names = append(*names, strings.TrimPrefix(path, "."))
			} else {
				_, err = p.Text()
			}
		case key == "context" && !p.Null():
			var text string
			text, err = p.Text()
			keys = contextKeys(text)
		case key == "children_spec" && !leaf:
			i := 0
			err = p.Array(func() error {
				name := strconv.Itoa(i)
				if i < len(keys) {
					name = keys[i]
				}
				i++
				if len(path)+len(name) > maxPath || len(*names) > maxLeaves {
					return p.Fail("the tree is too large")
				}
				return p.tree(path+"."+name, names)
			})
		case key != "context":
			err = p.Skip()
		}
		return err
	})
}

// contextKeys reads the keys of a dictionary or data class; nil for what has none.
func contextKeys(text string) []string {
	p := parser{Scanner: strictjson.Scan(text)}
	keys, err := list(&p, func() (string, error) { return p.name(false) })
	if err != nil || p.End("the keys") != nil || slices.ContainsFunc(keys, func(k string) bool {
		return human.Quote(k) != `"`+k+`"`
	}) {
		return nil
	}
	return keys
}
