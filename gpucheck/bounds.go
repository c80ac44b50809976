package gpucheck

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// Bounds of operations on a GPU, relative to the plain form on CPU devices, as
// [replay.Difference].Relative. They follow from the rounding of the types; none has been measured
// on a real GPU yet. An attention scale that is 1 % too large moves attention by 1.4e-2, and a
// logarithm of base 2 the log-sum-exp by 0.44.
var (
	boundGEMM = replay.Bound{Limit: 1e-4,
		Why: "bf16 times bf16 is exact in f32, and sums come in another order"}
	boundTF32 = replay.Bound{Limit: 3e-3,
		Why: "XLA lets cuBLAS round f32 operands to TF32, which has 11 bits"}
	boundAttention = replay.Bound{Limit: 1e-2,
		Why: "results and probabilities are rounded to bf16, which has 8 bits"}
	boundAttentionGrad = replay.Bound{Limit: 2e-2,
		Why: "gradients of scores are rounded to bf16, too"}
	boundBlocks = replay.Bound{Limit: 1e-3,
		Why: "codes are equal, and tensor cores may align sums to fewer bits than f32"}
	boundCodes  = replay.Bound{Limit: 0, Why: "on bits"}
	boundUpdate = replay.Bound{Limit: 1e-4,
		Why: "f32 with fused multiply-adds, and sums in another order"}
	boundStepF32 = replay.Bound{Limit: 2e-2,
		Why: "XLA lets cuBLAS round f32 operands to TF32, which has 11 bits"}
)

// stepBound is how far a program of a training step on a GPU may be from CPU devices: as far as a
// replay with bf16 as it is, but for what is f32 on both sides and what is compared on bits.
func stepBound(p *replay.Pair, format dtype.Format) replay.Bound {
	switch p.Kind {
	case step.Zero, step.Quantize:
		return boundCodes
	case step.Update, step.Reduce, step.Square:
		return boundUpdate
	}
	if format == "f32" {
		return boundStepF32
	}
	return p.Bound(false)
}
