package spmd

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// attend implements context parallelism: queries of one shard of the sequence see all keys, which
// are gathered, or sent around a ring (plan cp.kind); a window takes the keys that it sees of the
// chunk before from the device that has them, with either. Query and key positions become extra
// arguments, since a shard's index is not its position in the sequence. An all-to-all before, and
// one after, leaves attention fewer shards, or none, and fewer heads.
func (s *sharder) attend(op *ir.Op, in []*ir.Value) []*ir.Value {
	in = s.allReduced(in)
	cp, a := plan.ContextAxis, op.Attrs
	if in[0].Type.Place.On(cp) != ir.Seq {
		return s.CopyWith(op, a, nil, in...)
	}
	var sinks []*ir.Value // stay the last
	if a.Bool("sinks") {
		in, sinks = in[:len(in)-1], in[len(in)-1:]
	}
	heads := s.plan.CP.AllToAllAxis()
	if heads != "" {
		s.exchange(in, heads)
	}
	if n := s.plan.CP.Shards(); n > 1 {
		a = a.With("placed", true).With("balanced", s.plan.CP.Balance)
		n *= in[1].Type.Size(ir.Keys)
		ring := s.plan.CP.Ring() || a.Halo(in[0].Type.Size(ir.Seq), len(in) > 3) > 0
		if ring {
			a = a.With("ring", cp)
		}
		for i, v := range in {
			if sent := ring && i < 3; v.Type.Place.On(cp) == ir.Keys && !sent {
				in[i] = s.keys(v)
			}
		}
		queries := s.shardSlice(s.positions(ir.Seq, n), cp, ir.Seq)
		in = append(in, queries, s.positions(ir.Keys, n))
	}
	for _, v := range sinks { // as the heads are, after an all-to-all
		in = append(in, s.conform(v, lists.Filter(in[0].Type.Place, func(p ir.AxisSharding) bool {
			return p.Dim == ir.Heads
		})))
	}
	out := s.CopyWith(op, a, nil, in...)
	if heads != "" {
		out = []*ir.Value{s.AllToAll(out[0], heads, ir.Heads, ir.Seq), out[1]}
	}
	return out
}

// exchange gives a device more of the sequence and fewer heads: an all-to-all along an axis of n
// turns queries [B, S, H, D] to [B, nS, H/n, D], keys and values alike. KV heads that n does not
// divide are copied first. Document numbers are gathered.
func (s *sharder) exchange(in []*ir.Value, axis string) {
	in[0] = s.AllToAll(in[0], axis, ir.Seq, ir.Heads)
	for i, v := range in[1:3] {
		if n := s.plan.CP.Copies(v.Type.Size(ir.KVHeads)); n > 1 {
			v = s.copies(v, n)
		}
		in[1+i] = s.AllToAll(v, axis, ir.Keys, ir.KVHeads)
	}
	for i, v := range in[3:] {
		def := v.Def()
		if def == nil || def.Kind != "rename" {
			in[3+i] = s.gather(v, axis)
			continue
		}
		from := def.In[0] // keys have the queries' numbers, the same in all layers
		in[3+i] = s.once(from, gathered(axis)+" keys", func() *ir.Value {
			return s.Rename(s.gather(from, axis), ir.Seq, ir.Keys)
		})
	}
}

