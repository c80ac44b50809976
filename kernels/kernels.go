package kernels

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// The kernels that an operation can become.
const (
	// Plain is StableHLO as the operation's mathematics says, which every target runs.
	Plain = "plain"
	// CuDNN is a call of cuDNN: attention, forward and backward, or a product of blocks.
	CuDNN = "cudnn"
	// Matrix is a product of matrices, with whatever stands side by side made one dimension.
	Matrix = "matrix"
	// HeadFirst is attention as products of matrices, one for each head of each sequence.
	HeadFirst = "head first"
	// Chunked is cross-entropy that sums a part of each row at a time.
	Chunked = "chunked"
	// Windowed is largest magnitudes in windows, and a barrier between scales and codes.
	Windowed = "windowed"
	// Folded is a sum of everything, by parts that lie side by side.
	Folded = "folded"
)

// A Choice is what one operation becomes, and why.
type Choice struct {
	Kind   string `json:"kind"`
	Kernel string `json:"kernel"`
	Why    string `json:"why"`
}

// A Selector chooses for one target and keeps what it chose.
type Selector struct {
	arch    string // "cpu", or a card's such as "sm_100"
	choices []Choice
	seen    map[string]bool
}

// For gives the chooser of a target by its architecture.
func For(arch string) *Selector { return &Selector{arch: arch} }

// Arch is the architecture; "" of nil, which stands for what every target runs.
func (s *Selector) Arch() string {
	if s == nil {
		return ""
	}
	return s.arch
}

// Blocks reports whether cards multiply values in blocks.
func (s *Selector) Blocks() bool {
	return slices.Contains([]string{"sm_100", "sm_103", "sm_120"}, s.Arch())
}

// FusesOneOutput reports whether the target writes one result at a time, so that what two results
// have in common is better read back than computed twice.
func (s *Selector) FusesOneOutput() bool { return s.arch == "cpu" }

// Choices lists what was chosen, each once, in the order of the program.
func (s *Selector) Choices() []Choice { return slices.Clone(s.choices) }

// An Attention is what the choice of its kernel depends on, whether a graph says it or a plan of
// which there is no graph yet.
type Attention struct {
	Elem      dtype.DType // of queries
	Head      int64       // size of a head of queries
	Window    int64       // keys that a query sees; 0 is all
	Causal    bool
	Capped    bool // scores have a soft cap
	Documents bool // those of a row are kept apart
	// Part says that a device has some of a sequence's queries. Ring, that keys go round and meet
	// them piece by piece, and Balanced, that a device has pieces from the front and the back.
	Part, Ring, Balanced bool
}

// Attention says what an attention becomes, and why.
func (s *Selector) Attention(a Attention) (kernel, why string) {
	switch {
	case s.arch == "cpu" && a.Ring:
		return Plain, "the CPU has no cuDNN; pieces of a ring are joined as they come"
	case s.arch == "cpu":
		return HeadFirst, "the CPU has no cuDNN; products with one batch are fastest"
	}
	if why := s.againstCuDNN(a); why != "" {
		return Plain, why
	}
	return CuDNN, "cuDNN has it for this shape"
}

// Attends is Attention of an operation: an attention, or its gradient.
func (s *Selector) Attends(op *ir.Op) (kernel, why string) {
	q := op.In[0].Type
	segments, places := op.Extras()
	a := Attention{Elem: q.Elem, Head: q.Size(ir.HeadDim), Window: op.Attrs.Int("window"),
		Causal: op.Attrs.Bool("causal"), Capped: op.Attrs.Float("softcap") > 0,
		Documents: len(segments) > 0, Part: len(places) > 0, Ring: op.Attrs.Text("ring") != "",
		Balanced: op.Attrs.Bool("balanced")}
	kernel, why = s.Attention(a)
	names := ir.Names(q.Dims)
	batched := len(names) == 4 && slices.Equal(names[1:], []string{ir.Seq, ir.Heads, ir.HeadDim})
	if kernel == CuDNN && !batched {
		return Plain, fmt.Sprintf("cuDNN wants batch, seq, heads, head, not %v", names)
	}
	return kernel, why
}

// againstCuDNN gives the reason why cuDNN's attention cannot be used, "" if it can. The limits are
// those of XLA's call (xla/service/gpu/cublas_cudnn.h, cuDNN 9.24).
func (s *Selector) againstCuDNN(a Attention) string {
	switch {
	case !slices.Contains([]string{"sm_90", "sm_100", "sm_103", "sm_120"}, s.arch):
		return fmt.Sprintf("not tried on %s", s.arch)
	case a.Elem != dtype.BF16 && a.Elem != dtype.F16:
		return fmt.Sprintf("cuDNN wants bf16 or f16, not %s", a.Elem)
	case a.Head > 256 || a.Head%8 != 0:
		return fmt.Sprintf("cuDNN wants a head of at most 256 in steps of 8, not %d", a.Head)
	case a.Documents:
		return "cuDNN's call has no mask of documents"
	case a.Part && (!a.Ring || a.Balanced):
		return "cuDNN's call takes all queries of a sequence, not one device's part"
	case a.Capped:
		return "cuDNN's call has no soft cap"
	case a.Window > 0 && a.Ring:
		return "a window may end within a piece of the ring"
	case a.Window > 0 && !a.Causal:
		return "cuDNN's window is causal"
	}
	return ""
}
