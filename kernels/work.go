package kernels

import (
	"cmp"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/flash"
)

// A Quantizing is the work of the kernels that quantize a tensor, in one orientation or in both.
// Its zero value stands for a format that is not quantized.
type Quantizing struct {
	// bytes is the size of a quantized element with its share of the scale.
	bytes float64
	// reads is how often the source is read before both copies are written: NVFP4 must know the
	// largest magnitude of a tensor first.
	reads float64
	moved float64 // how many times the bytes that must be moved compiled programs move
	// saved is how many reads of a source that its kernels compute there are less.
	saved float64
	// Count is how many kernels there are: one for scales and one for codes, and for NVFP4 the
	// largest magnitude and its sum over devices besides.
	Count float64
}

// measuredMoves has, by format, how many times the bytes that must be moved compiled programs move
// (docs/precision.md; TestGEMMsAreCuDNNsOnBlackwell of lower holds them): kernels of our own and
// the swizzles of scales. A format that was not measured is taken to move 1.5 times.
var measuredMoves = map[dtype.Format]float64{dtype.MXFP8: 1.03, dtype.NVFP4: 1.05}

// savedReads has, by format, how many reads of a source are saved if its kernels compute it. MXFP8
// does not read it at all. Of NVFP4, which needs the largest magnitude first, a norm is computed
// twice from as much as it gives, which saves one; SwiGLU is written by the first kernel and read
// by the second, which saves none; the gradients of SwiGLU are two from three, computed twice.
var savedReads = map[dtype.Format]float64{dtype.MXFP8: 1, dtype.NVFP4: 0.5}

// ComputesSource tells whether the kernel that quantizes to a format also computes what it
// quantizes, element by element (pass fuse-sources of package rewrite).
func (s *Selector) ComputesSource(f dtype.Format) bool { return s.Blocks() && savedReads[f] > 0 }

// Requantizes tells whether the backward pass quantizes inputs of wgrad itself where it has what
// they are computed from, instead of reading codes that the forward pass saved: the kernel that
// writes the gradients of SwiGLU reads its gate and its other half anyway, and XLA copies what a
// library's GEMM reads out of a stack. Other targets would read the source once more.
func (s *Selector) Requantizes() bool { return s.Own() }

// Quantizing is how our own programs quantize to a format on the target.
func (s *Selector) Quantizing(f dtype.Format) Quantizing {
	if !f.Quantized() {
		return Quantizing{}
	}
	q := Quantizing{bytes: f.Bytes(), reads: 1, moved: cmp.Or(measuredMoves[f], 1.5),
		saved: savedReads[f], Count: 2}
	if f.TensorScale() { // amax of the tensor first: one more read, a kernel and an all-reduce
		q.reads, q.Count = 2, 4
	}
	return q
}

// Bytes is the memory traffic of quantizing a tensor of elements with wide bytes each, in 1 or 2
// orientations (sides). A tensor that the kernels compute is read less.
func (q Quantizing) Bytes(elements, wide, sides float64, computed bool) float64 {
	if sides == 0 {
		return 0
	}
	reads := q.reads
	if computed {
		reads -= q.saved
	}
	return q.moved * (elements * (reads*wide + sides*q.bytes))
}

// Slower is how many times as long as cuDNN's flash attention of our own takes, by a model.
func (s *Selector) Slower(head, value int) (forward, backward float64) {
	return flash.Slower(head, value, s.SmallTiles())
}

// SmallTiles tells a GPU without tensor memory, whose kernels sum in registers.
func (s *Selector) SmallTiles() bool { return s.Arch() == "sm_120" }

// Written is the memory traffic in bytes per score of attention that writes its scores, in a type
// of elem bytes, as counted in compiled programs (llama3.1-8b on 8 B200, cp 4, in bf16). Forward:
// the GEMM writes f32, its maximum is sought, exponentials are written and summed, divided and
// rounded, and multiplied by values. Backward: scores and the gradients of the probabilities are
// f32 GEMMs, both are rounded, one is transposed, and all three GEMMs read what was rounded.
func (s *Selector) Written(elem float64) (forward, backward float64) {
	return 20 + 2*elem, 16 + 7*elem
}
