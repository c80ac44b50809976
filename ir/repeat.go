package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// repeatKinds is the loop.
func repeatKinds() map[string]Kind {
	return map[string]Kind{"repeat": {-1, inferRepeat, repeatVJP, nil}}
}

// inferRepeat checks that the body takes what the loop has: carries and invariants as they are, one
// slice of each stack.
func inferRepeat(g *Graph, op *Op) ([]Type, error) {
	n, body, all := op.Attrs.Int("n"), op.Body, int64(len(op.In))
	carries, stacked := op.Attrs.Int("carries"), op.Attrs.Int("stacked")
	if body == nil || n < 1 || carries < 0 || stacked < 0 || carries > all || stacked > all-carries {
		return nil, fmt.Errorf("%d rounds with %d carries and %d stacks of %d arguments", n, carries,
			stacked, all)
	}
	l := op.Loop()
	if err := body.Verify(); err != nil {
		return nil, err
	}
	if !slices.Equal(body.Mesh, g.Mesh) {
		return nil, fmt.Errorf("the body is for another mesh")
	}
	if len(body.Inputs) != len(op.In) || len(body.Results) < len(l.Carries) {
		return nil, fmt.Errorf("the body takes %d values and gives %d", len(body.Inputs),
			len(body.Results))
	}
	for i, v := range op.In {
		t := v.Type
		if l.IsStack(i) {
			if len(t.Dims) == 0 || t.Dims[0] != (Dim{Layer, n}) {
				return nil, fmt.Errorf("%s is not a stack of %d", v.Type, n)
			}
			t = t.Slice()
		}
		if !t.Equal(body.Inputs[i].Type) {
			return nil, fmt.Errorf("the body takes %s for %s", body.Inputs[i].Type, v.Type)
		}
	}
	var types []Type
	for i, v := range body.Results {
		if !l.IsCarry(i) {
			types = append(types, v.Type.Stacked(n))
			continue
		}
		if t := op.In[i].Type; !v.Type.Equal(t) {
			return nil, fmt.Errorf("carry %d goes in as %s and comes out as %s", i, t, v.Type)
		}
		types = append(types, v.Type)
	}
	return types, nil
}

// Repeat runs a body n times. carries go from round to round; of each stack [layer=n, ...] a round
// gets its own slice; rest is the same in every round. The results are the last carries, then the
// body's further results, stacked [layer=n, ...].
func (b *Builder) Repeat(n int64, body *Graph, carries, stacked, rest []*Value) []*Value {
	a := loopAttrs(attrs(map[string]any{"n": n}), len(carries), len(stacked))
	return b.op("repeat", a, body, slices.Concat(carries, stacked, rest)...)
}

// repeatVJP makes the forward loop stack the residuals of its body, and adds a loop in reverse
// order over these stacks. The carries of the reverse loop are the gradients of the carries and,
// summed over rounds, of the invariants; it stacks the gradients of the stacks. Memory grows with
// depth by the residuals alone.
func repeatVJP(d *Differ, op *Op, dout []*Value) []*Value {
	r := &repeatGrad{d: d, Loop: op.Loop()}
	if err := r.differentiate(); err != nil {
		d.fail(err)
		return make([]*Value, len(op.In))
	}
	return r.back(dout)
}

// A repeatGrad takes the gradient of one loop. Arguments that get a gradient are listed by index in
// wrt, in the order carries, stacks, invariants.
type repeatGrad struct {
	Loop
	d    *Differ
	wrt  []int // arguments that get a gradient
	grad *Gradient
	kept map[string]*Value // stacks of residuals, by the name they have in the body
}

