package main

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/price"
)

// The published ratios to BF16 of the GEMMs of a layer, with quantization of their operands and
// without (TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst at d0067d0: 5B model
// on B300 SXM6, hidden 4096, intermediate 16384, 32 heads, 31 sequences of 512 tokens).
var published = []struct {
	format   dtype.Format
	with, of float64
}{{dtype.MXFP8, 1.42, 1.83}, {dtype.NVFP4, 1.98, 3.48}}

// tokens and the layer's GEMMs [in, out]: QKV, the attention's output, and both of the MLP.
const tokens = 31 * 512

var linears = [][2]float64{{4096, 3 * 4096}, {4096, 4096}, {4096, 16384}, {16384, 4096}}

// layers compares a layer's GEMMs. The GPU is a B300; the model of gb300 is of the same chip at
// another clock, so both are given.
func layers() error {
	fmt.Printf("TransformerEngine, 12 GEMMs of a layer over BF16\n%-8s %-6s %7s %24s %24s %12s\n", "",
		"", "peaks", "GEMMs alone", "as te.Linear runs them", "own kernels")
	for _, cluster := range []string{"8xb300", "8xgb300"} {
		c, p, err := own(cluster)
		if err != nil {
			return err
		}
		for _, row := range published {
			var bf16, alone, linear float64
			for _, g := range twelve() {
				bf16 += p.GEMM(dtype.FormatBF16, g[0], g[1], g[2])
				alone += p.GEMM(row.format, g[0], g[1], g[2])
				linear += quantizedByLinear(p, row.format, g)
			}
			ours := alone + quantizedByUs(p, kernels.For(c.GPU.Arch), row.format)
			fmt.Printf("%-8s %-6s %7.2f %24s %24s %12.2f\n", cluster, row.format,
				peaks(c, row.format, dtype.FormatBF16), against(bf16/alone, row.of),
				against(bf16/(alone+linear), row.with), bf16/ours)
		}
	}
	return nil
}

// twelve lists the twelve GEMMs [m, k, n] as the benchmark has them (compute_gemm_shapes of
// benchmarks/gemm/benchmark_gemm.py): forward, of inputs' gradients and of weights' gradients.
func twelve() (list [][3]float64) {
	for _, l := range linears {
		in, out := l[0], l[1]
		list = append(list, [3]float64{tokens, in, out}, [3]float64{tokens, out, in},
			[3]float64{in, tokens, out})
	}
	return list
}

// quantizedByLinear is the seconds of the kernels that te.Linear runs before a GEMM. The benchmark
// calls linear(x) with each of the twelve shapes, and no backward pass (benchmark_fp8, _fp4), so
// each GEMM quantizes both of its operands: x [m, k] both ways, since the weight has a gradient,
// and the weight [n, k] along its rows only, since x has none, in every call, since no microbatch
// is named the first (transformer_engine/pytorch/module/linear.py, _linear_forward_impl). MXFP8 is
// one kernel that reads once and swizzles scales. NVFP4 reads once more, for the largest magnitude;
// x is then quantized both ways, with the Hadamard transform, in one kernel
// (pytorch/csrc/quantizer.cpp, NVFP4Quantizer::quantize_impl).
func quantizedByLinear(p *price.Prices, f dtype.Format, g [3]float64) float64 {
	m, k, n := g[0], g[1], g[2]
	reads := 1.0
	if f.TensorScale() {
		reads = 2
	}
	return p.QuantizeBytes(m*k*(2*reads+2*f.Bytes()) + n*k*(2*reads+f.Bytes()))
}

// quantizedByUs is the seconds in which our own programs quantize inputs, gradients and weights
// both ways, once a step.
func quantizedByUs(p *price.Prices, set *kernels.Selector, f dtype.Format) (t float64) {
	q := set.Quantizing(f)
	for _, l := range linears {
		in, out := l[0], l[1]
		for _, n := range []float64{tokens * in, tokens * out, in * out} {
			t += p.QuantizeBytes(q.Bytes(n, 2, 2, false))
		}
	}
	return t
}
