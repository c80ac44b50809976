package optim

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// AdamW is Adam with decoupled decay (Loshchilov and Hutter, 2019). Parameters are kept in f32;
// where the model computes in another type, it gets a copy that the update makes.
type AdamW struct {
	Beta1, Beta2, Eps, Decay float64
	// ClipNorm is the largest norm that the gradients of all parameters together may have; larger ones
	// are scaled down to it. 0 turns clipping off.
	ClipNorm float64
	// Compute is the type of the model's copies; Invalid or F32 makes none.
	Compute dtype.DType
}

// The names of the update's inputs and results beside those of the parameters: master, first and
// second moment and gradient of parameter w are "w", "m.w", "v.w" and "g.w", its copy "c.w".
const (
	Commit = "commit" // whether the step counts: pred
	Rate   = "rate"   // the learning rate of the step
	Fix1   = "fix1"   // 1/(1 - Beta1^t), the correction of the first moment's bias
	Fix2   = "fix2"   // 1/(1 - Beta2^t)
	Norm   = "norm"   // result: the norm of all gradients, before clipping
)

// A Param is a parameter to be updated: its name and type, and whether it decays. Norms and biases
// commonly do not.
type Param struct {
	Name  string
	Type  ir.Type
	Decay bool
}

// Update builds the graph of one step. Its results are, for each parameter in order, the master and
// the two moments, then the model's copies, then the norm.
func (o AdamW) Update(params []Param) (*ir.Graph, error) {
	b := ir.NewBuilder("adamw")
	scalar := ir.Type{Elem: dtype.F32}
	commit := b.Input(Commit, ir.Data, ir.Type{Elem: dtype.Pred}, "")
	rate := b.Input(Rate, ir.Data, scalar, "")
	fix1, fix2 := b.Input(Fix1, ir.Data, scalar, ""), b.Input(Fix2, ir.Data, scalar, "")
	var grads []*ir.Value
	var square *ir.Value
	for _, p := range params {
		g := b.Convert(b.Input("g."+p.Name, ir.Data, p.Type, ""), dtype.F32)
		grads = append(grads, g)
		s := b.Sum(b.Mul(g, g), names(p.Type)...)
		if square == nil {
			square = s
		} else {
			square = b.Add(square, s)
		}
	}
	norm := b.Sqrt(square)
	clip := o.clip(b, norm, scalar)
	var results, copies []*ir.Value
	for i, p := range params {
		t := ir.Type{Elem: dtype.F32, Dims: p.Type.Dims, Place: p.Type.Place}
		w := b.Input(p.Name, ir.Param, t, "")
		m, v := b.Input("m."+p.Name, ir.Param, t, ""), b.Input("v."+p.Name, ir.Param, t, "")
		g := grads[i]
		if clip != nil {
			g = b.Mul(g, clip)
		}
		m1 := b.Add(b.Scale(m, o.Beta1), b.Scale(g, 1-o.Beta1))
		v1 := b.Add(b.Scale(v, o.Beta2), b.Scale(b.Mul(g, g), 1-o.Beta2))
		step := b.Div(b.Mul(m1, fix1), b.Shift(b.Sqrt(b.Mul(v1, fix2)), o.Eps))
		if p.Decay && o.Decay != 0 {
			step = b.Add(step, b.Scale(w, o.Decay))
		}
		w1 := b.Select(commit, b.Sub(w, b.Mul(step, rate)), w)
		results = append(results, w1, b.Select(commit, m1, m), b.Select(commit, v1, v))
		if o.Compute.Valid() && o.Compute != dtype.F32 {
			copies = append(copies, b.Convert(w1, o.Compute))
		}
	}
	return b.Graph(append(append(results, copies...), norm)...)
}

// clip gives the factor min(1, ClipNorm / norm), or nil if nothing is clipped.
func (o AdamW) clip(b *ir.Builder, norm *ir.Value, scalar ir.Type) *ir.Value {
	if o.ClipNorm <= 0 {
		return nil
	}
	limit := b.Fill(scalar, o.ClipNorm)
	return b.Select(b.Compare("gt", norm, limit), b.Div(limit, norm), b.Fill(scalar, 1))
}

// Donations pairs the inputs of an update with the results that take their place, for
// [lower.Options]: by the names of the graph's values.
func Donations(g *ir.Graph, params []Param) map[string]string {
	into := map[string]string{}
	for i, p := range params {
		for k, name := range []string{p.Name, "m." + p.Name, "v." + p.Name} {
			into[name] = g.Results[3*i+k].Name
		}
	}
	return into
}

func names(t ir.Type) []string {
	list := make([]string, len(t.Dims))
	for i, d := range t.Dims {
		list[i] = d.Name
	}
	return list
}
