package gpu

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower/quantized"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// Kernels lists the kernels of XLA:GPU, by file. A new kernel is a row in the file of its kind.
func Kernels() []stablehlo.Kernel {
	return slices.Concat(attentionKernels(), blockDotKernels(), quantizeKernels(),
		expertKernels(), groupedKernels(), lossKernels(), normKernels(), flashKernels())
}

type val = stablehlo.Val

// A writer adds layouts and calls of libraries to a writer of instructions.
type writer struct{ quantized.Writer }

// on makes a rule of a function of this package.
func on(f func(w writer, op *ir.Op, in []val) []val) stablehlo.Rule {
	return func(w *stablehlo.Writer, op *ir.Op, in []val) []val {
		return f(writer{quantized.Writer{Writer: w}}, op, in)
	}
}
