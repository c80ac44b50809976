package optim

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// Muon moves the matrices inside layers along the nearest orthogonal matrix to their momentum
// (Jordan et al., 2024), scaled so that the rate and the decay that suit AdamW suit it too (Liu et
// al., 2025). Everything else, the embedding, the head, norms and biases, is AdamW's.
type Muon struct {
	AdamW            // of the rest; decay, clipping and types are those of all
	Momentum float64 // commonly 0.95; the step looks ahead along it, as Nesterov's
	// Products is the type in which the matrices are multiplied; Invalid is F32. The method bears
	// BF16.
	Products dtype.DType
}

// The quintic whose repetition brings singular values near 1: the coefficients and the number of
// rounds of Jordan et al.
const (
	quintic1, quintic3, quintic5 = 3.4445, -4.7750, 2.0315
	rounds                       = 5
)

// likeAdamW times √max(rows, columns) gives a step the root mean square of AdamW's, from 0.2 to 0.4
// (Liu et al., 2025, section 2.2).
const likeAdamW = 0.2

// Update implements Optimizer.
func (o Muon) Update(params []Param) (*ir.Graph, error) { return o.recipe().build(params, false) }

// Part implements Optimizer.
func (o Muon) Part(params []Param) (*ir.Graph, error) { return o.recipe().build(params, true) }

func (o Muon) recipe() recipe {
	return recipe{name: "muon", scalars: []string{BiasCorrection1, BiasCorrection2},
		clip: o.ClipNorm, decay: o.Decay,
		compute: o.Compute, state: o.State, step: o.step}
}

// State implements Optimizer: the momentum m of a matrix, the moments m and v of the rest.
func (o Muon) State(p Param) []Slot {
	slots := o.AdamW.State(p)
	if hidden(p) {
		return slots[:1]
	}
	return slots
}

// hidden reports whether a parameter is a matrix inside a layer, or several side by side.
func hidden(p Param) bool {
	return (p.Tag == ir.Attn || p.Tag == ir.MLP || p.Tag == ir.Experts) && len(sides(p.Type)) == 2
}

// sides gives the two sides of a matrix, each as the dimensions that make it up. Heads and the
// elements of a head are one side; layers, and experts of a layer, are matrices of their own.
func sides(t ir.Type) (list [][]string) {
	before := ""
	for _, d := range t.Dims {
		switch heads := before == ir.Heads || before == ir.KVHeads; {
		case d.Name == ir.Layer || d.Name == string(ir.Experts):
		case d.Name == ir.HeadDim && heads:
			list[len(list)-1] = []string{before, d.Name}
		default:
			list = append(list, []string{d.Name})
		}
		before = d.Name
	}
	return list
}

// The names of the sides while they are multiplied: the shorter one, twice in its products, and the
// longer one.
const short, short2, short3, long = "muon.a", "muon.b", "muon.c", "muon.d"

func (o Muon) step(u *update, p Param, w, g *ir.Value, state []*ir.Value) (*ir.Value, []*ir.Value) {
	if !hidden(p) {
		return o.AdamW.step(u, p, w, g, state)
	}
	m := u.toward(state[0], g, 1-o.Momentum)
	ahead := u.toward(g, m, o.Momentum)
	straight, larger := o.orthogonal(u, ahead)
	scale := likeAdamW * math.Sqrt(float64(larger))
	move := u.Mul(straight, u.Scale(u.in[LR], scale))
	return u.Sub(u.decayed(p, w), move), []*ir.Value{m}
}

// orthogonal gives the matrices of x with singular values near 1, and the longer of their sides.
func (o Muon) orthogonal(u *update, x *ir.Value) (y *ir.Value, larger int64) {
	s := sides(x.Type)
	flat, at := x, [2]string{"muon.rows", "muon.columns"}
	for i, names := range s {
		if len(names) == 2 {
			flat = u.Merge(flat, at[i], names[0], names[1])
		} else {
			flat = u.Rename(flat, names[0], at[i])
		}
	}
	a, c := at[0], at[1]
	if flat.Type.Size(a) > flat.Type.Size(c) {
		a, c = c, a
	}
	larger = flat.Type.Size(c)
	order := ir.Names(flat.Type.Dims)
	turned := u.Rename(u.Rename(flat, a, short), c, long)
	side := append(ir.Names(ir.Without(turned.Type.Dims, short, long)), short, long)
	z := o.rounds(u, u.Transpose(turned, side...))
	z = u.Transpose(u.Rename(u.Rename(z, short, a), long, c), order...)
	for i, names := range s {
		if len(names) == 2 {
			z = u.Split(z, at[i], names[0], names[1], x.Type.Size(names[1]))
		} else {
			z = u.Rename(z, at[i], names[0])
		}
	}
	return z, larger
}

// rounds is the iteration of Newton and Schulz on matrices whose shorter side comes first:
// x ← a·x + (b·s + c·s²)·x with s = x·xᵀ, from a norm of 1.
func (o Muon) rounds(u *update, x *ir.Value) *ir.Value {
	elem := o.Products
	if !elem.Valid() {
		elem = dtype.F32
	}
	norm := u.Sqrt(u.Sum(u.Mul(x, x), short, long))
	const least = 1e-7 // the floor of torch.optim.Muon: a gradient of zeros stays one
	floor := u.Fill(norm.Type, least)
	norm = u.Select(u.Compare("gt", norm, floor), norm, floor)
	x = u.Convert(u.Div(x, norm), elem)
	for range rounds {
		s := u.Dot(x, u.Rename(x, short, short2), long)
		right := u.Rename(u.Rename(s, short2, short3), short, short2)
		square := u.Rename(u.Dot(s, right, short2), short3, short2)
		poly := u.Add(u.Scale(s, quintic3), u.Scale(square, quintic5))
		x = u.Add(u.Scale(x, quintic1), u.Dot(poly, u.Rename(x, short, short2), short2))
	}
	return u.Convert(x, dtype.F32)
}
