package quantized

import (
	"fmt"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

type val = stablehlo.Val

// A Writer adds the arithmetic of quantized formats to a writer of instructions.
type Writer struct{ *stablehlo.Writer }

// on makes a rule of a function on this package's writer.
func on(f func(w Writer, op *ir.Op, in []val) []val) stablehlo.Rule {
	return func(w *stablehlo.Writer, op *ir.Op, in []val) []val { return f(Writer{w}, op, in) }
}

// Rules are the plain rules of quantization, by kind.
func Rules() map[string]stablehlo.Rule {
	return map[string]stablehlo.Rule{
		rewrite.QuantizeBlocks: on(quantizeBlocks),
		rewrite.OrderBlocks:    on(orderBlocks),
		"amax":                 on(amax),
		"block_dot":            on(blockDot),
		"dequantize":           on(dequantized),
		"scale_stats":          on(scaleStats),
		"join_stats":           on(joinStats),
		"quantize_stats":       on(quantizeStats),
	}
}

// Kernels are operations that stay plain on some targets, with the reason for the report.
func Kernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Plain, Kinds: []string{rewrite.QuantizeBlocks}, Print: on(quantizeBlocks),
		Applies: kernels.OnCPU("rounded in the source's layout; scales come from bits"),
	}, {
		Name: kernels.Plain, Kinds: []string{"block_dot"}, Print: on(blockDot),
		Applies: func(s *kernels.Selector, _ *ir.Op) (string, bool) {
			return fmt.Sprintf("%s has no block-scaled matmuls", s.Arch()), s.Arch() != ""
		},
	}}
}
