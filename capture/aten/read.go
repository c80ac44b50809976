package aten

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A maker is one reading of a program.
type maker struct {
	*Model
	b          *ir.Builder
	dims       *table
	shape      model.Shape
	matmulType dtype.DType
	symbols    map[string]int64 // sizes
	env        map[*pt2.Graph]map[pt2.Ref]*variable
	region     int    // without gradients that is written, counted from 1 on
	regions    int    // so far
	autocast   bool   // operators convert what they take to the type that they give
	key        string // of the node that is written
	positions  *tensor
	segments   *ir.Value // the documents of tokens [batch, seq]; nil where there is one
	share      *ir.Value
	shift      bool            // the program moves the labels
	own        map[string]rule // in place of rules
	fixed      map[string]bool // buffers whose numbers were looked at
	tables     bool            // buffers that are tables are inputs, in a state_dict or not
	missing    unsupported
	bug        *diag.Error // the first
	marks      []mark
	nodes      map[place]int         // so far
	calls      map[string]int        // of dropout, by module
	draws      []Draw                // masks of dropout
	node       *node                 // that is written
	wanted     map[pt2.Ref]bool      // of the outermost graph; nil for all
	fills      map[*ir.Value]float64 // tensors of one number
	lines      map[*pt2.Graph]map[pt2.Ref]*line
	unsure     bool // lines are not followed
	router     router
	loads      []expertLoad
	// Mixed are values in which tokens of several documents meet, and what made them.
	mixed map[*ir.Value]*node
}

// read writes the graph of a result.
func (m *maker) read(result pt2.Ref) (*ir.Graph, error) {
	p := m.archive.Program
	m.env = map[*pt2.Graph]map[pt2.Ref]*variable{p.Graph: {}}
	m.nodes, m.calls = map[place]int{}, map[string]int{}
	m.fixed = map[string]bool{}
	if err := m.bind(); err != nil {
		return nil, err
	}
	live := needed(p.Graph, []pt2.Ref{result})
	m.wanted = wantedBy(p.Graph, live, result)
	if err := m.begin(p, result == m.loss); err != nil {
		return nil, err
	}
	m.run(p.Graph, live)
	if err := m.refused(); err != nil {
		return nil, err
	}
	if m.env[p.Graph][result] == nil {
		return nil, diag.New(diag.NotSupported, "the program does not compute %s", result)
	}
	out, err := m.result(result)
	if err != nil {
		return nil, err
	}
	m.Model.shifted = m.Model.shifted || m.shift
	v := out.v
	if ds := out.dims(); len(ds) > 0 && m.b.Err() == nil {
		v = m.b.Transpose(v, m.names(ds)...)
	}
	results := []*ir.Value{v}
	if result == m.loss {
		for _, l := range m.loads {
			results = append(results, l.v)
		}
	}
	return m.b.Graph(results...)
}

// result reads what the program gives, with a dimension for each axis that repeats.
func (m *maker) result(ref pt2.Ref) (t *tensor, err error) {
	m.guard(func() {
		t = m.real(m.value(m.archive.Program.Graph, ref))
		for i, a := range t.axes {
			if a.size > 1 {
				t = m.some(t, i)
			}
		}
	}, func(why string) {
		m.missing = append(m.missing, fmt.Sprintf("result %s (%s)", ref, why))
		err = m.refused()
	})
	return t, err
}

// bind gives the symbols of sizes their values: the first axis of inputs is the batch, the second
// the sequence.
func (m *maker) bind() error {
	m.symbols = map[string]int64{}
	p := m.archive.Program
	for _, s := range p.Inputs {
		ref, ok := s.Arg.(pt2.Ref)
		if s.Kind != pt2.UserInput || !ok {
			continue
		}
		for i, e := range p.Graph.Values[string(ref)].Dims {
			if e.Op != "Symbol" || i > 1 {
				continue
			}
			n := []int64{m.shape.Batch, m.shape.Seq}[i]
			m.symbols[e.Name] = n
			if r, ok := p.Ranges[e.Name]; ok && (n < r.Min && n != 1 || n > r.Max) {
				return diag.New(diag.BadInput, "%s of %d is outside the range of the export, %d to %d",
					[]string{"a batch", "a sequence"}[i], n, r.Min, r.Max).
					Try("export the module again with torch.export.Dim(%q, max=%d); or --fix microbatch=1",
						[]string{"batch", "seq"}[i], n)
			}
		}
	}
	return nil
}