// positions returns the positions [n] of a sequence's tokens in the order in which devices have
// them.
func (s *sharder) positions(dim string, n int64) *ir.Value {
	return s.cached("positions "+dim, func() *ir.Value {
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

// chunks returns the order of the sequence's chunks over the devices. With balancing, device i of n
// has chunks i and 2n-1-i of 2n, so that a causal mask leaves every device the same work. Devices
// that exchange heads count as one, and divide its chunks as they come.
func chunks(p *plan.Plan) []int64 {
	n := p.CP.Shards()
	var list []int64
	for i := range n {
		list = append(list, i)
		if p.CP.Balance {
			list = append(list, 2*n-1-i)
		}
	}
	return list
}

// Order returns, for each index of a sequence as the devices receive it, the token's position in
// the original sequence. Ids, labels, positions and segments of a batch come in this order.
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

// keys gathers a value along the keys dimension. Document numbers are the same in every layer: a
// loop body gets the gathered ones as an input.
func (s *sharder) keys(v *ir.Value) *ir.Value {
	cp := plan.ContextAxis
	if def := v.Def(); def != nil && def.Kind == "rename" {
		if whole := s.ready[def.In[0].Name+" "+gathered(cp)]; whole != nil {
			return s.once(v, gathered(cp), func() *ir.Value {
				return s.Rename(whole, ir.Seq, ir.Keys)
			})
		}
		if from := def.In[0]; from.Def() == nil { // the same in all layers, where there is no loop
			return s.once(from, "gather keys", func() *ir.Value { return s.gather(v, cp) })
		}
	}
	return s.gather(v, cp)
}

// documents gathers the document numbers that a loop body's attention needs, once before the loop,
// and adds them to the body's inputs. outer maps the new body's inputs to the values outside.
func (s *sharder) documents(body *ir.Graph, inner *sharder, outer map[*ir.Value]*ir.Value) (
	more []*ir.Value) {
	axes := []string{plan.ContextAxis}
	if heads := s.plan.CP.AllToAllAxis(); heads != "" && heads != plan.ContextAxis {
		axes = []string{heads, plan.ContextAxis}
	}
	for _, op := range body.Ops {
		if op.Kind != "attention" {
			continue
		}
		segments, _ := op.MaskArgs()
		for _, v := range segments[min(1, len(segments)):] {
			if v.Def() == nil || v.Def().Kind != "rename" {
				continue
			}
			x := inner.Replacement[v.Def().In[0]]
			if outer[x] == nil || outer[x].Type.Place.On(plan.ContextAxis) != ir.Seq {
				continue
			}
			for _, axis := range axes {
				key := x.Name + " " + gathered(axis)
				if inner.ready[key] == nil {
					whole := s.gather(outer[x], axis)
					more = append(more, whole)
					inner.ready[key] = inner.Input(x.Name+"."+axis, ir.Data, whole.Type, "")
					outer[inner.ready[key]] = whole
				}
				x = inner.ready[key]
			}
		}
	}
	return more
}

// repeat rebuilds a loop. Carried values have the same placement in every iteration. With overlap
// of tensor or expert parallelism the body works on two independent halves of the batch, so that
// the collectives of one can run beside the GEMMs of the other; weights are gathered once for both.
func (s *sharder) repeat(op *ir.Op, in []*ir.Value) ([]*ir.Value, error) {
	l := op.Loop()
	inner := newSharder(op.Body.Name, s.plan)
	inner.vocab, inner.inside = s.vocab, true
	parts := 1
	if s.plan.Halved() {
		parts = 2
	}
	inner.parts = int64(parts)
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
		for h, half := range s.halve(x, parts, stack) {
			t, name := half.Type, v.Name
			if stack {
				t = t.Slice()
			}
			if h > 0 {
				name += ".half"
			}
			y := inner.Input(name, v.Role, t, v.Source)
			args, outer[y] = append(args, half), half
			for k := h; k < parts; k++ { // both halves see what has no batch dimension
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
	out := s.CopyWith(op, op.Attrs.With("carries", len(l.Carries)*parts), body, args...)
	if parts == 1 {
		return out, nil
	}
	var joined []*ir.Value
	for i := range l.Carries {
		joined = append(joined, s.Rejoin([2]*ir.Value{out[2*i], out[2*i+1]}, ir.Batch))
	}
	return append(joined, out[2*len(l.Carries):]...), nil
}

// halve splits a value along the batch into the n halves that a body works on. Stacks and values
// without a batch dimension are returned alone.
func (s *sharder) halve(x *ir.Value, n int, stack bool) []*ir.Value {
	if n == 1 || stack || x.Type.Index(ir.Batch) < 0 {
		return []*ir.Value{x}
	}
	both := s.Halve(x, ir.Batch)
	return both[:]
}

// halves builds the body's operations once for each half of the batch. at maps the source body's
// values, by half; args collects the loop's arguments.
func (s *sharder) halves(l ir.Loop, inner *sharder, at []map[*ir.Value]*ir.Value,
	outer map[*ir.Value]*ir.Value, args *[]*ir.Value) ([]*ir.Value, error) {
	for h := range at {
		inner.Replacement = at[h]
		*args = append(*args, s.documents(l.Body, inner, outer)...)
	}
	carries := len(l.Carries)
	results := make([]*ir.Value, carries*len(at)+len(l.Body.Results)-carries)
	for h := range at {
		inner.Replacement = at[h]
		if err := inner.ops(l.Body); err != nil {
			return nil, err
		}
		for i, v := range l.Body.Results {
			x := inner.Replacement[v]
			switch k := carries*len(at) + i - carries; {
			case l.IsCarry(i):
				results[i*len(at)+h] = inner.conform(x, at[h][l.Body.Inputs[i]].Type.Place)
			case h == 0:
				results[k] = x // a stack of terms is reduced once, behind the loop
			default:
				results[k] = inner.Add(results[k], x) // statistics of both halves
			}
		}
	}
	return results, nil
}

// flowing shards an activation between layers along the sequence, if the plan has sequence
// parallelism and it is not sharded yet.
func (s *sharder) flowing(v *ir.Value) *ir.Value {
	if s.plan.TP.Sequence && s.plan.Size(plan.TensorAxis) > 1 && flows(v.Type) &&
		v.Type.Place.On(plan.TensorAxis) == "" {
		return s.shardSlice(v, plan.TensorAxis, ir.Seq)
	}
	return v
}
