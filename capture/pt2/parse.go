package pt2

import (
	"errors"
	"math"
	"strings"
	"unicode"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// The versions of torch._export.serde.schema that are read: the major one, and the first minor one
// (torch 2.9). Later minor versions add keys and kinds of arguments; the latter are refused by
// name.
const (
	schemaMajor = 8
	schemaMinor = 14
	schemaTried = 20 // the last minor version that tests read, of torch 2.15
)

// A parser reads the JSON of an archive.
type parser struct {
	strictjson.Scanner
	depth int             // of graphs and arguments within each other
	exprs map[string]Expr // by text: the same few sizes stand at most values
}

// within puts the place in a program before what an error says.
func within(err error, place string) error {
	e, ok := errors.AsType[*diag.Error](err)
	if !ok {
		e = damaged("%s", err)
	}
	c := *e
	c.What = place + ": " + e.What
	return &c
}

// parseProgram reads models/model.json.
func parseProgram(text string) (*Program, error) {
	p := parser{Scanner: strictjson.Scan(text), exprs: map[string]Expr{}}
	prog := &Program{Ranges: map[string]Range{}}
	if err := prog.readSchema(p.Scanner); err != nil {
		return nil, err
	}
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "graph_module":
			err = p.module(prog)
		case "range_constraints":
			err = p.ranges(prog)
		case "torch_version":
			prog.Torch, err = p.name(false)
		default:
			err = p.Skip()
		}
		return err
	})
	if err == nil {
		err = p.End("the program")
	}
	if err == nil && prog.Graph == nil {
		err = damaged("the program has no graph_module")
	}
	return prog, err
}

// readSchema looks for the version before anything else is read: what else is wrong with the
// program of another version is of no interest.
func (prog *Program) readSchema(s strictjson.Scanner) error {
	found := false
	err := s.Object(func(key string) error {
		if key != "schema_version" || found {
			return s.Skip()
		}
		found = true
		return s.Unique(func(key string) (err error) {
			switch key {
			case "major":
				prog.Schema[0], err = s.Int()
			case "minor":
				prog.Schema[1], err = s.Int()
			default:
				err = s.Skip()
			}
			return err
		})
	})
	v := prog.Schema
	switch {
	case err != nil:
		return err
	case !found:
		return damaged("the program has no schema_version")
	case v[0] != schemaMajor || v[1] < schemaMinor:
		return diag.New(codeFormat,
			"the program has schema version %d.%d; this binary reads %d.%d to %d.%d",
			v[0], v[1], schemaMajor, schemaMinor, schemaMajor, schemaTried).
			Try("export the module again with torch 2.9 to 2.15, or update Deepwell")
	}
	return nil
}

// name reads a text that may be shown in messages.
func (p *parser) name(empty bool) (string, error) {
	s, err := p.Text()
	if err == nil {
		err = p.checkName(s, empty)
	}
	return s, err
}

func (p *parser) checkName(s string, empty bool) error {
	switch {
	case s == "" && !empty:
		return p.Fail("a name is empty")
	case len(s) > maxName:
		return p.Fail("a name has %d bytes; at most %d are read", len(s), maxName)
	case strings.ContainsFunc(s, unicode.IsControl):
		return p.Fail("the name %s holds a control character", human.Quote(s))
	}
	return nil
}

func (p *parser) ranges(prog *Program) error {
	return p.Object(func(symbol string) error {
		if _, twice := prog.Ranges[symbol]; twice {
			return p.Fail("the range of %s stands twice", human.Quote(symbol))
		}
		r := Range{math.MinInt64, math.MaxInt64}
		err := p.Unique(func(key string) (err error) {
			switch {
			case key != "min_val" && key != "max_val":
				err = p.Skip()
			case p.Null():
			case key == "min_val":
				r.Min, err = p.Int()
			default:
				r.Max, err = p.Int()
			}
			return err
		})
		if err == nil && r.Min > r.Max {
			err = p.Fail("the range of %s is from %d to %d", human.Quote(symbol), r.Min, r.Max)
		}
		prog.Ranges[symbol] = r
		return errors.Join(err, p.checkName(symbol, false))
	})
}

