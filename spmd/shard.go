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

// A Sharding is a graph of a model as one device of a plan's mesh computes it.
type Sharding struct {
	Plan   *plan.Plan
	Graph  *ir.Graph
	Params []Layout
}

// Shard cuts the graph of a loss over a microbatch, or of one stage of it, for the devices of a
// plan, and writes down every collective. The graph is rebuilt operation by operation: inputs are
// cut by the names of their dimensions, the placements of results follow, and where an operation
// cannot take an argument as it lies, a collective brings it into place.
func Shard(loss *ir.Graph, p *plan.Plan) (*Sharding, error) {
	if len(loss.Mesh) > 0 {
		return nil, diag.New(diag.GraphInvalid, "only the graph of a whole batch can be cut").
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
		s.At[v] = s.Like(v, t)
	}
	s.gatherStacks(loss)
	if err := s.ops(loss); err != nil {
		return nil, err
	}
	var out []*ir.Value
	for _, v := range loss.Results {
		out = append(out, s.flowing(s.reduced(s.At[v])))
	}
	var err error
	sh.Graph, err = s.Graph(out...)
	return sh, err
}

// dataType cuts what comes from the batch, or from the stage before.
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

// flows tells whether something flows between layers.
func flows(t ir.Type) bool { return t.Index(ir.Seq) >= 0 && t.Index(ir.EmbedDim) >= 0 }

// A sharder rebuilds one graph, or one body.
type sharder struct {
	*ir.Rewriter
	plan   *plan.Plan
	mesh   []ir.Axis
	params map[*ir.Value]bool   // inputs of the old graph that are parameters
	ready  map[string]*ir.Value // values that were brought into place before, by what was done
	vocab  int64                // tokens that count, where the vocabulary was padded
	inside bool                 // a body, not the whole
}

func newSharder(name string, p *plan.Plan) *sharder {
	return &sharder{plan: p, mesh: p.Mesh(), Rewriter: ir.NewRewriter(name, p.Mesh()...),
		params: map[*ir.Value]bool{}, ready: map[string]*ir.Value{}}
}

// once does something to a value the first time, and remembers it.
func (s *sharder) once(v *ir.Value, what string, do func() *ir.Value) *ir.Value {
	return s.cached(v.Name+" "+what, do)
}

func (s *sharder) cached(key string, do func() *ir.Value) *ir.Value {
	if s.ready[key] == nil {
		s.ready[key] = do()
	}
	return s.ready[key]
}

// gather joins the pieces of a value along an axis. Who needs the whole again gathers it again.
func (s *sharder) gather(v *ir.Value, axis string) *ir.Value {
	return s.once(v, "gather "+axis, func() (y *ir.Value) {
		s.Tagged(ir.Gather, func() { y = s.AllGather(v, axis, v.Type.Place.On(axis)) })
		return y
	})
}

// own takes the device's piece of a copy.
func (s *sharder) own(v *ir.Value, axis, dim string) *ir.Value {
	return s.once(v, "own "+axis+" "+dim, func() *ir.Value { return s.OwnPiece(v, axis, dim) })
}

// reduced gives a value whose terms are summed up. With sequence parallelism the sum of what flows
// between layers is left in pieces of the sequence.
func (s *sharder) reduced(v *ir.Value) *ir.Value {
	return s.reduce(v, func(axis string) string {
		if axis == plan.TensorAxis && s.plan.TP.Sequence && flows(v.Type) {
			return ir.Seq
		}
		return ""
	})
}

// reduce sums up terms; into says by which dimension the sum is cut along an axis.
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

// conform brings a value to a placement.
func (s *sharder) conform(v *ir.Value, want ir.Placement) *ir.Value {
	v = s.reduce(v, want.On)
	for _, a := range s.mesh {
		switch has, to := v.Type.Place.On(a.Name), want.On(a.Name); {
		case has == to:
		case to == "":
			v = s.gather(v, a.Name)
		case has == "":
			v = s.own(v, a.Name, to)
		}
	}
	return v
}

// gatherStacks joins the pieces of parameters for a whole microbatch, if the plan says so.
//
// What the forward program of a pipeline's stage joined stays for its backward program; but not if
// products are in few bits, of which the two take different copies: each then joins its own.
func (s *sharder) gatherStacks(g *ir.Graph) {
	if s.plan.FSDP.Gather != "micro" {
		return
	}
	var tag ir.Tag
	if s.plan.Size(plan.PipelineAxis) > 1 && Quantizes(g) {
		tag = ir.Gather
	}
	for _, v := range g.Inputs {
		if s.params[v] {
			s.Tagged(tag, func() { s.At[v] = s.weight(s.At[v]) })
		}
	}
}

