package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// routed rebuilds the operations that bring tokens to experts and back. A device dispatches the
// tokens that it has: shards of the batch and of the sequence become shards of slots. Tensor
// parallelism shards the experts' MLPs, and every device of its axis dispatches all their tokens.
func (s *sharder) routed(op *ir.Op, in []*ir.Value) []*ir.Value {
	a := op.Attrs
	switch op.Kind {
	case "combine": // it is linear in terms of sums
		in = append([]*ir.Value{in[0]}, s.allReduced(in[1:])...)
	case "attach_loss": // every term has the gradient of the loss
		in = []*ir.Value{s.reduced(in[0]), in[1]}
	default:
		in = s.allReduced(in)
	}
	switch op.Kind {
	case "expert_positions":
		if !a.Bool("local") {
			return s.inOrder(op, in[0])
		}
		in = s.whole(in) // slots are counted where rows are dispatched
	case "expert_load":
		in[1] = s.conform(in[1], in[0].Type.Place)
	case "dispatch":
		in = s.whole(in)
		a = a.With("capacity", s.room(a, in[1].Type))
		if s.plan.GathersTokens() { // a device dispatches to its own experts
			own := a.Int("experts") / s.plan.Size(plan.ExpertAxis)
			a = a.With("axis", plan.ExpertAxis).With("experts", own)
		}
	case "expert_overflow":
		in = s.whole(in)
		a = a.With("capacity", s.room(a, in[0].Type))
	case "combine":
		if s.plan.GathersTokens() {
			return s.combineTerms(op, append(in[:1:1], s.whole(in[1:])...))
		}
		in = append([]*ir.Value{s.atTokens(in[0])}, s.whole(in[1:])...)
	}
	return s.CopyWith(op, a, nil, in...)
}

// combineTerms lets every device of ep combine what its experts give for all tokens, and leaves
// each the sum for its own.
func (s *sharder) combineTerms(op *ir.Op, in []*ir.Value) []*ir.Value {
	out := s.CopyWith(op, op.Attrs.With("axis", plan.ExpertAxis), nil, in...)[0]
	if s.Err() != nil {
		return []*ir.Value{out}
	}
	return []*ir.Value{s.ReduceScatter(out, plan.ExpertAxis, ir.Batch)}
}

// whole gathers what sequence parallelism shards along the axis of tensor parallelism, and tokens
// that all devices of ep take.
func (s *sharder) whole(in []*ir.Value) []*ir.Value {
	return lists.Map(in, func(v *ir.Value) *ir.Value {
		if v.Type.Place.On(plan.TensorAxis) != "" {
			v = s.gather(v, plan.TensorAxis)
		}
		if s.plan.GathersTokens() && v.Type.Place.On(plan.ExpertAxis) == ir.Batch {
			v = s.gather(v, plan.ExpertAxis)
		}
		return v
	})
}

// room is a device's part of the slots of an expert, for the tokens that it has of a batch, or of a
// half batch.
func (s *sharder) room(a ir.Attrs, choices ir.Type) int64 {
	slots, n, meet := a.Int("capacity"), max(s.parts, 1), int64(1)
	for _, share := range choices.Place {
		size, _ := ir.Along(s.mesh, share.Axis)
		if n *= size; share.Axis == plan.ExpertAxis {
			meet = size
		}
	}
	slots = (slots + n - 1) / n
	if a.Bool("blocks") {
		slots = ir.WholeBlocks(slots, meet)
	}
	return slots
}

// sameSlots gives a value that was broadcast over the slots of an expert, as the bias of its rows
// is, as many slots as the values beside it have, which [sharder.room] divided.
func (s *sharder) sameSlots(in []*ir.Value) []*ir.Value {
	spread := func(v *ir.Value) bool {
		return v.Def() != nil && v.Def().Kind == "broadcast" && v.Def().Attrs.Text("dim") == ir.Slots
	}
	i := slices.IndexFunc(in, func(v *ir.Value) bool {
		return v.Type.Index(ir.Slots) >= 0 && !spread(v)
	})
	if i < 0 {
		return in
	}
	slots := in[i].Type.Size(ir.Slots)
	for _, axis := range in[i].Type.Place.Axes(ir.Slots) {
		size, _ := ir.Along(s.mesh, axis)
		slots *= size
	}
	return lists.Map(in, func(v *ir.Value) *ir.Value {
		if !spread(v) || v.Type.Size(ir.Slots) == slots {
			return v
		}
		op := v.Def()
		return s.Broadcast(op.In[0], int(op.Attrs.Int("at")), ir.Dim{Name: ir.Slots, Size: slots})
	})
}

// atExperts brings rows to the devices that have their experts, if another argument has different
// experts on each: an all-to-all turns shards of slots into shards of experts.
func (s *sharder) atExperts(in []*ir.Value) []*ir.Value {
	const ep = plan.ExpertAxis
	if !slices.ContainsFunc(in, func(v *ir.Value) bool {
		return v.Type.Place.On(ep) == ir.ExpertDim
	}) {
		return slices.Clone(in)
	}
	return lists.Map(in, func(v *ir.Value) *ir.Value {
		if v.Type.Place.On(ep) != ir.Slots {
			return v
		}
		return s.once(v, "to experts", func() *ir.Value {
			return s.AllToAll(v, ep, ir.Slots, ir.ExpertDim)
		})
	})
}

// atTokens brings the rows of experts back to the devices that have their tokens.
func (s *sharder) atTokens(v *ir.Value) *ir.Value {
	const ep = plan.ExpertAxis
	if v.Type.Place.On(ep) != ir.ExpertDim {
		return v
	}
	return s.AllToAll(v, ep, ir.ExpertDim, ir.Slots)
}

// inOrder counts positions of choices in whole sequences, in the order of tokens, whatever device
// has them: an expert's capacity then drops the same tokens under every plan. The choices are
// gathered, which are few, and every device keeps its own positions.
func (s *sharder) inOrder(op *ir.Op, idx *ir.Value) []*ir.Value {
	place := idx.Type.Place
	axes := place.Axes(ir.Seq) // sequence parallelism (tp) shards what cp and cp_inner leave a device
	for _, axis := range slices.Backward(axes) {
		idx = s.gather(idx, axis)
	}
	sorted := s.plan.Size(plan.ContextAxis) > 1 && s.plan.CP.Balance
	if sorted {
		idx = s.permuted(idx, false)
	}
	pos := s.CopyWith(op, op.Attrs, nil, idx)[0]
	if sorted {
		pos = s.permuted(pos, true)
	}
	for _, axis := range axes {
		pos = s.shardSlice(pos, axis, ir.Seq)
	}
	return []*ir.Value{pos}
}

// permuted brings the chunks of a sequence from the order of devices to the order of tokens, or
// back.
func (s *sharder) permuted(v *ir.Value, back bool) *ir.Value {
	order := chunks(s.plan) // of each place, the chunk that devices have there
	each := v.Type.Size(ir.Seq) / int64(len(order))
	parts := make([]*ir.Value, len(order))
	for i, c := range order {
		from, to := int64(i), c
		if back {
			from, to = c, int64(i)
		}
		parts[to] = s.Slice(v, ir.Seq, from*each, (from+1)*each)
	}
	return s.Concat(ir.Seq, parts...)
}
