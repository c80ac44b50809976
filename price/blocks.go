package price

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// Bytes is what an element takes, with its part of the scales of blocks.
func (prec Precision) Bytes() float64 {
	switch prec {
	case F32:
		return 4
	case FP8:
		return 1
	case MXFP8, NVFP4:
		return dtype.Format(prec).Bytes()
	}
	return 2
}

// QuantizeBytes is the time in which our own programs write tensors in blocks with scales, by the
// bytes that their kernels move ([kernels.Quantizing]).
func (p *Prices) QuantizeBytes(bytes float64) float64 {
	return p.profile.Quantize * bytes / p.reached
}

// Agree is the time in which the devices of a group find the largest of a number that each has. It
// is a collective of no bytes; between domains a tree takes a round for each doubling.
func (p *Prices) Agree(g Group) float64 {
	if g.Size <= 1 {
		return 0
	}
	s := p.spread(g)
	return p.near(AllReduce, 4, s.most) + p.profile.Latency*farLatency*math.Log2(float64(s.domains))
}
