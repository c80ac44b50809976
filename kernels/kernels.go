package kernels

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels/flash"
)

// The kernels that an operation can become.
const (
	// Plain is StableHLO as the operation's mathematics says, which every target runs.
	Plain = "plain"
	// CuDNN is a call of cuDNN: attention, forward and backward, or a block-scaled matmul.
	CuDNN = "cudnn"
	// Matrix is a product as one GEMM per batch, its dimensions merged to at most three.
	Matrix = "matrix"
	// HeadFirst is attention as GEMMs, one per head and sequence.
	HeadFirst = "head first"
	// Chunked is cross-entropy that sums a chunk of the vocabulary at a time.
	Chunked = "chunked"
	// Windowed is reduce_window: quantization with block maxima by it, and a barrier between scales
	// and codes; the positions of choices of experts as running sums of one-hot rows.
	Windowed = "windowed"
	// Triton is a kernel of our own, printed by package kernels/fused.
	Triton = "triton"
	// Folded is a sum of all elements by slices that are added as whole vectors.
	Folded = "folded"
)

// A Choice is the kernel of operations of one kind, and why.
type Choice struct {
	Kind   string `json:"kind"`
	Kernel string `json:"kernel"`
	Why    string `json:"why"`
}

// A Selector chooses kernels for one target and records what it chose. It is not safe for
// concurrent use.
type Selector struct {
	arch    string // "cpu", or a GPU's such as "sm_100"
	options Options
	choices []Choice
	passes  []Pass
	seen    map[string]bool
}

// Options are what programs ask of a selector beyond its target.
type Options struct {
	// Without leaves out kernels of our own, to compare.
	Without bool
	// Refused are kernels of our own that are not used ([fused.Spec.Key], [fused.Group.Key]): on a GPU
	// of the run they differ from their plain form.
	Refused []string
	// Named gives instructions the names of their operations, for those who read compiled programs.
	// What runs is the same.
	Named bool
	// Grouped takes grouped GEMMs of experts also where they do not pay: to compare.
	Grouped bool
}

// A Pass is a rewrite of graphs, with how many operations they had before and after it.
type Pass struct {
	Name   string `json:"name"`
	Before int    `json:"before"`
	After  int    `json:"after"`
}

// For gives the selector of a target by its architecture: "cpu", or a GPU's such as "sm_100".
func For(arch string) *Selector { return &Selector{arch: arch} }

// With gives a selector options.
func (s *Selector) With(o Options) *Selector {
	s.options = o
	return s
}

// Arch is the architecture; "" for a nil selector, which stands for what every target runs.
func (s *Selector) Arch() string {
	if s == nil {
		return ""
	}
	return s.arch
}

// blackwell are the GPUs that Deepwell trains on.
var blackwell = []string{"sm_100", "sm_103", "sm_120"}

// Blocks reports whether the GPU's tensor cores multiply block-scaled operands.
func (s *Selector) Blocks() bool {
	return slices.Contains(blackwell, s.Arch())
}

// Own reports whether programs have kernels of our own, of package kernels/fused.
func (s *Selector) Own() bool { return s.Blocks() && !s.options.Without }

// Refuses reports whether a kernel of our own is not to be used, by its key.
func (s *Selector) Refuses(key string) bool {
	return s != nil && slices.Contains(s.options.Refused, key)
}

// Named reports whether instructions have names.
func (s *Selector) Named() bool { return s != nil && s.options.Named }

// Passed notes a pass. Passes of one name, over several graphs, are one.
func (s *Selector) Passed(p Pass) {
	if s == nil {
		return
	}
	for i := range s.passes {
		if known := &s.passes[i]; known.Name == p.Name {
			known.Before, known.After = known.Before+p.Before, known.After+p.After
			return
		}
	}
	s.passes = append(s.passes, p)
}

// Passes lists the passes, in their order.
func (s *Selector) Passes() []Pass { return slices.Clone(s.passes) }

// FusesOneOutput reports whether the backend fuses one output per loop (XLA:CPU): reloading a
// stored value beats recomputing it for a second output.
func (s *Selector) FusesOneOutput() bool { return s.arch == "cpu" }

