package ir

import (
	"fmt"
	"slices"
)

// shapeKinds move elements or reduce over dimensions. All but max are linear.
func shapeKinds() map[string]Kind {
	return map[string]Kind{
		"transpose": {1, takes(1, inferTranspose), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Transpose(dy[0], Names(op.In[0].Type.Dims)...)}
		}, nil},
		"rename": {1, takes(1, inferRename), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Rename(dy[0], op.Attrs.Text("to"), op.Attrs.Text("from"))}
		}, nil},
		"split": {1, takes(1, inferSplit), func(d *Differ, op *Op, dy []*Value) []*Value {
			major, minor := op.Attrs.Text("major"), op.Attrs.Text("minor")
			return []*Value{d.Merge(dy[0], op.Attrs.Text("dim"), major, minor)}
		}, nil},
		"merge": {1, takes(1, inferMerge), func(d *Differ, op *Op, dy []*Value) []*Value {
			major, minor := op.Attrs.Text("major"), op.Attrs.Text("minor")
			return []*Value{d.Split(dy[0], op.Attrs.Text("dim"), major, minor, op.In[0].Type.Size(minor))}
		}, nil},
		"broadcast": {1, takes(1, inferBroadcast), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.order(d.Sum(dy[0], op.Attrs.Text("dim")), op.In[0])}
		}, nil},
		"slice": {1, takes(1, inferSlice), func(d *Differ, op *Op, dy []*Value) []*Value {
			dim := op.Attrs.Text("dim")
			from, all := op.Attrs.Int("from"), op.In[0].Type.Size(dim)
			high := all - from - dy[0].Type.Size(dim)
			return []*Value{d.pad(dy[0], dim, from, high, op.Attrs.Bool("local"))}
		}, nil},
		"pad": {1, takes(1, inferPad), func(d *Differ, op *Op, dy []*Value) []*Value {
			dim, low := op.Attrs.Text("dim"), op.Attrs.Int("low")
			to := low + op.In[0].Type.Size(dim)
			return []*Value{d.slice(dy[0], dim, low, to, op.Attrs.Bool("local"))}
		}, nil},
		"concat": {1, inferConcat, func(d *Differ, op *Op, dy []*Value) []*Value {
			dim, at := op.Attrs.Text("dim"), int64(0)
			var parts []*Value
			for _, x := range op.In {
				n := x.Type.Size(dim)
				parts = append(parts, d.slice(dy[0], dim, at, at+n, op.Attrs.Bool("local")))
				at += n
			}
			return parts
		}, nil},
		"sum": {1, takes(1, inferReduce), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.unreduce(dy[0], op)}
		}, nil},
		"max": {1, takes(1, inferReduce), func(d *Differ, op *Op, dy []*Value) []*Value {
			x := d.Use(op.In[0])
			top := d.unreduce(d.Use(op.Out[0]), op)
			isTop := d.Compare("eq", x, top)
			return []*Value{d.Select(isTop, d.unreduce(dy[0], op), d.Fill(x.Type, 0))}
		}, nil},
	}
}

// inferTranspose permutes the dimensions.
func inferTranspose(_ *Graph, op *Op) ([]Type, error) {
	x, order := op.In[0].Type, op.Attrs.List("order")
	t := Type{Elem: x.Elem, Place: x.Place}
	for _, name := range order {
		i := x.Index(name)
		if i < 0 {
			return nil, fmt.Errorf("%s has no %s", x, name)
		}
		t.Dims = append(t.Dims, x.Dims[i])
	}
	if len(t.Dims) != len(x.Dims) {
		return nil, fmt.Errorf("%s has other dimensions than %s", x, joined(order))
	}
	return []Type{t}, nil
}

// replaceDim gives a type with one dimension replaced by others; the one named holder carries its
// sharding.
func replaceDim(t Type, name string, holder string, by ...Dim) Type {
	i := t.Index(name)
	out := Type{Elem: t.Elem, Place: t.Place}
	out.Dims = slices.Concat(t.Dims[:i], by, t.Dims[i+1:])
	for _, s := range t.Place {
		if s.Dim == name {
			out.Place = out.Place.With(s.Axis, holder)
		}
	}
	return out
}

// inferRename renames a dimension, and with it its sharding.
func inferRename(_ *Graph, op *Op) ([]Type, error) {
	x, from, to := op.In[0].Type, op.Attrs.Text("from"), op.Attrs.Text("to")
	if x.Index(from) < 0 {
		return nil, fmt.Errorf("%s has no %s", x, from)
	}
	return []Type{replaceDim(x, from, to, Dim{to, x.Size(from)})}, nil
}

