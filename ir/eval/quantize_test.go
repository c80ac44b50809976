package eval_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// A quantized GEMM is near the GEMM of its sources: E4M3 is off by 2^-5 of a number on
// average, E2M1 by more; and tiles make a weight the same both ways.
func TestBlockDotIsNearTheDot(t *testing.T) {
	d := irtest.D
	for f, bound := range map[ir.Format]float64{ir.MXFP8: 0.06, ir.NVFP4: 0.2} {
		b := ir.NewBuilder("blocks")
		x := b.Input("x", ir.Data, irtest.F32(d("rows", 32), d("embed", 64)), "")
		w := b.Input("w", ir.Data, irtest.F32(d("out", 48), d("embed", 64)), "")
		along := ir.Quantize{Format: f, Along: []string{"embed"}}
		tiles := along
		tiles.Tile = f == ir.NVFP4
		transposed := tiles
		transposed.Along = []string{"out"}
		parts := b.QuantizeAll(w, tiles)
		y := b.BlockDot(f, b.QuantizeAll(x, along), parts, []string{"embed"}, dtype.F32)
		results := []*ir.Value{y, b.Dot(x, w, "embed")}
		if f == ir.NVFP4 {
			codes, _ := b.Quantize(w, ir.Quantize{Format: f, Along: transposed.Along, Tile: true, Amax: parts[2]})
			results = append(results, parts[0], codes)
		}
		g, err := b.Graph(results...)
		if err != nil {
			t.Fatal(err)
		}
		r := rand.New(rand.NewPCG(1, 2))
		in := map[string][]*eval.Array{}
		for _, v := range g.Inputs {
			a := eval.New(v.Type)
			for i := range a.Data {
				a.Data[i] = r.NormFloat64()
			}
			in[v.Name] = []*eval.Array{a}
		}
		out, err := eval.Run(g, in)
		if err != nil {
			t.Fatal(err)
		}
		var off, norm float64
		for i, want := range out[1][0].Data {
			off += (out[0][0].Data[i] - want) * (out[0][0].Data[i] - want)
			norm += want * want
		}
		if e := math.Sqrt(off / norm); e > bound || e == 0 {
			t.Errorf("%s: the product is off by %.3f", f, e)
		}
		if f != ir.NVFP4 {
			continue
		}
		for o := range 48 {
			for e := range 64 {
				if a, b := out[2][0].Data[o*64+e], out[3][0].Data[e*48+o]; a != b {
					t.Fatalf("the weight of %d and %d is %v one way, %v the other", o, e, a, b)
				}
			}
		}
	}
}
