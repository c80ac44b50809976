package spmd

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// A Sharding is a model's graph as one device of a plan's mesh computes it. All devices run the
// same graph.
type Sharding struct {
	Plan   *plan.Plan
	Graph  *ir.Graph
	Params []Layout
}

// Shard partitions the graph of a microbatch's loss, or of one pipeline stage, for the devices of a
// plan. The graph is rebuilt operation by operation: inputs are sharded by the names of their
// dimensions and result placements follow. Where an operation cannot take an argument in its
// placement, a collective reshards it. The loss itself is not changed.
func Shard(loss *ir.Graph, p *plan.Plan) (*Sharding, error) {
	if len(loss.Mesh) > 0 {
		return nil, diag.New(diag.GraphInvalid, "only the graph of a whole batch can be sharded").
			At("graph %s", loss.Name)
	}
	sh := &Sharding{Plan: p}
	s := newSharder(loss.Name, p)
	for _, v := range loss.Inputs {
		t := dataType(v.Type, p)
		if v.Role == ir.Param {
			l := LayoutOf(v.Name, v.Type, p)
			sh.Params = append(sh.Params, l)
			t = l.Compute
			s.params[v] = true
			if v.Type.Size(ir.Vocab) != global(t, p.Mesh()).Size(ir.Vocab) {
				s.vocab = v.Type.Size(ir.Vocab)
			}
		}
		s.Replacement[v] = s.InputLike(v, t)
	}
	s.gatherStacks(loss)
	if err := s.ops(loss); err != nil {
		return nil, err
	}
	var out []*ir.Value
	for _, v := range loss.Results {
		out = append(out, s.flowing(s.reduced(s.Replacement[v])))
	}
	var err error
	sh.Graph, err = s.Graph(out...)
	named := lists.Filter(loss.Results, func(v *ir.Value) bool { return v.Means.Role != "" })
	for i, v := range named { // statistics, behind the loss or the activation
		x := out[len(out)-len(named)+i]
		x.Name, x.Means = v.Name, v.Means
	}
	return sh, err
}

// dataType returns one device's type of an input that comes from the batch, or from the stage
// before.
func dataType(t ir.Type, p *plan.Plan) ir.Type {
	out := ir.Type{Elem: t.Elem, Dims: slices.Clone(t.Dims)}
	for i, d := range t.Dims {
		for _, a := range p.Axes(t.Dims, d.Name) {
			out.Dims[i].Size /= a.Size
			out.Place = out.Place.With(a.Name, d.Name)
		}
	}
	return out
}

// flows reports whether a value is an activation between layers: [B, S, E].
func flows(t ir.Type) bool { return t.Index(ir.Seq) >= 0 && t.Index(ir.EmbedDim) >= 0 }

// A sharder rebuilds one graph, or the body of one loop.
type sharder struct {
	*ir.Rewriter
	plan   *plan.Plan
	mesh   []ir.Axis
	params map[*ir.Value]bool   // inputs of the source graph that are parameters
	ready  map[string]*ir.Value // resharded values, by source and what was done to it
	vocab  int64                // true size of a padded vocabulary
	inside bool                 // this is a loop body
	parts  int64                // of the batch that a loop body works on, one after the other; 0 is 1
}

func newSharder(name string, p *plan.Plan) *sharder {
	return &sharder{plan: p, mesh: p.Mesh(), Rewriter: ir.NewRewriter(name, p.Mesh()...),
		params: map[*ir.Value]bool{}, ready: map[string]*ir.Value{}}
}

// once applies do to a value the first time, and returns the same result after that, so that
// several users share one collective.
func (s *sharder) once(v *ir.Value, what string, do func() *ir.Value) *ir.Value {
	return s.cached(v.Name+" "+what, do)
}

// cached returns the value of a key, built on the first request.
func (s *sharder) cached(key string, do func() *ir.Value) *ir.Value {
	if s.ready[key] == nil {
		s.ready[key] = do()
	}
	return s.ready[key]
}

