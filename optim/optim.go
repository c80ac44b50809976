package optim

import (
	"cmp"
	"math"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

// An Optimizer builds the graph of one update and describes its state.
type Optimizer interface {
	// Update builds the graph of one update. Beside [Commit], [LR], [MaxNorm] and the inputs that
	// Scalars names, it takes for every parameter w the gradient "g.w", the f32 master "w" and the
	// state. Results are the new masters and states, which replace the old ones in place, then the
	// compute copies "c.w" if the model computes in another type, then [Norm] and [OK].
	Update(params []Param) (*ir.Graph, error)
	// PartialUpdate builds the update of one pipeline rank's parameters. It takes the square of the
	// global gradient norm as [GradSquare] ([Squares] gives a rank's share) and does not return it.
	PartialUpdate(params []Param) (*ir.Graph, error)
	// State lists the optimizer state of a parameter beside its master, of which a parameter with
	// Balance has none. All of it begins as zeros.
	State(p Param) []Slot
	// Scalars returns the inputs that depend only on the number of the update, counted from 1. A
	// rejected update does not count.
	Scalars(update int) map[string]float64
}

// The names of the inputs and results of an update that belong to no parameter.
const (
	Commit          = "commit"    // input, pred: whether the step counts, as far as the host knows
	LR              = "rate"      // input, f32: the learning rate of the step
	MaxNorm         = "limit"     // input, f32: a larger norm is a spike; +Inf accepts all
	BiasCorrection1 = "fix1"      // input, f32, of AdamW and Muon: 1/(1 - Beta1^t)
	BiasCorrection2 = "fix2"      // input, f32, of AdamW and Muon: 1/(1 - Beta2^t)
	Norm            = "grad_norm" // result, f32: the norm of all gradients together, before clipping
	GradSquare      = "square"    // f32: the square of that norm; input of a PartialUpdate
	OK              = "ok"        // result, pred: whether the state changed
	GradStats       = "watch"     // result, f32: squares and zeros of gradients with Stats
)

// A Param is a parameter to be updated.
type Param struct {
	Name  string
	Type  ir.Type // of the gradient
	Tag   ir.Tag  // the part of a layer it belongs to
	Decay bool    // whether weight decay applies; commonly not to norms and biases
	// Balance is how far a step moves the parameter against the sign of its gradient, whatever the
	// optimizer: the correction bias of a router, whose gradient is the load of its experts. It is
	// not 0 for these alone, and their gradients do not count in the norm. A negative number leaves
	// them as they are.
	Balance float64
	// Compute is the type in which the model takes the parameter, if it is not the optimizer's.
	Compute dtype.DType
	// Group is the same for parameters that are sharded alike. Their squares are summed first, so that
	// devices exchange one number per group.
	Group string
	// Stats asks for the squared norm and the number of zeros of the parameter's own gradient, for
	// each layer of a stack.
	Stats bool
}

// A Slot is one state tensor of a parameter.
type Slot struct {
	Name string // "m.w" or "v.w" for parameter w
	Type ir.Type
}

// A recipe is what distinguishes one optimizer from another.
type recipe struct {
	name    string
	scalars []string // inputs beside the common ones
	clip    float64
	decay   float64
	compute dtype.DType
	state   func(p Param) []Slot
	// step returns the new master and the new state, all in f32.
	step func(u *update, p Param, w, g *ir.Value, state []*ir.Value) (*ir.Value, []*ir.Value)
}

// An update is a graph under construction.
type update struct {
	*ir.Builder
	recipe
	in map[string]*ir.Value // the scalars
}

// Squares builds the graph that sums the squares of gradients as [GradSquare], for ranks that need
// the global norm before they update. It gives [GradStats] if some parameters ask for them.
func Squares(params []Param) (*ir.Graph, error) {
	if len(params) == 0 {
		return nil, errNothing()
	}
	u := &update{Builder: ir.NewBuilder("squares")}
	total, stats := u.square(params, u.gradients(params))
	results := []*ir.Value{named(total, GradSquare, program.Scalar)}
	if stats != nil {
		results = append(results, named(stats, GradStats, program.Stat))
	}
	return u.Graph(results...)
}

// errNothing is the error of a model without parameters.
func errNothing() error {
	return diag.New(diag.BadInput, "there is nothing to train: the model has no parameters")
}

// build writes the graph around an optimizer's step: norm, acceptance, clipping, selection of old
// or new state, compute copies. part: other ranks have more parameters.
func (r recipe) build(params []Param, part bool) (*ir.Graph, error) {
	if len(params) == 0 {
		return nil, errNothing()
	}
	u := &update{Builder: ir.NewBuilder(r.name), recipe: r, in: map[string]*ir.Value{}}
	commit := u.scalar(Commit, dtype.Pred)
	for _, name := range append([]string{LR, MaxNorm}, r.scalars...) {
		u.in[name] = u.scalar(name, dtype.F32)
	}
	grads := u.gradients(params)
	var norm, stats *ir.Value
	if part {
		norm = u.Sqrt(u.scalar(GradSquare, dtype.F32))
	} else {
		norm, stats = u.square(params, grads)
		norm = u.Sqrt(norm)
	}
	ok := u.accept(commit, norm)
	factor := u.clipped(norm)
	var results, copies []*ir.Value
	for i, p := range params {
		g := grads[i]
		if factor != nil && p.Balance == 0 {
			g = u.Mul(g, factor)
		}
		w := u.Input(p.Name, ir.Param, as(p.Type, dtype.F32), "")
		slots := r.state(p)
		old, wide := make([]*ir.Value, len(slots)), make([]*ir.Value, len(slots))
		for k, s := range slots {
			old[k] = u.Input(s.Name, ir.Param, s.Type, "").As(program.Moment.For(p.Name))
			wide[k] = u.Convert(old[k], dtype.F32)
		}
		w1, state := w, wide
		if p.Balance == 0 {
			w1, state = r.step(u, p, w, g, wide)
		} else if p.Balance > 0 {
			w1 = u.balanced(p, w, g)
		}
		w1 = u.Select(ok, w1, w)
		results = append(results, replacing(w1, w))
		for k, s := range slots {
			v := u.Select(ok, u.Convert(state[k], s.Type.Elem), old[k])
			results = append(results, replacing(v, old[k]))
		}
		if to := cmp.Or(p.Compute, r.compute); to.Valid() && to != dtype.F32 {
			c := named(u.Convert(w1, to), program.Copy.Of(p.Name), program.Copy)
			c.Means.Param = p.Name
			copies = append(copies, c)
		}
	}
	results = append(results, copies...)
	if stats != nil {
		results = append(results, named(stats, GradStats, program.Stat))
	}
	if !part {
		results = append(results, named(norm, Norm, program.Scalar))
	}
	return u.Graph(append(results, named(ok, OK, program.Scalar))...)
}

// balanced moves a bias by a fixed step against the sign of its gradient (Wang et al., 2024, arXiv
// 2408.15664, algorithm 1).
func (u *update) balanced(p Param, w, g *ir.Value) *ir.Value {
	zero, step := u.Fill(g.Type, 0), u.Fill(g.Type, p.Balance)
	down := u.Select(u.Compare("gt", g, zero), step, zero)
	up := u.Select(u.Compare("lt", g, zero), step, zero)
	return u.Add(w, u.Sub(up, down))
}

// gradients takes the gradients of all parameters and converts them to f32.
func (u *update) gradients(params []Param) (grads []*ir.Value) {
	for _, p := range params {
		g := u.Input(program.Gradient.Of(p.Name), ir.Data, p.Type, "").As(program.Gradient.For(p.Name))
		grads = append(grads, u.Convert(g, dtype.F32))
	}
	return grads
}

// square sums the squares of gradients, first within groups, and collects the statistics that were
// asked for: [n, 2] pairs of square and zeros, or nil.
func (u *update) square(params []Param, grads []*ir.Value) (total, stats *ir.Value) {
	const each = "stat"
	var groups []string
	var list []*ir.Value
	squares := map[string]*ir.Value{}
	for i, p := range params {
		if p.Balance != 0 {
			continue
		}
		over := ir.Names(p.Type.Dims)
		layers := p.Stats && len(over) > 0 && over[0] == ir.Layer
		if layers {
			over = over[1:]
		}
		s := u.Sum(u.Mul(grads[i], grads[i]), over...)
		switch {
		case layers:
			s = u.Rename(s, ir.Layer, each)
			zeros := u.Rename(u.zeros(grads[i], over), ir.Layer, each)
			list = append(list, u.pair(s, zeros, s.Type.Dims[0]))
			s = u.Sum(s, each)
		case p.Stats:
			list = append(list, u.pair(s, u.zeros(grads[i], over), ir.Dim{Name: each, Size: 1}))
		}
		if sum := squares[p.Group]; sum != nil {
			s = u.Add(sum, s)
		} else {
			groups = append(groups, p.Group)
		}
		squares[p.Group] = s
	}
	square := squares[groups[0]]
	for _, group := range groups[1:] {
		square = u.Add(square, squares[group])
	}
	switch len(list) {
	case 0:
		return square, nil
	case 1:
		return square, u.Scale(list[0], 1)
	}
	return square, u.Concat(each, list...)
}

// zeros counts the elements that are exactly zero.
func (u *update) zeros(g *ir.Value, over []string) *ir.Value {
	zero := u.Fill(ir.Type{Elem: dtype.F32}, 0)
	return u.Sum(u.Convert(u.Compare("eq", g, zero), dtype.F32), over...)
}

// pair puts two numbers side by side for each layer: [each, 2]. It is written as a sum, so that
// partial terms of both are reduced in one collective.
func (u *update) pair(a, b *ir.Value, each ir.Dim) *ir.Value {
	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{each, {Name: "pair", Size: 2}}}
	second := u.Iota(t, "pair")
	first := u.Shift(u.Neg(second), 1)
	return u.Add(u.Mul(first, a), u.Mul(second, b))
}