// module reads graph_module: the graph, what its inputs and outputs are, and how a caller names
// them.
func (p *parser) module(prog *Program) error {
	var calls callNames
	signed := false
	err := p.Unique(func(key string) (err error) {
		switch key {
		case "graph":
			prog.Graph, err = p.graph()
		case "signature":
			signed = true
			err = p.signature(prog)
		case "module_call_graph":
			calls, err = p.calls()
		default:
			err = p.Skip()
		}
		return err
	})
	switch {
	case err != nil:
		return err
	case prog.Graph == nil || !signed:
		return damaged("the program has no graph or no signature")
	}
	if err := prog.match(); err != nil {
		return err
	}
	calls.apply(prog)
	return nil
}

// match compares the signature with the graph.
func (prog *Program) match() error {
	g := prog.Graph
	if len(prog.Inputs) != len(g.Inputs) || len(prog.Outputs) != len(g.Outputs) {
		return damaged("the signature has %d inputs and %d outputs, the graph %d and %d",
			len(prog.Inputs), len(prog.Outputs), len(g.Inputs), len(g.Outputs))
	}
	for i := range prog.Inputs {
		in := &prog.Inputs[i]
		ref, isRef := in.Arg.(Ref)
		if have, ok := g.Inputs[i].(Ref); isRef != ok || have != ref {
			return damaged("input %d is not the same in the signature and in the graph", i)
		}
		if in.Kind == UserInput {
			in.Arg = g.Inputs[i]
		}
		if stored := in.Kind == Parameter || in.Kind == Buffer || in.Kind == TensorConstant; stored &&
			(!isRef || g.Values[string(ref)].Sym != nil) {
			return damaged("%s %s is no tensor", in.Kind, human.Quote(in.Name))
		}
	}
	for i := range prog.Outputs {
		out := &prog.Outputs[i]
		ref, isRef := out.Arg.(Ref)
		if have, ok := g.Outputs[i].(Ref); isRef != ok || have != ref {
			return damaged("output %d is not the same in the signature and in the graph", i)
		}
		out.Arg = g.Outputs[i]
	}
	return nil
}

// union reads an object with one key, which says what its value is.
func (p *parser) union(what string, arm func(key string) error) error {
	count := 0
	err := p.Object(func(key string) error {
		if count++; count > 1 {
			return p.Fail("%s is two things at once", what)
		}
		return arm(key)
	})
	if err == nil && count == 0 {
		err = p.Fail("%s is empty", what)
	}
	return err
}

// unknown refuses an arm of a union that this version does not know.
func unknown(what, arm string) error {
	return diag.New(codeFormat, "%s is %s, which this binary does not know", what, human.Quote(arm)).
		Because("a newer torch may have written the archive").
		Try("export the module with torch 2.9 to 2.15, or update Deepwell")
}

// scalarTypes are the element types by their numbers in the schema.
var scalarTypes = map[int64]dtype.DType{1: dtype.U8, 2: dtype.S8, 3: dtype.S16, 4: dtype.S32,
	5: dtype.S64, 6: dtype.F16, 7: dtype.F32, 8: dtype.F64, 10: dtype.C64, 11: dtype.C128,
	12: dtype.Pred, 13: dtype.BF16, 28: dtype.U16, 29: dtype.F8E4M3FN, 30: dtype.F8E5M2,
	33: dtype.F8E8M0FNU, 34: dtype.U32, 35: dtype.U64}

// foreignTypes are those that Deepwell does not have.
var foreignTypes = map[int64]string{0: "unknown", 9: "complex32", 31: "float8_e4m3fnuz",
	32: "float8_e5m2fnuz"}

func (p *parser) scalarType() (dtype.DType, error) {
	n, err := p.Int()
	if err != nil {
		return dtype.Invalid, err
	}
	if t, ok := scalarTypes[n]; ok {
		return t, nil
	}
	if name, ok := foreignTypes[n]; ok {
		return dtype.Invalid, diag.New(codeFormat,
			"element type %s has no counterpart in Deepwell", name).
			Try("convert the tensor to another element type")
	}
	return dtype.Invalid, damaged("%d is not the number of an element type", n)
}

const strided7 = 7

var (
	layouts = []Word{"unknown", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc",
		"mkldnn", strided7: "strided"}
	memoryFormats = []Word{"unknown", "contiguous", "channels_last", "channels_last_3d", "preserve"}
)

// word reads a number that stands for one of some words.
func (p *parser) word(words []Word) (int64, error) {
	n, err := p.Int()
	if err == nil && (n < 0 || n >= int64(len(words))) {
		err = p.Fail("a number from 0 to %d wanted, %d found", len(words)-1, n)
	}
	return n, err
}
