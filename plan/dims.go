package plan

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// dimAxes lists which mesh axes shard which dimension, of any array that has it: sequences and
// tokens of the batch, and the dimensions of weights and activations that tensor parallelism
// shards. A row with a second dimension applies to arrays that have both.
//
// Outside the experts, ep is data parallel.
var dimAxes = []dimSharding{
	{dim: ir.Batch, axes: []string{DataAxis, FSDPAxis, ExpertAxis}},
	{dim: ir.Seq, axes: []string{ContextAxis, innerAxis}},
	{dim: ir.Seq, with: ir.EmbedDim, axes: []string{TensorAxis}}, // with sequence parallelism
	{dim: ir.Heads, axes: []string{TensorAxis}},
	{dim: ir.KVHeads, axes: []string{TensorAxis}},
	{dim: ir.MLPDim, axes: []string{TensorAxis}},
	{dim: ir.Vocab, axes: []string{TensorAxis}},
	{dim: ir.ExpertDim, axes: []string{ExpertAxis}},
}

type dimSharding struct {
	dim, with string
	axes      []string
}

// sharded are the axes that also shard stored parameters (ZeRO), along a dimension that [dimAxes]
// leaves whole.
var sharded = []string{FSDPAxis, ExpertAxis}

// Axes lists the axes that shard a dimension of an array with the given dimensions, in mesh order.
func (p *Plan) Axes(dims []ir.Dim, dim string) (list []ir.Axis) {
	has := func(name string) bool {
		return slices.ContainsFunc(dims, func(d ir.Dim) bool { return d.Name == name })
	}
	for _, a := range p.Mesh() {
		for _, c := range dimAxes {
			if c.dim == dim && slices.Contains(c.axes, a.Name) && has(dim) &&
				(c.with == "" || has(c.with) && p.TP.Sequence) {
				list = append(list, a)
			}
		}
	}
	return list
}

// DataAxes names the axes that shard the sequences and tokens of a batch.
func DataAxes() (list []string) {
	for _, c := range dimAxes {
		if (c.dim == ir.Batch || c.dim == ir.Seq) && c.with == "" {
			list = append(list, c.axes...)
		}
	}
	return list
}

// Shards lists the axes that shard stored parameters, in mesh order.
func (p *Plan) Shards() []ir.Axis {
	return slices.DeleteFunc(p.Mesh(), func(a ir.Axis) bool {
		return !slices.Contains(sharded, a.Name)
	})
}

// DataParallelSize is the number of data-parallel ranks, dp × fsdp × ep: groups of devices with
// their own sequences.
func (p *Plan) DataParallelSize() int64 {
	rows := lists.Find(dimAxes, func(c dimSharding) bool { return c.dim == ir.Batch })
	return lists.Product(rows.axes, p.Size)
}

// DevicesAlong is the number of devices along some axes, the product of their sizes.
func DevicesAlong(axes []ir.Axis) int64 {
	return lists.Product(axes, func(a ir.Axis) int64 { return a.Size })
}
