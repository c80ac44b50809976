package optim

import (
	"math"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

// An Optimizer builds the graph of one step and says what is kept between steps.
type Optimizer interface {
	// Update builds the graph of one step. Beside [Commit], [LR], [MaxNorm] and the numbers that
	// Scalars names it takes, for every parameter w, the gradient "g.w", the master copy "w" in f32,
	// and the state. Its results are the new masters and states, which take the place of the old
	// ones, then the model's copies "c.w" where it computes in another type, then [Norm] and [OK].
	Update(params []Param) (*ir.Graph, error)
	// Part builds the update of some of the parameters, for devices that do not have the others: it
	// takes the square of the norm of all gradients as [GradSquare] instead of the norm of its own,
	// and does not give it back ([Squares]).
	Part(params []Param) (*ir.Graph, error)
	// State lists what is kept for a parameter beside its master copy. All of it begins as zeros.
	State(p Param) []Slot
	// Scalars gives the inputs that depend on the number of the update alone, counted from 1. An
	// update that was rejected does not count.
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
	GradSquare      = "square"    // f32: the square of that norm; input of a part's update
	OK              = "ok"        // result, pred: whether the state changed
	GradStats       = "watch"     // result, f32: squares and zeros of gradients with Stats
)

// A Param is a parameter to be updated.
type Param struct {
	Name  string
	Type  ir.Type // of the gradient
	Tag   ir.Tag  // the part of the model it belongs to
	Decay bool    // whether it decays; norms and biases commonly do not
	// Group names those that devices share in the same way: the squares of their gradients are added
	// up before those of others, so that devices exchange one number for all of them.
	Group string
	// Stats asks for the square of the norm of its own gradient, and for the number of its elements
	// that are zero, of each layer if it is a stack.
	Stats bool
}

// A Slot is one tensor that an optimizer keeps for a parameter.
type Slot struct {
	Name string // "m.w" or "v.w" for parameter w
	Type ir.Type
}

// A recipe is what sets one optimizer apart.
type recipe struct {
	name    string
	scalars []string // inputs beside those of all
	clip    float64
	decay   float64
	compute dtype.DType
	state   func(p Param) []Slot
	// step gives the new master and the new state, all in f32.
	step func(u *update, p Param, w, g *ir.Value, state []*ir.Value) (*ir.Value, []*ir.Value)
}

// An update is a graph while it is built.
type update struct {
	*ir.Builder
	recipe
	in map[string]*ir.Value // the scalars
}

// Squares builds the graph that adds up the squares of gradients as [GradSquare], for parts that
// must know the norm of all of them before they update, and gives [GradStats] if some are watched.
func Squares(params []Param) (*ir.Graph, error) {
	if len(params) == 0 {
		return nil, errNothing()
	}
	u := &update{Builder: ir.NewBuilder("squares")}
	total, watched := u.square(params, u.gradients(params))
	results := []*ir.Value{named(total, GradSquare, program.Scalar)}
	if watched != nil {
		results = append(results, named(watched, GradStats, program.Stat))
	}
	return u.Graph(results...)
}

func errNothing() error {
	return diag.New(diag.BadInput, "there is nothing to train: the model has no parameters")
}

// build makes the graph that all optimizers share around the step of one; part tells that there are
// more parameters elsewhere.
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
	var norm, watched *ir.Value
	if part {
		norm = u.Sqrt(u.scalar(GradSquare, dtype.F32))
	} else {
		norm, watched = u.square(params, grads)
		norm = u.Sqrt(norm)
	}
	ok := u.accept(commit, norm)
	factor := u.clipped(norm)
	var results, copies []*ir.Value
	for i, p := range params {
		g := grads[i]
		if factor != nil {
			g = u.Mul(g, factor)
		}
		w := u.Input(p.Name, ir.Param, as(p.Type, dtype.F32), "")
		slots := r.state(p)
		old, wide := make([]*ir.Value, len(slots)), make([]*ir.Value, len(slots))
		for k, s := range slots {
			old[k] = u.Input(s.Name, ir.Param, s.Type, "").As(program.Moment.For(p.Name))
			wide[k] = u.Convert(old[k], dtype.F32)
		}
		w1, state := r.step(u, p, w, g, wide)
		w1 = u.Select(ok, w1, w)
		results = append(results, replacing(w1, w))
		for k, s := range slots {
			v := u.Select(ok, u.Convert(state[k], s.Type.Elem), old[k])
			results = append(results, replacing(v, old[k]))
		}
		if r.compute.Valid() && r.compute != dtype.F32 {
			c := named(u.Convert(w1, r.compute), program.Copy.Of(p.Name), program.Copy)
			c.Means.Param = p.Name
			copies = append(copies, c)
		}
	}
	results = append(results, copies...)
	if watched != nil {
		results = append(results, named(watched, GradStats, program.Stat))
	}
	if !part {
		results = append(results, named(norm, Norm, program.Scalar))
	}
	return u.Graph(append(results, named(ok, OK, program.Scalar))...)
}