// inferSplit splits a dimension in two, [major, minor]; if it is sharded the major part is.
func inferSplit(_ *Graph, op *Op) ([]Type, error) {
	x, dim, n := op.In[0].Type, op.Attrs.Text("dim"), op.Attrs.Int("size")
	if x.Index(dim) < 0 || n < 1 || x.Size(dim)%n != 0 {
		return nil, fmt.Errorf("%s cannot have its %s split by %d", x, dim, n)
	}
	major, minor := op.Attrs.Text("major"), op.Attrs.Text("minor")
	return []Type{replaceDim(x, dim, major, Dim{major, x.Size(dim) / n}, Dim{minor, n})}, nil
}

// inferMerge merges two neighbouring dimensions; only the major one may be sharded.
func inferMerge(_ *Graph, op *Op) ([]Type, error) {
	x, major, minor := op.In[0].Type, op.Attrs.Text("major"), op.Attrs.Text("minor")
	i := x.Index(major)
	if i < 0 || i+1 >= len(x.Dims) || x.Dims[i+1].Name != minor {
		return nil, fmt.Errorf("%s does not have %s just before %s", x, major, minor)
	}
	for _, s := range x.Place {
		if s.Dim == minor {
			return nil, fmt.Errorf("along %s %s is sharded, so it cannot be merged into %s", s.Axis,
				minor, major)
		}
	}
	dim := op.Attrs.Text("dim")
	t := replaceDim(x, major, dim, Dim{dim, x.Size(major) * x.Size(minor)})
	t.Dims = slices.Delete(t.Dims, i+1, i+2)
	return []Type{t}, nil
}

// inferBroadcast repeats a value along a new dimension, which may be sharded.
func inferBroadcast(_ *Graph, op *Op) ([]Type, error) {
	x := op.In[0].Type
	at := op.Attrs.Int("at")
	if at < 0 || at > int64(len(x.Dims)) {
		return nil, fmt.Errorf("%s has no place %d", x, at)
	}
	d := Dim{op.Attrs.Text("dim"), op.Attrs.Int("size")}
	t := Type{x.Elem, slices.Insert(slices.Clone(x.Dims), int(at), d), x.Place}
	for _, axis := range op.Attrs.List("sharded") { // copies are shards of it too
		if t.Place.On(axis) != "" {
			return nil, fmt.Errorf("along %s %s is not copied", axis, x)
		}
		t.Place = t.Place.With(axis, d.Name)
	}
	return []Type{t}, nil
}

// resized gives a type with one dimension of another size, which must not be sharded. A local
// operation works on each device's shard.
func resized(x Type, dim string, size int64, local bool) ([]Type, error) {
	i := x.Index(dim)
	if i < 0 || size < 0 {
		return nil, fmt.Errorf("%s cannot have %s=%d", x, dim, size)
	}
	for _, s := range x.Place {
		if s.Dim == dim && !local {
			return nil, fmt.Errorf("along %s %s is sharded", s.Axis, dim)
		}
	}
	t := Type{Elem: x.Elem, Dims: slices.Clone(x.Dims), Place: x.Place}
	t.Dims[i].Size = size
	return []Type{t}, nil
}

// inferSlice takes [from, to) of a dimension.
func inferSlice(_ *Graph, op *Op) ([]Type, error) {
	x, dim, from, to := op.In[0].Type, op.Attrs.Text("dim"), op.Attrs.Int("from"), op.Attrs.Int("to")
	if from < 0 || to < from || to > x.Size(dim) {
		return nil, fmt.Errorf("%s has no %s from %d to %d", x, dim, from, to)
	}
	return resized(x, dim, to-from, op.Attrs.Bool("local"))
}

// inferPad adds zeros at both ends of a dimension.
func inferPad(_ *Graph, op *Op) ([]Type, error) {
	x, low, high := op.In[0].Type, op.Attrs.Int("low"), op.Attrs.Int("high")
	if low < 0 || high < 0 {
		return nil, fmt.Errorf("cannot pad by %d and %d", low, high)
	}
	dim := op.Attrs.Text("dim")
	return resized(x, dim, low+x.Size(dim)+high, op.Attrs.Bool("local"))
}

// inferConcat concatenates along a dimension in which alone the arguments differ.
func inferConcat(_ *Graph, op *Op) ([]Type, error) {
	if len(op.In) == 0 {
		return nil, fmt.Errorf("joins nothing")
	}
	dim, size := op.Attrs.Text("dim"), int64(0)
	first := op.In[0].Type
	for _, v := range op.In {
		size += v.Type.Size(dim)
		same, err := resized(v.Type, dim, first.Size(dim), op.Attrs.Bool("local"))
		if err != nil {
			return nil, err
		}
		if !same[0].Equal(first) {
			return nil, fmt.Errorf("%s and %s differ in more than %s", first, v.Type, dim)
		}
	}
	return resized(first, dim, size, op.Attrs.Bool("local"))
}

