package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// A RankParam is a parameter of the stages of one rank of a pipeline.
type RankParam struct {
	optim.Param // its type is that of the gradient that the stages add up
	Layout      Layout
	// Shared tells that another rank has it, too, and Counts that its gradient counts here when the
	// norm is taken; of what is shared it counts once.
	Shared, Counts bool
}

// An End says how an update is made.
type End struct {
	Plan      *plan.Plan // nil is one device
	Optimizer optim.Optimizer
	Copies    *QuantizedCopies // the quantized copies that the update makes, as stages asked for them
	// Zero asks for the graph that makes accumulators; Inspect for the one that measures the errors
	// of copies.
	Zero, Inspect bool
	// State keeps what the optimizer keeps between updates in the memory of the host.
	State bool
	// Fused makes one graph of reduce, square and update, where no rank has to hear of another
	// in between.
	Fused bool
}

// A Part is what one rank of a pipeline does at both ends of a step; a mesh is a pipeline of one
// rank. Ranks know only the gradients of their own stages, while the norm is that of all: so an
// update is three programs, between which ranks exchange the gradients of what they share, and one
// number.
type Part struct {
	// Zero gives the gradients that the stages add to: zeros. It is nil where the first microbatch
	// gives them.
	Zero *ir.Graph
	// Reduce takes the gradients and leaves each device its piece of their sums over the rank's mesh;
	// nil if they are that already, or if Update does it.
	Reduce *ir.Graph
	// Square takes these, and of shared parameters those of the other rank, which it adds
	// ([program.PeerGradient]). It gives the sum of all squares that count here, [optim.Square]; nil
	// if Update does it.
	Square *ir.Graph
	// Update takes the gradients and the sum of the squares of all ranks ([optim.Optimizer.Part]), or
	// it is fused ([optim.Optimizer.Update]).
	Update *ir.Graph
	// Quantize makes the copies that the others take of the parameters; nil if they take none that
	// are quantized.
	Quantize *ir.Graph
	// Inspect measures the errors of the quantized copies of the masters ([CopyErrors]), and Measured
	// says where they stand, by the names of the copies' scales; nil if that was not asked for.
	Inspect  *ir.Graph
	Measured map[string]Measured

	RankParams []RankParam

	copies *QuantizedCopies
}

// NewPart builds the graphs of a rank.
func NewPart(held []RankParam, o End) (*Part, error) {
	if o.Plan == nil {
		o.Plan = plan.Default()
	}
	e := &updateBuilder{End: o, params: held}
	t := &Part{RankParams: held, copies: o.Copies}
	builds := []func(*updateBuilder) error{t.quantize, t.reduce, t.square, t.update}
	if o.Fused {
		builds = []func(*updateBuilder) error{t.quantize, t.fused}
	}
	if o.Zero {
		builds = append(builds, t.zero)
	}
	for _, build := range builds {
		if err := build(e); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// quantize builds what makes copies of masters alone, and what measures their errors.
func (t *Part) quantize(e *updateBuilder) (err error) {
	if t.Quantize, err = e.Copies.graph(e.Plan.Mesh(), e.params); err == nil && e.Inspect {
		t.Inspect, t.Measured, err = e.Copies.inspection(e.Plan.Mesh(), e.params)
	}
	return err
}

// Copies lists what the graphs of the rank take of parameters in blocks.
func (t *Part) Copies() []ir.Copy { return t.copies.Copies }

// Made lists the scales that updates report on; a stack stands there once for each layer.
func (t *Part) Made() (list []string) {
	if t.Quantize == nil {
		return nil
	}
	for _, name := range t.copies.scales() {
		for _, v := range t.Quantize.Results {
			if v.Name == name {
				list = append(list, slices.Repeat([]string{name}, int(v.Type.StackDepth()))...)
			}
		}
	}
	return list
}

func (t *Part) zero(e *updateBuilder) (err error) {
	u := newSharder("zero", e.Plan)
	out := lists.Map(e.params, func(h RankParam) result {
		return gradient(u.Fill(h.Type, 0), h.Name, false)
	})
	t.Zero, err = named(u.Builder, out)
	return err
}

func (t *Part) reduce(e *updateBuilder) (err error) {
	u := newSharder("reduce", e.Plan)
	var out []result
	idle := true // nothing is to be done
	for i, h := range e.params {
		g := e.reduced(u, i)
		if idle = idle && g.Def() == nil; g.Def() == nil {
			g = u.Scale(g, 1) // a result of its own
		}
		out = append(out, gradient(g, h.Name, true))
	}
	if idle {
		return u.Err()
	}
	t.Reduce, err = named(u.Builder, out)
	return err
}

// sum takes a gradient as Reduce gives it.
func (e *updateBuilder) sum(u *sharder, i int) *ir.Value {
	stored := e.params[i].Layout.Stored
	t := ir.Type{Elem: e.params[i].Type.Elem, Dims: stored.Dims, Place: stored.Place}
	return u.gradient(e.params[i].Name, t)
}

func (t *Part) square(e *updateBuilder) error {
	u := newSharder("square", e.Plan)
	var counting []optim.Param
	bound := map[string]binding{}
	var out []result
	for i, p := range e.whole() {
		h := e.params[i]
		if h.Counts {
			counting = append(counting, p)
		}
		if !h.Shared {
			bound[program.Gradient.Of(p.Name)] = func(*ir.Value) *ir.Value { return e.sum(u, i) }
			continue
		}
		mine := e.sum(u, i)
		other := u.Input(program.PeerGradient.Of(p.Name), ir.Data, mine.Type, "")
		both := u.Add(mine, other.As(program.PeerGradient.For(p.Name)))
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
	for _, v := range whole.Results {
		out = append(out, result{u.reduced(u.At[v]), v.Name, v.Means})
	}
	t.Square, err = named(u.Builder, out)
	return err
}

// update builds that of a rank: the update of the whole parameters, rebuilt for what one device
// keeps of them.
func (t *Part) update(e *updateBuilder) error { return t.build(e, e.Optimizer.Part, e.sum) }

// fused builds the update with what must be done before it.
func (t *Part) fused(e *updateBuilder) error { return t.build(e, e.Optimizer.Update, e.reduced) }

func (t *Part) build(e *updateBuilder, make func([]optim.Param) (*ir.Graph, error),
	take func(u *sharder, i int) *ir.Value) error {
	whole, err := make(e.whole())
	if err != nil {
		return err
	}
	u := newSharder(whole.Name, e.Plan)
	bound := e.bindState(u)
	for i, h := range e.params {
		bound[program.Gradient.Of(h.Name)] = func(*ir.Value) *ir.Value { return take(u, i) }
	}
	if err := u.rebuild(whole, bound); err != nil {
		return err
	}
	if t.Update, err = e.results(u, whole); err == nil && e.State {
		t.Update, err = offloaded(t.Update)
	}
	return err
}