// differentiate takes the gradient of the body and lets the forward loop stack its residuals. Every
// carry gets a gradient, even if none flows in from outside: one may flow within the body.
func (r *repeatGrad) differentiate() error {
	body := r.Body
	var wrt []string
	for i, v := range r.In {
		// A carry is differentiated if anything flows through it, even from within the body.
		if v.Type.Elem.Kind() == dtype.Float && (r.IsCarry(i) || r.d.needs[v]) {
			r.wrt = append(r.wrt, i)
			wrt = append(wrt, body.Inputs[i].Name)
		}
	}
	grad, err := Grad(body, GradPlan{Wrt: wrt, Recompute: r.d.recompute, Terms: r.d.terms,
		SaveRows: r.d.saveRows, Requantize: r.d.requant})
	if err != nil {
		return err
	}
	r.grad, r.kept = grad, map[string]*Value{}
	// Carries that the gradient reads change from round to round, so they are kept like residuals.
	for _, v := range grad.Forward.Inputs[:len(r.Carries)] {
		if grad.Backward.Find(v.Name) != nil {
			grad.Forward.Results = append(grad.Forward.Results, v)
		}
	}
	names := newFresh(r.d.fwd)
	for _, v := range grad.Forward.Results[len(body.Results):] {
		stack := r.gives(names.name("kept"), v.Type.Stacked(r.N))
		r.kept[v.Name] = stack
		r.d.names.used[stack.Name] = true
	}
	if r.d.offload {
		r.toHost(grad.Forward.Results[len(body.Results):])
	}
	r.Body = grad.Forward
	return nil
}

// toHost offloads the residuals of a round to the host, and copies them back in the round that
// reads them. If there is but one round, source copies them before the loop: XLA unrolls such a
// loop, makes a bitcast of the slice on the host and refuses it, since a bitcast cannot change the
// memory.
func (r *repeatGrad) toHost(kept []*Value) {
	fwd, bw := r.grad.Forward, r.grad.Backward
	there, back := newFresh(fwd), newFresh(bw)
	var fetched []*Op
	for i, v := range kept {
		op := &Op{Kind: "to_host", In: []*Value{v}}
		kept[i] = op.gives(there.name("host"), v.Type)
		fwd.Ops = append(fwd.Ops, op)
		if r.N == 1 {
			continue
		}
		in, inputs := bw.Find(v.Name), slices.Clone(bw.Inputs)
		op = &Op{Kind: "to_device", In: []*Value{in}}
		replace(bw, in, op.gives(back.name("kept"), v.Type))
		bw.Inputs, fetched = inputs, append(fetched, op)
	}
	bw.Ops = append(fetched, bw.Ops...)
}

// back builds the reverse loop. Its body is the backward graph of the body, with inputs sorted into
// carries, stacks and invariants.
func (r *repeatGrad) back(dout []*Value) []*Value {
	b, bw := r.d.Builder, r.grad.Backward
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
			seed = b.Fill(dual(r.Out[i].Type), 0)
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
		carryOut = append(carryOut, add.gives(names.name("add"), t))
		nb.Inputs, nb.Ops = append(nb.Inputs, sum), append(slices.Clip(nb.Ops), add)
		carries = append(carries, b.Fill(t, 0))
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
	a := loopAttrs(r.Attrs.With("reverse", !r.Reverse), len(carries), len(stacks))
	out := b.op("repeat", a, nb, slices.Concat(carries, stacks, rest)...)
	grads := make([]*Value, len(r.In))
	for k, i := range slices.Concat(r.wrt[:own], r.wrt[own+stacked:], r.wrt[own:own+stacked]) {
		grads[i] = out[k]
	}
	return grads
}

// parts counts, of the arguments that get a gradient, the carries and the stacks after them.
func (r *repeatGrad) parts() (own, stacked int) {
	own, _ = slices.BinarySearch(r.wrt, len(r.Carries))
	to, _ := slices.BinarySearch(r.wrt, len(r.Carries)+len(r.Stacks))
	return own, to - own
}

// source finds what an input of the backward body is in the outer backward graph: the gradient of a
// stacked result, a stack of residuals, or an argument of the loop.
func (r *repeatGrad) source(v *Value, dout []*Value) (outer *Value, stack bool) {
	for i, name := range r.grad.Seeds { // the gradient of something that the body stacked up
		if name == v.Name && !r.IsCarry(i) {
			if dout[i] == nil {
				return r.d.Fill(dual(r.Out[i].Type), 0), true
			}
			return dout[i], true
		}
	}
	if kept := r.kept[v.Name]; kept != nil {
		outer = r.d.Use(kept)
		if r.d.offload && r.N == 1 {
			outer = r.d.ToDevice(outer, nil)
		}
		return outer, true
	}
	i := slices.IndexFunc(r.Body.Inputs, func(in *Value) bool { return in.Name == v.Name })
	if i < 0 {
		r.d.fail(fmt.Errorf("the gradient of the body asks for %s", v))
		return nil, false
	}
	return r.d.Use(r.In[i]), r.IsStack(i)
}
