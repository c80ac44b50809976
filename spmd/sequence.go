package spmd

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// attend lets the queries of a piece of the sequence see the keys of all of it, gathered or handed
// round, and tells them where they stand.
func (s *sharder) attend(op *ir.Op, in []*ir.Value) ([]*ir.Value, ir.Attrs) {
	in = s.allSettled(in)
	cp := plan.ContextAxis
	if in[0].Type.Place.On(cp) != ir.Seq {
		return in, op.Attrs
	}
	a, n := op.Attrs.With("placed", true), in[1].Type.Size(ir.Keys)*s.plan.Size(cp)
	ring := s.plan.CP.Kind == "ring"
	if ring {
		a = a.With("ring", cp).With("balanced", s.plan.CP.Balance)
	}
	for i, v := range in {
		if handed := ring && i < 3; v.Type.Place.On(cp) == ir.Keys && !handed {
			in[i] = s.keys(v)
		}
	}
	places := s.own(s.places(ir.Seq, n), cp, ir.Seq)
	return append(in, places, s.places(ir.Keys, n)), a
}

// places counts the places of a sequence in the order in which the devices hold them.
func (s *sharder) places(dim string, n int64) *ir.Value {
	key := "places " + dim
	if s.ready[key] != nil {
		return s.ready[key]
	}
	run := func(n int64) ir.Type {
		return ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: dim, Size: n}}}
	}
	if !s.plan.CP.Balance {
		s.ready[key] = s.Iota(run(n), dim)
		return s.ready[key]
	}
	var list []*ir.Value
	order := chunks(s.plan)
	each := n / int64(len(order))
	for _, c := range order {
		list = append(list, s.Add(s.Iota(run(each), dim), s.Fill(run(each), float64(c*each))))
	}
	s.ready[key] = s.Concat(dim, list...)
	return s.ready[key]
}

// chunks gives the order of the pieces of a sequence. With balance device i has pieces i and, from
// the back, i: what a causal mask leaves of both together is the same for all.
func chunks(p *plan.Plan) []int64 {
	n := p.Size(plan.ContextAxis)
	var list []int64
	for i := range n {
		list = append(list, i)
		if p.CP.Balance {
			list = append(list, 2*n-1-i)
		}
	}
	return list
}

// Order gives, for each place of the rows that the devices of a plan are given, the place in the
// sequence of the token that stands there: ids, labels, positions and segments come in this order.
func Order(p *plan.Plan) []int64 {
	order := chunks(p)
	each := p.Seq / int64(len(order))
	var list []int64
	for _, c := range order {
		for k := range each {
			list = append(list, c*each+k)
		}
	}
	return list
}

// keys gathers what stands where keys do. The documents of the whole sequence are the same in every
// round, so a body is given them.
func (s *sharder) keys(v *ir.Value) *ir.Value {
	if def := v.Def(); def != nil && def.Kind == "rename" {
		if whole := s.ready[def.In[0].Name+wholeSequence]; whole != nil {
			return s.once(v, "gather "+plan.ContextAxis, func() *ir.Value {
				return s.Rename(whole, ir.Seq, ir.Keys)
			})
		}
		if from := def.In[0]; from.Def() == nil { // the same in all layers, where there is no loop
			return s.once(from, "gather keys", func() *ir.Value { return s.gather(v, plan.ContextAxis) })
		}
	}
	return s.gather(v, plan.ContextAxis)
}

// wholeSequence is what was done to a value of a piece of the sequence before a loop.
const wholeSequence = " of the whole sequence"