// needed finds the nodes that results depend on. What is changed in place is needed if anything
// that may share its memory is, or an input.
func needed(g *pt2.Graph, results []pt2.Ref) map[*pt2.Node]bool {
	root := map[pt2.Ref]pt2.Ref{}
	base := func(r pt2.Ref) pt2.Ref {
		for root[r] != "" {
			r = root[r]
		}
		return r
	}
	share := func(a, b pt2.Ref) {
		if a, b = base(a), base(b); a != b {
			root[b] = a
		}
	}
	for i := range g.Nodes {
		n := &g.Nodes[i]
		if self, ok := selfOf(n); ok && (lendingOf(g, n) != copies || inPlace(n.Target)) {
			for _, o := range n.Outputs {
				share(self, o)
			}
		}
		if changes(n) { // a region may give what it takes
			all := n.Outputs
			for _, a := range n.Args {
				all = append(slices.Clip(all), refs(a.Value)...)
			}
			for _, r := range all {
				share(all[0], r)
			}
		}
	}
	want := map[pt2.Ref]bool{}
	for _, r := range results {
		want[base(r)] = true
	}
	for _, a := range g.Inputs { // a change of an input is refused, wherever it stands
		for _, r := range refs(a) {
			want[base(r)] = true
		}
	}
	live := map[*pt2.Node]bool{}
	for i := len(g.Nodes) - 1; i >= 0; i-- {
		n := &g.Nodes[i]
		self, ok := selfOf(n)
		use := ok && inPlace(n.Target) && want[base(self)] || changes(n)
		for _, o := range n.Outputs {
			use = use || o != "" && (want[o] || slices.Contains(results, o))
		}
		if !use {
			continue
		}
		live[n] = true
		for _, a := range n.Args {
			for _, r := range refs(a.Value) {
				want[r], want[base(r)] = true, true
			}
		}
	}
	return live
}

// wantedBy lists what nodes take, and results.
func wantedBy(g *pt2.Graph, live map[*pt2.Node]bool, results ...pt2.Ref) map[pt2.Ref]bool {
	all := map[pt2.Ref]bool{}
	for _, r := range results {
		all[r] = true
	}
	for i := range g.Nodes {
		if n := &g.Nodes[i]; live[n] {
			for _, a := range n.Args {
				for _, r := range refs(a.Value) {
					all[r] = true
				}
			}
		}
	}
	return all
}

// changes reports whether a node calls a graph that changes something in place.
func changes(n *pt2.Node) bool {
	for _, a := range n.Args {
		if g, ok := a.Value.(*pt2.Graph); ok && slices.ContainsFunc(g.Nodes, func(n pt2.Node) bool {
			return inPlace(n.Target) || changes(&n)
		}) {
			return true
		}
	}
	return false
}

// refs lists the tensors of an argument.
func refs(a pt2.Argument) []pt2.Ref {
	switch a := a.(type) {
	case pt2.Ref:
		return []pt2.Ref{a}
	case []pt2.Ref:
		return slices.DeleteFunc(slices.Clone(a), func(r pt2.Ref) bool { return r == "" })
	}
	return nil
}

// begin adds the inputs of the graph: what comes from the batch, then the parameters that are used.
func (m *maker) begin(p *pt2.Program, loss bool) error {
	used := m.wanted
	if err := distinct(p, used); err != nil {
		return err
	}
	env := m.env[p.Graph]
	batch := m.dims.dim("batch", m.shape.Batch, ir.Batch, -1)
	seq := m.dims.dim("seq", m.shape.Seq, ir.Seq, -1)
	for _, s := range p.Inputs {
		ref, ok := s.Arg.(pt2.Ref)
		if s.Kind != pt2.UserInput || !ok || !used[ref] {
			continue
		}
		value := p.Graph.Values[string(ref)]
		t := ir.Type{Elem: m.elem(value.Type)}
		out := &tensor{}
		for i, e := range value.Dims {
			n, err := e.Eval(m.symbols)
			if err != nil {
				return diag.New(diag.NotSupported, "input %s has the size %v", s.Name, e).Because("%v", err).
					Try("export with sizes that are numbers or symbols of their own")
			}
			d := m.dims.dim("input "+s.Name+string(rune('0'+i)), n, "", -1)
			switch {
			case i == 0 && n == m.shape.Batch:
				d = batch
			case i == 1 && n == m.shape.Seq && value.Type.Kind() != dtype.Float:
				d = seq
			}
			d = m.dims.root(d)
			out.axes = append(out.axes, axis{[]dim{d}, n})
			t.Dims = append(t.Dims, ir.Dim{Name: m.name(d), Size: n})
		}
		name := s.Name
		switch name {
		case "input_ids":
			name, out.token = model.InputIDs, true
		case "labels":
			name, out.label = model.InputLabels, true
		}
		out.v = m.b.Input(name, ir.Data, t, "")
		env[ref] = m.input(out)
	}
	rows := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: m.name(batch), Size: m.shape.Batch},
		{Name: m.name(seq), Size: m.shape.Seq}}}
	positions := m.b.Input(model.InputPositions, ir.Data, rows, "")
	m.positions = &tensor{v: positions, axes: []axis{{[]dim{seq}, m.shape.Seq}}, hidden: []dim{batch}}
	if m.shape.Documents > 1 {
		m.segments = m.b.Input(model.InputSegments, ir.Data, rows, "")
	}
	if loss {
		m.share = m.b.Input(model.InputShare, ir.Data, ir.Type{Elem: dtype.F32}, "")
	}
	return m.parameters(used)
}

