package ir

import (
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Kind is what an operation is: the number of its results, its shape rule, its VJP and its work
// on a device.
type Kind struct {
	// Results is the number of results; -1 means as many as Infer returns.
	Results int
	// Infer is the shape rule: it returns the types of the results, or says what is wrong. It must
	// check everything that it relies on, before it relies on it: the number of arguments (len(op.In)
	// may be anything; arguments are not nil), their element types and dimensions, the attributes,
	// and the placement along every axis. An operation that is not linear must reject partial sums,
	// and one that works along a dimension must reject shards of it: see [KeepPlacement]. It changes
	// neither g nor op.
	Infer func(g *Graph, op *Op) ([]Type, error)
	// Gradient is the VJP: from the gradients of the results (nil where nothing depends on one; not
	// all are nil) it builds the gradients of the arguments, in order (nil where nothing flows). It
	// reads forward values by d.Use(op.In[0]) or d.Use(op.Out[0]), never directly: they belong to the
	// forward graph. dout are values of the backward graph already. A gradient has the type of its
	// argument, but may be in f32, and may be a partial sum, which is reduced before it is read; see
	// [Differ.Unbroadcast]. A nil function says that the kind has no VJP of its own.
	Gradient func(d *Differ, op *Op, dout []*Value) []*Value
	// Work is nil for operations that XLA fuses with their neighbours.
	Work func(g *Graph, op *Op) Work
}

// A Row is an operation of a table. An operation that another package adds says by Lower what it
// means in operations of this package: the interpreter and the lowering expand it, and so does Grad
// if it has no VJP. Lower is nil for the operations of this package, which have a rule each in
// ir/eval and in lower/stablehlo.
type Row struct {
	Kind
	// Lower builds the results of op with b, which builds operations of this package and adds to the
	// graph that op is in: so op.In are its arguments (unlike in Gradient, where they are looked up
	// by [Differ.Use]). The values returned have the types that Infer gives.
	Lower func(b *Builder, op *Op) []*Value
}

// A Table says what operations there are, by name. It is a value that a builder is given: packages
// add rows to a copy ([Table.With]), and nothing is registered globally.
type Table map[string]*Row

// With returns a copy of the table with more rows; a row of the same name replaces the old one.
// Rows are shared and must not be changed.
func (t Table) With(rows Table) Table {
	t = maps.Clone(t)
	maps.Copy(t, rows)
	return t
}

// operations is the table of this package. It is made at first use, because gradients build
// operations, which look at it.
var operations struct {
	once    sync.Once
	table   Table
	element map[string]Kind
}

// Operations returns a copy of the table of this package. Rows are shared and must not be changed.
func Operations() Table { return maps.Clone(builtin()) }

// builtin is the table of this package.
func builtin() Table {
	operations.once.Do(func() {
		operations.table, operations.element = Table{}, elementKinds()
		for _, group := range []map[string]Kind{
			operations.element, contractKinds(), shapeKinds(), blockKinds(), meshKinds(), repeatKinds(),
			quantizeKinds(), expertKinds(),
		} {
			for name, k := range group {
				operations.table[name] = &Row{Kind: k}
			}
		}
	})
	return operations.table
}

// spec is the row of an operation: of the table it was built from, or of this package's; nil if
// neither has it.
func (op *Op) spec() *Row {
	if row := op.table[op.Kind]; row != nil {
		return row
	}
	return builtin()[op.Kind]
}

// Elementwise tells whether each element of an operation's result follows from the same elements of
// its arguments.
func (op *Op) Elementwise() bool {
	if op == nil || builtin() == nil {
		return false
	}
	_, ok := operations.element[op.Kind]
	return ok
}

// manyResults is the number of dead values for an operation that failed, if the number of its
// results is not known: callers may index them before they look at the error.
const manyResults = 64

// deadResults is the number of dead values that stand for the results of an operation that failed.
func (op *Op) deadResults() int {
	switch row := op.spec(); {
	case row != nil && row.Results >= 0:
		return row.Results
	case op.Body != nil:
		return len(op.Body.Results)
	}
	return manyResults
}

// infer gives the types of an operation's results, or what is wrong with its arguments.
func (g *Graph) infer(op *Op) ([]Type, error) {
	if op.spec() == nil {
		return nil, fmt.Errorf("there is no operation %q", op.Kind)
	}
	if err := op.Attrs.check(); err != nil {
		return nil, err
	}
	if err := op.checkAttrs(); err != nil {
		return nil, err
	}
	if op.spec().Infer == nil {
		return nil, fmt.Errorf("the operation's row has no shape rule")
	}
	types, err := op.spec().Infer(g, op)
	if err != nil {
		return nil, err
	}
	if want := op.spec().Results; want >= 0 && want != len(types) {
		return nil, fmt.Errorf("the shape rule gives %d types for %d results", len(types), want)
	}
	for _, t := range types {
		if err := t.check(); err != nil {
			return nil, err
		}
	}
	return types, nil
}

// arity checks the number of arguments.
func arity(op *Op, n int) error {
	if len(op.In) != n {
		return fmt.Errorf("takes %d arguments, got %d", n, len(op.In))
	}
	return nil
}

// takes checks the number of arguments before a shape rule.
func takes(n int, infer func(*Graph, *Op) ([]Type, error)) func(*Graph, *Op) ([]Type, error) {
	return func(g *Graph, op *Op) ([]Type, error) {
		if err := arity(op, n); err != nil {
			return nil, err
		}
		return infer(g, op)
	}
}

// axesOf lists the mesh axes along which any of the types is not a copy.
func axesOf(types ...Type) []string {
	var list []string
	for _, t := range types {
		for _, s := range t.Place {
			if !slices.Contains(list, s.Axis) {
				list = append(list, s.Axis)
			}
		}
	}
	slices.Sort(list)
	return list
}

// spread is the placement of an element-wise operation: along each axis the arguments must agree,
// or one is replicated and lacks the dimension that the other shards. linear says in how many
// arguments partial sums may be: in all of a "sum", in one of a "product", in none of anything
// else.
func spread(linear string, types ...Type) (Placement, error) {
	var place Placement
	for _, axis := range axesOf(types...) {
		how, partials := "", 0
		for _, t := range types {
			s := t.Place.On(axis)
			switch {
			case s == Partial:
				partials++
			case s != "" && how != "" && how != s:
				return nil, fmt.Errorf("along %s one argument shards %s, another %s", axis, how, s)
			case s != "":
				how = s
			}
		}
		if partials > 0 {
			ok := linear == "sum" && partials == len(types) || linear == "product" && partials == 1
			if !ok || how != "" {
				return nil, fmt.Errorf("along %s an argument is a partial sum that was not reduced", axis)
			}
			place = place.With(axis, Partial)
			continue
		}
		for _, t := range types {
			if t.Place.On(axis) == "" && t.Index(how) >= 0 {
				return nil, fmt.Errorf("along %s one argument shards %s, another has all of it", axis, how)
			}
		}
		place = place.With(axis, how)
	}
	return place, nil
}

// KeepPlacement is the placement of the result of an operation that computes along some dimensions
// of its argument, such as a norm or a softmax: the argument's own. It is an error if one of these
// dimensions is sharded, or if the argument is a partial sum along any axis. Without dimensions it
// is the rule of an element-wise operation of one argument that is not linear.
func KeepPlacement(t Type, whole ...string) (Placement, error) {
	for _, s := range t.Place {
		if s.Dim == Partial {
			return nil, fmt.Errorf("along %s the argument is a partial sum that was not reduced", s.Axis)
		}
		if slices.Contains(whole, s.Dim) {
			return nil, fmt.Errorf("along %s the argument shards %s, which must be whole", s.Axis, s.Dim)
		}
	}
	return t.Place, nil
}

// sameDims reports the first dimension in which two types differ.
func sameDims(a, b Type) error {
	if slices.Equal(a.Dims, b.Dims) {
		return nil
	}
	return fmt.Errorf("%s and %s differ in shape", a, b)
}

// Without gives the dimensions less some.
//
//go:noinline
func Without(dims []Dim, names ...string) []Dim {
	return lists.Filter(dims, func(d Dim) bool { return !slices.Contains(names, d.Name) })
}

// Names lists the names of dimensions.
//
//go:noinline
func Names(dims []Dim) []string {
	return lists.Map(dims, func(d Dim) string { return d.Name })
}

// joined spells names with commas between.
func joined(names []string) string { return strings.Join(names, ", ") }

// A Builder makes a graph. Its methods take and give values; the first error is remembered, with
// the line of the caller, and later calls do nothing, so that one check at the end is enough. After
// an error methods return dead values, whose Type is zero: code that computes with sizes of a type
// must not divide by them before it looks at [Builder.Err]. A nil value is an error as well; only
// CopyWith and InputLike, which read from another graph, must not be given one. A Builder is not
// safe for concurrent use.
type Builder struct {
	g     *Graph
	names *fresh
	table Table // nil is this package's
	tag   Tag
	err   error
	ended bool // Graph was called
}

// NewBuilder begins a graph for one device of a mesh.
func NewBuilder(name string, mesh ...Axis) *Builder {
	g := &Graph{Name: name, Mesh: mesh}
	return &Builder{g: g, names: newFresh(g)}
}

// Builder begins a graph of the operations of a table. What rewrites the graph knows them from it.
func (t Table) Builder(name string, mesh ...Axis) *Builder {
	b := NewBuilder(name, mesh...)
	b.table = t
	return b
}

// ExtendGraph returns a builder that changes g: new operations are appended to g.Ops, and
// [Builder.Graph] replaces g.Results. After an error g has operations without readers, and must be
// discarded.
func ExtendGraph(g *Graph) *Builder { return &Builder{g: g, names: newFresh(g)} }

// ExtendGraph is the function [ExtendGraph], with operations of the table. It changes g.
func (t Table) ExtendGraph(g *Graph) *Builder {
	b := ExtendGraph(g)
	b.table = t
	return b
}

// Tagged calls build; operations that are added during the call have the tag. Calls nest: the inner
// tag wins.
func (b *Builder) Tagged(tag Tag, build func()) {
	old := b.tag
	b.tag = tag
	build()
	b.tag = old
}

// Input adds an input. Its name is kept: graphs hand values over by the names of their inputs.
func (b *Builder) Input(name string, role Role, t Type, source string) *Value {
	v := &Value{Name: name, Type: t, Role: role, Source: source}
	b.names.used[name] = true
	if err := t.check(); err != nil && b.err == nil {
		b.fail(fmt.Errorf("input %s: %w", name, err))
	}
	b.g.Inputs = append(b.g.Inputs, v)
	return v
}

// InputLike adds an input with the name, role, source and meaning of an input of another graph, and
// a type of its own.
func (b *Builder) InputLike(v *Value, t Type) *Value {
	return b.Input(v.Name, v.Role, t, v.Source).As(v.Means)
}

// Err is the first error so far.
func (b *Builder) Err() error { return b.err }

// Graph ends the graph with its results, and verifies it. The builder is then at its end: it adds
// nothing more, and a later call of a method is an error of the next Graph.
func (b *Builder) Graph(results ...*Value) (*Graph, error) {
	if b.err != nil {
		return nil, b.err
	}
	b.ended = true
	b.g.Results = results
	return b.g, b.g.Verify()
}

// Op adds an operation of the builder's table, for operations that have no method here, and returns
// its results. constants have the types that [Attrs] has, and exactly the type that the operation
// reads: 2.0, not 2, for a number. A key that an operation of this package does not have is an
// error. After an error, such as a kind that the table does not have, it returns dead values, so
// that indexing the results does not panic.
func (b *Builder) Op(kind string, constants map[string]any, in ...*Value) []*Value {
	return b.op(kind, attrs(constants), nil, in...)
}

// op adds an operation of the builder's table.
//
//go:noinline
func (b *Builder) op(kind string, a Attrs, body *Graph, in ...*Value) []*Value {
	return b.add(&Op{Kind: kind, In: in, Attrs: a, Tag: b.tag, Body: body, table: b.table})
}

// CopyWith adds a copy of op, usually from another graph, with other arguments, constants or body.
// Its tag and table are op's, so that a copied custom operation stays what it is.
func (b *Builder) CopyWith(op *Op, a Attrs, body *Graph, in ...*Value) []*Value {
	return b.add(&Op{Kind: op.Kind, In: in, Attrs: a, Tag: op.Tag, Body: body, table: op.table})
}

// add adds an operation; the types of its results are inferred.
func (b *Builder) add(op *Op) []*Value {
	if i := slices.Index(op.In, nil); i >= 0 {
		b.fail(fmt.Errorf("%s: argument %d is nil", op.Kind, i))
	}
	if b.ended {
		b.fail(fmt.Errorf("%s: the graph is complete; begin another with NewBuilder, or add to it with"+
			" ExtendGraph", op.Kind))
	}
	if b.err != nil {
		return b.dead(op.deadResults())
	}
	types, err := b.g.infer(op)
	if err != nil {
		b.fail(fmt.Errorf("%s: %w", op.Kind, err))
		return b.dead(op.deadResults())
	}
	for _, t := range types {
		op.gives(b.names.value(op.Kind), t)
	}
	b.g.Ops = append(b.g.Ops, op)
	return op.Out
}

// one adds an operation with one result.
//
//go:noinline
func (b *Builder) one(kind string, a Attrs, in ...*Value) *Value {
	return b.op(kind, a, nil, in...)[0]
}

// dead stands in for the results of operations after the first error.
func (b *Builder) dead(n int) []*Value {
	out := make([]*Value, n)
	for i := range out {
		out[i] = &Value{Name: "dead"}
	}
	return out
}

// fail keeps the first error with the first line outside the methods of this package.
func (b *Builder) fail(err error) {
	if b.err != nil {
		return
	}
	e := diag.New(diag.GraphInvalid, "%v", err)
	for skip := 2; ; skip++ {
		pc, file, line, ok := runtime.Caller(skip)
		if !ok {
			break
		}
		if fn := runtime.FuncForPC(pc); fn != nil && !strings.HasPrefix(fn.Name(), ownPackage) {
			e = e.At("%s:%d", filepath.Base(file), line)
			break
		}
	}
	b.err = e
}

// ownPackage is how functions of this package begin, which an error's location skips.
const ownPackage = "github.com/deepwell/deepwell/ir.(*"
