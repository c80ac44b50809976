package lower_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// Positions of choices are the interpreter's by a sort, as CPUs have them, and by running sums, as
// GPUs do: with and without groups, one expert or many, some choices dropped.
func TestPositionsOfChoices(t *testing.T) {
	e, d, r := cpu(t), irtest.D, rand.New(rand.NewPCG(11, 12))
	for _, row := range []struct {
		dims    []ir.Dim
		over    int // of the last dimensions
		experts int64
	}{
		{[]ir.Dim{d(ir.Batch, 2), d(ir.Seq, 150), d(ir.Choice, 3)}, 3, 7},
		{[]ir.Dim{d(ir.Batch, 3), d(ir.Seq, 67), d(ir.Choice, 8)}, 2, 64},
		{[]ir.Dim{d(ir.Batch, 2), d(ir.Seq, 5), d(ir.Choice, 2)}, 1, 1},
		{[]ir.Dim{d(ir.Choice, 1)}, 1, 4},
	} {
		b := ir.NewBuilder("positions")
		idx := b.Input("idx", ir.Data, irtest.S32(row.dims...), "")
		names := ir.Names(row.dims)
		pos := b.ExpertPositions(idx, row.experts, false, names[len(names)-row.over:]...)
		g, err := b.Graph(pos)
		if err != nil {
			t.Fatal(err)
		}
		data := make([]float64, idx.Type.Shape().Elements())
		for i := range data {
			data[i] = float64(r.Int64N(row.experts+2) - 1) // -1 is dropped, and so is one too many
		}
		inputs := map[string][]*eval.Array{"idx": {{Type: idx.Type, Data: data}}}
		for arch, how := range map[string]string{"cpu": "stablehlo.sort", "sm_100": "reduce_window"} {
			on := engineWith{e, func() *kernels.Selector { return kernels.For(arch) }}
			text, err := lower.StableHLO(g, lower.Options{Kernels: on.kernels()})
			if err != nil || !strings.Contains(text, how) ||
				strings.Contains(text, "stablehlo.sort") != (arch == "cpu") {
				t.Errorf("%s: %v\n%s", arch, err, text)
			}
			on.compare(t, g, inputs, 0)
		}
	}
}
