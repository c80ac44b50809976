package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// A Gradient is the derivative of a graph as graphs that run one after the other. Values go from
// one to the next by name: the forward graph returns residuals, which are inputs of the backward
// graph.
type Gradient struct {
	// Forward gives the results of the graph, then the residuals that Backward takes.
	Forward *Graph
	// Backward takes the gradients of the results, parameters, data and residuals, and gives the
	// gradient of every input that was asked for, in their order.
	Backward *Graph
	// Seeds names, for each result of the graph, the input of Backward that takes its gradient; ""
	// where none is taken.
	Seeds []string
	// Wrt are the inputs whose gradients Backward gives.
	Wrt []*Value
	// Reached says which of Wrt a result with a seed depends on; the gradient of others is 0.
	Reached []bool
}

// A GradPlan says what a gradient is taken of, and what it keeps.
type GradPlan struct {
	// Wrt lists the inputs by name; nil means all parameters.
	Wrt []string
	// Without lists results, by their place, that have no gradient: nothing is computed for them.
	Without []int
	// Recompute lists the tags whose values are recomputed in the backward graph instead of saved
	// (activation checkpointing).
	Recompute []Tag
	// Terms leaves the gradients of parameters as terms of a sum along the axes along which the
	// devices saw different data, for whoever adds up several gradients before they are reduced.
	Terms bool
	// SaveRows saves the rows that an all-to-all brings to experts, as bytes of their payload's format
	// if they have one, where their tag would have them sent again.
	SaveRows bool
	// Requantize quantizes the input of a wgrad in the backward graph where that needs nothing but
	// what is saved anyway ([Differ.again]): no second copy is saved. NVFP4, which would need the
	// largest magnitude first, is saved as ever.
	Requantize bool
	// Offload keeps the residuals of repeats in the memory of the host, from the round that makes
	// them to the round back that takes them.
	Offload bool
}

// Grad takes the gradient of a graph's results.
func Grad(g *Graph, p GradPlan) (*Gradient, error) {
	for _, tag := range p.Recompute {
		if tag == "" || !slices.Contains(tags, tag) {
			return nil, diag.New(diag.GraphInvalid, "there is no tag %q to recompute", tag).
				At("graph %s", g.Name)
		}
	}
	fwd, err := WriteOut(g.Clone(), func(r *Row) bool { return r.Gradient == nil })
	if err != nil {
		return nil, err
	}
	d := newDiffer(fwd, p)
	wrt, err := d.inputs(p.Wrt)
	if err != nil {
		return nil, err
	}
	d.mark(wrt)
	seeds := d.seed(p.Without)
	d.backward()
	out := make([]*Value, len(wrt))
	reached := d.reached(seeds)
	for i, v := range wrt {
		if out[i] = d.grads[v]; !p.Terms || v.Role != Param {
			out[i] = d.settled(v)
		}
		if out[i] == nil {
			out[i] = d.Fill(v.Type, 0)
		}
	}
	bw, err := d.Graph(out...)
	if err != nil {
		return nil, err
	}
	fwd.Results = append(fwd.Results, d.residuals...)
	return &Gradient{Forward: fwd, Backward: bw, Seeds: seeds, Wrt: wrt,
		Reached: lists.Map(wrt, func(v *Value) bool { return reached[v] })}, fwd.Verify()
}

// reached finds the values that results with a seed depend on, whether their gradient is 0 or not.
func (d *Differ) reached(seeds []string) map[*Value]bool {
	found := map[*Value]bool{}
	for i, v := range d.fwd.Results[:len(seeds)] {
		found[v] = found[v] || seeds[i] != ""
	}
	for _, op := range slices.Backward(d.fwd.Ops) {
		if op.Kind == "stop_gradient" ||
			!slices.ContainsFunc(op.Out, func(v *Value) bool { return found[v] }) {
			continue
		}
		for _, v := range op.In {
			found[v] = found[v] || d.needs[v]
		}
	}
	return found
}

// dual is the type of a value's gradient: a replicated value has a replicated gradient, a shard the
// shard's, and every partial sum has the gradient of the sum, which is replicated.
func dual(t Type) Type {
	t.Place = lists.Filter(t.Place, func(s AxisSharding) bool { return s.Dim != Partial })
	return t
}

