package flash

import "math"

// MeanKeys is the mean number of keys that a query of a causal row of seq tokens sees if it looks
// back over window of them (0 is all): the first see 1, 2, ..., all others window.
func MeanKeys(seq, window float64) float64 {
	w := min(seq, window)
	if window <= 0 {
		w = seq
	}
	return (w*(w+1)/2 + (seq-w)*w) / seq
}

// gemms is how often a part multiplies along a head of queries, and along one of values: scores and
// the sum of values; scores, dP and dQ; scores, dP, dK and dV.
func (a Attention) gemms() (head, value float64) {
	switch a.Part {
	case Forward:
		return 1, 1
	case DQ:
		return 2, 1
	}
	return 2, 2
}

// perScore is the FLOPs of a part for each score.
func (a Attention) perScore() float64 {
	head, value := a.gemms()
	return 2 * (head*float64(a.Head) + value*float64(a.Value))
}

// FLOPs counts the GEMMs of the keys that queries see, documents aside: blocks of keys that no
// query of a block sees are left out.
func (a Attention) FLOPs() int64 {
	keys := float64(a.Keys)
	if a.Causal {
		keys = MeanKeys(float64(a.Seq), float64(a.Window))
	}
	return int64(float64(a.Batch) * float64(a.Heads) * float64(a.Seq) * keys * a.perScore())
}

// Bytes is what the kernel reads and writes, each once: keys and values that several blocks of
// queries read stay in the L2 cache.
func (a Attention) Bytes() (n int64) {
	for _, arg := range append(a.operands(), a.results()...) {
		size := int64(arg.Elem.Bits() / 8)
		for _, d := range arg.Shape {
			size *= int64(d)
		}
		n += size
	}
	return n
}

// Instructions of a part for each score beside the GEMMs. Forward is counted in compiled code
// (reference/triton_kernels.md 1: 20.6 with a cap, a window and documents); the gradients have the
// score's, less its maximum and sum, and dS. A multiprocessor issues 128 a clock, of which 70 % is
// assumed, while tensor cores wait: blocks of scores are not computed while others are multiplied.
var perScore = map[Part]float64{Forward: 20.6, DQ: 22, DKV: 24}

const issued = 0.7 * 128

// Share is the kernel's FLOP rate over a library's, by a model: GEMMs take as long as a library's,
// at 70 % of the peak of 7,700 bf16 FLOPs a clock in a multiprocessor of B200, 1,100 of RTX PRO
// 6000, and instructions come on top.
func (a Attention) Share() float64 {
	peak := 7700.0
	if a.Small {
		peak = 1100
	}
	library := a.perScore() / (0.7 * peak)
	return library / (library + perScore[a.Part]/issued)
}

// Slower is how many times as long as a library's attention of the same size the kernels take,
// forward and backward; both gradients recompute scores and dP, which a library computes once.
func Slower(head, value int, small bool) (forward, backward float64) {
	time := func(part Part) float64 {
		a := Attention{Part: part, Head: head, Value: value, Small: small}
		return a.perScore() / a.Share()
	}
	forward = time(Forward) / Attention{Part: Forward, Head: head, Value: value}.perScore()
	library := 2 * (3*float64(head) + 2*float64(value))
	return forward, (time(DQ) + time(DKV)) / math.Max(library, 1)
}