// parameters adds the parameters, buffers and constants that are used.
func (m *maker) parameters(used map[pt2.Ref]bool) error {
	p := m.archive.Program
	env := m.env[p.Graph]
	made := map[string]*tensor{}
	for _, s := range p.Inputs {
		ref, ok := s.Arg.(pt2.Ref)
		if s.Kind == pt2.UserInput || !ok || !used[ref] {
			continue
		}
		t, err := m.stored(s, made)
		if err != nil {
			return err
		}
		env[ref] = m.input(t)
	}
	return m.b.Err()
}

// distinct refuses a program that reads labels where it should read ids: torch.export takes two
// arguments that are one tensor for one.
func distinct(p *pt2.Program, used map[pt2.Ref]bool) error {
	reads := map[string]bool{}
	for _, s := range p.Inputs {
		if ref, ok := s.Arg.(pt2.Ref); ok && s.Kind == pt2.UserInput {
			reads[s.Name] = used[ref]
		}
	}
	if ids, given := reads["input_ids"]; given && !ids && reads["labels"] {
		return diag.New(diag.NotSupported, "the program reads labels and not input_ids").
			Because("ids and labels were one tensor when the module was exported").
			Try("torch.export.export(..., dict(input_ids=ids, labels=ids.clone()))")
	}
	return nil
}

// stored gives a parameter, buffer or constant.
func (m *maker) stored(s pt2.Spec, made map[string]*tensor) (*tensor, error) {
	name := s.Name
	if to, ok := m.sole[name]; ok {
		name = to
	}
	if t := made[name]; t != nil {
		return t, nil
	}
	have, err := m.archive.Tensor(name)
	if err != nil {
		return nil, err
	}
	trained := s.Kind == pt2.Parameter || s.Kind == pt2.Buffer && s.Persistent
	if !trained || have.Type.Kind() != dtype.Float {
		if made[name], err = numbers(have); err != nil {
			return nil, err
		}
		if s.Kind != pt2.Buffer || !m.tables || !isTable(made[name]) {
			return made[name], nil
		}
	}
	t := ir.Type{Elem: m.elem(have.Type)}
	if m.tag(name) == ir.Router && t.Elem != dtype.F64 {
		t.Elem = dtype.F32 // nearly equal scores decide where a token goes
	}
	out := &tensor{param: true, buffer: s.Kind == pt2.Buffer}
	if out.buffer {
		out.twin = func() *tensor {
			m.fixed[name] = true
			t, err := numbers(have)
			if err != nil {
				panic(refusal(err.Error()))
			}
			return t
		}
	}
	for i, n := range have.Dims {
		d := m.dims.dim(name+string(rune('0'+i)), n, "", -1)
		m.dims.all[m.dims.root(d)].param = true
		a := axis{size: n}
		for _, leaf := range m.dims.leaves(d) {
			a.dims = append(a.dims, leaf)
			t.Dims = append(t.Dims, ir.Dim{Name: m.name(leaf), Size: m.size(leaf)})
		}
		out.axes = append(out.axes, a)
	}
	m.dims.meet(out.dims())
	out.v = m.b.Input(graphName(name), ir.Param, t, name)
	made[name] = out
	return out, nil
}

// graphName is the name of a parameter in graphs: it begins with a letter, and has only letters,
// digits, dots and underscores.
func graphName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, name)
	if name[0] <= '9' {
		return "_" + name
	}
	return name
}

