package ir

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// A Graph is the program of one device: inputs, operations in an order in which they can run,
// results. Passes that return a graph leave their argument alone; those that change it say so.
type Graph struct {
	Name    string
	Mesh    []Axis // the axes of the mesh that types speak of
	Inputs  []*Value
	Ops     []*Op
	Results []*Value
}

// An Axis is one dimension of the mesh of devices.
type Axis struct {
	Name string
	Size int64
}

// A Role says what an input of a graph is.
type Role string

// The roles. Gradients are taken of data and parameters; a residual is what another graph kept.
const (
	Data     Role = "data"
	Param    Role = "param"
	Residual Role = "residual"
)

// A Value is an input of a graph or a result of one of its operations.
type Value struct {
	Name string // unique in its graph
	Type Type
	Role Role // of inputs

	// Source is what the value was called where it came from, such as a tensor's name in a
	// checkpoint.
	Source string

	// Means says what an input or result is to those who run the graph (a moment, a gradient, the
	// loss); if it is empty, see Meaning.
	Means program.Meaning

	def *Op // what makes it; nil for inputs
}

// An Op is one operation. Its row (shape rule, VJP, work) comes from the table that its builder
// had.
type Op struct {
	Kind  string // a row of a [Table]
	In    []*Value
	Out   []*Value
	Attrs Attrs
	Tag   Tag
	Body  *Graph // of a repeat

	table Table // that it was built of; nil is this package's
}

// A Tag says which part of a block an operation belongs to: recomputation and precision are chosen
// by tag.
type Tag string

// The tags of a Transformer: the embedding, the parts of a block, and the head with the loss.
const (
	Embed   Tag = "embed"
	Attn    Tag = "attn"
	MLP     Tag = "mlp"
	Norm    Tag = "norm"
	Router  Tag = "router"
	Experts Tag = "experts"
	Head    Tag = "head"
	// Gather is the tag of operations that gather shards for those who compute with the whole: to
	// save the whole would undo the sharding.
	Gather Tag = "gather"
)

// BlockTags are the parts of a Transformer block: "full" activation checkpointing recomputes all
// of them.
var BlockTags = []Tag{Norm, Attn, MLP, Router, Experts}

// tags are all tags, as text forms may have them.
var tags = []Tag{"", Embed, Attn, MLP, Norm, Router, Experts, Head, Gather}

// Attrs are an operation's constants, sorted by key. A value is a bool, an int64 (an int is
// converted), a float64, a string, or a list of strings; the verifier rejects other types, and for
// operations of this package also unknown keys and a type that the operation does not read. Readers
// ([Attrs.Int] and so on) return zero for an absent key or another type. Attrs are never changed in
// place: [Attrs.With] copies.
type Attrs []Attr

// An Attr is one constant.
type Attr struct {
	Key   string
	Value any
}

// attrs sorts a map into Attrs; absent values (nil, false, "", empty lists) are left out, so that
// equal operations print alike.
func attrs(m map[string]any) Attrs {
	var list Attrs
	for k, v := range m {
		switch x := v.(type) {
		case nil:
			continue
		case bool:
			if !x {
				continue
			}
		case string:
			if x == "" {
				continue
			}
		case []string:
			if len(x) == 0 {
				continue
			}
		case int:
			v = int64(x)
		}
		list = append(list, Attr{k, v})
	}
	lists.Sort(list, func(a, b Attr) int { return strings.Compare(a.Key, b.Key) })
	return list
}

// check reports a constant of a type that the text form cannot have.
func (a Attrs) check() error {
	for _, x := range a {
		switch x.Value.(type) {
		case bool, int64, float64, string, []string:
		default:
			return fmt.Errorf("attribute %s is a %T; it may be a bool, int, int64, float64, string "+
				"or []string", x.Key, x.Value)
		}
	}
	return nil
}

// some leaves out what is zero.
func some[T comparable](v T) any {
	if v == *new(T) {
		return nil
	}
	return v
}

// spelled is the name of an element type, "" for Invalid.
func spelled(t dtype.DType) string {
	if !t.Valid() {
		return ""
	}
	return t.String()
}

// get finds a constant by key; nil if it is absent.
//
//go:noinline
func (a Attrs) get(key string) any {
	for _, x := range a {
		if x.Key == key {
			return x.Value
		}
	}
	return nil
}

