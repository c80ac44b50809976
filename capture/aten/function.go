package aten

import (
	"fmt"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A Function is a captured program with its own inputs and outputs, whatever they are: positions
// are counted, labels stand where the caller has them, and a loss is the mean that the program
// says. It is for callers that run the program themselves; a [Model] is for training.
type Function struct {
	model *Model
	specs []pt2.Spec // the tensors that the caller gives, in the order of the call
}

// NewFunction reads the signature of an archive, which must stay open.
func NewFunction(a *pt2.Archive) (*Function, error) {
	f := &Function{model: newModel(a)}
	f.model.masked = true
	for _, s := range a.Program.Inputs {
		ref, ok := s.Arg.(pt2.Ref)
		if s.Kind != pt2.UserInput || !ok {
			continue
		}
		if a.Program.Graph.Values[string(ref)].Sym != nil {
			return nil, diag.New(diag.NotSupported, "the program takes the number %s", s.Name).
				Try("give a constant, or a tensor")
		}
		f.specs = append(f.specs, s)
	}
	for _, s := range a.Program.Outputs {
		if s.Kind != pt2.UserOutput {
			return nil, diag.New(diag.NotSupported, "the program changes %s (%s)", s.Name, s.Kind).
				Try("a module that changes nothing outside itself")
		}
	}
	return f, nil
}

// Inputs names the tensors that the caller gives, in the order of the call.
func (f *Function) Inputs() []string {
	names := make([]string, len(f.specs))
	for i, s := range f.specs {
		names[i] = s.Name
	}
	return names
}

// InputName is the name of the caller's i-th tensor in graphs.
func InputName(i int) string { return fmt.Sprint("in", i) }

// A Reading is the graph of a function for inputs of certain sizes.
type Reading struct {
	Graph   *ir.Graph
	Outputs []Output // as the program returns them, then what was asked for beside them
	Params  []model.Param
	Parts   []Part
	Draws   []Draw
	// Fixed are buffers that are parameters, and whose numbers the graph depends on beside.
	Fixed []string
}

// An Output is a tensor that the program returns.
type Output struct {
	Result int // among the results of the graph; -1 for what is no tensor
	Dims   []int64
	Type   dtype.DType // as the program has it
	Number *int64      // of what is no tensor but a size, or computed of sizes
}

// A Part is what became of the calls in one module.
type Part struct {
	Path  string   `json:"path"`
	Class string   `json:"class"`
	Ops   []string `json:"ops"`  // kinds of operations of the graph, in order, each once
	Loop  int64    `json:"loop"` // rounds of the loop that the module is part of; 0 for none
}

// Read writes the graph for inputs of the given sizes, in the order of Inputs. Beside its outputs
// the graph gives the values of some nodes of the program, by name, where it has them.
func (f *Function) Read(sizes [][]int64, nodes []string) (*Reading, error) {
	symbols, err := f.bind(sizes)
	if err != nil {
		return nil, err
	}
	var out *Reading
	err = withTables(func(tables bool) (err error) {
		out, err = f.read(maps.Clone(symbols), nodes, tables) // a refused reading adds sizes
		return err
	})
	return out, err
}

// read writes the graph until the names of its dimensions stay.
func (f *Function) read(symbols map[string]int64, nodes []string, tables bool) (*Reading, error) {
	dims := newTable()
	f.model.stacks = map[string]stack{}
	for range maxReadings {
		dims.changed = false
		r := &maker{Model: f.model, b: ir.NewBuilder("function"), dims: dims,
			shape: model.Shape{Elem: f.model.elem}, symbols: symbols, own: functionRules,
			tables: tables}
		out, err := r.function(f, nodes)
		if err != nil {
			return nil, err
		}
		if renamed := dims.rename(); !dims.changed && !renamed {
			return r.finish(out)
		}
	}
	return nil, diag.New(diag.Internal, "the dimensions of the program got no names in %d readings",
		maxReadings)
}

// bind gives symbols of sizes their values, and checks that the sizes are the program's.
func (f *Function) bind(sizes [][]int64) (map[string]int64, error) {
	p := f.model.archive.Program
	if len(sizes) != len(f.specs) {
		return nil, diag.New(diag.BadInput, "the program takes %d tensors, not %d", len(f.specs),
			len(sizes))
	}
	symbols := map[string]int64{}
	each := func(visit func(s pt2.Spec, e pt2.Expr, n int64) error) error {
		for i, s := range f.specs {
			ref, _ := s.Arg.(pt2.Ref)
			dims := p.Graph.Values[string(ref)].Dims
			if len(dims) != len(sizes[i]) {
				return diag.New(diag.BadInput, "%s has %d dimensions, not %d", s.Name, len(dims),
					len(sizes[i]))
			}
			for k, e := range dims {
				if err := visit(s, e, sizes[i][k]); err != nil {
					return err
				}
			}
		}
		return nil
	}
	err := each(func(s pt2.Spec, e pt2.Expr, n int64) error {
		if e.Op != "Symbol" {
			return nil
		}
		if r, ok := p.Ranges[e.Name]; ok && (n < r.Min && n != 1 || n > r.Max) {
			return diag.New(diag.BadInput, "%s has a size of %d outside the export's range, %d to %d",
				s.Name, n, r.Min, r.Max)
		}
		symbols[e.Name] = n
		return nil
	})
	if err == nil {
		err = each(func(s pt2.Spec, e pt2.Expr, n int64) error {
			if have, err := e.Eval(symbols); err != nil || have != n {
				return diag.New(diag.BadInput, "%s has a size of %d where the program has %v", s.Name, n, e)
			}
			return nil
		})
	}
	return symbols, err
}

// function writes the graph once, before layers become loops.
func (m *maker) function(f *Function, nodes []string) (*Reading, error) {
	p := m.archive.Program
	m.env = map[*pt2.Graph]map[pt2.Ref]*variable{p.Graph: {}}
	m.nodes, m.calls = map[place]int{}, map[string]int{}
	m.fixed = map[string]bool{}
	var wanted []pt2.Ref // "" for what is no tensor
	for _, s := range p.Outputs {
		ref, _ := s.Arg.(pt2.Ref)
		wanted = append(wanted, ref)
	}
	for _, n := range nodes {
		wanted = append(wanted, pt2.Ref(n))
	}
	live := needed(p.Graph, wanted)
	if err := m.inputsOf(f, live, wanted); err != nil {
		return nil, err
	}
	m.run(p.Graph, live)
	if err := m.refused(); err != nil {
		return nil, err
	}
	return m.outputs(wanted, len(p.Outputs))
}

// inputsOf adds the caller's tensors and the parameters that are used.
func (m *maker) inputsOf(f *Function, live map[*pt2.Node]bool, wanted []pt2.Ref) error {
	p := m.archive.Program
	used, env := wantedBy(p.Graph, live, wanted...), m.env[p.Graph]
	for i, s := range f.specs {
		ref, _ := s.Arg.(pt2.Ref)
		value := p.Graph.Values[string(ref)]
		if !used[ref] {
			continue
		}
		t, out := ir.Type{Elem: m.elem(value.Type)}, &tensor{token: value.Type.Kind() != dtype.Float}
		for k, e := range value.Dims {
			n, want := m.eval(e), ""
			if k == 0 {
				want = ir.Batch
			} else if k == 1 && out.token {
				want = ir.Seq
			}
			d := m.dims.root(m.dims.dim(fmt.Sprint("input ", i, ".", k), n, want, -1))
			out.axes = append(out.axes, axis{[]dim{d}, n})
			t.Dims = append(t.Dims, ir.Dim{Name: m.name(d), Size: n})
		}
		m.dims.meet(out.dims())
		out.v = m.b.Input(InputName(i), ir.Data, t, "")
		env[ref] = m.input(out)
	}
	return m.parameters(used)
}

// outputs makes values the results of the graph, dense in the order of the program's axes.
func (m *maker) outputs(wanted []pt2.Ref, own int) (*Reading, error) {
	r := &Reading{}
	var results []*ir.Value
	var err error
	p := m.archive.Program
	for i, ref := range wanted {
		if m.env[p.Graph][ref] == nil {
			if ref != "" && i < own {
				return nil, diag.New(diag.NotSupported, "the program does not compute %s", ref)
			}
			o := Output{Result: -1}
			if i < own {
				if o.Number, err = m.number(p.Outputs[i]); err != nil {
					return nil, err
				}
			}
			r.Outputs = append(r.Outputs, o)
			continue
		}
		t, err := m.result(ref)
		if err != nil {
			return nil, err
		}
		o := Output{Dims: t.sizes(), Type: p.Graph.Values[string(ref)].Type}
		v := t.v
		if ds := t.dims(); len(ds) > 0 && m.b.Err() == nil {
			v = m.b.Transpose(v, m.names(ds)...)
		}
		if to := m.elem(o.Type); m.b.Err() == nil && v.Type.Elem != to {
			v = m.b.Convert(v, to)
		}
		if o.Result = slices.Index(results, v); o.Result < 0 {
			o.Result = len(results)
			results = append(results, v)
		}
		r.Outputs = append(r.Outputs, o)
	}
	r.Graph, err = m.b.Graph(results...)
	return r, err
}

// number computes an output that is no tensor; nil for one that every call has the same.
func (m *maker) number(s pt2.Spec) (*int64, error) {
	e, ok := s.Arg.(pt2.Expr)
	if !ok {
		return nil, nil
	}
	n, err := e.Eval(m.symbols)
	if err != nil {
		return nil, diag.New(diag.NotSupported, "the program returns the number %v (%v)", e, err)
	}
	return &n, nil
}

// finish describes the parts of the program, and makes repeated layers loops.
func (m *maker) finish(r *Reading) (*Reading, error) {
	r.Graph.Ops, r.Draws = used(r.Graph), m.draws
	r.Fixed = slices.Sorted(maps.Keys(m.fixed))
	r.Parts = m.parts(r.Graph)
	g, err := m.looped(r.Graph)
	if err != nil {
		return nil, err
	}
	r.Graph = g
	rounds := map[place]int64{}
	for _, v := range g.Params() {
		p, err := m.param(v)
		if err != nil {
			return nil, err
		}
		r.Params = append(r.Params, p)
		if _, ok := m.stacks[v.Name]; !ok {
			continue
		}
		for _, name := range p.Tensors() {
			at, _ := placeOf(name)
			rounds[at] = v.Type.Dims[0].Size
		}
	}
	for i := range r.Parts {
		at, _ := placeOf(r.Parts[i].Path)
		r.Parts[i].Loop = rounds[at]
	}
	return r, nil
}

// parts lists modules in the order of their first operation, with what became of their calls.
func (m *maker) parts(g *ir.Graph) []Part {
	index := map[*ir.Value]int{}
	for i, op := range g.Ops {
		for _, v := range op.Out {
			index[v] = i
		}
	}
	var list []Part
	byPath, next := map[string]int{}, 0
	for _, k := range m.marks {
		i, ok := index[k.v]
		if !ok || i < next {
			continue
		}
		at, known := byPath[k.path]
		if !known {
			at = len(list)
			byPath[k.path] = at
			list = append(list, Part{Path: k.path, Class: k.class})
		}
		for _, op := range g.Ops[next : i+1] {
			if !slices.Contains(list[at].Ops, op.Kind) {
				list[at].Ops = append(list[at].Ops, op.Kind)
			}
		}
		next = i + 1
	}
	return list
}
