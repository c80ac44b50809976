package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
)

// A Layout is how a parameter is sharded over a mesh. It is computed once and never changes.
type Layout struct {
	Name  string
	Whole []ir.Dim // the model's dimensions
	// Stored is one device's shard between steps: the f32 master, and the optimizer state like it. Its
	// dimensions may be in another order than the model's, because a gather along the first one needs
	// no transpose, and may be padded to divide evenly: the padding is zero and stays zero.
	Stored ir.Type
	// Compute is what the loss takes: Stored itself, or with ZeRO 1 and 2 (and gathers once a step)
	// the parameter without FSDP sharding.
	Compute ir.Type
	// Shards are the FSDP-like axes: they shard Stored, but not what operations take. The slowest is
	// first, and gathered last ([ir.Placement.Nested]): most bytes of fsdp and ep together then stay
	// where ep does, in an NVLink domain.
	Shards []ir.AxisSharding
}

// LayoutOf chooses the layout of a parameter: tensor and expert parallelism first, by dimension
// names, then FSDP along one more dimension. A stacked parameter [layer, ...] keeps its layer
// dimension first and whole.
//
// A vocabulary is padded to a multiple of its axes. Key heads that do not divide stay replicated,
// and each device computes with the key heads of its query heads (see sharder.use).
func LayoutOf(name string, whole ir.Type, p *plan.Plan) Layout {
	l := Layout{Name: name, Whole: whole.Dims}
	t := ir.Type{Elem: whole.Elem, Dims: slices.Clone(whole.Dims)}
	for i, d := range t.Dims {
		axes := p.Axes(whole.Dims, d.Name)
		n := plan.DevicesAlong(axes)
		if d.Name == ir.Vocab {
			d.Size = (d.Size + n - 1) / n * n
		}
		if d.Size%n != 0 { // key heads, fewer than devices: each takes what it needs of a copy
			continue
		}
		t.Dims[i].Size = d.Size / n
		for _, a := range axes {
			t.Place = t.Place.With(a.Name, d.Name)
		}
	}
	l.Compute = t
	shards := slices.DeleteFunc(p.Shards(), func(a ir.Axis) bool { // ep has its own experts
		return t.Place.On(a.Name) != ""
	})
	if at := shardDim(t, plan.DevicesAlong(shards), max(p.Block(), 1)); at >= 0 {
		if t.Dims[0].Name == ir.Layer { // a table's rows stay first: they are looked up
			end := at + 1
			if headCount(t.Dims[at].Name) && end < len(t.Dims) && t.Dims[end].Name == ir.HeadDim {
				end++ // heads and the elements of a head stay together
			}
			dims := slices.Delete(slices.Clone(t.Dims), at, end)
			t.Dims, at = slices.Insert(dims, 1, t.Dims[at:end]...), 1
			l.Compute = t
		}
		t.Dims = slices.Clone(t.Dims)
		dim := t.Dims[at].Name
		for _, a := range shards {
			t.Place = t.Place.With(a.Name, dim)
			t.Dims[at].Size /= a.Size
		}
		l.Shards = lists.Map(t.Place.Nested(p.Mesh(), dim), func(a ir.Axis) ir.AxisSharding {
			return ir.AxisSharding{Axis: a.Name, Dim: dim}
		})
	}
	l.Stored = t
	if p.FSDP.Zero == 3 && p.FSDP.Gather != "step" {
		l.Compute = t
	}
	l.Stored.Elem = dtype.F32
	return l
}

// shardDim returns the dimension of a matrix along which FSDP shards it: the first unsharded one
// that divides into whole quantization blocks, else the first that divides at all. It is -1 for
// vectors (norms, biases), which are cheaper to replicate.
func shardDim(t ir.Type, n, block int64) int {
	if n == 1 {
		return -1
	}
	sides, first, even := 0, -1, -1
	for i, d := range t.Dims {
		if d.Name == ir.Layer {
			continue
		}
		if d.Name == ir.HeadDim && i > 0 && headCount(t.Dims[i-1].Name) {
			continue // heads and the elements of a head are one side of a matrix
		}
		sides++
		taken := slices.ContainsFunc(t.Place, func(s ir.AxisSharding) bool { return s.Dim == d.Name })
		if !taken && d.Size%n == 0 && first < 0 {
			first = i
		}
		if !taken && d.Size%(n*block) == 0 && even < 0 {
			even = i
		}
	}
	switch {
	case sides < 2:
		return -1
	case even >= 0:
		return even
	}
	return first
}

// headCount reports whether a dimension counts heads: query heads or key heads.
func headCount(dim string) bool { return dim == ir.Heads || dim == ir.KVHeads }

// LayerBytes returns the bytes of one layer's gradient shards on one device, in the type of
// collectives. Parameters without FSDP shards do not count.
func (s *Sharding) LayerBytes() int64 {
	n := int64(0)
	for _, l := range s.Params {
		if l.Whole[0].Name == ir.Layer && len(l.Shards) > 0 {
			n += l.Stored.Shape().Elements() / l.Whole[0].Size
		}
	}
	return n * int64(s.Plan.Types.Collectives.Bits()) / 8
}

// BoundaryBytes returns the bytes of one device's shard of the activations [B, S, E] between two
// layers, for one microbatch, if tensor parallelism scatters them along the sequence; else 0.
func (s *Sharding) BoundaryBytes() int64 {
	p := s.Plan
	tp := p.Size(plan.TensorAxis)
	if tp == 1 {
		return 0
	}
	width := int64(0)
	for _, l := range s.Params {
		width = max(width, (ir.Type{Dims: l.Whole}).Size(ir.EmbedDim))
	}
	rows := p.MicrobatchSequences() / p.DataParallelSize()
	tokens := rows * p.Seq / (tp * p.Size(plan.ContextAxis))
	return tokens * width * int64(p.Types.Params.Bits()) / 8
}

// global returns the type of the global array: dimensions times the axes that shard them, and no
// placement.
func global(t ir.Type, mesh []ir.Axis) ir.Type {
	w := ir.Type{Elem: t.Elem, Dims: slices.Clone(t.Dims)}
	for _, s := range t.Place {
		if i := t.Index(s.Dim); i >= 0 {
			size, _ := ir.Along(mesh, s.Axis)
			w.Dims[i].Size *= size
		}
	}
	return w
}
