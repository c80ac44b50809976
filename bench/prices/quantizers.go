package main

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
)

// A quantizer is a published time of the kernels that quantize a matrix.
type quantizer struct {
	source, what string
	cluster      string
	format       dtype.Format
	rows, cols   float64
	reads, sides float64
	micros       float64 // published
}

// quantizerRows are torchao's and TransformerEngine's kernels. Of NVFP4 it is the search for the
// largest magnitudes and the kernel that quantizes, both with the Hadamard transform. Of published
// ranges it is the middle.
var quantizerRows = []quantizer{
	{"ao training.md", "Triton, rows", "8xb200", dtype.MXFP8, 16384, 16384, 1, 1,
		rate(16384*16384, 5.87)},
	{"ao training.md", "CUDA, columns", "8xb200", dtype.MXFP8, 16384, 16384, 1, 1,
		rate(16384*16384, 5.56)},
	{"ao training.md", "compiled, rows", "8xb200", dtype.MXFP8, 16384, 16384, 1, 1,
		rate(16384*16384, 3.70)},
	{"TE#3137", "C++, both", "8xb200", dtype.MXFP8, 4096, 14336, 1, 2, 41.72},
	{"TE#3137", "C++, rows", "8xb200", dtype.MXFP8, 4096, 14336, 1, 1, 28.31},
	{"ao#4487", "CuTeDSL, both", "8xgb200", dtype.NVFP4, 2048, 14336, 2, 2, 20.96 + 34.91},
	{"ao#4487", "CuTeDSL, both", "8xgb200", dtype.NVFP4, 2048, 28672, 2, 2, 39.58 + 67.94},
	{"ao#4487", "Triton, both", "8xgb200", dtype.NVFP4, 2048, 28672, 2, 2, 43.20 + 113.74},
}

// rate gives the microseconds of a kernel of MXFP8 along one side at terabytes a second, as
// torchao publishes it.
func rate(elements, terabytes float64) float64 {
	return elements * (2 + dtype.MXFP8.Bytes()) / terabytes / 1e6
}

// quantizers compares times of kernels that quantize: ours move their bytes at the bandwidth that
// kernels reach which only move bytes.
func quantizers() error {
	fmt.Println("kernels that quantize, µs")
	fmt.Printf("%-15s %-15s %-6s %12s %9s %10s %10s\n", "", "", "", "matrix",
		"published", "bandwidth", "price")
	for _, q := range quantizerRows {
		c, p, err := own(q.cluster)
		if err != nil {
			return err
		}
		bytes := q.rows * q.cols * (2*q.reads + q.sides*q.format.Bytes())
		price := 1e6 * p.QuantizeBytes(bytes)
		fmt.Printf("%-15s %-15s %-6s %12s %9.1f %10.1f %10.1f (%+.0f %%)\n", q.source, q.what, q.format,
			fmt.Sprintf("%.0f×%.0f", q.rows, q.cols), q.micros,
			1e6*bytes/float64(c.GPU.MemoryBandwidth), price, 100*(price/q.micros-1))
	}
	return nil
}
