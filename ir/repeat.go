package ir

import (
	"fmt"
	"slices"

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
	grad, err := Grad(body, GradPlan{Wrt: names, Recompute: r.d.recompute})
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
	r.op.Body = grad.Forward
	return nil
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
	for k, i := range r.wrt {
		if i >= r.carries {
			continue
		}
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
	for k, i := range r.wrt {
		if i < r.carries+r.stacked {
			continue
		}
		t := bw.Results[k].Type
		sum := &Value{Name: names.name("total"), Type: t, Role: Residual}
		add := &Op{Kind: "add", In: []*Value{sum, bw.Results[k]}}
		add.Out = []*Value{{Name: names.name("add"), Type: t, def: add}}
		nb.Inputs, nb.Ops = append(nb.Inputs, sum), append(slices.Clip(nb.Ops), add)
		carries = append(carries, b.Fill(t, 0))
		carryOut = append(carryOut, add.Out[0])
	}
	var laid []*Value
	for k, i := range r.wrt {
		if i >= r.carries && i < r.carries+r.stacked {
			laid = append(laid, bw.Results[k])
		}
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
	nb.Results = append(carryOut, laid...)
	a := attrs(map[string]any{"n": r.op.Attrs.Int("n"), "carries": len(carries),
		"stacked": len(stacks), "reverse": !r.op.Attrs.Bool("reverse")})
	out := b.op("repeat", a, nb, slices.Concat(carries, stacks, rest)...)
	return r.deal(out, len(carries))
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

// deal hands the results of the backward repeat to the arguments of the forward one.
func (r *repeatGrad) deal(out []*Value, carries int) []*Value {
	grads := make([]*Value, len(r.op.In))
	at, stackAt := 0, carries
	for _, part := range []func(i int) bool{
		func(i int) bool { return i < r.carries },
		func(i int) bool { return i >= r.carries+r.stacked },
	} {
		for _, i := range r.wrt {
			if part(i) {
				grads[i] = out[at]
				at++
			}
		}
	}
	for _, i := range r.wrt {
		if i >= r.carries && i < r.carries+r.stacked {
			grads[i] = out[stackAt]
			stackAt++
		}
	}
	return grads
}

// dual is the type of a value's gradient.
func dual(t Type) Type { return Type{t.Elem, t.Dims, dualPlace(t.Place)} }