// accept reports whether the step counts: the host commits it, and the norm is finite and at most
// MaxNorm. A NaN gradient makes the norm NaN, an infinite one +Inf; comparisons with NaN are false,
// so the step is rejected. A maximum would not do: XLA:CPU's drops NaN.
func (u *update) accept(commit, norm *ir.Value) *ir.Value {
	finite := u.Compare("le", norm, u.Fill(norm.Type, math.MaxFloat32))
	within := u.Compare("le", norm, u.in[MaxNorm])
	ok := u.Select(finite, within, finite) // both
	return u.Select(commit, ok, commit)
}

// clipped returns the factor min(1, clip/(norm + 1e-6)), as PyTorch computes it, or nil without
// clipping.
func (u *update) clipped(norm *ir.Value) *ir.Value {
	if u.clip <= 0 {
		return nil
	}
	one := u.Fill(norm.Type, 1)
	factor := u.Div(u.Fill(norm.Type, u.clip), u.Shift(norm, 1e-6))
	return u.Select(u.Compare("lt", factor, one), factor, one)
}

// decayed returns w·(1 - lr·decay): decoupled weight decay (Loshchilov and Hutter, 2019).
func (u *update) decayed(p Param, w *ir.Value) *ir.Value {
	if !p.Decay || u.decay == 0 {
		return w
	}
	return u.Mul(w, u.Shift(u.Scale(u.in[LR], -u.decay), 1))
}