// Choices lists what was chosen, each once, in the order of the programs.
func (s *Selector) Choices() []Choice { return slices.Clone(s.choices) }

// An Attention is what the choice of its kernel depends on, whether a graph states it or a plan of
// which there is no graph yet.
type Attention struct {
	Elem   dtype.DType // of queries
	Head   int64       // size of a head of queries and keys
	Value  int64       // of values, where it is another; 0 if not
	Window int64       // keys that a query sees; 0 is all
	Causal bool
	Capped bool // scores have a soft cap
	// Documents tells that packed documents of a sequence are masked from each other.
	Documents bool
	Lengths   bool // each row has its own number of keys
	// Chunk is the tokens of each chunk of a sequence of which a device has one, or two with
	// balancing (context parallelism); 0 if it has whole sequences. Ring tells that keys and values
	// travel around a ring, instead of being gathered.
	Chunk int64
	Ring  bool
	Plain bool // the plan asks for it
}

// Attention chooses the kernel of an attention, and says why.
func (s *Selector) Attention(a Attention) (kernel, why string) {
	switch {
	case s.arch == "cpu" && a.Ring:
		return Plain, "the CPU has no cuDNN; shards of a ring are combined as they arrive"
	case s.arch == "cpu":
		return HeadFirst, "the CPU has no cuDNN; GEMMs with one batch dimension are fastest"
	}
	if why := s.againstCuDNN(a); why != "" {
		return s.withoutCuDNN(a, why)
	}
	switch {
	case a.Chunk > 0 && a.Window > 0:
		return CuDNN, "chunks and the keys that a window sees of the chunk before are cuDNN's calls"
	case a.Chunk > 0 && a.Ring:
		return CuDNN, "chunks of a ring are cuDNN's calls, without a mask or with the causal one"
	case a.Chunk > 0:
		return CuDNN, "chunks are cuDNN's calls, and so are the gathered keys before them, by length"
	}
	return CuDNN, "cuDNN supports this shape"
}

// Attends is Attention of an operation: an attention, or its gradient.
func (s *Selector) Attends(op *ir.Op) (kernel, why string) {
	q := op.In[0].Type
	segments, places := op.MaskArgs()
	a := Attention{Elem: q.Elem, Head: q.Size(ir.HeadDim), Value: op.In[2].Type.Size(ir.HeadDim),
		Window: op.Attrs.Int("window"),
		Causal: op.Attrs.Bool("causal"), Capped: op.Attrs.Float("softcap") > 0,
		Documents: len(segments) > 0, Lengths: op.KeyLengths() > 0, Ring: op.Attrs.Text("ring") != "",
		Plain: op.Attrs.Bool("plain")}
	if len(places) > 0 {
		if a.Chunk = q.Size(ir.Seq); op.Attrs.Bool("balanced") {
			a.Chunk /= 2
		}
	}
	kernel, why = s.Attention(a)
	names := ir.Names(q.Dims)
	batched := len(names) == 4 && slices.Equal(names[1:], []string{ir.Seq, ir.Heads, ir.HeadDim})
	if kernel == CuDNN && !batched {
		return Plain, fmt.Sprintf("cuDNN wants batch, seq, heads, head, not %v", names)
	}
	if kernel != Triton {
		return kernel, why
	}
	if !batched {
		return Plain, fmt.Sprintf("the kernel of our own wants batch, seq, heads, head, not %v", names)
	}
	for _, part := range []flash.Part{flash.Forward, flash.DKV} { // dQ has the sizes of the first
		if err := s.FlashOf(op, part).Check(); err != nil {
			return Plain, fmt.Sprintf("the kernel of our own does not compute %s", err)
		}
	}
	return kernel, why
}

