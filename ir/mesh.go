package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// meshKinds are the collectives and the copies between device and host. A collective's VJP is its
// transpose: all-gather and reduce-scatter are each other's, all-reduce of partial sums is
// replication's, an all-to-all has the one back.
func meshKinds() map[string]Kind {
	return map[string]Kind{
		// A sum over an axis gives everyone the sum; everyone's term has the gradient of the sum.
		"all_reduce": {1, takes(1, inferAllReduce), sameGradient, reduceWork},
		"all_gather": {1, inferShard("", true), func(d *Differ, op *Op, dy []*Value) []*Value {
			axis, dim := op.Attrs.Text("axis"), op.Attrs.Text("dim")
			if dy[0].Type.Place.On(axis) == Partial {
				if sum, err := dtype.Parse(op.Attrs.Text("sum")); err == nil {
					dy[0] = d.Convert(dy[0], sum)
				}
				return []*Value{d.ReduceScatter(dy[0], axis, dim)}
			}
			return []*Value{d.ShardSlice(dy[0], axis, dim)}
		}, gatherWork},
		"reduce_scatter": {1, inferShard(Partial, false), shardVJP, reduceWork},
		// Each device takes its own shard of a replicated value; the shards of the gradient together are
		// the gradient.
		"shard_slice": {1, inferShard("", false), shardVJP, nil},
		"all_to_all": {1, takes(1, inferAllToAll), func(d *Differ, op *Op, dy []*Value) []*Value {
			axis, from, to := op.Attrs.Text("axis"), op.Attrs.Text("from"), op.Attrs.Text("to")
			return []*Value{d.AllToAll(dy[0], axis, to, from)}
		}, exchangeWork},
		"to_host":   {1, inferMove, sameGradient, moveWork},
		"to_device": {1, inferMove, sameGradient, moveWork},
	}
}

// shardVJP is the VJP of an operation that leaves each device a shard: a gather.
func shardVJP(d *Differ, op *Op, dy []*Value) []*Value {
	return []*Value{d.AllGather(dy[0], op.Attrs.Text("axis"), op.Attrs.Text("dim"))}
}

// inferMove leaves the type as it is: [Graph.Hosted] tells where a value lies. A move to the device
// may have a second argument, which it waits for.
func inferMove(_ *Graph, op *Op) ([]Type, error) {
	if op.Kind != "to_device" || len(op.In) != 2 {
		if err := arity(op, 1); err != nil {
			return nil, err
		}
	}
	return []Type{op.In[0].Type}, nil
}

// ToHost moves a value to the memory of the host. All that can be done with it there is to keep it,
// in the stack of a repeat or as a result, and to move it back.
func (b *Builder) ToHost(x *Value) *Value { return b.one("to_host", nil, x) }

// ToDevice moves a value to the device's own memory. If after is not nil, the move waits until
// after is on the device, so that not all moves need room at once. An input that is moved lies on
// the host.
func (b *Builder) ToDevice(x, after *Value) *Value {
	if after == nil {
		return b.one("to_device", nil, x)
	}
	return b.one("to_device", nil, x, after)
}

// Hosted gives the values of a graph that lie in the memory of the host: what is moved there, the
// stacks of it, and inputs that are moved back before anything else is done with them.
func (g *Graph) Hosted() map[*Value]bool {
	hosted := map[*Value]bool{}
	for _, op := range g.Ops {
		in, out := op.hosted()
		for i, v := range op.In {
			hosted[v] = hosted[v] || in[i]
		}
		for i, v := range op.Out {
			hosted[v] = hosted[v] || out[i]
		}
	}
	return hosted
}

// hosted tells which arguments and results of an operation lie on the host.
func (op *Op) hosted() (in, out []bool) {
	in, out = make([]bool, len(op.In)), make([]bool, len(op.Out))
	switch op.Kind {
	case "to_host":
		out[0] = true
	case "to_device":
		for i := range in {
			in[i] = true
		}
	case "repeat":
		inside := op.Body.Hosted()
		for i, v := range op.Body.Inputs {
			in[i] = inside[v]
		}
		for i, v := range op.Body.Results {
			out[i] = inside[v]
		}
	}
	return in, out
}

// verifyMemory holds the values of a graph to one memory each.
func (g *Graph) verifyMemory() error {
	hosted := g.Hosted()
	for _, op := range g.Ops {
		in, out := op.hosted()
		for i, v := range op.In {
			if hosted[v] && !in[i] {
				return fmt.Errorf("%s takes %s, which lies on the host", op.Kind, v)
			}
			if op.Kind == "repeat" && op.Loop().IsCarry(i) && in[i] != out[i] {
				return fmt.Errorf("carry %d of %s goes in and comes out of another memory", i, op.Kind)
			}
		}
		for i, v := range op.Out {
			if hosted[v] && !out[i] {
				return fmt.Errorf("%s is moved from the host, but %s gives it on the device", v, op.Kind)
			}
		}
	}
	return nil
}

// Axes lists the axes of the mesh that a collective goes along: one, or several for a sum. It is
// nil for other operations.
func (op *Op) Axes() []string {
	if axis := op.Attrs.Text("axis"); axis != "" {
		return []string{axis}
	}
	return op.Attrs.List("axes")
}