// use gives a value of the old graph as operations take it: a parameter's shards are gathered, and
// it has the key heads of the device's own query heads.
func (s *sharder) use(v *ir.Value) *ir.Value {
	x := s.At[v]
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
				at := x.Type.Index(ir.KVHeads) + 1
				y = s.Broadcast(x, at, ir.Dim{Name: "copies", Size: tp / kv})
				y = s.Merge(y, ir.KVHeads, ir.KVHeads, "copies")
				y = s.OwnPiece(y, plan.TensorAxis, ir.KVHeads)
			})
			return y
		})
	}
	return x
}

// shards lists the axes that cut a parameter beside those that cut it for operations.
func shards(t ir.Type, p *plan.Plan) (list []ir.AxisSharding) {
	for _, a := range p.Shards() {
		if dim := t.Place.On(a.Name); dim != "" && !slices.Contains(p.Axes(t.Dims, dim), a) {
			list = append(list, ir.AxisSharding{Axis: a.Name, Dim: dim})
		}
	}
	return list
}

// weight gathers a parameter; one of a layer may be fetched while the layer before it computes.
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

// ops rebuilds the operations of a graph.
func (s *sharder) ops(g *ir.Graph) error {
	for _, op := range g.Ops {
		in := make([]*ir.Value, len(op.In))
		for i, v := range op.In {
			if op.Kind == "repeat" {
				in[i] = s.At[v] // a body gathers what it needs
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
			return diag.From(err).Because("%s of %s cannot be cut for %d devices", op.Kind, g.Name,
				s.plan.Devices())
		}
		s.Set(op.Out, out)
	}
	return nil
}

// op rebuilds one operation: its arguments are brought into place first.
func (s *sharder) op(op *ir.Op, in []*ir.Value) ([]*ir.Value, error) {
	a := op.Attrs
	switch op.Kind {
	case "repeat":
		return s.repeat(op, in)
	case "add", "sub", "mul", "div", "select", "compare":
		in = s.alike(op.Kind, in)
	case "dot", "linear":
		in = s.factors(op.Kind, in)
	case "neg", "scale", "convert", "stop_gradient", "rename", "transpose", "embedding", "fill",
		"iota": // any placement will do
	case "attention":
		in, a = s.attend(op, in)
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
	return s.Again(op, a, nil, in...), nil
}

func (s *sharder) allReduced(in []*ir.Value) []*ir.Value {
	return lists.Map(in, s.reduced)
}

// alike brings the arguments of an element-wise operation to one placement.
func (s *sharder) alike(kind string, in []*ir.Value) []*ir.Value {
	out := slices.Clone(in)
	same := s.sameTerms(in)
	for _, a := range s.mesh {
		terms, cut := 0, ""
		for _, v := range out {
			switch how := v.Type.Place.On(a.Name); how {
			case ir.Partial:
				terms++
			case "":
			default:
				cut = how
			}
		}
		linear := (kind == "add" || kind == "sub") && terms == len(out) && same ||
			kind == "mul" && terms == 1 && cut == ""
		for i, v := range out {
			if how := v.Type.Place.On(a.Name); how == ir.Partial && !linear {
				if cut != "" && v.Type.Index(cut) >= 0 {
					out[i] = s.reduce(v, func(axis string) string {
						if axis == a.Name {
							return cut
						}
						return ""
					})
				} else {
					out[i] = s.reduced(v)
				}
			}
		}
		for _, v := range out { // what was settled may be cut now
			if how := v.Type.Place.On(a.Name); how != "" && how != ir.Partial {
				cut = how
			}
		}
		for i, v := range out {
			if cut != "" && v.Type.Place.On(a.Name) == "" && v.Type.Index(cut) >= 0 {
				out[i] = s.own(v, a.Name, cut)
			}
		}
	}
	return out
}

// sameTerms tells whether all arguments are terms along the same axes, so that they can be added
// before they are summed up: a sum is taken along all axes at once.
func (s *sharder) sameTerms(in []*ir.Value) bool {
	return !slices.ContainsFunc(s.mesh, func(a ir.Axis) bool {
		first := in[0].Type.Place.On(a.Name) == ir.Partial
		return slices.ContainsFunc(in, func(v *ir.Value) bool {
			return (v.Type.Place.On(a.Name) == ir.Partial) != first
		})
	})
}

// factors brings the arguments of a product into place: what is summed over must be cut on both
// sides or on none. Of two dimensions that one axis cuts, that of the activation is gathered, since
// weights stay where they are.
func (s *sharder) factors(kind string, in []*ir.Value) []*ir.Value {
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
			y = s.own(y, a.Name, has)
		case other != "" && x.Type.Index(other) >= 0:
			x = s.own(x, a.Name, other)
		}
	}
	return []*ir.Value{x, y}
}