// gather all-gathers a value along an axis. The tag lets the backward pass gather again instead of
// saving the result.
func (s *sharder) gather(v *ir.Value, axis string) *ir.Value {
	return s.once(v, gathered(axis), func() (y *ir.Value) {
		s.Tagged(ir.Gather, func() { y = s.AllGather(v, axis, v.Type.Place.On(axis)) })
		return y
	})
}

// gathered is the name of a value gathered along an axis, in the cache of resharded values.
func gathered(axis string) string { return "gather " + axis }

// shardSlice returns the device's slice of a replicated value.
func (s *sharder) shardSlice(v *ir.Value, axis, dim string) *ir.Value {
	return s.once(v, "own "+axis+" "+dim, func() *ir.Value { return s.ShardSlice(v, axis, dim) })
}

// reduced sums the partial terms of a value. With sequence parallelism an activation between layers
// is reduce-scattered along the sequence instead of all-reduced.
func (s *sharder) reduced(v *ir.Value) *ir.Value {
	return s.reduce(v, func(axis string) string {
		if axis == plan.TensorAxis && s.plan.TP.Sequence && flows(v.Type) {
			return ir.Seq
		}
		return ""
	})
}

// reduce sums partial terms; into returns the dimension along which an axis scatters the sum, or ""
// for an all-reduce. All axes that all-reduce do it in one collective.
func (s *sharder) reduce(v *ir.Value, into func(axis string) string) *ir.Value {
	var whole []string
	for _, share := range slices.Clone(v.Type.Place) {
		if share.Dim != ir.Partial {
			continue
		}
		dim := into(share.Axis)
		if dim == "" {
			whole = append(whole, share.Axis)
			continue
		}
		v = s.once(v, "scatter "+share.Axis+" "+dim, func() *ir.Value {
			return s.ReduceScatter(v, share.Axis, dim)
		})
	}
	if len(whole) == 0 {
		return v
	}
	return s.once(v, fmt.Sprint("reduce ", whole), func() *ir.Value {
		return s.AllReduce(v, whole...)
	})
}

// conform reshards a value to the wanted placement.
func (s *sharder) conform(v *ir.Value, want ir.Placement) *ir.Value {
	v = s.reduce(v, want.On)
	for _, d := range v.Type.Dims {
		for _, a := range slices.Backward(v.Type.Place.Nested(s.mesh, d.Name)) {
			if want.On(a.Name) == "" {
				v = s.gather(v, a.Name)
			}
		}
	}
	for _, d := range v.Type.Dims {
		for _, a := range want.Nested(s.mesh, d.Name) {
			if v.Type.Place.On(a.Name) == "" {
				v = s.shardSlice(v, a.Name, d.Name)
			}
		}
	}
	return v
}

// gatherStacks gathers the parameters of all layers once for a microbatch, if the plan's
// fsdp.gather is "microbatch".
//
// A pipeline stage's forward program keeps the gathered parameters for its backward program. With
// quantized GEMMs the two take different copies (fprop and dgrad orientation), so each gathers its
// own.
func (s *sharder) gatherStacks(g *ir.Graph) {
	if s.plan.FSDP.Gather != "microbatch" {
		return
	}
	var tag ir.Tag
	if s.plan.Size(plan.PipelineAxis) > 1 && quantizes(g) {
		tag = ir.Gather
	}
	for _, v := range g.Inputs {
		if s.params[v] {
			s.Tagged(tag, func() { s.Replacement[v] = s.weight(s.Replacement[v]) })
		}
	}
}

// use returns a value as operations take it: a parameter's FSDP shards are gathered, and with fewer
// key heads than tensor-parallel devices each device takes the key heads of its query heads.
func (s *sharder) use(v *ir.Value) *ir.Value {
	x := s.Replacement[v]
	if !s.params[v] {
		return x
	}
	if len(shards(x.Type, s.plan)) > 0 {
		x = s.once(x, "whole", func() (y *ir.Value) {
			s.Tagged(ir.Gather, func() { y = s.weight(x) })
			return y
		})
	}
	tp, kv := s.plan.Size(plan.TensorAxis), x.Type.Size(ir.KVHeads)
	if tp > 1 && kv > 0 && x.Type.Place.On(plan.TensorAxis) == "" {
		x = s.once(x, "kv", func() (y *ir.Value) {
			s.Tagged(ir.Gather, func() {
				y = s.ShardSlice(s.copies(x, tp/kv), plan.TensorAxis, ir.KVHeads)
			})
			return y
		})
	}
	return x
}