// inferAllReduce turns partial sums into a replicated sum.
func inferAllReduce(_ *Graph, op *Op) ([]Type, error) {
	t := op.In[0].Type
	for i, axis := range op.Axes() {
		if how := t.Place.On(axis); how != Partial || slices.Contains(op.Axes()[:i], axis) {
			return nil, fmt.Errorf("along %s the argument %s is placed %q, not %q", axis, t, how, Partial)
		}
	}
	if len(op.Axes()) == 0 {
		return nil, fmt.Errorf("adds up along no axis")
	}
	for _, axis := range op.Axes() {
		t.Place = t.Place.With(axis, "")
	}
	return []Type{t}, nil
}

// inferShard is the shape rule of operations that gather a sharded dimension along an axis (join),
// or shard it; how is the placement that the argument must have.
func inferShard(how string, join bool) func(*Graph, *Op) ([]Type, error) {
	return takes(1, func(g *Graph, op *Op) ([]Type, error) {
		t, axis, dim, how := op.In[0].Type, op.Attrs.Text("axis"), op.Attrs.Text("dim"), how
		if join {
			how = dim
		}
		got, n := t.Place.On(axis), g.AxisSize(axis)
		switch {
		case got != how:
			return nil, fmt.Errorf("along %s the argument %s is placed %q, not %q", axis, t, got, how)
		case join:
			return []Type{resharded(t, axis, dim, "", n, 1)}, nil
		case t.Index(dim) < 0 || t.Size(dim)%n != 0:
			return nil, fmt.Errorf("%s cannot be sharded along %s in %d", t, dim, n)
		}
		return []Type{resharded(t, axis, dim, dim, 1, n)}, nil
	})
}

// inferAllToAll turns shards of one dimension (from) into shards of another (to).
func inferAllToAll(g *Graph, op *Op) ([]Type, error) {
	t, axis := op.In[0].Type, op.Attrs.Text("axis")
	from, to, n := op.Attrs.Text("from"), op.Attrs.Text("to"), g.AxisSize(op.Attrs.Text("axis"))
	switch got := t.Place.On(axis); {
	case got != from || from == Partial || t.Index(from) < 0:
		return nil, fmt.Errorf("along %s the argument %s is placed %q, not %q", axis, t, got, from)
	case from == to || t.Index(to) < 0 || t.Size(to)%n != 0:
		return nil, fmt.Errorf("%s cannot be sharded along %q in %d", t, to, n)
	}
	return []Type{resharded(resharded(t, axis, from, "", n, 1), axis, to, to, 1, n)}, nil
}

// resharded gives a type whose dimension is times/by as long, with another placement along the
// axis.
func resharded(t Type, axis, dim, how string, times, by int64) Type {
	out := Type{Elem: t.Elem, Place: t.Place.With(axis, how)}
	for _, d := range t.Dims {
		if d.Name == dim {
			d.Size = d.Size * times / by
		}
		out.Dims = append(out.Dims, d)
	}
	return out
}

// collective adds a collective along one axis.
func (b *Builder) collective(kind, axis, dim string, x *Value) *Value {
	return b.one(kind, attrs(map[string]any{"axis": axis, "dim": dim}), x)
}

// AllReduce adds up the terms that the devices of an axis, or of several axes together, hold.
func (b *Builder) AllReduce(x *Value, axes ...string) *Value {
	if len(axes) == 1 {
		return b.collective("all_reduce", axes[0], "", x)
	}
	return b.one("all_reduce", attrs(map[string]any{"axes": axes}), x)
}

// AllGather concatenates the shards that the devices of an axis hold.
func (b *Builder) AllGather(x *Value, axis, dim string) *Value {
	return b.collective("all_gather", axis, dim, x)
}

// Fetch is AllGather of a parameter (FSDP). With ahead, a compiler may prefetch it one round of a
// loop early. The partial sums of its gradient are converted to sum before they are
// reduce-scattered; Invalid leaves them as they are.
func (b *Builder) Fetch(x *Value, axis, dim string, ahead bool, sum dtype.DType) *Value {
	a := map[string]any{"axis": axis, "dim": dim, "prefetch": ahead, "sum": spelled(sum)}
	return b.one("all_gather", attrs(a), x)
}

// ReduceScatter adds up partial sums and leaves each device a shard of the sum.
func (b *Builder) ReduceScatter(x *Value, axis, dim string) *Value {
	return b.collective("reduce_scatter", axis, dim, x)
}

// ShardSlice takes the device's own shard of a replicated value; it sends nothing.
func (b *Builder) ShardSlice(x *Value, axis, dim string) *Value {
	return b.collective("shard_slice", axis, dim, x)
}

// AllToAll turns the shards of dimension from, which the devices of an axis hold, into shards of
// dimension to: each device sends every other the slice of its own shard that is in the other's.
func (b *Builder) AllToAll(x *Value, axis, from, to string) *Value {
	return b.one("all_to_all", attrs(map[string]any{"axis": axis, "from": from, "to": to}), x)
}
