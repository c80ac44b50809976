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