// A Differ builds the backward graph of one forward graph, in reverse order of its operations. VJPs
// build with its Builder and read forward values by Use, which decides between saving and
// recomputing. While a VJP runs, the builder has the table that the operation was built from, so
// that d.Op can build operations of it, such as a fused gradient.
type Differ struct {
	*Builder  // of the backward graph
	fwd       *Graph
	recompute []Tag
	terms     bool
	offload   bool
	saveRows  bool
	requant   bool
	needs     map[*Value]bool     // values that a gradient must flow through
	grads     map[*Value]*Value   // gradients so far, in the backward graph
	used      map[*Value]*Value   // forward values, in the backward graph
	residuals []*Value            // forward values that are kept
	quantized map[string][]*Value // quantized forward values, by format and name
}

// newDiffer prepares the backward graph of fwd.
func newDiffer(fwd *Graph, p GradPlan) *Differ {
	d := &Differ{Builder: NewBuilder(fwd.Name+"_grad", fwd.Mesh...), fwd: fwd, recompute: p.Recompute,
		terms: p.Terms, offload: p.Offload, saveRows: p.SaveRows, requant: p.Requantize,
		needs: map[*Value]bool{}, grads: map[*Value]*Value{}, used: map[*Value]*Value{}}
	// A forward value may become an input at any time, so its name is taken from the start.
	d.names = newFresh(fwd)
	return d
}

// inputs finds the inputs of the forward graph that the gradient is taken of.
func (d *Differ) inputs(names []string) ([]*Value, error) {
	if names == nil {
		return d.fwd.Params(), nil
	}
	var list []*Value
	for _, name := range names {
		v := lists.Find(d.fwd.Inputs, func(v *Value) bool { return v.Name == name })
		if v == nil {
			return nil, diag.New(diag.GraphInvalid, "graph %s has no input %q", d.fwd.Name, name)
		}
		list = append(list, v)
	}
	return list, nil
}

// seed makes an input for the gradient of each result that is not a statistic, without some. A
// value that is two results gets the sum.
func (d *Differ) seed(without []int) []string {
	names := make([]string, len(d.fwd.Results))
	for i, v := range d.fwd.Results {
		if !d.needs[v] || v.Means.Role == program.Stat || slices.Contains(without, i) {
			continue
		}
		names[i] = "d." + v.Name
		if slices.Contains(names[:i], names[i]) {
			names[i] = fmt.Sprintf("d%d.%s", i, v.Name)
		}
		d.accumulate(v, d.Input(names[i], Residual, dual(v.Type), "").As(program.Seed.For("")))
	}
	return names
}

// mark finds the values that depend on the inputs in question.
func (d *Differ) mark(wrt []*Value) {
	for _, v := range wrt {
		d.needs[v] = true
	}
	for _, op := range d.fwd.Ops {
		if op.Kind == "stop_gradient" || !d.reaches(op) {
			continue
		}
		for _, v := range op.Out {
			d.needs[v] = v.Type.Elem.Kind() == dtype.Float
		}
	}
}

// reaches tells whether an argument of an operation needs a gradient.
func (d *Differ) reaches(op *Op) bool {
	return slices.ContainsFunc(op.In, func(v *Value) bool { return d.needs[v] })
}

// movers are the operations that only rearrange elements. They are linear, so that their VJPs
// accept partial sums; the VJP of a gather scatters.
var movers = []string{"all_gather", "shard_slice", "all_to_all", "rename", "transpose", "split",
	"merge", "broadcast", "slice", "pad", "concat", "convert", "to_host", "to_device"}