// inferReduce drops dimensions. A sum over a sharded one is a partial sum; a maximum has no such
// type.
func inferReduce(_ *Graph, op *Op) ([]Type, error) {
	x, over := op.In[0].Type, op.Attrs.List("over")
	for _, name := range over {
		if x.Index(name) < 0 {
			return nil, fmt.Errorf("%s has no %s", x, name)
		}
	}
	t := Type{Elem: x.Elem, Dims: Without(x.Dims, over...), Place: x.Place}
	for _, s := range x.Place {
		switch cut := slices.Contains(over, s.Dim); {
		case op.Kind != "sum" && (cut || s.Dim == Partial):
			return nil, fmt.Errorf("along %s the maximum of a shard is not the maximum", s.Axis)
		case cut:
			t.Place = t.Place.With(s.Axis, Partial)
		}
	}
	return []Type{t}, nil
}

// Transpose puts the dimensions into another order.
func (b *Builder) Transpose(x *Value, order ...string) *Value {
	if x != nil && slices.Equal(Names(x.Type.Dims), order) {
		return x
	}
	return b.one("transpose", attrs(map[string]any{"order": order}), x)
}

// Rename gives a dimension another name.
func (b *Builder) Rename(x *Value, from, to string) *Value {
	return b.one("rename", attrs(map[string]any{"from": from, "to": to}), x)
}

// Split splits dimension dim into major and minor, the latter of the given size.
func (b *Builder) Split(x *Value, dim, major, minor string, size int64) *Value {
	a := map[string]any{"dim": dim, "major": major, "minor": minor, "size": size}
	return b.one("split", attrs(a), x)
}

// Merge joins two neighbouring dimensions.
func (b *Builder) Merge(x *Value, dim, major, minor string) *Value {
	return b.one("merge", attrs(map[string]any{"dim": dim, "major": major, "minor": minor}), x)
}

// Broadcast repeats x along a new dimension at the given place.
func (b *Builder) Broadcast(x *Value, at int, dim Dim) *Value {
	return b.one("broadcast", attrs(map[string]any{"at": at, "dim": dim.Name, "size": dim.Size}), x)
}

// Slice takes a range of a dimension.
func (b *Builder) Slice(x *Value, dim string, from, to int64) *Value {
	return b.slice(x, dim, from, to, false)
}

// slice takes [from, to); local counts within a device's shard.
func (b *Builder) slice(x *Value, dim string, from, to int64, local bool) *Value {
	a := map[string]any{"dim": dim, "from": from, "to": to, "local": local}
	return b.one("slice", attrs(a), x)
}

// Halve takes the two halves of each device's shard of a dimension; Rejoin undoes it.
func (b *Builder) Halve(x *Value, dim string) [2]*Value {
	n := int64(0)
	if x != nil { // else slice reports it
		n = x.Type.Size(dim)
	}
	return [2]*Value{b.slice(x, dim, 0, n/2, true), b.slice(x, dim, n/2, n, true)}
}

// Rejoin joins what Halve took apart.
func (b *Builder) Rejoin(halves [2]*Value, dim string) *Value {
	return b.one("concat", attrs(map[string]any{"dim": dim, "local": true}), halves[0], halves[1])
}

// Pad adds zeros before and after.
func (b *Builder) Pad(x *Value, dim string, low, high int64) *Value {
	return b.pad(x, dim, low, high, false)
}

// pad is the transpose of slice.
func (b *Builder) pad(x *Value, dim string, low, high int64, local bool) *Value {
	a := map[string]any{"dim": dim, "low": low, "high": high, "local": local}
	return b.one("pad", attrs(a), x)
}

// Concat joins values along a dimension.
func (b *Builder) Concat(dim string, parts ...*Value) *Value {
	return b.one("concat", attrs(map[string]any{"dim": dim}), parts...)
}

// ConcatAny is Concat of any number of parts: nil for none, and the part itself for one.
func (b *Builder) ConcatAny(dim string, parts []*Value) *Value {
	switch len(parts) {
	case 0:
		return nil
	case 1:
		return parts[0]
	}
	return b.Concat(dim, parts...)
}

// Sum adds up over dimensions.
func (b *Builder) Sum(x *Value, over ...string) *Value {
	return b.one("sum", attrs(map[string]any{"over": over}), x)
}

// Max takes the largest over dimensions.
func (b *Builder) Max(x *Value, over ...string) *Value {
	return b.one("max", attrs(map[string]any{"over": over}), x)
}
