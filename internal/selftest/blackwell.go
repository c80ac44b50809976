package selftest

import (
	"fmt"
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
)

// MXFP8 is one block-scaled linear in data parallel: the matmul of 4096 x 4096 by 16384 x 4096
// in E4M3 with a scale for every 32 elements, then a sum over all devices.
func MXFP8(devices int) *program.Module {
	const (
		x, xs = "tensor<4096x4096xf8E4M3FN>", "tensor<4096x128xf8E8M0FNU>"
		w, ws = "tensor<16384x4096xf8E4M3FN>", "tensor<16384x128xf8E8M0FNU>"
		y     = "tensor<4096x16384xbf16>"
	)
	text := fmt.Sprintf(`module @mxfp8 attributes {mhlo.num_replicas = %d : i32} {
  func.func @main(%%x: %s, %%xs: %s, %%w: %s, %%ws: %s) -> %s {
    %%y = stablehlo.custom_call @__op$block_scaled_dot(%%x, %%w, %%xs, %%ws)
      {api_version = 2 : i32} : (%[2]s, %[4]s, %[3]s, %[5]s) -> %[6]s
    %%s = "stablehlo.all_reduce"(%%y) (%s) {%s} : (%[6]s) -> %[6]s
    return %%s : %[6]s
  }
}
`, devices, x, xs, w, ws, y, adder("bf16"), groups(devices, devices))
	return &program.FromText("mxfp8", text, devices).Modules[0]
}

// Attention is causal attention with 32 heads over 8 key heads, forward and backward, lowered as
// for a GPU: the two calls of cuDNN.
func Attention(devices int) *program.Module {
	d := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
	b := ir.NewBuilder("attention")
	qt := ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{
		d("batch", 4), d(ir.Seq, 2048), d(ir.Heads, 32), d(ir.HeadDim, 128)}}
	kt := ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{
		d("batch", 4), d(ir.Keys, 2048), d(ir.KVHeads, 8), d(ir.HeadDim, 128)}}
	q := b.Input("q", ir.Param, qt, "")
	k, v := b.Input("k", ir.Param, kt, ""), b.Input("v", ir.Param, kt, "")
	how := ir.Attention{Scale: 1 / math.Sqrt(128), Causal: true}
	text, err := stepText(b, b.Attend(q, k, v, how))
	if err != nil {
		text = "// " + err.Error() // does not parse, so the compile says it
	}
	return &program.FromText("attention", text, devices).Modules[0]
}

// stepText lowers a value and its gradient for Blackwell.
func stepText(b *ir.Builder, y *ir.Value) (string, error) {
	g, err := b.Graph(y)
	if err != nil {
		return "", err
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		return "", err
	}
	joint, err := gr.Joint()
	if err != nil {
		return "", err
	}
	return lower.StableHLO(joint, lower.Options{Kernels: kernels.For("sm_100")})
}