// backward walks through the operations from the last to the first.
func (d *Differ) backward() {
	for i := len(d.fwd.Ops) - 1; i >= 0 && d.err == nil; i-- {
		op := d.fwd.Ops[i]
		dout := make([]*Value, len(op.Out))
		any := false
		for k, v := range op.Out {
			if slices.Contains(movers, op.Kind) {
				dout[k] = d.grads[v]
			} else {
				dout[k] = d.settled(v)
			}
			any = any || dout[k] != nil
		}
		if !any || !d.reaches(op) {
			continue
		}
		gradient := op.spec().Gradient
		if gradient == nil {
			d.fail(fmt.Errorf("%s has no gradient", op.Kind))
			return
		}
		d.table = op.table // so that the VJP can build operations of the table that op is from
		d.Tagged(op.Tag, func() {
			list := gradient(d, op, dout)
			if err := checkGradients(op, list); err != nil {
				d.fail(err) // the first error wins: dead values have no type
				return
			}
			for k, g := range list {
				if g != nil && k < len(op.In) && d.needs[op.In[k]] {
					d.accumulate(op.In[k], g)
				}
			}
		})
		d.table = nil
	}
}

// accumulate adds a gradient to what a value has.
func (d *Differ) accumulate(v, g *Value) {
	old := d.grads[v]
	if old == nil {
		d.grads[v] = g
		return
	}
	if !old.Type.Place.Equal(g.Type.Place) {
		old, g = d.reduce(old), d.reduce(g)
	}
	d.grads[v] = d.Add(old, g)
}

// settled gives a value's gradient with the placement that it must have.
func (d *Differ) settled(v *Value) *Value {
	if d.grads[v] != nil {
		d.grads[v] = d.reduce(d.grads[v])
	}
	return d.grads[v]
}

// reduce sums what is still in terms.
func (d *Differ) reduce(g *Value) *Value {
	if axes := g.Type.Place.Axes(Partial); len(axes) > 0 {
		return d.AllReduce(g, axes...)
	}
	return g
}

// Use gives a forward value inside the backward graph: an input that both graphs have, a constant,
// a recomputed value, or a residual.
func (d *Differ) Use(v *Value) *Value {
	if u := d.used[v]; u != nil {
		return u
	}
	op := v.def
	switch {
	case op == nil:
		d.used[v] = d.InputLike(v, v.Type)
	case d.saveRows && reachesExperts(op):
		d.used[v] = d.savedRows(v)
	case len(op.In) == 0 || op.Tag != "" && slices.Contains(d.recompute, op.Tag) || cheaper(v):
		d.copy(op)
	case d.again(op):
		if from := op.In[0].def; d.used[op.In[0]] == nil {
			switch from.Kind {
			case "mul":
				d.copy(from)
			case "rms_norm":
				d.normAgain(from)
			}
		}
		d.copy(op)
	default:
		d.used[v] = d.residual(v)
	}
	return d.used[v]
}

// copy recomputes an operation in the backward graph.
func (d *Differ) copy(op *Op) {
	in := lists.Map(op.In, d.Use)
	for i, u := range d.CopyWith(op, op.Attrs, op.Body, in...) {
		d.used[op.Out[i]] = u
	}
}

// cheaper tells whether a value follows element by element from values that take no more memory:
// then these are saved, and it is recomputed. SwiGLU saves its gate and its other
// half and neither the sigmoid nor SiLU, as Megatron-Core's and TransformerEngine's fused forms do.
func cheaper(v *Value) bool {
	from, ops := map[*Value]bool{}, map[*Op]bool{}
	if !v.def.Elementwise() || !elementRoots(v, from, ops) {
		return false
	}
	var bytes int64
	for root := range from {
		if root.Role != Param {
			bytes += bytesOf(root)
		}
	}
	return bytes <= bytesOf(v)
}

// mostAgain is how many operations are recomputed for one value at most: the tanh form of GELU
// has 8.
const mostAgain = 12

// elementRoots collects the values that v follows from element by element, and is false if too
// many operations lie between.
func elementRoots(v *Value, from map[*Value]bool, ops map[*Op]bool) bool {
	if !v.def.Elementwise() {
		from[v] = true
		return true
	}
	if ops[v.def] {
		return true
	}
	if ops[v.def] = true; len(ops) > mostAgain {
		return false
	}
	return !slices.ContainsFunc(v.def.In, func(x *Value) bool { return !elementRoots(x, from, ops) })
}

// residual saves a forward value for the backward graph.
func (d *Differ) residual(v *Value) *Value {
	d.residuals = append(d.residuals, v)
	return d.Input(v.Name, Residual, v.Type, v.Source)
}

