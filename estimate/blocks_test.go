package estimate

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// Quantization moves the bytes that compiled programs were seen to move, at the GPU's bandwidth.
func TestBlocks(t *testing.T) {
	e := estimator(t, "llama3.1-8b", "8xb200", "deepwell")
	b := e.builder(&sharding{})
	const n = 1 << 26
	rate := 1 / (e.prices.Stream(1) / e.prices.Profile().Stream)
	for _, row := range []struct {
		precision   dtype.Format
		wide, sides float64
		bytes       float64 // of an element
	}{
		{dtype.MXFP8, 2, 2, 1.03 * (2 + 2*33.0/32)},
		{dtype.MXFP8, 2, 1, 1.03 * (2 + 33.0/32)},
		{dtype.MXFP8, 4, 2, 1.03 * (4 + 2*33.0/32)},
		{dtype.NVFP4, 2, 2, 1.05 * (2*2 + 2*9.0/16)},
		{dtype.NVFP4, 2, 0, 0}, {dtype.FormatBF16, 2, 2, 0}, {dtype.FormatF32, 4, 2, 0},
	} {
		want := row.bytes * n / rate
		if got := b.quantized(row.precision, n, row.wide, row.sides, false); math.Abs(got-want) > 1e-12 {
			t.Errorf("%+v: %v s, not %v", row, got, want)
		}
	}
}
