package spmd

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// copied reports whether the loss takes more of a parameter than a device stores.
func (l *Layout) copied() bool { return !l.Compute.Place.Equal(l.Stored.Place) }

// layout returns the layout of a parameter, or nil.
func (s *Sharding) layout(param string) *Layout {
	for i := range s.Params {
		if s.Params[i].Name == param {
			return &s.Params[i]
		}
	}
	return nil
}

// Copies renames parameters that are not the stored f32 masters, because of their type or because
// the loss takes gathered ones: the graphs take the compute copies, "c.w", that the update makes.
func (s *Sharding) Copies(graphs ...*ir.Graph) {
	for _, g := range graphs {
		for _, v := range g.Params() {
			l := s.layout(v.Name)
			if l != nil && (v.Type.Elem != dtype.F32 || l.copied()) {
				copied(v)
			}
		}
	}
}

// copied turns a parameter input into its compute copy.
func copied(v *ir.Value) {
	v.Name, v.Means = program.Copy.Of(v.Name), program.Copy.For(v.Name)
}

// A result is a value with the name and the meaning that it has outside its graph.
type result struct {
	v    *ir.Value
	name string
	is   program.Meaning
}

// gradient is the result that has a parameter's gradient. onto: it replaces an input, whose name it
// cannot have inside the graph.
func gradient(v *ir.Value, param string, onto bool) result {
	name := program.Gradient.Of(param)
	if onto {
		return result{v, program.Next(name), program.Gradient.For(param).Replacing(name)}
	}
	return result{v, name, program.Gradient.For(param)}
}

// Scatter reduce-scatters a parameter's gradient, if the plan shards gradients (ZeRO 2 and 3) and
// it is not sharded yet.
func (s *Sharding) Scatter(b *ir.Builder, param string, g *ir.Value) *ir.Value {
	if s.Plan.FSDP.Zero < 2 {
		return g
	}
	return s.layout(param).reduceScatter(b, s.Plan, g)
}

// reduceScatter sums partial terms along the axes that shard the stored parameter, in the type of
// collectives.
func (l *Layout) reduceScatter(b *ir.Builder, p *plan.Plan, g *ir.Value) *ir.Value {
	for _, a := range slices.Backward(p.Mesh()) { // the slowest first ([ir.Placement.Nested])
		if dim := l.Stored.Place.On(a.Name); dim != "" && g.Type.Place.On(a.Name) == ir.Partial {
			g = b.Convert(g, p.Types.Collectives)
			g = b.ReduceScatter(g, a.Name, dim)
		}
	}
	return g
}

// gather all-gathers a stored parameter over its FSDP axes.
func (l *Layout) gather(b *ir.Builder, x *ir.Value) *ir.Value {
	for _, s := range slices.Backward(l.Shards) {
		x = b.AllGather(x, s.Axis, s.Dim)
	}
	return x
}

// An updateBuilder builds the sharded optimizer step.
type updateBuilder struct {
	UpdateOptions
	params []RankParam // with the types of the gradients
}

// whole returns the parameters as global arrays; Group tells the optimizer which are sharded alike.
func (e *updateBuilder) whole() []optim.Param {
	params := make([]optim.Param, len(e.params))
	for i, h := range e.params {
		params[i] = h.Param
		t := global(h.Layout.Stored, e.Plan.Mesh())
		t.Elem = h.Type.Elem
		params[i].Type = t
		axes := lists.Map(h.Layout.Stored.Place, func(s ir.AxisSharding) string { return s.Axis })
		params[i].Group = strings.Join(axes, " ")
	}
	return params
}

// A binding returns the device's value for an input of the global update.
type binding func(whole *ir.Value) *ir.Value

// rebuild shards the graph of a global update. Inputs without a binding are the same on all
// devices.
func (u *sharder) rebuild(whole *ir.Graph, bound map[string]binding) error {
	for _, v := range whole.Inputs {
		if local := bound[v.Name]; local != nil {
			u.Replacement[v] = local(v)
		} else {
			u.Inputs(v)
		}
	}
	return u.ops(whole)
}

// bindState binds parameters and optimizer state to a device's shards.
func (e *updateBuilder) bindState(u *sharder) map[string]binding {
	bound := map[string]binding{}
	for i, p := range e.whole() {
		stored := e.params[i].Layout.Stored
		keep := func(v *ir.Value) *ir.Value {
			t := ir.Type{Elem: v.Type.Elem, Dims: stored.Dims, Place: stored.Place}
			return u.InputLike(v, t)
		}
		bound[p.Name] = keep
		for _, slot := range e.Optimizer.State(p) {
			bound[slot.Name] = keep
		}
	}
	return bound
}

