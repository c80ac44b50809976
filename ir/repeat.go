package ir

import (
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A repeat runs its body n times. Its arguments, and the inputs of the body, come in three parts:
// carries, which each round takes from the one before; stacked values, of which each round gets its
// own slice; and the rest, which every round sees. The body's results are the carries and what is
// stacked up, round by round. A repeat that goes in reverse takes the slices, and lays its own
// down, from the last to the first.

// Layer is the name of the dimension along which a repeat stacks.
const Layer = "layer"

func repeatKinds() map[string]kind {
	return map[string]kind{"repeat": {-1, inferRepeat, repeatVJP}}
}

func inferRepeat(g *Graph, op *Op) ([]Type, error) {
	n, carries := op.Attrs.Int("n"), int(op.Attrs.Int("carries"))
	stacked, body := int(op.Attrs.Int("stacked")), op.Body
	if body == nil || n < 1 || carries < 0 || stacked < 0 || carries+stacked > len(op.In) {
		return nil, fmt.Errorf("%d rounds with %d carries and %d stacks of %d arguments", n, carries,
			stacked, len(op.In))
	}
	if err := body.Verify(); err != nil {
		return nil, err
	}
	if !slices.Equal(body.Mesh, g.Mesh) {
		return nil, fmt.Errorf("the body is for another mesh")
	}
	if len(body.Inputs) != len(op.In) || len(body.Results) < carries {
		return nil, fmt.Errorf("the body takes %d values and gives %d", len(body.Inputs),
			len(body.Results))
	}
	for i, v := range op.In {
		t := v.Type
		if i >= carries && i < carries+stacked {
			if len(t.Dims) == 0 || t.Dims[0] != (Dim{Layer, n}) {
				return nil, fmt.Errorf("%s is not a stack of %d", v.Type, n)
			}
			t = Type{t.Elem, t.Dims[1:], t.Place}
		}
		if !t.Equal(body.Inputs[i].Type) {
			return nil, fmt.Errorf("the body takes %s for %s", body.Inputs[i].Type, v.Type)
		}
	}
	var types []Type
	for i, v := range body.Results {
		t := v.Type
		if i < carries {
			if !t.Equal(op.In[i].Type) {
				return nil, fmt.Errorf("carry %d goes in as %s and comes out as %s", i, op.In[i].Type, t)
			}
		} else {
			t = Type{t.Elem, append([]Dim{{Layer, n}}, t.Dims...), t.Place}
		}
		types = append(types, t)
	}
	return types, nil
}

// Repeat runs a body n times over stacked values; rest is what every round sees. The results are
// the last carries, then what the body gives beside them, stacked.
func (b *Builder) Repeat(n int64, body *Graph, carries, stacked, rest []*Value) []*Value {
	a := attrs(map[string]any{"n": n, "carries": len(carries), "stacked": len(stacked)})
	return b.op("repeat", a, body, slices.Concat(carries, stacked, rest)...)
}

// repeatVJP turns a repeat into one that also stacks up what the gradient needs, and adds a repeat
// that goes back over the stacks: its carries are the gradients of the carries, and sums of the
// gradients of what every round saw; it lays down the gradients of the stacks.
func repeatVJP(d *differ, op *Op, dout []*Value) []*Value {
	r := &repeatGrad{d: d, op: op, carries: int(op.Attrs.Int("carries")),
		stacked: int(op.Attrs.Int("stacked"))}
	if err := r.differentiate(); err != nil {
		d.b.fail(err)
		return make([]*Value, len(op.In))
	}
	return r.back(dout)
}

type repeatGrad struct {
	d                *differ
	op               *Op
	carries, stacked int
	wrt              []int // arguments that get a gradient
	grad             *Gradient
	kept             map[string]*Value // stacks of residuals, by the name they have in the body
}

// differentiate takes the gradient of the body and lets the forward repeat keep its residuals.
func (r *repeatGrad) differentiate() error {
	body := r.op.Body
	var names []string
	for i, v := range r.op.In {
		// A carry is differentiated if anything flows through it, even from within the body.
		if v.Type.Elem.Kind() == dtype.Float && (i < r.carries || r.d.needs[v]) {
			r.wrt = append(r.wrt, i)
			names = append(names, body.Inputs[i].Name)
		}
	}
	grad, err := Grad(body, GradPlan{Wrt: names, Recompute: r.d.recompute, Terms: r.d.terms})
	if err != nil {
		return err
	}
	r.grad, r.kept = grad, map[string]*Value{}
	// Carries that the gradient reads change from round to round, so they are kept like residuals.
	for i, v := range grad.Forward.Inputs[:r.carries] {
		if grad.Backward.Find(v.Name) != nil && i < r.carries {
			grad.Forward.Results = append(grad.Forward.Results, v)
		}
	}
	names2 := newFresh(r.d.fwd)
	n := r.op.Attrs.Int("n")
	for _, v := range grad.Forward.Results[len(body.Results):] {
		t := Type{v.Type.Elem, append([]Dim{{Layer, n}}, v.Type.Dims...), v.Type.Place}
		stack := &Value{Name: names2.name("kept"), Type: t, def: r.op}
		r.op.Out = append(r.op.Out, stack)
		r.kept[v.Name] = stack
		r.d.b.names.used[stack.Name] = true
	}
	if r.d.offload {
		r.toHost(grad.Forward.Results[len(body.Results):])
	}
	r.op.Body = grad.Forward
	return nil
}

// toHost moves what a round keeps to the host, and back in the round that takes it.
func (r *repeatGrad) toHost(kept []*Value) {
	fwd, bw := r.grad.Forward, r.grad.Backward
	there, back := newFresh(fwd), newFresh(bw)
	var fetched []*Op
	for i, v := range kept {
		op := &Op{Kind: "to_host", In: []*Value{v}}
		op.Out = []*Value{{Name: there.name("host"), Type: v.Type, def: op}}
		fwd.Ops, kept[i] = append(fwd.Ops, op), op.Out[0]
		in, inputs := bw.Find(v.Name), slices.Clone(bw.Inputs)
		op = &Op{Kind: "to_device", In: []*Value{in}}
		op.Out = []*Value{{Name: back.name("kept"), Type: v.Type, Source: v.Source, def: op}}
		replace(bw, in, op.Out[0])
		bw.Inputs, fetched = inputs, append(fetched, op)
	}
	bw.Ops = append(fetched, bw.Ops...)
}

// back builds the repeat that goes in reverse.
func (r *repeatGrad) back(dout []*Value) []*Value {
	b, bw := r.d.b, r.grad.Backward
	nb := &Graph{Name: bw.Name, Mesh: bw.Mesh, Ops: bw.Ops}
	var carries, stacks, rest []*Value // in the outer graph
	var stackIn, restIn []*Value       // the same in the body
	given := map[string]bool{}
	// Gradients of the carries come first: each round takes them from the round after it.
	var carryOut []*Value
	own, stacked := r.parts()
	for k, i := range r.wrt[:own] {
		v := r.grad.Forward.Results[i]
		seed := dout[i]
		if seed == nil {
			seed = b.Fill(dual(r.op.Out[i].Type), 0)
		}
		carries = append(carries, seed)
		in := bw.Find(r.grad.Seeds[i])
		if in == nil { // nothing in the body depends on what comes in here
			in = &Value{Name: "d." + v.Name + ".in", Type: dual(v.Type), Role: Residual}
		}
		nb.Inputs = append(nb.Inputs, in)
		given[in.Name] = true
		carryOut = append(carryOut, bw.Results[k])
	}
	// What every round saw gets the sum of the gradients of all rounds.
	names := newFresh(bw)
	for _, v := range bw.Results[own+stacked:] {
		t := v.Type
		sum := &Value{Name: names.name("total"), Type: t, Role: Residual}
		add := &Op{Kind: "add", In: []*Value{sum, v}}
		add.Out = []*Value{{Name: names.name("add"), Type: t, def: add}}
		nb.Inputs, nb.Ops = append(nb.Inputs, sum), append(slices.Clip(nb.Ops), add)
		carries = append(carries, b.Fill(t, 0))
		carryOut = append(carryOut, add.Out[0])
	}
	for _, v := range bw.Inputs {
		if given[v.Name] {
			continue
		}
		if outer, isStack := r.source(v, dout); isStack {
			stacks, stackIn = append(stacks, outer), append(stackIn, v)
		} else {
			rest, restIn = append(rest, outer), append(restIn, v)
		}
	}
	nb.Inputs = slices.Concat(nb.Inputs, stackIn, restIn)
	nb.Results = append(carryOut, bw.Results[own:own+stacked]...)
	a := attrs(map[string]any{"n": r.op.Attrs.Int("n"), "carries": len(carries),
		"stacked": len(stacks), "reverse": !r.op.Attrs.Bool("reverse"),
		"first": r.op.Attrs.get("first")})
	out := b.op("repeat", a, nb, slices.Concat(carries, stacks, rest)...)
	grads := make([]*Value, len(r.op.In))
	for k, i := range slices.Concat(r.wrt[:own], r.wrt[own+stacked:], r.wrt[own:own+stacked]) {
		grads[i] = out[k]
	}
	return grads
}

// parts counts, of the arguments that get a gradient, the carries and the stacks after them.
func (r *repeatGrad) parts() (own, stacked int) {
	own, _ = slices.BinarySearch(r.wrt, r.carries)
	to, _ := slices.BinarySearch(r.wrt, r.carries+r.stacked)
	return own, to - own
}

// source finds what an input of the backward body is in the outer backward graph.
func (r *repeatGrad) source(v *Value, dout []*Value) (outer *Value, stack bool) {
	for i, name := range r.grad.Seeds { // the gradient of something that the body stacked up
		if name == v.Name && i >= r.carries {
			if dout[i] == nil {
				return r.d.b.Fill(dual(r.op.Out[i].Type), 0), true
			}
			return dout[i], true
		}
	}
	if kept := r.kept[v.Name]; kept != nil {
		return r.d.use(kept), true
	}
	i := slices.IndexFunc(r.op.Body.Inputs, func(in *Value) bool { return in.Name == v.Name })
	if i < 0 {
		r.d.b.fail(fmt.Errorf("the gradient of the body asks for %s", v))
		return nil, false
	}
	return r.d.use(r.op.In[i]), i >= r.carries && i < r.carries+r.stacked
}

// dual is the type of a value's gradient.
func dual(t Type) Type { return Type{t.Elem, t.Dims, dualPlace(t.Place)} }

// Unroll writes the rounds of every repeat one after another, and makes of each stack that goes
// into one an input for each round: stack w becomes w.0, w.1 and so on. On a CPU the gradient of a
// slice of a stack costs more than the stack saves; short stacks are faster without.
//
// It is for graphs before their gradient is taken: a repeat must take its stacks from inputs, and
// must not stack anything up.
func Unroll(g *Graph) (*Graph, error) {
	u := &unroller{from: g, to: &Graph{Name: g.Name, Mesh: g.Mesh}, at: map[*Value]*Value{},
		layers: map[*Value][]*Value{}}
	u.inputs()
	u.names = newFresh(u.to)
	for _, op := range g.Ops {
		if op.Kind != "repeat" {
			u.copy(op, u.at)
			continue
		}
		if err := u.rounds(op); err != nil {
			return nil, diag.New(diag.GraphInvalid, "cannot unroll: %v", err).At("graph %s", g.Name)
		}
	}
	for _, v := range g.Results {
		u.to.Results = append(u.to.Results, u.at[v])
	}
	if slices.Contains(u.to.Results, nil) {
		return nil, diag.New(diag.GraphInvalid, "cannot unroll: a stack is a result").
			At("graph %s", g.Name)
	}
	return u.to, u.to.Verify()
}

// LayerName is the name of one layer of a stack that was unrolled.
func LayerName(stack string, layer int) string { return fmt.Sprintf("%s.%d", stack, layer) }

// SegmentName is the name of what stands for some layers of a stack, from one of them on.
func SegmentName(stack string, from int64) string {
	if from == 0 {
		return stack
	}
	return fmt.Sprintf("%s.from%d", stack, from)
}

// Segment cuts every repeat before the given rounds, and each stack that goes into one with it, so
// that what follows can treat layers differently. It is for graphs as those of [Unroll].
func Segment(g *Graph, before []int64) (*Graph, error) {
	u := &unroller{from: g, to: &Graph{Name: g.Name, Mesh: g.Mesh}, at: map[*Value]*Value{}}
	parts := map[*Value][]*Value{}
	stacks := u.stacks()
	for _, v := range g.Inputs {
		for from, to := range segments(stacks[v], before) {
			one := &Value{Name: SegmentName(v.Name, from), Type: v.Type, Role: v.Role, Source: v.Source}
			if stacks[v] > 0 {
				one.Type.Dims = slices.Clone(v.Type.Dims)
				one.Type.Dims[0].Size = to - from
			}
			u.at[v], parts[v] = one, append(parts[v], one)
			u.to.Inputs = append(u.to.Inputs, one)
		}
	}
	u.names = newFresh(u.to)
	for _, op := range g.Ops {
		if op.Kind != "repeat" {
			u.copy(op, u.at)
			continue
		}
		if err := u.cut(op, parts, before); err != nil {
			return nil, diag.New(diag.GraphInvalid, "cannot cut: %v", err).At("graph %s", g.Name)
		}
	}
	for _, v := range g.Results {
		u.to.Results = append(u.to.Results, u.at[v])
	}
	return u.to, u.to.Verify()
}

// segments gives the runs of n rounds between cuts; without rounds one run of nothing.
func segments(n int64, before []int64) iter.Seq2[int64, int64] {
	return func(yield func(from, to int64) bool) {
		from := int64(0)
		for _, at := range before {
			if at > from && at < n {
				if !yield(from, at) {
					return
				}
				from = at
			}
		}
		yield(from, n)
	}
}

// cut writes a repeat once for each run of its rounds.
func (u *unroller) cut(op *Op, parts map[*Value][]*Value, before []int64) error {
	carries, stacked := int(op.Attrs.Int("carries")), int(op.Attrs.Int("stacked"))
	if len(op.Out) > carries {
		return fmt.Errorf("a repeat stacks up %s", op.Out[carries])
	}
	at := maps.Clone(u.at)
	part := 0
	for from, to := range segments(op.Attrs.Int("n"), before) {
		for _, v := range op.In[carries : carries+stacked] {
			if parts[v] == nil {
				return fmt.Errorf("stack %s is not an input", v)
			}
			at[v] = parts[v][part]
		}
		one := *op
		one.Body = op.Body.Clone()
		one.Attrs = op.Attrs.With("n", to-from).With("first", op.Attrs.Int("first")+from)
		u.copy(&one, at)
		for i, v := range op.In[:carries] {
			at[v] = at[op.Out[i]]
		}
		part++
	}
	for _, v := range op.Out {
		u.at[v] = at[v]
	}
	return nil
}

type unroller struct {
	from, to *Graph
	names    *fresh
	at       map[*Value]*Value   // values of the old graph in the new one
	layers   map[*Value][]*Value // stacks of the old graph, layer by layer
}

// stacks gives the rounds of the inputs that repeats take slices of.
func (u *unroller) stacks() map[*Value]int64 {
	stacks := map[*Value]int64{}
	for _, op := range u.from.Ops {
		if op.Kind == "repeat" {
			first := int(op.Attrs.Int("carries"))
			for _, v := range op.In[first : first+int(op.Attrs.Int("stacked"))] {
				stacks[v] = op.Attrs.Int("n")
			}
		}
	}
	return stacks
}

// inputs copies the inputs, those that are stacks of a repeat layer by layer.
func (u *unroller) inputs() {
	stacks := u.stacks()
	for _, v := range u.from.Inputs {
		if stacks[v] == 0 {
			u.at[v] = &Value{Name: v.Name, Type: v.Type, Role: v.Role, Source: v.Source}
			u.to.Inputs = append(u.to.Inputs, u.at[v])
			continue
		}
		t := Type{v.Type.Elem, v.Type.Dims[1:], v.Type.Place}
		for i := range int(stacks[v]) {
			one := &Value{Name: LayerName(v.Name, i), Type: t, Role: v.Role, Source: v.Source}
			u.layers[v] = append(u.layers[v], one)
			u.to.Inputs = append(u.to.Inputs, one)
		}
	}
}

// rounds writes the body of a repeat once for each round.
func (u *unroller) rounds(op *Op) error {
	n, carries := int(op.Attrs.Int("n")), int(op.Attrs.Int("carries"))
	stacked := int(op.Attrs.Int("stacked"))
	if len(op.Out) > carries {
		return fmt.Errorf("a repeat stacks up %s", op.Out[carries])
	}
	carried := make([]*Value, carries)
	for i, v := range op.In[:carries] {
		carried[i] = u.at[v]
	}
	for round := range n {
		layer := round
		if op.Attrs.Bool("reverse") {
			layer = n - 1 - round
		}
		at := map[*Value]*Value{}
		for i, v := range op.Body.Inputs {
			switch {
			case i < carries:
				at[v] = carried[i]
			case i < carries+stacked:
				one := u.layers[op.In[i]]
				if one == nil {
					return fmt.Errorf("stack %s is not an input", op.In[i])
				}
				at[v] = one[layer]
			default:
				at[v] = u.at[op.In[i]]
			}
			if at[v] == nil {
				return fmt.Errorf("%s is a stack and is used as a whole", op.In[i])
			}
		}
		for _, inner := range op.Body.Ops {
			if inner.Kind == "repeat" {
				return fmt.Errorf("a repeat stands in a repeat")
			}
			u.copy(inner, at)
		}
		for i, v := range op.Body.Results[:carries] {
			carried[i] = at[v]
		}
	}
	for i, v := range op.Out {
		u.at[v] = carried[i]
	}
	return nil
}

// copy writes one operation, with its arguments and results as at has them.
func (u *unroller) copy(op *Op, at map[*Value]*Value) {
	twin := &Op{Kind: op.Kind, Attrs: op.Attrs, Tag: op.Tag, Body: op.Body}
	for _, v := range op.In {
		twin.In = append(twin.In, at[v])
	}
	for _, v := range op.Out {
		w := &Value{Name: u.names.name(v.Name), Type: v.Type, Source: v.Source, def: twin}
		at[v] = w
		twin.Out = append(twin.Out, w)
	}
	u.to.Ops = append(u.to.Ops, twin)
}
