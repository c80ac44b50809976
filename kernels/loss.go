package kernels

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A Loss is cross-entropy of rows of logits, with its gradient, to choose for.
type Loss struct {
	Rows, Cols int64
	Elem       dtype.DType // of logits
	Labels     dtype.DType
	Sharded    bool // devices share the vocabulary
	Across     bool // the vocabulary is not the last dimension
	Others     bool // others read the logits, too
	Late       bool // what the gradient is multiplied by depends on the loss
}

// Losses tells whether a kernel of our own computes a loss and, in the place of the logits, their
// gradient, and why. XLA reads logits for their largest, for the sum of exponentials and for the
// gradient; the kernel reads them twice.
func (s *Selector) Losses(l Loss) (why string, ok bool) {
	own := fused.Loss{Rows: int(l.Rows), Cols: int(l.Cols)}
	switch {
	case !s.Own():
		return "", false
	case l.Sharded:
		return "devices share the vocabulary: a row's sum is all-reduced before its gradient", false
	case l.Elem != dtype.BF16 || l.Labels != dtype.S32:
		return fmt.Sprintf("the loss in place has logits in bf16 and labels in s32, not %s and %s",
			l.Elem, l.Labels), false
	case l.Across:
		return "rows of logits do not stand one behind the other", false
	case l.Others:
		return "others read the logits that the gradient would overwrite", false
	case l.Late:
		return "what the gradient is multiplied by comes after the loss", false
	case s.Refuses(own.Key()):
		return "the kernel of the loss differs on a GPU of this run from its plain form", false
	case own.Bytes() >= l.plainBytes():
		return "one kernel would move as many bytes", false
	}
	return "one kernel reads logits twice, not three times, and writes the gradient in their place",
		true
}

// plainBytes is what XLA's kernels read and write: logits for their largest, for the sum of
// exponentials, and for the gradient, which is written; each sum in parts of 256 columns.
func (l Loss) plainBytes() int64 {
	return l.Rows * (4*l.Cols*int64(l.Elem.Bits()/8) + 2*2*4*(l.Cols/256))
}