// Int reads a whole number, 0 if absent.
func (a Attrs) Int(key string) int64 { v, _ := a.get(key).(int64); return v }

// Float reads a number, 0 if absent or an integer; the verifier rejects an integer in its place.
func (a Attrs) Float(key string) float64 { v, _ := a.get(key).(float64); return v }

// Bool reads a flag, false if absent.
func (a Attrs) Bool(key string) bool { v, _ := a.get(key).(bool); return v }

// Text reads a word, "" if absent.
func (a Attrs) Text(key string) string { v, _ := a.get(key).(string); return v }

// List reads words, nil if absent.
func (a Attrs) List(key string) []string { v, _ := a.get(key).([]string); return v }

// With returns a copy of the constants with one of them changed. Setting a key to nil, false, "" or
// an empty list removes it, since absent means the same; the numbers 0 and 0.0 are stored.
func (a Attrs) With(key string, value any) Attrs {
	m := map[string]any{}
	for _, x := range a {
		m[x.Key] = x.Value
	}
	m[key] = value
	return attrs(m)
}

// Def is the operation that makes a value, or nil for an input.
func (v *Value) Def() *Op { return v.def }

// String writes the value as the text form refers to it.
func (v *Value) String() string { return "%" + v.Name }

// Meaning says what an input or result is to those who run the graph. What a graph does not say
// follows from the roles of its inputs.
func (v *Value) Meaning() program.Meaning {
	switch {
	case v.Means.Role != "" || v.def != nil:
		return v.Means
	case v.Role == Param:
		return program.Meaning{Role: program.Param, Param: v.Name}
	case v.Role == Residual:
		return program.Meaning{Role: program.Residual}
	}
	return program.Meaning{Role: program.Batch}
}

// As says what a value means, and gives it back.
func (v *Value) As(m program.Meaning) *Value {
	v.Means = m
	return v
}

// Donations pairs inputs with the results that take over their buffers, by name. A result of
// another type has the input's meaning but not its memory; a partial sum and its sum share one.
func (g *Graph) Donations() map[string]string {
	into := map[string]string{}
	for _, v := range g.Results {
		for _, from := range g.Inputs {
			if from.Name == v.Means.Replaces && dual(from.Type).Equal(dual(v.Type)) {
				into[from.Name] = v.Name
			}
		}
	}
	return into
}

// Find gives the input or result of an operation with that name, or nil.
func (g *Graph) Find(name string) *Value {
	for _, v := range g.Inputs {
		if v.Name == name {
			return v
		}
	}
	for _, op := range g.Ops {
		for _, v := range op.Out {
			if v.Name == name {
				return v
			}
		}
	}
	return nil
}

// Params are the inputs of that role.
func (g *Graph) Params() []*Value {
	return lists.Filter(g.Inputs, func(v *Value) bool { return v.Role == Param })
}

// AxisSize is the number of devices along an axis of the mesh, 1 if there is no such axis.
func (g *Graph) AxisSize(axis string) int64 {
	size, _ := Along(g.Mesh, axis)
	return size
}

// Along gives the number of devices along an axis of a mesh, and their stride in device numbers; 1
// and 1 if there is no such axis. Devices are numbered along the last axis first.
func Along(mesh []Axis, axis string) (size, stride int64) {
	stride = 1
	for _, a := range slices.Backward(mesh) {
		if a.Name == axis {
			return a.Size, stride
		}
		stride *= a.Size
	}
	return 1, 1
}

// Devices is how many a mesh has.
func Devices(mesh []Axis) int64 {
	return lists.Product(mesh, func(a Axis) int64 { return a.Size })
}

// fresh gives names that a graph does not have yet.
type fresh struct {
	used map[string]bool
	next map[string]int
}

// newFresh knows the names that a graph has.
func newFresh(g *Graph) *fresh {
	f := &fresh{used: map[string]bool{}, next: map[string]int{}}
	for _, v := range g.Inputs {
		f.used[v.Name] = true
	}
	for _, op := range g.Ops {
		for _, v := range op.Out {
			f.used[v.Name] = true
		}
	}
	return f
}

// name gives base, or base.1, base.2 and so on.
func (f *fresh) name(base string) string {
	base, _, _ = strings.Cut(base, ".")
	name := base
	for f.used[name] {
		f.next[base]++
		name = fmt.Sprintf("%s.%d", base, f.next[base])
	}
	f.used[name] = true
	return name
}

