package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// contractKinds are the matrix products. A dot multiplies over the dimensions that both arguments
// have and sums over the named ones; a linear is the dot of a model's weight, whose three GEMMs
// (fprop, dgrad, wgrad) may each have a precision of its own.
func contractKinds() map[string]Kind {
	return map[string]Kind{
		"dot": {1, takes(2, inferDot), func(d *Differ, op *Op, dy []*Value) []*Value {
			a, c := d.Use(op.In[0]), d.Use(op.In[1])
			return []*Value{d.dotInto(dy[0], c, op.In[0]), d.dotInto(dy[0], a, op.In[1])}
		}, dots},
		"linear": {1, takes(2, inferDot), func(d *Differ, op *Op, dy []*Value) []*Value {
			w := d.Use(op.In[1])
			dx := d.one("linear_dx", op.Attrs.With("over", outOf(op)), dy[0], w)
			return []*Value{d.order(dx, op.In[0]), d.order(d.weightGrad(op, dy[0]), op.In[1])}
		}, dots},
		"linear_dx": {1, takes(2, inferDot), nil, dots},
		"linear_dw": {1, takes(2, inferDot), nil, dots},
		"embedding": {1, takes(2, inferEmbedding), func(d *Differ, op *Op, dy []*Value) []*Value {
			t := op.In[1].Type
			t.Place = lists.Filter(t.Place, func(s AxisSharding) bool { // each device has its own rows
				return s.Dim == t.Dims[0].Name
			})
			a := attrs(map[string]any{"type": t.String()})
			return []*Value{nil, d.one("embedding_dw", a, d.Use(op.In[0]), dy[0])}
		}, embeddingWork},
		"embedding_dw": {1, takes(2, inferEmbeddingDW), nil, embeddingDWWork},
	}
}

// outOf lists the dimensions of a linear's result that come from the weight alone: dgrad sums over
// them. wgrad sums over the rows of x. Experts, which both have, go side by side.
func outOf(op *Op) []string {
	return Names(Without(op.In[1].Type.Dims, Names(op.In[0].Type.Dims)...))
}

// inferDot gives the dimensions of the first argument without the summed ones, then the dimensions
// that only the second has. Dimensions in both that are not summed are batch dimensions.
func inferDot(_ *Graph, op *Op) ([]Type, error) {
	a, b, over := op.In[0].Type, op.In[1].Type, op.Attrs.List("over")
	for _, name := range over {
		if a.Index(name) < 0 || b.Index(name) < 0 {
			return nil, fmt.Errorf("%s and %s do not both have %s", a, b, name)
		}
	}
	for _, d := range a.Dims {
		if i := b.Index(d.Name); i >= 0 && b.Dims[i].Size != d.Size {
			return nil, fmt.Errorf("%s and %s differ in %s", a, b, d.Name)
		}
	}
	if a.Elem != b.Elem {
		return nil, fmt.Errorf("%s and %s differ in element type", a, b)
	}
	elem := a.Elem
	if to := op.Attrs.Text("to"); to != "" {
		var err error
		if elem, err = dtype.Parse(to); err != nil {
			return nil, err
		}
	}
	t := Type{Elem: elem, Dims: Without(a.Dims, over...)}
	t.Dims = append(t.Dims, Without(b.Dims, append(Names(a.Dims), over...)...)...)
	var err error
	t.Place, err = dotPlace(a, b, over)
	return []Type{t}, err
}

