package optim

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// AdamW is Adam with decoupled weight decay (Loshchilov and Hutter, 2019). Master parameters are
// f32; where the model computes in another type, the update makes the compute copy.
type AdamW struct {
	Beta1, Beta2, Eps, Decay float64
	// ClipNorm bounds the global L2 norm of all gradients; larger gradients are scaled down to it. 0
	// turns clipping off.
	ClipNorm float64
	// Compute is the type of the model's copies; Invalid or F32 makes none.
	Compute dtype.DType
	// Moments is the type in which m and v are stored, rounded to nearest; Invalid means F32. A step
	// uses its own moments before they are rounded.
	Moments dtype.DType
}

// Update implements Optimizer.
func (o AdamW) Update(params []Param) (*ir.Graph, error) { return o.recipe().build(params, false) }

// PartialUpdate implements Optimizer.
func (o AdamW) PartialUpdate(params []Param) (*ir.Graph, error) {
	return o.recipe().build(params, true)
}

func (o AdamW) recipe() recipe {
	return recipe{name: "adamw", scalars: []string{BiasCorrection1, BiasCorrection2},
		clip: o.ClipNorm, decay: o.Decay,
		compute: o.Compute, state: o.State, step: o.step}
}

// step follows the order of operations of torch.optim.AdamW, so that both round alike.
func (o AdamW) step(u *update, p Param, w, g *ir.Value, state []*ir.Value) (*ir.Value,
	[]*ir.Value) {
	m := u.toward(state[0], g, 1-o.Beta1)
	v := u.Add(u.Scale(state[1], o.Beta2), u.Mul(u.Scale(g, 1-o.Beta2), g))
	size := u.Mul(u.in[LR], u.in[BiasCorrection1])
	root := u.Mul(u.Sqrt(v), u.Sqrt(u.in[BiasCorrection2]))
	move := u.Div(u.Mul(m, size), u.Shift(root, o.Eps))
	return u.Sub(u.decayed(p, w), move), []*ir.Value{m, v}
}

// State implements Optimizer: the moments m and v.
func (o AdamW) State(p Param) []Slot {
	if p.Balance != 0 {
		return nil
	}
	t := as(p.Type, dtype.F32)
	if o.Moments.Valid() {
		t.Elem = o.Moments
	}
	return []Slot{{"m." + p.Name, t}, {"v." + p.Name, t}}
}

// Scalars implements Optimizer.
func (o AdamW) Scalars(update int) map[string]float64 {
	t := float64(update)
	return map[string]float64{
		BiasCorrection1: 1 / (1 - math.Pow(o.Beta1, t)),
		BiasCorrection2: 1 / (1 - math.Pow(o.Beta2, t)),
	}
}
