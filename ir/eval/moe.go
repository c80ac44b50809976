package eval

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// expertKernels compute the operations of a mixture of experts. Dispatch and combine along an axis
// see the choices as their device's experts count them (localize).
var expertKernels = map[string]kernel{
	"expert_positions": expertPositions,
	"expert_counts":    expertCounts,
	"expert_overflow": func(op *ir.Op, in, out []*Array) {
		for _, pos := range in[0].Data {
			if pos >= float64(op.Attrs.Int("capacity")) {
				out[0].Data[0]++
			}
		}
	},
	"expert_load": first,
	"attach_loss": first,
	"dispatch":    dispatch,
	"combine":     combine,
}

// first gives the first argument: the others matter to the gradient alone.
func first(_ *ir.Op, in, out []*Array) { copy(out[0].Data, in[0].Data) }

// expertPositions counts earlier choices of the same expert.
func expertPositions(op *ir.Op, in, out []*Array) {
	dims := in[0].Type.Dims
	each := elements(dims[len(dims)-len(op.Attrs.List("over")):])
	n := op.Attrs.Int("experts")
	counts := map[float64]float64{}
	for i, e := range in[0].Data {
		if int64(i)%each == 0 {
			clear(counts)
		}
		out[0].Data[i] = -1
		if e >= 0 && int64(e) < n {
			out[0].Data[i] = counts[e]
			counts[e]++
		}
	}
}

// elements is the product of sizes.
func elements(dims []ir.Dim) int64 {
	return lists.Product(dims, func(d ir.Dim) int64 { return d.Size })
}

// expertCounts counts choices over dimensions.
func expertCounts(op *ir.Op, in, out []*Array) {
	t, o := in[0].Type, out[0].Type
	n := op.Attrs.Int("experts")
	walk(t, func(at []int64, i int) {
		e := int64(in[0].Data[i])
		if e < 0 || e >= n {
			return
		}
		var place []int64
		for k, d := range t.Dims {
			if !slices.Contains(op.Attrs.List("over"), d.Name) {
				place = append(place, at[k])
			}
		}
		out[0].Data[offset(o, append(place, e))]++
	})
}

// slots calls visit with the row of each choice and its slot, if it has one.
func slots(table ir.Type, in []*Array, apart bool, visit func(row, slot int64)) {
	n, c, k := table.Dims[0].Size, table.Dims[1].Size, last(in[1].Type)
	for i, e := range in[1].Data {
		pos := in[2].Data[i]
		if e < 0 || e >= float64(n) || pos < 0 || pos >= float64(c) {
			continue
		}
		row := int64(i)
		if !apart {
			row /= k
		}
		visit(row, int64(e)*c+int64(pos))
	}
}

// dispatch copies rows, rounded first if they have a payload's format.
func dispatch(op *ir.Op, in, out []*Array) {
	width := elements(out[0].Type.Dims[2:])
	if f := ir.Format(op.Attrs.Text(ir.Payload)); f != "" {
		in = append([]*Array{rounded(f, in[0])}, in[1:]...)
	}
	apart := in[0].Type.Index(ir.Choice) >= 0
	slots(out[0].Type, in, apart, func(row, slot int64) {
		copy(out[0].Data[slot*width:][:width], in[0].Data[row*width:][:width])
	})
}

func combine(op *ir.Op, in, out []*Array) {
	width := elements(in[0].Type.Dims[2:])
	slots(in[0].Type, in, op.Attrs.Bool("apart"), func(row, slot int64) {
		for i := range width {
			out[0].Data[row*width+i] += in[0].Data[slot*width+i]
		}
	})
}