// dotPlace is the heart of tensor parallelism. A summed dimension that both arguments shard leaves
// partial sums (row parallelism); a kept dimension stays sharded (column parallelism); a partial
// sum times a replicated value is a partial sum.
func dotPlace(a, b Type, over []string) (Placement, error) {
	var place Placement
	for _, axis := range axesOf(a, b) {
		s, t := a.Place.On(axis), b.Place.On(axis)
		switch {
		case s == Partial && t == "" || s == "" && t == Partial:
			place = place.With(axis, Partial)
		case s == Partial || t == Partial:
			return nil, fmt.Errorf("along %s an argument is a partial sum that was not reduced", axis)
		case s == t && slices.Contains(over, s):
			place = place.With(axis, Partial)
		case s == t:
			place = place.With(axis, s)
		case s != "" && t != "":
			return nil, fmt.Errorf("along %s one argument shards %s, the other %s", axis, s, t)
		default:
			cut, other := s+t, b // one of s and t is empty
			if t != "" {
				other = a
			}
			if slices.Contains(over, cut) || other.Index(cut) >= 0 {
				return nil, fmt.Errorf("along %s only one argument shards %s", axis, cut)
			}
			place = place.With(axis, cut)
		}
	}
	return place, nil
}

// inferEmbedding gives rows of a table [vocab, embed]. A table sharded by rows gives partial sums:
// a device that lacks a row contributes zeros.
func inferEmbedding(_ *Graph, op *Op) ([]Type, error) {
	ids, table := op.In[0].Type, op.In[1].Type
	if ids.Elem.Kind() != dtype.Signed || len(table.Dims) != 2 {
		return nil, fmt.Errorf("wants whole numbers and a table, got %s and %s", ids, table)
	}
	rows := table.Dims[0].Name
	t := Type{Elem: table.Elem, Dims: append(slices.Clone(ids.Dims), table.Dims[1])}
	for _, axis := range axesOf(ids, table) {
		s, r := ids.Place.On(axis), table.Place.On(axis)
		switch {
		case s != "" && r != "" || s == Partial || r == Partial:
			return nil, fmt.Errorf("along %s both are sharded, or one is a partial sum", axis)
		case r == rows:
			t.Place = t.Place.With(axis, Partial)
		default:
			t.Place = t.Place.With(axis, s+r)
		}
	}
	return []Type{t}, nil
}

// inferEmbeddingDW sums the gradients of equal ids into the rows of a table. Devices with different
// ids hold partial sums.
func inferEmbeddingDW(_ *Graph, op *Op) ([]Type, error) {
	t, err := ParseType(op.Attrs.Text("type"))
	if err != nil {
		return nil, err
	}
	ids := op.In[0].Type
	for _, s := range ids.Place {
		t.Place = t.Place.With(s.Axis, Partial) // each device has some of the ids
	}
	for _, s := range op.In[1].Type.Place {
		if ids.Index(s.Dim) < 0 {
			t.Place = t.Place.With(s.Axis, s.Dim)
		}
	}
	return []Type{t}, nil
}

// Dot sums the product of a and c over the named dimensions; others that both have are batch
// dimensions.
func (b *Builder) Dot(a, c *Value, over ...string) *Value {
	return b.one("dot", attrs(map[string]any{"over": over}), a, c)
}

// Linear multiplies x [..., in] by a weight [in, out] or [out, in], summing over the dimensions
// that they share, except for the experts [experts, ...], each of which has a weight.
func (b *Builder) Linear(x, w *Value) *Value { return b.LinearIn(x, w, dtype.Invalid) }

// LinearIn is Linear with the operands of its three GEMMs rounded to a type; sums and results keep
// the type of x. Invalid keeps the operands as they are.
func (b *Builder) LinearIn(x, w *Value, operands dtype.DType) *Value {
	if b.err != nil || x == nil || w == nil {
		return b.one("linear", nil, x, w)
	}
	over := lists.Filter(w.Type.Dims, func(d Dim) bool {
		return d.Name != ExpertDim && x.Type.Index(d.Name) >= 0
	})
	a := map[string]any{"in": spelled(operands), "over": Names(over)}
	return b.one("linear", attrs(a), x, w)
}

// Embedding takes the rows of a table [vocab, embed] that ids name.
func (b *Builder) Embedding(ids, table *Value) *Value { return b.one("embedding", nil, ids, table) }
