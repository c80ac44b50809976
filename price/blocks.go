package price

import (
	"math"
)

// QuantizeBytes is the seconds in which our own programs quantize tensors, given the bytes that
// their kernels move ([kernels.Quantizing]).
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