// gradients takes those of all parameters, in f32.
func (u *update) gradients(params []Param) (grads []*ir.Value) {
	for _, p := range params {
		g := u.Input(program.Gradient.Of(p.Name), ir.Data, p.Type, "").As(program.Gradient.For(p.Name))
		grads = append(grads, u.Convert(g, dtype.F32))
	}
	return grads
}

// square adds up the squares of gradients, first within groups, and lists those that are watched,
// nil if none is.
func (u *update) square(params []Param, grads []*ir.Value) (total, watched *ir.Value) {
	const each = "stat"
	var groups []string
	var list []*ir.Value
	squares := map[string]*ir.Value{}
	for i, p := range params {
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

// pair puts two numbers side by side, for each of some layers. It is written as a sum, so that
// devices which have terms of both add them up at once.
func (u *update) pair(a, b *ir.Value, each ir.Dim) *ir.Value {
	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{each, {Name: "pair", Size: 2}}}
	second := u.Iota(t, "pair")
	first := u.Shift(u.Neg(second), 1)
	return u.Add(u.Mul(first, a), u.Mul(second, b))
}

// accept says whether the step counts: the host wants it, and the norm is a number within bounds.
// Any gradient that is no number makes the norm none, and one that is infinite, or whose square is,
// makes it infinite; a comparison with what is no number fails. A maximum would not do: XLA's on
// the CPU loses what is no number (reference/parity_notes.md, traps).
func (u *update) accept(commit, norm *ir.Value) *ir.Value {
	finite := u.Compare("le", norm, u.Fill(norm.Type, math.MaxFloat32))
	within := u.Compare("le", norm, u.in[MaxNorm])
	ok := u.Select(finite, within, finite) // both
	return u.Select(commit, ok, commit)
}

// clipped gives the factor that brings the gradients to the largest norm that they may have, 1 if
// they are smaller, or nil if nothing is clipped. What is added to the norm is PyTorch's.
func (u *update) clipped(norm *ir.Value) *ir.Value {
	if u.clip <= 0 {
		return nil
	}
	one := u.Fill(norm.Type, 1)
	factor := u.Div(u.Fill(norm.Type, u.clip), u.Shift(norm, 1e-6))
	return u.Select(u.Compare("lt", factor, one), factor, one)
}

// decayed gives what is left of a parameter after decay, which is apart from the gradient's step
// (Loshchilov and Hutter, 2019).
func (u *update) decayed(p Param, w *ir.Value) *ir.Value {
	if !p.Decay || u.decay == 0 {
		return w
	}
	return u.Mul(w, u.Shift(u.Scale(u.in[LR], -u.decay), 1))
}

// toward gives the point that part of the way from a to b: a + part·(b - a), in that order, since
// PyTorch's moments come about so.
func (u *update) toward(a, b *ir.Value, part float64) *ir.Value {
	return u.Add(a, u.Scale(u.Sub(b, a), part))
}

// scalar takes a number that the host gives.
func (u *update) scalar(name string, elem dtype.DType) *ir.Value {
	return u.Input(name, ir.Data, ir.Type{Elem: elem}, "").As(program.Scalar.For(""))
}

// named gives a result the name by which others know it.
func named(v *ir.Value, name string, role program.Role) *ir.Value {
	v.Name = name
	return v.As(role.For(""))
}

// replacing gives a result that takes the place of an input.
func replacing(v, old *ir.Value) *ir.Value {
	v.Name = program.Next(old.Name)
	return v.As(old.Meaning().Replacing(old.Name))
}

// as is a type with another kind of element.
func as(t ir.Type, elem dtype.DType) ir.Type {
	return ir.Type{Elem: elem, Dims: t.Dims, Place: t.Place}
}

// SGD moves against the gradient, and keeps nothing.
type SGD struct {
	Decay    float64
	ClipNorm float64     // as that of [AdamW]
	Compute  dtype.DType // as that of [AdamW]
}

// Update implements Optimizer.
func (o SGD) Update(params []Param) (*ir.Graph, error) { return o.recipe().build(params, false) }

// Part implements Optimizer.
func (o SGD) Part(params []Param) (*ir.Graph, error) { return o.recipe().build(params, true) }

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
