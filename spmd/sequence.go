package spmd

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// attend lets the queries of a piece of the sequence see the keys of all of it, gathered or handed
// round, and tells them where they stand.
func (s *sharder) attend(op *ir.Op, in []*ir.Value) ([]*ir.Value, ir.Attrs) {
	in = s.allReduced(in)
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
	return s.cached("places "+dim, func() *ir.Value {
		run := func(n int64) ir.Type {
			return ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: dim, Size: n}}}
		}
		if !s.plan.CP.Balance {
			return s.Iota(run(n), dim)
		}
		order := chunks(s.plan)
		each := n / int64(len(order))
		return s.Concat(dim, lists.Map(order, func(c int64) *ir.Value {
			return s.Add(s.Iota(run(each), dim), s.Fill(run(each), float64(c*each)))
		})...)
	})
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

// documents gives a body what the numbers of documents are in the whole sequence, if it asks for
// them. outer has what the inputs of the new body are outside.
func (s *sharder) documents(body *ir.Graph, inner *sharder, outer map[*ir.Value]*ir.Value) (
	more []*ir.Value) {
	cp := plan.ContextAxis
	for _, op := range body.Ops {
		if op.Kind != "attention" {
			continue
		}
		segments, _ := op.Extras()
		for _, v := range segments[min(1, len(segments)):] {
			if v.Def() == nil || v.Def().Kind != "rename" {
				continue
			}
			x := inner.At[v.Def().In[0]]
			if outer[x] == nil || outer[x].Type.Place.On(cp) != ir.Seq ||
				inner.ready[x.Name+wholeSequence] != nil {
				continue
			}
			whole := s.gather(outer[x], cp)
			more = append(more, whole)
			inner.ready[x.Name+wholeSequence] = inner.Input(x.Name+".whole", ir.Data, whole.Type, "")
		}
	}
	return more
}

// repeat rebuilds a loop; what goes round is placed alike in every round. With overlap the body
// works on two halves of the batch, which do not wait for each other; weights are gathered once.
func (s *sharder) repeat(op *ir.Op, in []*ir.Value) ([]*ir.Value, error) {
	l := op.Loop()
	inner := newSharder(op.Body.Name, s.plan)
	inner.vocab, inner.inside = s.vocab, true
	parts := 1
	if s.plan.TP.Overlap && s.plan.Size(plan.TensorAxis) > 1 && len(l.Carries) == len(op.Out) {
		parts = 2
	}
	at := make([]map[*ir.Value]*ir.Value, parts)
	for h := range at {
		at[h] = map[*ir.Value]*ir.Value{}
	}
	var args []*ir.Value
	outer := map[*ir.Value]*ir.Value{}
	for i, v := range op.Body.Inputs {
		x := s.reduced(in[i])
		if l.IsCarry(i) {
			x = s.flowing(x)
		}
		stack := l.IsStack(i)
		for h, piece := range s.parts(x, parts, stack) {
			t, name := piece.Type, v.Name
			if stack {
				t = t.Slice()
			}
			if h > 0 {
				name += ".half"
			}
			y := inner.Input(name, v.Role, t, v.Source)
			args, outer[y] = append(args, piece), piece
			for k := h; k < parts; k++ { // what is not cut in halves is seen by both
				at[k][v] = y
			}
		}
		inner.params[v] = v.Role == ir.Param
	}
	results, err := s.halves(l, inner, at, outer, &args)
	if err != nil {
		return nil, err
	}
	body, err := inner.Graph(results...)
	if err != nil {
		return nil, err
	}
	out := s.Again(op, op.Attrs.With("carries", len(l.Carries)*parts), body, args...)
	if parts == 1 {
		return out, nil
	}
	var joined []*ir.Value
	for i := range op.Out {
		joined = append(joined, s.Rejoin([2]*ir.Value{out[2*i], out[2*i+1]}, ir.Batch))
	}
	return joined, nil
}

// parts gives a value in as many parts of its batch as a body works on, or as it is.
func (s *sharder) parts(x *ir.Value, n int, stack bool) []*ir.Value {
	if n == 1 || stack || x.Type.Index(ir.Batch) < 0 {
		return []*ir.Value{x}
	}
	both := s.Halve(x, ir.Batch)
	return both[:]
}

// halves builds a body once for each part of the batch.
func (s *sharder) halves(l ir.Loop, inner *sharder, at []map[*ir.Value]*ir.Value,
	outer map[*ir.Value]*ir.Value, args *[]*ir.Value) ([]*ir.Value, error) {
	for h := range at {
		inner.At = at[h]
		*args = append(*args, s.documents(l.Body, inner, outer)...)
	}
	results := make([]*ir.Value, len(l.Body.Results)*len(at))
	for h := range at {
		inner.At = at[h]
		if err := inner.ops(l.Body); err != nil {
			return nil, err
		}
		for i, v := range l.Body.Results {
			k := i*len(at) + h
			if l.IsCarry(i) {
				results[k] = inner.conform(inner.At[v], at[h][l.Body.Inputs[i]].Type.Place)
			} else {
				results[k] = inner.reduced(inner.At[v])
			}
		}
	}
	return results, nil
}

// flowing cuts the sequence of what flows between layers, if the plan has sequence parallelism and
// it is not cut yet.
func (s *sharder) flowing(v *ir.Value) *ir.Value {
	if s.plan.TP.Sequence && s.plan.Size(plan.TensorAxis) > 1 && flows(v.Type) &&
		v.Type.Place.On(plan.TensorAxis) == "" {
		return s.own(v, plan.TensorAxis, ir.Seq)
	}
	return v
}
