package spmd

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// A Held is a parameter of the stages of one rank of a pipeline.
type Held struct {
	optim.Param // its type is that of the gradient that the stages add up
	Layout      Layout
	// Shared tells that another rank has it, too, and Counts that its gradient counts here when the
	// norm is taken; of what is shared it counts once.
	Shared, Counts bool
}

// A Part is what one rank of a pipeline does at both ends of a step. Ranks know only the gradients
// of their own stages, while the norm is that of all: so what is one program without a pipeline is
// three here, between which ranks exchange the gradients of what they share, and one number.
type Part struct {
	// Zero gives the gradients that the stages add to: zeros.
	Zero *ir.Graph
	// Reduce takes the gradients and leaves each device its piece of their sums over the rank's mesh.
	Reduce *ir.Graph
	// Square takes these, and of shared parameters those of the other rank, which it adds
	// ([program.PeerGradient]). It gives the sum of all squares that count here, [optim.Square].
	Square *ir.Graph
	// Update takes the gradients and the sum of the squares of all ranks ([optim.Optimizer.Part]).
	Update *ir.Graph
	// Quantize is as that of [Step].
	Quantize *ir.Graph

	Held []Held
}

// NewPart builds the graphs of a rank, whose stages take the copies in blocks that they
// asked for.
func NewPart(p *plan.Plan, o optim.Optimizer, held []Held, w *Blocks) (*Part, error) {
	e := &ending{plan: p, o: o, blocks: w}
	var names []string
	for _, h := range held {
		e.params, e.layouts = append(e.params, h.Param), append(e.layouts, h.Layout)
		names = append(names, h.Name)
	}
	part := &Part{Held: held}
	var err error
	part.Quantize, err = w.graph(p.Mesh(), names, func(i int) (ir.Type, *Layout) {
		return held[i].Layout.Stored, &held[i].Layout
	})
	if err != nil {
		return nil, err
	}
	for _, build := range []func(*ending) error{part.zero, part.reduce, part.square, part.update} {
		if err := build(e); err != nil {
			return nil, err
		}
	}
	return part, nil
}

func (t *Part) zero(e *ending) (err error) {
	u := newSharder("zero", e.plan)
	var out []result
	for _, p := range e.params {
		out = append(out, gradient(u.b.Fill(p.Type, 0), p.Name, false))
	}
	t.Zero, err = named(u.b, out)
	return err
}

func (t *Part) reduce(e *ending) (err error) {
	u := newSharder("reduce", e.plan)
	var out []result
	for i, p := range e.params {
		g := e.reduced(u, i)
		if g.Def() == nil {
			g = u.b.Scale(g, 1) // a result of its own
		}
		out = append(out, gradient(g, p.Name, true))
	}
	t.Reduce, err = named(u.b, out)
	return err
}

// sum takes a gradient as Reduce gives it.
func (e *ending) sum(u *sharder, i int) *ir.Value {
	stored := e.layouts[i].Stored
	t := ir.Type{Elem: e.params[i].Type.Elem, Dims: stored.Dims, Place: stored.Place}
	return u.gradient(e.params[i].Name, t)
}

func (t *Part) square(e *ending) error {
	u := newSharder("square", e.plan)
	var counting []optim.Param
	bound := map[string]binding{}
	var out []result
	for i, p := range e.whole() {
		h := t.Held[i]
		if h.Counts {
			counting = append(counting, p)
		}
		if !h.Shared {
			bound[program.Gradient.Of(p.Name)] = func(*ir.Value) *ir.Value { return e.sum(u, i) }
			continue
		}
		mine := e.sum(u, i)
		other := u.b.Input(program.PeerGradient.Of(p.Name), ir.Data, mine.Type, "")
		both := u.b.Add(mine, other.As(program.PeerGradient.For(p.Name)))
		bound[program.Gradient.Of(p.Name)] = func(*ir.Value) *ir.Value { return both }
		out = append(out, gradient(both, p.Name, true))
	}
	whole, err := optim.Squares(counting)
	if err != nil {
		return err
	}
	if err := u.rebuild(whole, bound); err != nil {
		return err
	}
	total := u.settled(u.at[whole.Results[0]])
	t.Square, err = named(u.b, append(out, result{total, optim.Square, program.Scalar.For("")}))
	return err
}

func (t *Part) update(e *ending) error {
	whole, err := e.o.Part(e.whole())
	if err != nil {
		return err
	}
	u := newSharder(whole.Name, e.plan)
	bound := e.kept(u)
	for i, p := range e.params {
		bound[program.Gradient.Of(p.Name)] = func(*ir.Value) *ir.Value { return e.sum(u, i) }
	}
	if err := u.rebuild(whole, bound); err != nil {
		return err
	}
	if t.Update, err = e.results(u, whole); err == nil && e.plan.Offloads(plan.OptimizerState) {
		t.Update, err = offloaded(t.Update)
	}
	return err
}
