package ir

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Dim is one dimension of a value: what it counts, and how many there are on this device.
type Dim struct {
	Name string
	Size int64
}

// A Type is what is known of a value before it exists. Sizes are one device's: a sharded dimension
// has the size of a shard.
type Type struct {
	Elem  dtype.DType
	Dims  []Dim
	Place Placement
}

// A Placement says how the devices along each axis of the mesh share a value: by the name of the
// dimension that the axis shards, or [Partial] where each device holds a partial sum. Along an axis
// that is not listed the value is replicated. The list is sorted by axis.
type Placement []AxisSharding

// An AxisSharding is the placement along one axis of the mesh. One axis shards at most one
// dimension; one dimension may be sharded by several axes ([Placement.Nested]).
type AxisSharding struct {
	Axis string
	Dim  string // a dimension's name, or Partial
}

// Partial is the placement of partial sums over the devices of an axis.
const Partial = "+"

// On gives the placement along one axis: "" if the value is replicated.
//
//go:noinline
func (p Placement) On(axis string) string {
	for _, s := range p {
		if s.Axis == axis {
			return s.Dim
		}
	}
	return ""
}

// Axes lists the axes with one placement.
func (p Placement) Axes(how string) []string {
	shares := lists.Filter(p, func(s AxisSharding) bool { return s.Dim == how })
	return lists.Map(shares, func(s AxisSharding) string { return s.Axis })
}

// Nested lists the axes that shard a dimension, the slowest first: it is gathered along the last of
// them first. Rows lie in the order of devices. Of anything else, which is parameters, the
// innermost axis of the mesh is the slowest: the devices that are farthest apart gather first,
// while shards are smallest.
func (p Placement) Nested(mesh []Axis, dim string) []Axis {
	list := lists.Filter(mesh, func(a Axis) bool { return p.On(a.Name) == dim })
	if dim != Batch && dim != Seq && dim != Slots {
		slices.Reverse(list)
	}
	return list
}

// With gives the placement with one axis changed; "" replicates.
func (p Placement) With(axis, how string) Placement {
	q := lists.Filter(p, func(s AxisSharding) bool { return s.Axis != axis })
	if how != "" {
		q = append(q, AxisSharding{axis, how})
	}
	lists.Sort(q, func(a, b AxisSharding) int { return strings.Compare(a.Axis, b.Axis) })
	return q
}

// Equal reports whether two placements are the same.
func (p Placement) Equal(q Placement) bool { return slices.Equal(p, q) }

// String writes {dp: batch, tp: +}, or nothing for copies everywhere.
func (p Placement) String() string {
	if len(p) == 0 {
		return ""
	}
	parts := lists.Map(p, func(s AxisSharding) string { return s.Axis + ": " + s.Dim })
	return "{" + strings.Join(parts, ", ") + "}"
}

// String writes f32[batch=2, seq=16]{dp: batch}.
func (t Type) String() string {
	parts := lists.Map(t.Dims, func(d Dim) string {
		return d.Name + "=" + strconv.FormatInt(d.Size, 10)
	})
	return t.Elem.String() + "[" + strings.Join(parts, ", ") + "]" + t.Place.String()
}

// Equal reports whether two types are the same.
func (t Type) Equal(u Type) bool {
	return t.Elem == u.Elem && slices.Equal(t.Dims, u.Dims) && t.Place.Equal(u.Place)
}

// Shape forgets names and placement.
func (t Type) Shape() dtype.Shape {
	s := dtype.Shape{Type: t.Elem, Dims: make([]int64, len(t.Dims))}
	for i, d := range t.Dims {
		s.Dims[i] = d.Size
	}
	return s
}

// Index finds a dimension by name, or -1. Inlined, it takes 120 kB of the binary.
//
//go:noinline
func (t Type) Index(name string) int {
	return slices.IndexFunc(t.Dims, func(d Dim) bool { return d.Name == name })
}

// Size is the length of a named dimension, or 0.
//
//go:noinline
func (t Type) Size(name string) int64 {
	if i := t.Index(name); i >= 0 {
		return t.Dims[i].Size
	}
	return 0
}

// maxElements bounds the elements of a value, so that their bits fit an int64.
const maxElements = 1 << 56

// check reports what makes a type impossible: two dimensions of one name, a sharded dimension it
// lacks, more elements than can be counted.
func (t Type) check() error {
	if !t.Elem.Valid() {
		return fmt.Errorf("no element type")
	}
	elements := int64(1)
	for i, d := range t.Dims {
		if d.Size < 0 || !isName(d.Name) {
			return fmt.Errorf("dimension %q of size %d", d.Name, d.Size)
		}
		if elements > maxElements/max(d.Size, 1) {
			return fmt.Errorf("%s has more than 2^56 elements", t)
		}
		elements *= max(d.Size, 1)
		if slices.ContainsFunc(t.Dims[:i], func(e Dim) bool { return e.Name == d.Name }) {
			return fmt.Errorf("two dimensions are called %q", d.Name)
		}
	}
	for _, s := range t.Place {
		if s.Dim != Partial && t.Index(s.Dim) < 0 {
			return fmt.Errorf("axis %s shards %q, which %s does not have", s.Axis, s.Dim, t)
		}
	}
	return nil
}

// isName reports whether a word can be the name of a dimension, an axis, a value or a kind.
func isName(s string) bool {
	for i, r := range s {
		letter := r == '_' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (i == 0 || r < '0' || r > '9') && (i == 0 || r != '.') {
			return false
		}
	}
	return s != ""
}
