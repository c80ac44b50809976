// Command prices compares the cost model's prices of quantized linear layers with published ones:
// TransformerEngine's GEMMs of a layer with and without quantization, on B300. The prices are named
// by the hashes of their sources, so that it can be seen whether they were chosen before.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/price"
)

// A published ratio to BF16 of all GEMMs of a layer, forward and backward, with quantization of
// their operands and without (nvidia.github.io/TransformerEngine, GEMM Speedups Across Precisions,
// 5B model on B300: hidden 4096, intermediate 16384, 32 heads, 31 sequences of 512 tokens).
var published = []struct {
	format   dtype.Format
	with, of float64
}{{dtype.MXFP8, 1.42, 1.83}, {dtype.NVFP4, 1.98, 3.48}}

// tokens and the layer's GEMMs [in, out]: QKV, the attention's output, and both of the MLP.
const tokens = 31 * 512

var linears = [][2]float64{{4096, 3 * 4096}, {4096, 4096}, {4096, 16384}, {16384, 4096}}

func main() {
	cluster := flag.String("cluster", "8xgb300", "GPUs whose prices are compared")
	flag.Parse()
	if err := run(*cluster); err != nil {
		fmt.Fprintln(os.Stderr, "prices:", err)
		os.Exit(1)
	}
}

func run(cluster string) error {
	c, err := machine.ParseCluster(cluster)
	if err != nil {
		return err
	}
	prof, err := price.Find(price.Own)
	if err != nil {
		return err
	}
	p, set := price.New(c, prof), kernels.For(c.GPU.Arch)
	for _, path := range []string{"price", "kernels/work.go"} {
		out, err := exec.Command("git", "rev-parse", "HEAD:"+path).Output()
		if err != nil {
			return err
		}
		fmt.Printf("%-16s %s\n", path, strings.TrimSpace(string(out)))
	}
	bf16 := gemms(p, dtype.FormatBF16)
	fmt.Printf("%-8s %22s %22s\n", "", "GEMMs alone", "with quantization")
	for _, row := range published {
		alone := gemms(p, row.format)
		with := alone + quantization(p, set, row.format)
		fmt.Printf("%-8s %6.2f, published %.2f (%+.0f %%) %6.2f, published %.2f (%+.0f %%)\n", row.format,
			bf16/alone, row.of, 100*(bf16/alone/row.of-1), bf16/with, row.with,
			100*(bf16/with/row.with-1))
	}
	return nil
}

// gemms is the seconds of the twelve GEMMs of a layer.
func gemms(p *price.Prices, f dtype.Format) (t float64) {
	for _, l := range linears {
		in, out := l[0], l[1]
		t += p.GEMM(f, tokens, in, out) + p.GEMM(f, tokens, out, in) + p.GEMM(f, out, tokens, in)
	}
	return t
}

// quantization is the seconds to quantize inputs, gradients and weights both ways, as autocast does
// in every step.
func quantization(p *price.Prices, set *kernels.Selector, f dtype.Format) (t float64) {
	q := set.Quantizing(f)
	for _, l := range linears {
		in, out := l[0], l[1]
		for _, n := range []float64{tokens * in, tokens * out, in * out} {
			t += p.QuantizeBytes(q.Bytes(n, 2, 2, false))
		}
	}
	return t
}
