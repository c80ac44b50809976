package kernels

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/plan"
)

// A Norming is a norm of rows, or its gradient, to choose for.
type Norming struct {
	rownorm.Norm
	Elem dtype.DType // of what is normalized
	// Saved is how many of its matrices a loop saves in stacks.
	Saved int64
	// Scattered rows are of several sequences that tp shards ([Scattered]).
	Scattered bool
}

// Scattered tells rows of several sequences that tp shards along the sequence. Their collectives
// want the sequence first in memory, and stacks of them as well, which a kernel that reads rows of
// a stack in place would have XLA transpose: 12 GB more for llama3.1-405b on 1,024 B200.
func Scattered(t ir.Type) bool {
	return t.Place.On(plan.TensorAxis) == ir.Seq && t.Index(ir.Batch) >= 0 && t.Size(ir.Batch) > 1
}

// own is the bytes that the kernel of our own moves: matrices that are saved are written once more,
// and the parts of the weight's gradient are read again.
func (n Norming) own() int64 {
	parts := int64(0)
	if n.Grads > 0 {
		parts = 4 * int64(n.Parts()) * int64(n.Cols)
	}
	return n.Bytes() + parts + n.Saved*n.matrix()
}

// library is the bytes that XLA's fusions move, as counted in compiled programs. A sum and its
// statistics are one kernel, a norm reads the sum again, and what is saved is copied. A gradient
// reads its matrices for the sums of rows, where it writes the sum of several, for the gradient of
// the weight, and for its result.
func (n Norming) library() int64 {
	matrices := int64(0)
	switch {
	case n.Codes: // statistics are read before, and the sum is written by them
		return n.own() + n.matrix()
	case n.Grads > 0:
		if matrices = int64(n.Grads) + 6; n.Grads > 1 {
			matrices++
		}
		if n.Residual {
			matrices++
		}
	case n.Added && n.Normed:
		matrices = 5
	case n.Added:
		matrices = 3
	case n.Normed:
		matrices = 2
	default:
		matrices = 1
	}
	return (matrices + 2*n.Saved) * n.matrix()
}

func (n Norming) matrix() int64 { return 2 * int64(n.Rows) * int64(n.Cols) }

// Norms tells whether a kernel of our own that reads rows once computes a norm or its gradient, and
// why. It must move fewer bytes than XLA's fusions.
func (s *Selector) Norms(n Norming) (why string, ok bool) {
	switch widest := rownorm.Widest(n.Grads > 0); {
	case !s.Own():
		return "", false
	case n.Elem != dtype.BF16:
		return fmt.Sprintf("kernels of rows are for bf16, not %s", n.Elem), false
	case n.Cols > widest:
		return fmt.Sprintf("rows of %d are more than registers hold: at most %d", n.Cols, widest), false
	case n.Scattered:
		return "tp shards several sequences, which collectives want in another order", false
	case n.Sized() != nil:
		return fmt.Sprintf("kernels of rows do not compute %s", n.Sized()), false
	case s.Refuses(n.Key()):
		return "the kernel of rows differs on a GPU of this run from its plain form", false
	case n.own() >= n.library():
		return "XLA's fusions move no more bytes", false
	case n.Grads > 0:
		return "one kernel reads the rows once, for both gradients", true
	case n.Codes:
		return "one kernel reads the rows once, and quantizes their norm", true
	}
	return "one kernel reads the rows once, and saves what the gradient reads", true
}