// copies repeats each KV head n times, one after another.
func (s *sharder) copies(x *ir.Value, n int64) *ir.Value {
	y := s.Broadcast(x, x.Type.Index(ir.KVHeads)+1, ir.Dim{Name: "copies", Size: n})
	return s.Merge(y, ir.KVHeads, ir.KVHeads, "copies")
}

// shards lists the axes that shard a parameter in storage only, not for the operations that take
// it, the slowest first.
func shards(t ir.Type, p *plan.Plan) (list []ir.AxisSharding) {
	stored := p.Shards()
	for _, d := range t.Dims {
		taken := p.Axes(t.Dims, d.Name)
		for _, a := range t.Place.Nested(p.Mesh(), d.Name) {
			if slices.Contains(stored, a) && !slices.Contains(taken, a) {
				list = append(list, ir.AxisSharding{Axis: a.Name, Dim: d.Name})
			}
		}
	}
	return list
}

// weight gathers a parameter's shards, the last axis first. Inside a loop body the gather may be
// prefetched while the layer before computes. The VJP reduces the gradient in the type of
// collectives.
func (s *sharder) weight(x *ir.Value) *ir.Value {
	sum := dtype.Invalid
	if t := s.plan.Types.Collectives; t != x.Type.Elem {
		sum = t
	}
	for _, share := range slices.Backward(shards(x.Type, s.plan)) {
		x = s.Fetch(x, share.Axis, share.Dim, s.inside, sum)
	}
	return x
}

// ops rebuilds the operations of a graph, in order.
func (s *sharder) ops(g *ir.Graph) error {
	for _, op := range g.Ops {
		in := make([]*ir.Value, len(op.In))
		for i, v := range op.In {
			if op.Kind == "repeat" {
				in[i] = s.Replacement[v] // a body gathers what it needs
			} else {
				s.Tagged(op.Tag, func() { in[i] = s.use(v) })
			}
		}
		var out []*ir.Value
		var err error
		s.Tagged(op.Tag, func() { out, err = s.op(op, in) })
		if err != nil {
			return err
		}
		if err := s.Err(); err != nil {
			return diag.From(err).Because("%s of %s cannot be sharded over %d devices", op.Kind, g.Name,
				s.plan.Devices())
		}
		s.Map(op.Out, out)
	}
	return nil
}

// op rebuilds one operation, after its arguments were resharded to placements that it accepts.
func (s *sharder) op(op *ir.Op, in []*ir.Value) ([]*ir.Value, error) {
	a := op.Attrs
	switch op.Kind {
	case "repeat":
		return s.repeat(op, in)
	case "add", "sub", "mul", "div", "select", "compare":
		in = s.alike(op.Kind, s.sameSlots(in))
	// Column-parallel and row-parallel layers follow from which dimension of the weight is sharded.
	case "dot", "linear":
		in = s.factors(op.Kind, in)
	case "neg", "scale", "convert", "stop_gradient", "rename", "transpose", "embedding", "fill",
		"iota": // any placement will do
	case "concat": // of terms, if all parts are
		same := func(v *ir.Value) bool { return v.Type.Place.Equal(in[0].Type.Place) }
		if lists.Find(in, func(v *ir.Value) bool { return !same(v) }) != nil {
			in = s.allReduced(in)
		}
	case "broadcast": // of terms, too
	case "attention":
		return s.attend(op, in), nil
	case "expert_positions", "expert_overflow", "expert_load", "attach_loss", "dispatch", "combine":
		return s.routed(op, in), nil
	case "rope":
		in = s.positioned(in)
	// With a sharded vocabulary the loss is computed on shards of the logits [B, S, V/tp]: maximum and
	// sum are reduced over tp. Padded columns do not count.
	case "cross_entropy":
		in = s.allReduced(in)
		if dim := a.Text("dim"); in[0].Type.Place.On(plan.TensorAxis) == dim {
			a = a.With("axis", plan.TensorAxis)
			if s.vocab > 0 {
				a = a.With("valid", s.vocab)
			}
		}
	default:
		in = s.allReduced(in)
	}
	return s.CopyWith(op, a, nil, in...), nil
}