// reduced takes a gradient as the microbatches left it and returns the device's shard of the sum.
func (e *updateBuilder) reduced(u *sharder, i int) *ir.Value {
	t := e.params[i].Type
	g := u.gradient(e.params[i].Name, t)
	terms := func(share ir.AxisSharding) bool { return share.Dim == ir.Partial }
	if slices.ContainsFunc(g.Type.Place, terms) {
		g = u.Convert(g, e.Plan.Types.Collectives)
	}
	l := &e.params[i].Layout
	g = u.conform(l.reduceScatter(u.Builder, e.Plan, g), l.Stored.Place)
	return u.Convert(g, t.Elem)
}

// gradient adds the input that takes a parameter's gradient.
func (u *sharder) gradient(param string, t ir.Type) *ir.Value {
	return u.Input(program.Gradient.Of(param), ir.Data, t, "").As(program.Gradient.For(param))
}

// results names the results as the global update does, and adds the compute copies that the loss
// takes: gathered, quantized, or both.
func (e *updateBuilder) results(u *sharder, whole *ir.Graph) (*ir.Graph, error) {
	var out []result
	masters, copies := map[string]*ir.Value{}, map[string]int{} // by parameter; indices in out
	for _, v := range whole.Results {
		x := u.reduced(u.Replacement[v])
		masters[v.Means.Replaces] = x
		if e.Quantized.unused(v.Means) {
			continue
		}
		if v.Means.Role == program.Copy {
			copies[v.Means.Param] = len(out)
		}
		out = append(out, result{x, v.Name, v.Means})
	}
	for i := range e.params {
		p := &e.params[i]
		out = append(out, e.Quantized.make(u.Builder, p.Name, masters[p.Name], &p.Layout)...)
		is := program.Copy.For(p.Name)
		if !p.Layout.copied() || e.Quantized.unused(is) {
			continue
		}
		at, ok := copies[p.Name]
		if !ok {
			at = len(out)
			out = append(out, result{masters[p.Name], program.Copy.Of(p.Name), is})
		}
		out[at].v = p.Layout.gather(u.Builder, out[at].v)
	}
	return named(u.Builder, e.Quantized.withStats(u.Builder, out))
}

// named ends a graph with results that have names and meanings.
func named(b *ir.Builder, out []result) (*ir.Graph, error) {
	values := lists.Map(out, func(one result) *ir.Value { return one.v })
	g, err := b.Graph(values...)
	if err != nil {
		return nil, err
	}
	for _, one := range out {
		one.v.Name, one.v.Means = one.name, one.is
	}
	return g, g.Verify()
}

// offloaded moves the optimizer state of an update to host memory: moments, and masters of which
// the model takes copies. The fetch of one parameter waits for the write-back of an earlier one,
// which bounds the device memory for state in flight.
func offloaded(g *ir.Graph) (*ir.Graph, error) {
	b, fetch := ir.NewRewriter(g.Name, g.Mesh...), offloadable(g)
	stays, kept := map[*ir.Value]bool{}, map[*ir.Value]*ir.Value{}
	b.Inputs(g.Inputs...)
	for _, v := range g.Results {
		stays[v] = fetch[v.Means.Replaces]
	}
	var done []*ir.Value // written back, and no fetch waits for it yet
	for _, op := range g.Ops {
		for _, v := range op.In {
			if v.Def() == nil && fetch[v.Name] {
				var after *ir.Value
				if len(done) > 0 {
					after, done = done[0], done[1:]
				}
				b.Replacement[v], fetch[v.Name] = b.ToDevice(b.Replacement[v], after), false
			}
		}
		for i, v := range b.Copy(op) {
			if stays[op.Out[i]] {
				kept[op.Out[i]] = b.ToHost(v)
				done = append(done, kept[op.Out[i]])
			}
		}
	}
	out := make([]result, len(g.Results))
	for i, v := range g.Results {
		if out[i] = (result{kept[v], v.Name, v.Means}); kept[v] == nil {
			out[i].v = b.Replacement[v]
		}
	}
	return named(b.Builder, out)
}

// offloadable names the inputs of an update that no other program takes.
func offloadable(g *ir.Graph) map[string]bool {
	copied, list := map[string]bool{}, map[string]bool{}
	for _, v := range g.Results {
		if v.Name == program.Copy.Of(v.Means.Param) { // not a quantized one
			copied[v.Means.Param] = true
		}
	}
	for _, v := range g.Params() {
		is := v.Meaning()
		list[v.Name] = is.Role == program.Moment || copied[is.Param]
	}
	return list
}