// value names a result of an operation: all_gather_1, all_gather_2 and so on, as inputs are not.
func (f *fresh) value(kind string) string {
	for {
		f.next[kind]++
		if name := fmt.Sprintf("%s_%d", kind, f.next[kind]); !f.used[name] {
			f.used[name] = true
			return name
		}
	}
}

// Verify reports the first thing that is wrong: a value used before it is made or from another
// graph, a name that is not unique, a type that its operation does not infer, a copy in the wrong
// memory. Passes of this package and of spmd end with it, so that a forgotten collective is found
// where it was forgotten; passes of package rewrite do if they say so.
func (g *Graph) Verify() error {
	bad := func(format string, args ...any) error {
		return diag.New(diag.GraphInvalid, format, args...).At("graph %s", g.Name)
	}
	if !isName(g.Name) {
		return bad("the graph's name %q is not a name: letters, digits, _ and .", g.Name)
	}
	axes := map[string]bool{}
	for _, a := range g.Mesh {
		if axes[a.Name] || a.Size < 1 || !isName(a.Name) {
			return bad("mesh axis %q of size %d", a.Name, a.Size)
		}
		axes[a.Name] = true
	}
	made, names := map[*Value]bool{}, map[string]bool{}
	add := func(v *Value) error {
		if names[v.Name] || !isName(v.Name) {
			return bad("the name %q is not a name, or not unique", v.Name)
		}
		names[v.Name], made[v] = true, true
		for _, s := range v.Type.Place {
			if !axes[s.Axis] {
				return bad("%s is placed along %s, which the mesh does not have", v, s.Axis)
			}
		}
		return nil
	}
	for _, v := range g.Inputs {
		if err := v.Type.check(); err != nil {
			return bad("input %s: %v", v, err)
		}
		if err := add(v); err != nil {
			return err
		}
	}
	for _, op := range g.Ops {
		for i, v := range op.In {
			if v == nil || !made[v] {
				return bad("argument %d of %s, %s, belongs to another graph or is made later", i, op.Kind,
					valueName(v))
			}
		}
		if err := g.verifyOp(op, bad); err != nil {
			return err
		}
		for _, v := range op.Out {
			if err := add(v); err != nil {
				return err
			}
		}
	}
	for i, v := range g.Results {
		if v == nil || !made[v] {
			return bad("result %d is not made", i)
		}
	}
	if err := g.verifyMemory(); err != nil {
		return bad("%v", err)
	}
	return nil
}

// valueName is a value as a message names it.
func valueName(v *Value) string {
	if v == nil {
		return "nil"
	}
	return v.String()
}

// verifyOp infers the types of an operation's results again and compares them.
func (g *Graph) verifyOp(op *Op, bad func(string, ...any) error) error {
	types, err := g.infer(op)
	if err != nil {
		return bad("%s: %v", op.Kind, err)
	}
	if len(types) != len(op.Out) {
		return bad("%s has %d results, not %d", op.Kind, len(op.Out), len(types))
	}
	for i, v := range op.Out {
		if v.def != op {
			return bad("%s is not a result of its operation", v)
		}
		if !v.Type.Equal(types[i]) {
			return bad("%s is %s; %s gives %s", v, v.Type, op.Kind, types[i])
		}
	}
	return nil
}

// Clone copies a graph deeply, bodies included.
func (g *Graph) Clone() *Graph {
	c := &Graph{Name: g.Name, Mesh: g.Mesh}
	at := map[*Value]*Value{}
	twin := func(v *Value, def *Op) *Value {
		n := *v
		n.def = def
		at[v] = &n
		return &n
	}
	list := func(vs []*Value) []*Value {
		return lists.Map(vs, func(v *Value) *Value { return at[v] })
	}
	c.Inputs = lists.Map(g.Inputs, func(v *Value) *Value { return twin(v, nil) })
	for _, op := range g.Ops {
		n := &Op{Kind: op.Kind, Attrs: op.Attrs, Tag: op.Tag, In: list(op.In),
			table: op.table}
		if op.Body != nil {
			n.Body = op.Body.Clone()
		}
		n.Out = lists.Map(op.Out, func(v *Value) *Value { return twin(v, n) })
		c.Ops = append(c.Ops, n)
	}
	c.Results = list(g.Results)
	return c
}