// Unbroadcast sums a gradient over the dimensions that an argument does not have, and gives it the
// argument's order of dimensions: the VJP of a broadcast. like is a value of either graph, of which
// only the type is read.
func (d *Differ) Unbroadcast(g, like *Value) *Value {
	if over := Names(Without(g.Type.Dims, Names(like.Type.Dims)...)); len(over) > 0 {
		g = d.Sum(g, over...)
	}
	return d.order(g, like)
}

// order puts dimensions into the order of another value.
func (d *Differ) order(g, like *Value) *Value {
	return d.Transpose(g, Names(like.Type.Dims)...)
}

// dotInto is the gradient of one argument of a dot: the product with the other argument, summed
// over everything that the argument does not have.
func (d *Differ) dotInto(dy, other, like *Value) *Value {
	over := lists.Filter(Without(dy.Type.Dims, Names(like.Type.Dims)...), func(dim Dim) bool {
		return other.Type.Index(dim.Name) >= 0
	})
	return d.Unbroadcast(d.Dot(dy, other, Names(over)...), like)
}

// unreduce repeats the gradient of a reduction along the dimensions that were reduced.
func (d *Differ) unreduce(g *Value, op *Op) *Value {
	x := op.In[0].Type
	for i, dim := range x.Dims {
		if !slices.Contains(op.Attrs.List("over"), dim.Name) {
			continue
		}
		a := map[string]any{"at": i, "dim": dim.Name, "size": dim.Size, "sharded": x.Place.Axes(dim.Name)}
		g = d.one("broadcast", attrs(a), g)
	}
	return g
}

// Split splits the backward graph into two that may run at different times, as zero-bubble
// pipelines do (Qi et al., 2023): the gradient of the data, which the stage before waits for, and
// the gradient of the parameters, which nobody waits for. Values of the first that the second needs
// are residuals, passed by name.
func (gr *Gradient) Split() (input, weight *Graph, err error) {
	late := func(i int) bool { return gr.Wrt[i].Role == Param }
	c := newSplitter(gr.Backward.Clone(), late)
	input, weight, _ = c.split(gr.Backward.Name+"_input", gr.Backward.Name+"_weight")
	if err := input.Verify(); err != nil {
		return nil, nil, err
	}
	return input, weight, weight.Verify()
}

// A splitter divides the operations of a graph by whether an early result needs them. Each
// operation goes to exactly one half; a loop whose results are needed by both is split into two
// loops.
type splitter struct {
	g     *Graph
	late  func(result int) bool
	early map[*Value]bool // values that the early half makes or is given
	names *fresh
}

// newSplitter divides a graph by its results: late tells which of them the second graph returns.
func newSplitter(g *Graph, late func(int) bool) *splitter {
	return &splitter{g: g, late: late, early: map[*Value]bool{}, names: newFresh(g)}
}

// split returns the early graph, whose results are the early ones and then the crossing values, and
// the late graph, which takes the crossing values among its inputs. Values keep their names.
func (c *splitter) split(earlyName, lateName string) (early, late *Graph, crossing []*Value) {
	c.mark()
	early = &Graph{Name: earlyName, Mesh: c.g.Mesh}
	late = &Graph{Name: lateName, Mesh: c.g.Mesh}
	isLate := func(v *Value) bool { return !c.early[v] }
	for _, op := range c.g.Ops {
		switch {
		case !c.isEarly(op):
			late.Ops = append(late.Ops, op)
		case op.Kind == "repeat" && slices.ContainsFunc(op.Out, isLate):
			first, second := c.cutRepeat(op)
			early.Ops, late.Ops = append(early.Ops, first), append(late.Ops, second)
		default:
			early.Ops = append(early.Ops, op)
		}
	}
	for i, v := range c.g.Results {
		if c.late(i) {
			late.Results = append(late.Results, v)
		} else {
			early.Results = append(early.Results, v)
		}
	}
	early.Inputs = inputsOf(early, c.g.Inputs)
	made := map[*Value]bool{}
	for _, op := range early.Ops {
		for _, v := range op.Out {
			made[v] = true
		}
	}
	handed := map[*Value]*Value{}
	var fetched []*Op
	var hand func(v *Value) *Value
	hand = func(v *Value) *Value {
		if !made[v] {
			return v
		}
		if handed[v] == nil && v.def.Kind == "to_device" {
			// From the host once more: to hand it over would keep it on the device.
			op := &Op{Kind: v.def.Kind, Tag: v.def.Tag, In: []*Value{hand(v.def.In[0])}}
			handed[v], fetched = op.gives(v.Name, v.Type), append(fetched, op)
		}
		if handed[v] == nil && rowsFormat(v) != "" {
			codes, rows := c.quantizedRows(v)
			for i, x := range codes.Out {
				made[x] = true
				rows.In[i] = hand(x)
			}
			early.Ops, fetched = append(early.Ops, codes), append(fetched, rows)
			handed[v] = rows.Out[0]
		}
		if handed[v] == nil {
			handed[v] = &Value{Name: v.Name, Type: v.Type, Role: Residual, Source: v.Source}
			crossing = append(crossing, v)
		}
		return handed[v]
	}
	for _, op := range late.Ops {
		for i, v := range op.In {
			op.In[i] = hand(v)
		}
	}
	for i, v := range late.Results {
		late.Results[i] = hand(v)
	}
	late.Ops = append(fetched, late.Ops...)
	late.Inputs = inputsOf(late, c.g.Inputs)
	for _, v := range crossing {
		late.Inputs = append(late.Inputs, handed[v])
	}
	early.Results = append(early.Results, crossing...)
	return early, late, crossing
}

