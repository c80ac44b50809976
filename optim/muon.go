package optim

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// Muon moves the matrices inside layers along the nearest orthogonal matrix to their momentum
// (Jordan et al., 2024), scaled so that learning rate and weight decay of AdamW carry over (Liu et
// al., 2025). Embedding, head, norms and biases are updated by AdamW.
type Muon struct {
	AdamW            // for the rest; decay, clipping and types apply to all
	Momentum float64 // commonly 0.95; Nesterov
	// MatmulType is the type of the Newton-Schulz matmuls; Invalid means F32. BF16 is accurate enough.
	MatmulType dtype.DType
}

// The quintic polynomial that drives singular values toward 1, and its number of iterations, from
// Jordan et al.
const (
	quintic1, quintic3, quintic5 = 3.4445, -4.7750, 2.0315
	iterations                   = 5
)

// likeAdamW times √max(rows, columns) gives a step the RMS of an AdamW step, 0.2 to 0.4 (Liu et
// al., 2025, section 2.2).
const likeAdamW = 0.2

// Update implements Optimizer.
func (o Muon) Update(params []Param) (*ir.Graph, error) { return o.recipe().build(params, false) }

// PartialUpdate implements Optimizer.
func (o Muon) PartialUpdate(params []Param) (*ir.Graph, error) {
	return o.recipe().build(params, true)
}

func (o Muon) recipe() recipe {
	return recipe{name: "muon", scalars: []string{BiasCorrection1, BiasCorrection2},
		clip: o.ClipNorm, decay: o.Decay,
		compute: o.Compute, state: o.State, step: o.step}
}

// State implements Optimizer: the momentum m of a matrix; m and v for the rest.
func (o Muon) State(p Param) []Slot {
	slots := o.AdamW.State(p)
	if hidden(p) {
		return slots[:1]
	}
	return slots
}

// hidden reports whether a parameter is a matrix inside a layer, or a stack of them.
func hidden(p Param) bool {
	return (p.Tag == ir.Attn || p.Tag == ir.MLP || p.Tag == ir.Experts) && len(sides(p.Type)) == 2
}

// sides returns the two sides of a matrix, each as the dimensions that make it up. Heads and
// head_dim are one side; layers and experts are separate matrices.
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

// Dimension names during the iteration: the shorter side, its renamed copies, and the longer side.
const short, short2, short3, long = "muon.a", "muon.b", "muon.c", "muon.d"

// step is AdamW's for parameters that are not matrices of a layer.
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

// orthogonal returns the matrices of x with singular values near 1, and the length of their longer
// side. Dimensions are flattened to [..., short, long] and restored after the iteration.
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
	transposed := u.Rename(u.Rename(flat, a, short), c, long)
	side := append(ir.Names(ir.Without(transposed.Type.Dims, short, long)), short, long)
	z := o.newtonSchulz(u, u.Transpose(transposed, side...))
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

// newtonSchulz iterates x ← a·x + (b·s + c·s²)·x with s = x·xᵀ, on matrices [..., short, long]
// scaled to Frobenius norm 1.
func (o Muon) newtonSchulz(u *update, x *ir.Value) *ir.Value {
	elem := o.MatmulType
	if !elem.Valid() {
		elem = dtype.F32
	}
	norm := u.Sqrt(u.Sum(u.Mul(x, x), short, long))
	const least = 1e-7 // as in torch.optim.Muon: a zero gradient stays zero
	floor := u.Fill(norm.Type, least)
	norm = u.Select(u.Compare("gt", norm, floor), norm, floor)
	x = u.Convert(u.Div(x, norm), elem)
	for range iterations {
		s := u.Dot(x, u.Rename(x, short, short2), long)
		right := u.Rename(u.Rename(s, short2, short3), short, short2)
		square := u.Rename(u.Dot(s, right, short2), short3, short2)
		poly := u.Add(u.Scale(s, quintic3), u.Scale(square, quintic5))
		x = u.Add(u.Scale(x, quintic1), u.Dot(poly, u.Rename(x, short, short2), short2))
	}
	return u.Convert(x, dtype.F32)
}