// toward returns a + part·(b - a), in this order of operations: torch's lerp rounds so.
func (u *update) toward(a, b *ir.Value, part float64) *ir.Value {
	return u.Add(a, u.Scale(u.Sub(b, a), part))
}

// scalar adds an input for a number that the host provides.
func (u *update) scalar(name string, elem dtype.DType) *ir.Value {
	return u.Input(name, ir.Data, ir.Type{Elem: elem}, "").As(program.Scalar.For(""))
}

// named gives a result the name by which others know it.
func named(v *ir.Value, name string, role program.Role) *ir.Value {
	v.Name = name
	return v.As(role.For(""))
}

// replacing marks a result as the new value of an input, which is donated.
func replacing(v, old *ir.Value) *ir.Value {
	v.Name = program.Next(old.Name)
	return v.As(old.Meaning().Replacing(old.Name))
}

// as returns the type with another element type.
func as(t ir.Type, elem dtype.DType) ir.Type {
	return ir.Type{Elem: elem, Dims: t.Dims, Place: t.Place}
}

// SGD moves against the gradient and has no state.
type SGD struct {
	Decay    float64
	ClipNorm float64     // see [AdamW]
	Compute  dtype.DType // see [AdamW]
}

// Update implements Optimizer.
func (o SGD) Update(params []Param) (*ir.Graph, error) { return o.recipe().build(params, false) }

// PartialUpdate implements Optimizer.
func (o SGD) PartialUpdate(params []Param) (*ir.Graph, error) {
	return o.recipe().build(params, true)
}

func (o SGD) recipe() recipe {
	return recipe{name: "sgd", clip: o.ClipNorm, decay: o.Decay, compute: o.Compute, state: o.State,
		step: func(u *update, p Param, w, g *ir.Value, _ []*ir.Value) (*ir.Value, []*ir.Value) {
			return u.Sub(u.decayed(p, w), u.Mul(g, u.in[LR])), nil
		}}
}

// State implements Optimizer.
func (o SGD) State(Param) []Slot { return nil }

// Scalars implements Optimizer.
func (o SGD) Scalars(int) map[string]float64 { return nil }
