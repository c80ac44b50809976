package kernels

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A Grouping is a GEMM of experts to choose for: rows of tokens [Experts, Slots, In] times weights
// [Experts, Out, In], or the gradient of the weights, which sums over slots.
type Grouping struct {
	Experts, Slots, Out, In int64
	// Tokens is how many rows hold a token if experts are loaded evenly; the rest are empty slots.
	Tokens int64
	// Parts is from how many devices the slots of an expert come, each filled from its first.
	Parts  int64
	Elem   dtype.DType  // of operands that are not quantized
	Format dtype.Format // "" if they are not
	Grad   bool
	Wide   bool // the result is float32
	// Shards is in how many parts FSDP gathers weights along what is summed over, if numbers are
	// packed along it and the kernel reads the parts as they come; else 0.
	Shards int64
	// Moved tells that the weights, or their gradient, have another dimension before the experts, as
	// FSDP gathers and reduces them: a library wants a copy with the experts first.
	Moved bool
}

// tile is how many rows a grouped kernel takes or skips.
const tile = 128

// Filled is how many rows are expected in tiles with a token: of the last tile of each part half is
// empty, and where parts do not begin with a tile, another half of the first. The gradient of
// weights sums up to the last of them.
func (g Grouping) Filled() int64 {
	parts := max(g.Parts, 1)
	waste := int64(tile / 2)
	if g.Slots/parts%tile != 0 {
		waste = tile
	}
	rows := g.Tokens/max(g.Experts, 1) + parts*waste
	if g.Grad && parts > 1 {
		rows = g.Slots
	}
	step := int64(tile)
	if g.Grad && g.Format == dtype.NVFP4 {
		step *= 2 // it adds two tiles at a time
	}
	return g.Experts * min(g.Slots, (rows+step-1)/step*step)
}

// flopsPerByte is how many FLOPs of a library's GEMM take as long as a byte of a copy: about 300 on
// a B200 in bf16, 390 in MXFP8 and 700 in NVFP4.
func (g Grouping) flopsPerByte() float64 {
	if g.Format == dtype.NVFP4 {
		return 700
	}
	return 300
}

// Groups tells whether a kernel of our own that skips tiles without a token computes a GEMM of
// experts, and why. It must pay by the model of [fused.Group.Share]: what it skips, and the copies
// that it does not need, against a library's higher rate.
func (s *Selector) Groups(g Grouping) (why string, ok bool) {
	switch {
	case !s.Own():
		return "", false
	case g.Format != "" && g.Format != dtype.MXFP8 && g.Format != dtype.NVFP4 ||
		g.Format == "" && g.Elem != dtype.BF16:
		return "grouped kernels have bf16, MXFP8 and NVFP4", false
	case g.Slots%tile != 0 || g.Out%tile != 0 || g.In%tile != 0:
		return fmt.Sprintf("slots and sizes of experts are not whole tiles of %d", tile), false
	case s.Refuses(fused.Group{Format: g.Format, Grad: g.Grad}.Key()):
		return "the grouped kernel differs on a GPU of this run from its plain form", false
	case g.Grad && g.Wide && g.Format == "":
		return "a library adds gradients in float32 to what is there already", false
	}
	size := 2 * g.Out * g.In
	own := float64(g.Filled()*size) / g.share()
	library := float64(g.Experts*g.Slots*size) + g.flopsPerByte()*float64(g.copied())
	if own >= library && !s.options.Grouped {
		return fmt.Sprintf("%d %% of experts' tiles hold tokens: skipping the rest does not pay",
			100*g.Filled()/(g.Experts*g.Slots)), false
	}
	if g.Moved {
		return "experts' tiles without tokens are skipped; weights stay as FSDP gathers and reduces them",
			true
	}
	return "experts' tiles without tokens are skipped", true
}

// share is the grouped kernel's FLOP rate over a library's.
func (g Grouping) share() float64 {
	return fused.Group{In: int(g.In), Experts: int(g.Experts), Grad: g.Grad, Format: g.Format,
		Filled: int(g.Filled())}.Share()
}

// Equal is how many rows of an expert a library computes in the time of the grouped kernel.
func (g Grouping) Equal() int64 { return int64(float64(g.Filled()/g.Experts) / g.share()) }

// copied is the bytes that copies of the weights, or of their gradient, read and write beside a
// library's GEMM where FSDP has another dimension first: one with the experts first, and of NVFP4's
// gradient another, which multiplies by the scales of tensors and which XLA does not fuse with it.
// XLA's calls of cuBLASLt take weights in every order.
func (g Grouping) copied() (bytes int64) {
	n := g.Experts * g.Out * g.In
	switch {
	case !g.Moved || !g.Grad && g.Format == "":
		return 0
	case !g.Grad:
		return 2 * g.Format.Codes().Bytes(n)
	case g.Wide:
		bytes = 8 * n
	default:
		bytes = 4 * n
	}
	if g.Format.TensorScale() {
		bytes *= 2
	}
	return bytes
}