// numbers reads what an archive holds.
func numbers(have *pt2.Tensor) (*tensor, error) {
	if have.Type.Kind() == dtype.Complex {
		return nil, diag.New(diag.NotSupported, "%s is of complex numbers", have.Name)
	}
	raw, err := have.Bytes()
	if err != nil {
		return nil, err
	}
	data := have.Type.Values(raw)
	if have.Type.Kind() == dtype.Signed {
		for _, x := range data {
			if math.Abs(x) > exact {
				return nil, diag.New(diag.NotSupported, "%s has the number %.0f, which may not be exact",
					have.Name, x)
			}
		}
	}
	return constant(have.Type, have.Dims, data), nil
}

// run writes the nodes of a graph that are needed.
func (m *maker) run(g *pt2.Graph, live map[*pt2.Node]bool) {
	for i := range g.Nodes {
		if n := &g.Nodes[i]; live[n] {
			m.write(&node{Node: n, graph: g, m: m})
		}
	}
}

// write writes one node. What a rule refuses is listed, and zeros stand for its results, so that
// all that follows is tried.
func (m *maker) write(n *node) {
	outer := m.key
	defer func() { m.key = outer }()
	at, _ := placeOf(n.path())
	m.nodes[at]++
	m.key = fmt.Sprintf("%s.%d.:%d:", at.list, at.n, m.nodes[at])
	m.node = n
	sound := m.b.Err() == nil
	m.guard(func() {
		m.b.Tagged(m.tag(n.path()), func() { m.apply(n) })
		if err := m.b.Err(); sound && err != nil && len(m.missing) == 0 {
			panic(refusal(diag.From(err).What))
		}
	}, func(why string) {
		m.missing.add(n, why)
		for i, o := range n.Outputs {
			if o != "" {
				m.env[n.graph][o] = m.owned(m.standIn(n, i))
			}
		}
	})
}

// guard calls f, and otherwise if a rule refuses, or if it has a bug, which is noted. A rule may
// count on what torch checks; an archive of another origin then gives it an axis or an argument too
// few.
func (m *maker) guard(f func(), otherwise func(why string)) {
	defer func() {
		switch why := recover().(type) {
		case nil:
		case refusal:
			otherwise(string(why))
		case runtime.Error:
			if m.bug == nil {
				m.bug = bug(m.node, why)
			}
			otherwise("a bug in Deepwell")
		default:
			panic(why)
		}
	}()
	f()
}

// bug says that a rule failed, and where.
func bug(n *node, why error) *diag.Error {
	at := unsupported{}
	if n != nil {
		at.add(n, "")
	}
	return diag.New(diag.Internal, "Deepwell cannot read a program, by a bug of its own: %s",
		strings.Join(at, "")).Because("%v", why).
		Try("please report this, with the part of the module that is named")
}

// refused is the error of a reading that has failed: a bug, or all calls that are not supported.
func (m *maker) refused() error {
	switch {
	case m.bug != nil:
		return m.bug
	case len(m.missing) > 0:
		return m.missing.err()
	}
	return nil
}

// input is a variable that a program is given.
func (m *maker) input(t *tensor) *variable {
	v := m.owned(t)
	v.memory.fixed = "an input, a parameter or a buffer, which lasts"
	return v
}

// anySize stands for a size that is not known, in a program that is refused for it.
const anySize = 3

// standIn is a tensor of zeros in place of an output.
func (m *maker) standIn(n *node, i int) *tensor {
	value := n.graph.Values[string(n.Outputs[i])]
	t := ir.Type{Elem: m.elem(value.Type)}
	for _, e := range value.Dims { // a size that the values decide may be any
		for _, s := range e.Symbols() {
			if _, known := m.symbols[s]; !known {
				m.symbols[s] = anySize
			}
		}
	}
	var sizes []int64
	m.guard(func() { sizes = n.out(i) }, func(string) {})
	var axes []axis
	for k, size := range sizes {
		d := m.fresh(fmt.Sprint("none", i, ".", k), size, -1)
		axes = append(axes, axis{[]dim{d}, size})
		t.Dims = append(t.Dims, ir.Dim{Name: m.name(d), Size: size})
	}
	return m.tensor(m.b.Fill(t, 0), nil, axes...)
}