// mark finds what the early results need. Of a repeat they may need the carries only.
func (c *splitter) mark() {
	for i, v := range c.g.Results {
		if !c.late(i) {
			c.early[v] = true
		}
	}
	for _, op := range slices.Backward(c.g.Ops) {
		if !c.isEarly(op) {
			continue
		}
		var inner *splitter // of a repeat
		if op.Kind == "repeat" {
			inner = c.bodyCutter(op)
			inner.mark()
		}
		for k, v := range op.In {
			if inner == nil || inner.early[op.Body.Inputs[k]] {
				c.early[v] = true
			}
		}
	}
}

// isEarly tells whether an operation belongs to the first graph.
func (c *splitter) isEarly(op *Op) bool {
	return slices.ContainsFunc(op.Out, func(v *Value) bool { return c.early[v] })
}

// bodyCutter divides a repeat's body: a carry is early if any round's early results may need it.
func (c *splitter) bodyCutter(op *Op) *splitter {
	lateAt := lists.Map(op.Out, func(v *Value) bool { return !c.early[v] })
	for { // a carry that an early result needs is early in the rounds before, and so on
		inner := newSplitter(op.Body, func(i int) bool { return lateAt[i] })
		inner.mark()
		changed := false
		for i := range op.Loop().Carries {
			if lateAt[i] && inner.early[op.Body.Inputs[i]] {
				lateAt[i], changed = false, true
			}
		}
		if !changed {
			return newSplitter(op.Body, func(i int) bool { return lateAt[i] })
		}
	}
}

// cutRepeat makes two repeats of one: the first has the early carries and stacks up what the
// second, which has the late carries and lays down the late stacks, takes over.
func (c *splitter) cutRepeat(op *Op) (first, second *Op) {
	whole := op.Loop()
	inner := c.bodyCutter(op)
	lateAt := inner.late
	early, late, crossing := inner.split(op.Body.Name+"_input", op.Body.Name+"_weight")
	// A carry of the first that the second reads is another value in every round: it is stacked too.
	for i, v := range op.Body.Inputs[:len(whole.Carries)] {
		if !lateAt(i) && slices.Contains(late.Inputs, v) {
			twin := &Value{Name: v.Name, Type: v.Type, Role: Residual}
			replace(late, v, twin)
			late.Inputs = append(late.Inputs, twin)
			early.Results = append(early.Results, v)
			crossing = append(crossing, v)
		}
	}
	first = &Op{Kind: "repeat", Tag: op.Tag, Body: early}
	second = &Op{Kind: "repeat", Tag: op.Tag, Body: late}
	for i, v := range op.Out {
		half := first
		if lateAt(i) {
			half = second
		}
		v.def = half
		half.Out = append(half.Out, v)
	}
	for _, v := range crossing {
		c.early[first.gives(c.names.name("kept"), v.Type.Stacked(whole.N))] = true
	}
	kept := first.Out[len(first.Out)-len(crossing):]
	first.arrange(whole, nil, nil)
	second.arrange(whole, crossing, kept)
	return first, second
}

