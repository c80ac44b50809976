package eval

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// own is the position of a device along the axis that shards a dimension of a type, 0 if none does.
func (m *machine) own(t ir.Type, dim string, device int) (place int64, axis string) {
	for _, s := range t.Place {
		if s.Dim == dim {
			return int64(slices.Index(m.along(s.Axis, device), device)), s.Axis
		}
	}
	return 0, ""
}

// localize gives whole numbers that name rows, or scores, as the device counts those that it has:
// -1 stands for another device's.
func (m *machine) localize(op *ir.Op, in []*Array, device int) {
	which, has, dim := 0, ir.Type{}, ""
	switch op.Kind {
	case "embedding":
		has = op.In[1].Type
		dim = has.Dims[0].Name
	case "embedding_dw":
		has = op.Out[0].Type
		dim = has.Dims[0].Name
	case "cross_entropy_grad":
		which, has, dim = 1, op.In[0].Type, op.Attrs.Text("dim")
	case "dispatch":
		which, has, dim = 1, op.Out[0].Type, ir.ExpertDim
	case "combine":
		which, has, dim = 1, op.In[0].Type, ir.ExpertDim
	default:
		return
	}
	place, axis := m.own(has, dim, device)
	if axis == "" {
		return
	}
	n := has.Size(dim)
	names := &Array{in[which].Type, slices.Clone(in[which].Data)}
	for i, x := range names.Data {
		switch local := int64(x) - place*n; {
		case op.Kind == "cross_entropy_grad" && x < 0:
		case local < 0 || local >= n:
			names.Data[i] = foreign
			if op.Kind != "cross_entropy_grad" {
				names.Data[i] = -1
			}
		default:
			names.Data[i] = float64(local)
		}
	}
	in[which] = names
	if valid := op.Attrs.Int("valid"); valid > 0 {
		in[0] = &Array{in[0].Type, slices.Clone(in[0].Data)}
		ban(in[0], dim, valid-place*n)
	}
}

// foreign is a label whose logit another device has: the row counts, but no logit here is its
// label's.
const foreign = 1 << 40

// ban sets the logits from a position on to minus infinity: padding of the vocabulary.
func ban(x *Array, dim string, from int64) {
	k := x.Type.Index(dim)
	walk(x.Type, func(at []int64, i int) {
		if at[k] >= from {
			x.Data[i] = math.Inf(-1)
		}
	})
}

// crossEntropy computes with logits that the devices of an axis share.
func (m *machine) crossEntropy(op *ir.Op) {
	dim := op.Attrs.Text("dim")
	whole := m.each(func(d int) *Array {
		x := gathered(op.In[0], m.at[op.In[0]], m.group(op, d), dim)
		if valid := op.Attrs.Int("valid"); valid > 0 {
			ban(x, dim, valid)
		}
		return x
	})
	for _, v := range op.Out {
		m.at[v] = m.each(func(int) *Array { return New(v.Type) })
	}
	for d := range m.devices {
		crossEntropy(op, []*Array{whole[d], m.at[op.In[1]][d]},
			[]*Array{m.at[op.Out[0]][d], m.at[op.Out[1]][d]})
	}
}

// ring is attention, or its gradient, whose keys go round: everyone sees all of them, and the terms
// of their gradients come together where they came from.
func (m *machine) ring(op *ir.Op) {
	axis := op.Attrs.Text("ring")
	all := func(v *ir.Value, d int) *Array { return gathered(v, m.at[v], m.along(axis, d), ir.Keys) }
	terms := make([][]*Array, len(op.Out))
	for d := range m.devices {
		in := lists.Map(op.In, func(v *ir.Value) *Array { return &Array{v.Type, m.at[v][d].Data} })
		in[1], in[2] = all(op.In[1], d), all(op.In[2], d)
		out := make([]*Array, len(op.Out))
		for i, v := range op.Out {
			if out[i] = New(v.Type); op.Kind == "attention_grad" && i > 0 {
				out[i] = New(in[i].Type)
			}
		}
		if op.Kind == "attention" {
			attention(op, in, out)
		} else {
			attentionGrad(op, in, out)
		}
		for i := range out {
			terms[i] = append(terms[i], out[i])
		}
	}
	for i, v := range op.Out {
		m.at[v] = terms[i]
		if op.Kind == "attention_grad" && i > 0 {
			m.at[v] = m.each(func(d int) *Array {
				group := m.along(axis, d)
				total := sum(terms[i], group, terms[i][d].Type)
				return own(total, v.Type, ir.Keys, slices.Index(group, d))
			})
		}
	}
}