// positioned gathers what rotary embeddings rotate along axes that shard its sequence but not the
// positions: the keys' elements that all heads share are made of the residual stream, which
// sequence parallelism shards (latent attention).
func (s *sharder) positioned(in []*ir.Value) []*ir.Value {
	x, pos := s.reduced(in[0]), in[1]
	for _, a := range s.mesh {
		if x.Type.Place.On(a.Name) == ir.Seq && pos.Type.Place.On(a.Name) != ir.Seq {
			x = s.gather(x, a.Name)
		}
	}
	return []*ir.Value{x, pos}
}

// allReduced sums the partial terms of all arguments.
func (s *sharder) allReduced(in []*ir.Value) []*ir.Value {
	return lists.Map(in, s.reduced)
}

// alike brings the arguments of an element-wise operation to one placement, axis by axis. Partial
// terms stay terms where the operation is linear in them (a sum of terms along the same axes, a
// product with one replicated factor). Else they are reduced, scattered if another argument is
// sharded. Then replicated arguments are sliced like the sharded ones.
func (s *sharder) alike(kind string, in []*ir.Value) []*ir.Value {
	out := s.atExperts(in)
	same := s.sameTerms(out)
	for _, a := range s.mesh {
		terms, sharded := 0, ""
		for _, v := range out {
			switch how := v.Type.Place.On(a.Name); how {
			case ir.Partial:
				terms++
			case "":
			default:
				sharded = how
			}
		}
		linear := (kind == "add" || kind == "sub") && terms == len(out) && same ||
			kind == "mul" && terms == 1 && sharded == ""
		for i, v := range out {
			if how := v.Type.Place.On(a.Name); how == ir.Partial && !linear {
				if sharded != "" && v.Type.Index(sharded) >= 0 {
					out[i] = s.reduce(v, func(axis string) string {
						if axis == a.Name {
							return sharded
						}
						return ""
					})
				} else {
					out[i] = s.reduced(v)
				}
			}
		}
		for _, v := range out { // a reduce-scatter may have sharded one
			if how := v.Type.Place.On(a.Name); how != "" && how != ir.Partial {
				sharded = how
			}
		}
		for i, v := range out {
			if sharded != "" && v.Type.Place.On(a.Name) == "" && v.Type.Index(sharded) >= 0 {
				out[i] = s.shardSlice(v, a.Name, sharded)
			}
		}
	}
	return out
}

// sameTerms reports whether all arguments are partial along the same axes, so that they can be
// added before the one reduction over all these axes.
func (s *sharder) sameTerms(in []*ir.Value) bool {
	return !slices.ContainsFunc(s.mesh, func(a ir.Axis) bool {
		first := in[0].Type.Place.On(a.Name) == ir.Partial
		return slices.ContainsFunc(in, func(v *ir.Value) bool {
			return (v.Type.Place.On(a.Name) == ir.Partial) != first
		})
	})
}

// factors reshards the operands of a matmul. The contracted dimension must be sharded on both sides
// or on neither. If an axis shards different dimensions of the two, the activation is gathered and
// the weight stays: Megatron's column-parallel layer.
func (s *sharder) factors(kind string, in []*ir.Value) []*ir.Value {
	in = s.atExperts(in)
	x, y := s.reduced(in[0]), s.reduced(in[1])
	for _, a := range s.mesh {
		has, other := x.Type.Place.On(a.Name), y.Type.Place.On(a.Name)
		switch {
		case has == other:
		case has != "" && other != "" && kind == "linear":
			x = s.gather(x, a.Name)
		case has != "" && other != "":
			y = s.gather(y, a.Name)
		case has != "" && y.Type.Index(has) >= 0:
			y = s.shardSlice(y, a.Name, has)
		case other != "" && x.Type.Index(other) >= 0:
			x = s.shardSlice(x, a.Name, other)
		}
	}
	return []*ir.Value{x, y}
}
