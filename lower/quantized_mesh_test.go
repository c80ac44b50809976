package lower_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

const meshDevices = 8

// gathered quantizes shards of a weight, split by rows, in both orientations and gathers them, and
// quantizes the whole: six results, of which the last four, if there are as many, come from the
// whole.
func gathered(t *testing.T, f ir.Format, rows, cols int64) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("gathered", ir.Axis{Name: "fsdp", Size: meshDevices})
	d := irtest.D
	w := b.Input("w", ir.Param, ir.Type{Elem: dtype.F32, Dims: []ir.Dim{d("mlp", rows), d("embed", cols)},
		Place: ir.Placement{{Axis: "fsdp", Dim: "mlp"}}}, "")
	var amax *ir.Value
	if f == ir.NVFP4 {
		amax = b.Amax(w, nil, false)
	}
	how := func(along string) ir.Quantize {
		return ir.Quantize{Format: f, Along: []string{along}, Tile: f == ir.NVFP4, Amax: amax}
	}
	whole := b.AllGather(w, "fsdp", "mlp")
	var results []*ir.Value
	for _, along := range []string{"embed", "mlp"} { // the last dimension is packed, and gathered along
		codes, scales := b.Quantize(w, how(along))
		results = append(results, b.AllGather(codes, "fsdp", "mlp"), b.AllGather(scales, "fsdp", "mlp"))
		codes, scales = b.Quantize(whole, how(along))
		results = append(results, codes, scales)
	}
	g, err := b.Graph(results...)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Shards that were quantized and then gathered, along either dimension, are the whole, quantized; on
// every device, and in the interpreter.
func TestGatheredBlocksAreThoseOfTheWhole(t *testing.T) {
	r := quantizedRig(t, meshDevices)
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		rows := meshDevices * f.Block()
		g := gathered(t, f, rows/meshDevices, 96)
		random := rand.New(rand.NewPCG(3, 1))
		in := map[string][]*eval.Array{"w": make([]*eval.Array, meshDevices)}
		for d := range in["w"] {
			in["w"][d] = eval.New(g.Inputs[0].Type)
			for i := range in["w"][d].Data {
				in["w"][d].Data[i] = float64(float32(random.NormFloat64()))
			}
		}
		want, err := eval.Run(g, in)
		if err != nil {
			t.Fatal(err)
		}
		p := r.Compile(t, g, lower.Options{Kernels: kernels.For("cpu")})
		got := ran(t, r, p, g, in)
		for i := range got {
			for d := range meshDevices {
				if !bytes.Equal(got[i][d], packed(want[i][d])) {
					t.Errorf("%s: result %d of device %d differs from the interpreter", f, i, d)
				}
				if whole := i&^3 | i&1 | 2; !bytes.Equal(got[i][d], got[whole][0]) {
					t.Errorf("%s: result %d of device %d differs from the whole", f, i, d)
				}
			}
		}
		if spec := p.Module().Results[0]; spec.Global.Type != dtype.U8 {
			t.Errorf("codes are described as %s", spec.Global)
		}
	}
}

// In a loop over stacks codes and scales are arguments, slices and results, as bytes.
func TestBlocksGoThroughLoops(t *testing.T) {
	slowtest.Only(t)
	r := quantizedRig(t, 1)
	d := irtest.D
	const layers, rows, cols = 3, 32, 64
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		body := ir.NewBuilder("body")
		x := body.Input("x", ir.Data, irtest.F32(d("rows", rows), d("embed", cols)), "")
		codes := body.Input("codes", ir.Param,
			ir.Type{Elem: f.Codes(), Dims: []ir.Dim{d("out", cols), d("embed", cols)}}, "")
		scales := body.Input("scales", ir.Param,
			ir.Type{Elem: f.Scales(), Dims: []ir.Dim{d("out", cols), d("embed", cols/f.Block())}}, "")
		w := []*ir.Value{codes, scales}
		if f == ir.NVFP4 {
			w = append(w, body.Input("amax", ir.Param, irtest.F32(), ""))
		}
		kept := body.QuantizeAll(x, ir.Quantize{Format: f, Along: []string{"rows"}})
		y := body.BlockDot(f, body.QuantizeAll(x, ir.Quantize{Format: f, Along: []string{"embed"}}), w,
			[]string{"embed"}, dtype.F32)
		block, err := body.Graph(append([]*ir.Value{body.Rename(y, "out", "embed")}, kept...)...)
		if err != nil {
			t.Fatal(err)
		}
		b := ir.NewBuilder("loop")
		start := b.Input("x", ir.Data, x.Type, "")
		stack := b.Input("w", ir.Param,
			irtest.F32(d(ir.Layer, layers), d("out", cols), d("embed", cols)), "")
		stacks := b.QuantizeAll(stack, ir.Quantize{Format: f, Along: []string{"embed"}, Tile: f == ir.NVFP4})
		out := b.Repeat(layers, block, []*ir.Value{start}, stacks, nil)
		g, err := b.Graph(out...)
		if err != nil {
			t.Fatal(err)
		}
		in := randomInputs(rand.New(rand.NewPCG(5, 1)), g)
		want, err := eval.Run(g, in)
		if err != nil {
			t.Fatal(err)
		}
		for _, arch := range []string{"cpu", "sm_90"} { // which has no block-scaled matmuls
			p := r.Compile(t, g, lower.Options{Kernels: kernels.For(arch)})
			got := ran(t, r, p, g, in)
			for i := 1; i <= 2; i++ { // codes and scales of what was kept
				if n := differ(got[i][0], packed(want[i][0])); n > len(got[i][0])/50 {
					t.Errorf("%s on %s: %d of %d bytes of result %d differ", f, arch, n, len(got[i][0]), i)
				}
			}
		}
	}
}

// differ counts bytes: a sum in another order may bring a later layer's input over an edge.
func differ(a, b []byte) (n int) {
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}
