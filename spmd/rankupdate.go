package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// A RankParam is a parameter of the stages of one pipeline rank.
type RankParam struct {
	optim.Param // with the type of the accumulated gradient
	Layout      Layout
	// Shared: another rank has the parameter, too (tied embeddings). Counts: this rank adds the
	// gradient to the global norm; of the ranks that share a parameter one does.
	Shared, Counts bool
}

// UpdateOptions describe the update of one rank.
type UpdateOptions struct {
	Plan      *plan.Plan // nil is one device
	Optimizer optim.Optimizer
	Quantized *QuantizedCopies // made by the update for the rank's stages
	// Zero asks for the graph that makes zeroed accumulators; Inspect for the graph that measures the
	// quantization errors of copies.
	Zero, Inspect bool
	// OffloadState keeps the optimizer state in host memory between updates.
	OffloadState bool
	// Fused makes one graph of reduce, square and update. It needs no exchange between ranks in
	// between, so it is for a single rank.
	Fused bool
}

// A RankUpdate is what one pipeline rank does around the microbatches of a step; a mesh without
// pipeline is a pipeline of one rank. A rank knows only its own stages' gradients, but the norm is
// global. So an update is three programs, between which ranks exchange the gradients of shared
// parameters, and one number.
type RankUpdate struct {
	// Zero gives zeroed gradient accumulators; nil where the only microbatch gives the gradients.
	Zero *ir.Graph
	// Reduce takes the gradients and leaves each device its shard of their sums over the rank's mesh;
	// nil if there is nothing to reduce, or if Update does it.
	Reduce *ir.Graph
	// Square takes the reduced gradients, and adds the other rank's for shared parameters
	// ([program.PeerGradient]). It gives the sum of squares that count here, [optim.Square]; nil if
	// Update does it.
	Square *ir.Graph
	// Update takes the gradients and the sum of squares of all ranks
	// ([optim.Optimizer.PartialUpdate]), or it is fused ([optim.Optimizer.Update]).
	Update *ir.Graph
	// Quantize makes the compute copies from the masters; nil if no copy is quantized.
	Quantize *ir.Graph
	// Inspect measures the quantization errors of the copies (result [CopyErrors]); CopyErrors says
	// where they are, by the names of the copies' scales. nil if not asked for.
	Inspect    *ir.Graph
	CopyErrors map[string]ErrorSpan

	RankParams []RankParam

	copies *QuantizedCopies
}

// NewRankUpdate builds the graphs of a rank.
func NewRankUpdate(params []RankParam, o UpdateOptions) (*RankUpdate, error) {
	if o.Plan == nil {
		o.Plan = plan.Default()
	}
	e := &updateBuilder{UpdateOptions: o, params: params}
	t := &RankUpdate{RankParams: params, copies: o.Quantized}
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

// quantize builds the graph that makes copies of masters, and the one that measures their errors.
func (t *RankUpdate) quantize(e *updateBuilder) (err error) {
	if t.Quantize, err = e.Quantized.graph(e.Plan.Mesh(), e.params); err == nil && e.Inspect {
		t.Inspect, t.CopyErrors, err = e.Quantized.inspection(e.Plan.Mesh(), e.params)
	}
	return err
}

// Copies lists the quantized copies of parameters that the rank's graphs take.
func (t *RankUpdate) Copies() []ir.QuantizedParam { return t.copies.Copies }

// CopyStats names the scales that updates report on, in the order of the result [CopyStats]; a
// stack is listed once for each layer.
func (t *RankUpdate) CopyStats() (list []string) {
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

// zero builds the graph of zeroed accumulators.
func (t *RankUpdate) zero(e *updateBuilder) (err error) {
	u := newSharder("zero", e.Plan)
	out := lists.Map(e.params, func(h RankParam) result {
		return gradient(u.Fill(h.Type, 0), h.Name, false)
	})
	t.Zero, err = named(u.Builder, out)
	return err
}

// reduce builds the graph that reduces the gradients over the rank's mesh, if any needs it.
func (t *RankUpdate) reduce(e *updateBuilder) (err error) {
	u := newSharder("reduce", e.Plan)
	var out []result
	idle := true // no gradient needs a collective
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

// sum takes a gradient as Reduce gives it: sharded like the stored parameter.
func (e *updateBuilder) sum(u *sharder, i int) *ir.Value {
	stored := e.params[i].Layout.Stored
	t := ir.Type{Elem: e.params[i].Type.Elem, Dims: stored.Dims, Place: stored.Place}
	return u.gradient(e.params[i].Name, t)
}

// square builds the graph that adds peers' gradients and sums the squares.
func (t *RankUpdate) square(e *updateBuilder) error {
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
		out = append(out, result{u.reduced(u.Replacement[v]), v.Name, v.Means})
	}
	t.Square, err = named(u.Builder, out)
	return err
}

// update builds the optimizer's global update, sharded to what one device stores.
func (t *RankUpdate) update(e *updateBuilder) error {
	return t.build(e, e.Optimizer.PartialUpdate, e.sum)
}

// fused builds the update with reduction, norm and clipping in one program.
func (t *RankUpdate) fused(e *updateBuilder) error {
	return t.build(e, e.Optimizer.Update, e.reduced)
}

// build shards the global update that make writes; take returns the i-th parameter's gradient.
func (t *RankUpdate) build(e *updateBuilder, make func([]optim.Param) (*ir.Graph, error),
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
	if t.Update, err = e.results(u, whole); err == nil && e.OffloadState {
		t.Update, err = offloaded(t.Update)
	}
	return err
}
