package lower_test

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// Rows that are dispatched as codes and scales, and decoded, are the rows that the interpreter
// rounds and dispatches, bit for bit: programs for CPUs and for GPUs, in both types. A NaN makes
// its block NaN; slots that nobody has are zero.
func TestRowsWithAPayload(t *testing.T) {
	r := quantizedRig(t, 1)
	const experts, room = 3, 4
	for _, elem := range []dtype.DType{dtype.F32, dtype.BF16} {
		b := ir.NewBuilder("rows")
		tokens := irtest.D("rows", 5)
		x := b.Input("x", ir.Data, ir.Type{Elem: elem, Dims: []ir.Dim{tokens,
			irtest.D(ir.EmbedDim, 64)}}, "")
		idx := b.Input("idx", ir.Data, irtest.S32(tokens, irtest.D(ir.Choice, 2)), "")
		pos := b.ExpertPositions(idx, experts, false, "rows", ir.Choice)
		g, err := b.Graph(b.Op("dispatch", map[string]any{"experts": int64(experts),
			"capacity": int64(room), ir.Payload: "mxfp8"}, x, idx, pos)...)
		if err != nil {
			t.Fatal(err)
		}
		in := map[string][]*eval.Array{"x": {eval.New(x.Type)}, "idx": {eval.New(idx.Type)}}
		random := rand.New(rand.NewPCG(5, 6))
		for i := range in["x"][0].Data {
			in["x"][0].Data[i] = float64(float32(random.NormFloat64() * math.Exp(4*random.NormFloat64())))
			if elem == dtype.BF16 {
				v := dtype.BF16FromF32(float32(in["x"][0].Data[i]))
				in["x"][0].Data[i] = float64(dtype.F32FromBF16(v))
			}
		}
		in["x"][0].Data[70] = math.NaN()
		copy(in["idx"][0].Data, []float64{0, 2, 1, 0, 2, -1, 0, 1, 0, 2})
		want, err := eval.Run(g, in)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := ir.LowerQuantized(g, nil, nil, ir.ReportNothing); err != nil {
			t.Fatal(err)
		}
		for _, arch := range []string{"cpu", "sm_90"} { // Blackwell has a kernel of our own
			p := r.Compile(t, g, lower.Options{Kernels: kernels.For(arch)})
			if got := ran(t, r, p, g, in)[0][0]; !bytes.Equal(got, packed(want[0][0])) {
				t.Errorf("%s for %s: rows differ", elem, arch)
			}
		}
	}
}