// apply finds the rule of a node and keeps its results.
func (m *maker) apply(n *node) {
	if strings.HasPrefix(n.Target, "higher_order.wrap_with_") {
		m.inline(n)
		return
	}
	env, target := m.env[n.graph], n.Target
	if strings.HasPrefix(target, "aten.sym_") || strings.HasPrefix(target, "_operator.") {
		return // sizes are known
	}
	change := inPlace(target)
	if change {
		target = strings.Replace(target, "_.", ".", 1)
	}
	f := m.rule(target)
	if f == nil {
		panic(refusal(""))
	}
	line := m.follow(n, change)
	if line != nil && target == "aten.diff.default" {
		// Positions go on by one in the program, whatever documents the rows of a batch are packed of,
		// which attention keeps apart.
		env[n.Outputs[0]] = m.bound(n, 0, followed(line))
		return
	}
	var out []*tensor
	if line == nil {
		out = f(m, n)
	} else {
		m.guard(func() { out = f(m, n) }, func(string) { out = []*tensor{followed(line)} })
	}
	if change {
		self, _ := selfOf(n.Node)
		m.assign(n, env[self], out[0])
		for _, o := range n.Outputs {
			env[o] = env[self]
		}
		m.mark(n, env[self].now)
		return
	}
	for i, o := range n.Outputs {
		if have, want := out[i].sizes(), n.out(i); !slices.Equal(have, want) {
			panic(refusal(fmt.Sprintf("a result of %v where the program says %v", have, want)))
		}
		env[o] = m.bound(n, i, out[i])
		m.mark(n, out[i])
	}
}

// rule finds the rule of an operator; nil if it has none.
func (m *maker) rule(target string) rule {
	if f := m.own[target]; f != nil {
		return f
	}
	return rules[target]
}

// mark notes the place of what a node made.
func (m *maker) mark(n *node, t *tensor) {
	if at, _ := placeOf(n.path()); t.v != nil {
		k := mark{v: t.v, at: at, path: n.path()}
		if len(n.Modules) > 0 {
			k.class = n.Modules[len(n.Modules)-1].Class
		}
		m.marks = append(m.marks, k)
	}
}

// value finds a tensor of a graph.
func (m *maker) value(g *pt2.Graph, ref pt2.Ref) *tensor {
	v := m.env[g][ref]
	if v == nil {
		panic(refusal("no value " + string(ref)))
	}
	t := m.current(v)
	if t.line {
		panic(refusal("differences of positions, other than in a mask of attention"))
	}
	return t
}

// inline writes the graph that a region calls. Gradients do not flow out of one without them.
func (m *maker) inline(n *node) {
	var sub *pt2.Graph
	var args []pt2.Argument
	grad := true
	for i, a := range n.Args {
		switch v := a.Value.(type) {
		case *pt2.Graph:
			sub, args = v, lists(n.Args[i+1:])
		case bool:
			grad = v || !strings.Contains(n.Target, "set_grad")
		}
		if sub != nil {
			break
		}
	}
	if sub == nil || len(args) != len(sub.Inputs) {
		panic(refusal("a region with other inputs"))
	}
	m.env[sub] = map[pt2.Ref]*variable{}
	for i, in := range sub.Inputs {
		to, ok := in.(pt2.Ref)
		if from, isRef := args[i].(pt2.Ref); ok && isRef {
			m.env[sub][to] = m.env[n.graph][from]
		}
	}
	var results []pt2.Ref
	for _, o := range sub.Outputs {
		results = append(results, refs(o)...)
	}
	outer, cast := m.region, m.autocast
	if !grad {
		m.regions++
		m.region = m.regions
	}
	m.autocast = m.autocast || strings.Contains(n.Target, "autocast")
	read := map[pt2.Ref]bool{}
	for i, o := range n.Outputs {
		read[results[i]] = m.wanted == nil || n.graph != m.archive.Program.Graph || m.wanted[o]
	}
	m.run(sub, needed(sub, slices.DeleteFunc(slices.Clone(results), func(r pt2.Ref) bool {
		return !read[r]
	})))
	m.region, m.autocast = outer, cast
	for i, o := range n.Outputs {
		if !read[results[i]] {
			continue
		}
		v := m.env[sub][results[i]]
		t := m.value(sub, results[i])
		if !grad && t.v != nil && t.v.Type.Elem.Kind() == dtype.Float {
			t = t.with(m.b.StopGradient(t.v))
			v = m.borrowed(t, v.memory)
		}
		m.env[n.graph][o] = v
		m.mark(n, t)
	}
}

func lists(args []pt2.Arg) []pt2.Argument {
	var out []pt2.Argument
	for _, a := range args {
		out = append(out, a.Value)
	}
	return slices.Clip(out)
}
