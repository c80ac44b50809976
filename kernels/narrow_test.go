package kernels_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// Products of blocks are cuDNN's where cards have them, and each choice has a reason.
func TestBlocks(t *testing.T) {
	b := ir.NewBuilder("blocks")
	x := b.Input("x", ir.Data, ir.Type{Elem: dtype.BF16,
		Dims: []ir.Dim{{Name: "rows", Size: 64}, {Name: "embed", Size: 32}}}, "")
	w := b.Rename(x, "rows", "out")
	how := ir.Quantize{Format: ir.MXFP8, Along: []string{"embed"}}
	y := b.BlockDot(ir.MXFP8, b.Narrow(x, how), b.Narrow(w, how), []string{"embed"}, dtype.BF16)
	g, err := b.Graph(y)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ arch, quantize, product, why string }{
		{"cpu", kernels.Plain, kernels.Matrix, "exact"},
		{"sm_90", kernels.Windowed, kernels.Plain, "sm_90 has no products of blocks"},
		{"sm_100", kernels.Windowed, kernels.CuDNN, "cuDNN multiplies blocks"},
		{"sm_103", kernels.Windowed, kernels.CuDNN, "cuDNN multiplies blocks"},
	} {
		s := kernels.For(row.arch)
		for _, op := range g.Ops {
			got := lower.Kernel(s, op)
			if op.Kind == "quantize" && got != row.quantize || op.Kind == "block_dot" && got != row.product {
				t.Errorf("%s: %s becomes %s", row.arch, op.Kind, got)
			}
		}
		list := s.Choices()
		if len(list) != 2 || list[0].Why == "" || !strings.Contains(list[1].Why, row.why) {
			t.Errorf("%s: %+v", row.arch, list)
		}
		if flags := s.Exact(map[string]any{"a": 1}); flags["xla_allow_excess_precision"] != false ||
			len(flags) != 2 {
			t.Errorf("%s: %v", row.arch, flags)
		}
	}
}
