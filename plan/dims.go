package plan

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// cuts is which axes of the mesh cut which dimension, of whatever array has it: rows and tokens of
// the batch, and what tensor parallelism cuts of weights and of what comes of them. A row with a
// second dimension counts where an array has both.
//
// Outside the experts ep is data parallel.
var cuts = []cut{
	{dim: ir.Batch, axes: []string{DataAxis, FSDPAxis, ExpertAxis}},
	{dim: ir.Seq, axes: []string{ContextAxis}},
	{dim: ir.Seq, with: ir.EmbedDim, axes: []string{TensorAxis}}, // with sequence parallelism
	{dim: ir.Heads, axes: []string{TensorAxis}},
	{dim: ir.KVHeads, axes: []string{TensorAxis}},
	{dim: ir.MLPDim, axes: []string{TensorAxis}},
	{dim: ir.Vocab, axes: []string{TensorAxis}},
}

type cut struct {
	dim, with string
	axes      []string
}

// sharded are the axes that also cut what a device keeps of a parameter between its uses, along a
// dimension that [cuts] leaves whole (ZeRO).
var sharded = []string{FSDPAxis, ExpertAxis}

// Axes lists the axes that cut a dimension of an array with the given dimensions, in the order of
// the mesh.
func (p *Plan) Axes(dims []ir.Dim, dim string) (list []ir.Axis) {
	has := func(name string) bool {
		return slices.ContainsFunc(dims, func(d ir.Dim) bool { return d.Name == name })
	}
	for _, a := range p.Mesh() {
		for _, c := range cuts {
			if c.dim == dim && slices.Contains(c.axes, a.Name) && has(dim) &&
				(c.with == "" || has(c.with) && p.TP.Sequence) {
				list = append(list, a)
			}
		}
	}
	return list
}

// DataAxes names the axes that cut the rows and tokens of a batch.
func DataAxes() (list []string) {
	for _, c := range cuts {
		if (c.dim == ir.Batch || c.dim == ir.Seq) && c.with == "" {
			list = append(list, c.axes...)
		}
	}
	return list
}

// Shards lists the axes that cut what a device keeps of a parameter, in the order of the mesh.
func (p *Plan) Shards() []ir.Axis {
	return slices.DeleteFunc(p.Mesh(), func(a ir.Axis) bool {
		return !slices.Contains(sharded, a.Name)
	})
}

// Ranks is the number of devices that have rows of their own.
func (p *Plan) Ranks() int64 {
	rows := lists.Find(cuts, func(c cut) bool { return c.dim == ir.Batch })
	return lists.Product(rows.axes, p.Size)
}

// Times is the number of devices along some axes.
func Times(axes []ir.Axis) int64 {
	return lists.Product(axes, func(a ir.Axis) int64 { return a.Size })
}