// arrange gives one half of a repeat its arguments, in the order that a repeat has them, and the
// body's inputs in the same order.
func (half *Op) arrange(whole Loop, crossing, kept []*Value) {
	var in, body [3][]*Value
	for k, v := range whole.Body.Inputs {
		if !slices.Contains(half.Body.Inputs, v) {
			continue
		}
		part := 2
		if whole.IsCarry(k) {
			part = 0
		} else if whole.IsStack(k) {
			part = 1
		}
		in[part], body[part] = append(in[part], whole.In[k]), append(body[part], v)
	}
	for i, v := range crossing {
		at := slices.IndexFunc(half.Body.Inputs, func(u *Value) bool { return u.Name == v.Name })
		in[1], body[1] = append(in[1], kept[i]), append(body[1], half.Body.Inputs[at])
	}
	half.In = slices.Concat(in[0], in[1], in[2])
	half.Body.Inputs = slices.Concat(body[0], body[1], body[2])
	half.Attrs = loopAttrs(whole.Attrs, len(in[0]), len(in[1]))
}

// replace puts one value in the place of another.
func replace(g *Graph, from, to *Value) {
	swap := func(list []*Value) {
		for i, v := range list {
			if v == from {
				list[i] = to
			}
		}
	}
	for _, op := range g.Ops {
		swap(op.In)
	}
	swap(g.Results)
	g.Inputs = slices.DeleteFunc(g.Inputs, func(v *Value) bool { return v == from })
}

// inputsOf lists the inputs that a graph reads, in their order.
func inputsOf(g *Graph, all []*Value) []*Value {
	read := lists.Set(g.Results)
	for _, op := range g.Ops {
		for _, v := range op.In {
			read[v] = true
		}
	}
	return lists.Filter(all, func(v *Value) bool { return read[v] })
}

// Joint gives forward and backward as one graph: the results of the graph, then the gradients. The
// gradient of a scalar result, a loss, is 1; gradients of other results are inputs.
func (gr *Gradient) Joint() (*Graph, error) {
	f, b := gr.Forward.Clone(), gr.Backward.Clone()
	j := &Graph{Name: gr.Forward.Name + "_step", Mesh: f.Mesh, Inputs: f.Inputs, Ops: f.Ops}
	for _, v := range slices.Clone(b.Inputs) {
		if known := f.Find(v.Name); known != nil {
			replace(b, v, known)
			continue
		}
		if len(v.Type.Dims) > 0 {
			j.Inputs = append(j.Inputs, v)
			continue
		}
		one := &Op{Kind: "fill", Attrs: attrs(map[string]any{"type": v.Type.String(), "value": 1.0})}
		replace(b, v, one.gives(v.Name, v.Type))
		j.Ops = append(j.Ops, one)
	}
	for _, op := range b.Ops {
		if again := j.gathered(op); again != nil {
			for i, v := range op.Out {
				replace(b, v, again.Out[i])
			}
			continue
		}
		j.Ops = append(j.Ops, op)
	}
	j.Results = append(slices.Clone(f.Results[:len(gr.Seeds)]), b.Results...)
	return j, j.Verify()
}

// gathered finds what a graph has gathered already: in one program, outside loops, a compiler would
// find it too, and what is sent should be what the graph says.
func (g *Graph) gathered(op *Op) *Op {
	if op.Tag != Gather {
		return nil
	}
	return lists.Find(g.Ops, func(old *Op) bool { return old.Tag == Gather && sameOp(old, op) })
}

// sameOp tells whether two operations compute the same of the same.
func sameOp(a, b *Op) bool {
	if a.Kind != b.Kind || a.Body != nil || b.Body != nil || a.Attrs.String() != b.Attrs.String() {
		return false
	}
	return slices.EqualFunc(a.In, b.In, func(x, y *Value) bool {
		return x == y || x.def != nil && y.def != nil && sameOp(x.def, y.def) &&
			slices.Index(x.def.Out, x) == slices.Index(y.def.Out, y)
	})
}
