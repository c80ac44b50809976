package spmd_test

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/spmd"
)

// XLA:GPU finds that the devices of an all-reduce have copies of one report, and sends nothing
// (an NVFP4 update of zero 1 that keeps whole copies): a census allows it there, and nowhere else.
func TestReportsOnCopiesMayStayUnsent(t *testing.T) {
	for _, c := range []struct {
		name string
		cut  bool
		cpu  bool
		fine bool
	}{{"copies", false, false, true}, {"copies on the CPU", false, true, false},
		{"shards", true, false, false}} {
		b := ir.NewBuilder("update", ir.Axis{Name: "fsdp", Size: 8})
		x := b.Input("scales", ir.Data, ir.Type{Elem: dtype.F8E4M3FN, Place: ir.Placement{
			{Axis: "fsdp", Dim: "embed"}}, Dims: []ir.Dim{{Name: "rows", Size: 4}, {Name: "embed", Size: 2}}}, "")
		if !c.cut {
			x = b.AllGather(x, "fsdp", "embed")
		}
		g, err := b.Graph(b.JoinStats(b.ScaleStats(x)))
		if err != nil {
			t.Fatal(err)
		}
		list := spmd.CensusOf(g)
		list = slices.DeleteFunc(list, func(t spmd.Traffic) bool { return t.Kind != hlo.AllReduce })
		if len(list) != 1 || list[0].Bytes == 0 {
			t.Fatalf("%s: the graph sends %v", c.name, list)
		}
		if got := list.Diff(nil, c.cpu, dtype.F32); (got == nil) != c.fine {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