// FlashOf describes a kernel of our own of an attention, or of its gradient.
func (s *Selector) FlashOf(op *ir.Op, part flash.Part) flash.Attention {
	q, k, v := op.In[0].Type, op.In[1].Type, op.In[2].Type
	documents, _ := op.MaskArgs()
	return flash.Attention{Part: part, Batch: int(q.Dims[0].Size), Seq: int(q.Size(ir.Seq)),
		Keys: int(k.Size(ir.Keys)), Heads: int(q.Size(ir.Heads)), KVHeads: int(k.Size(ir.KVHeads)),
		Head: int(q.Size(ir.HeadDim)), Value: int(v.Size(ir.HeadDim)), Scale: op.Attrs.Float("scale"),
		SoftCap: op.Attrs.Float("softcap"), Window: int(op.Attrs.Int("window")),
		Causal: op.Attrs.Bool("causal"), Documents: len(documents) > 0, Small: s.SmallTiles()}
}

// withoutCuDNN chooses the kernel of an attention that cuDNN cannot compute, for a reason: flash
// attention of our own, unless its conditions do not hold either.
func (s *Selector) withoutCuDNN(a Attention, why string) (kernel, reason string) {
	key := flash.Attention{}
	if a.Capped {
		key.SoftCap = 1
	}
	switch {
	case !s.Own() || a.Plain || a.Elem != dtype.BF16 || a.Chunk > 0 || a.Ring || a.Lengths ||
		max(a.Head, a.value()) > flash.MaxHead:
		return Plain, why
	case s.Refuses(key.Key()):
		return Plain, why + "; the kernel of our own differs on a GPU of this run from its plain form"
	}
	return Triton, why + "; a kernel of our own writes no scores"
}

// Flash tells whether a kernel's attention keeps its scores out of memory.
func Flash(kernel string) bool { return kernel == CuDNN || kernel == Triton }

// value is the size of a head of values.
func (a Attention) value() int64 { return cmp.Or(a.Value, a.Head) }

// headFits tells whether cuDNN's gradient has a plan for the sizes of heads. Those beyond 128 have
// none on sm_120.
func (s *Selector) headFits(a Attention) bool {
	value := a.value()
	if a.Head%8 != 0 || value%8 != 0 || value > a.Head {
		return false
	}
	large := a.Head == 256 && value == 256 || a.Head == 192 && value == 128
	return a.Head <= 128 || large && s.arch != "sm_120"
}

// againstCuDNN gives the reason why cuDNN's attention cannot be used, "" if it can. The limits are
// in XLA's call (xla/service/gpu/cublas_cudnn.h, cuDNN 9.24).
func (s *Selector) againstCuDNN(a Attention) string {
	switch {
	case a.Plain:
		return "the plan says plain attention"
	case !slices.Contains([]string{"sm_90", "sm_100", "sm_103", "sm_120"}, s.arch):
		return fmt.Sprintf("not tried on %s", s.arch)
	case a.Elem != dtype.BF16 && a.Elem != dtype.F16:
		return fmt.Sprintf("cuDNN wants bf16 or f16, not %s", a.Elem)
	case !s.headFits(a):
		return fmt.Sprintf("cuDNN wants heads of at most 128 in steps of 8, on sm_100 also of 256, or "+
			"192 with values of 128; not %d with %d", a.Head, a.value())
	case a.Documents && a.Chunk > 0 && a.Window > 0:
		return "a window and documents in chunks of a sequence are no mask of cuDNN's calls; " +
			"with cp.kind a2a, devices have whole sequences"
	case a.Documents && !a.Causal:
		return "cuDNN's segments are causal, of whole sequences"
	case a.Capped:
		return "cuDNN's call has no soft cap"
	case a.Window > 0 && !a.Causal:
		return "cuDNN's window is causal"
	case a.Lengths && (a.Causal || a.Chunk > 0):
		return "lengths are for calls without another mask"
	case a.Chunk > 0 && !a.Causal:
		return "chunks of a sequence are computed under a causal mask"
	case a.Chunk > 0 && a.Window > 1 && ir.Halo(a.Window, a.Chunk) == 0:
		return fmt.Sprintf("a window of %d keys begins before the previous chunk, of %d tokens", a.Window,
			a.Chunk)
	case a.Chunk > 0 && a.Window > 0 && a.Window < 3:
		return "cuDNN has no call for a single query"
	}
	return ""
}
