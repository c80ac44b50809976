package kernels

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
)

// maxUnrolled bounds the layers that are written one after another on a CPU, since the time to
// compile grows with them. It is a choice, not a measured optimum: deeper models are rare here.
const maxUnrolled = 32

// Unroll says whether a model's layers are written one after another, each with weights of its own,
// or as a loop over stacks, and why.
func (s *Set) Unroll(layers int64) (bool, string) {
	switch {
	case s.arch != "cpu":
		return false, "a loop compiles as fast for 126 layers as for 4"
	case layers > maxUnrolled:
		return false, fmt.Sprintf("%d layers take long to compile one by one; up to %d are unrolled",
			layers, maxUnrolled)
	}
	return true, "the gradient of a slice of a stack is written into the whole stack"
}

// Types says what a model that computes in a precision keeps its values in, and what its products
// take: a GPU reads and writes bf16 everywhere, while a CPU only multiplies in it, since it has no
// other arithmetic of that type.
func (s *Set) Types(precision dtype.DType) (elem, products dtype.DType) {
	if s.arch == "cpu" && precision != dtype.F32 {
		return dtype.F32, precision
	}
	return precision, precision
}

// Documents says whether the documents that share a row are kept apart, and why or why not.
func (s *Set) Documents() (bool, string) {
	if s.arch == "cpu" {
		return true, "attention compares the numbers of documents"
	}
	return false, "documents in a row see each other: cuDNN's call in XLA has no mask of documents"
}

// xlaJoins is the most that XLA:GPU joins into one reduce-scatter by default
// (reference/overlap.md, 4h).
const xlaJoins = 30 << 20

// Joined gives the compile options that let XLA join the gradients of a layer, so many bytes on a
// device, into one reduce-scatter, where they are more than it joins by default: else it issues
// them all early in the backward body, and nothing is left to hide behind its second half (405b on
// 64 B200: 69 % of the communication hidden, 93 % with it; docs/results/overlap.txt). It must not
// join what tensor parallelism hands on in two halves, handed bytes together; 0 is none.
func (s *Set) Joined(layer, handed int64) map[string]any {
	limit := layer * 6 / 5
	if s.arch == "cpu" || limit <= xlaJoins || handed > 0 && limit >= handed {
		return nil
	}
	return map[string]any{"xla_gpu_reduce_scatter_combine_threshold_bytes": limit}
}
