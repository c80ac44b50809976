package kernels

import (
	"cmp"

	"github.com/deepwell/deepwell/dtype"
)

// A Quantizing is the work of the kernels that write a tensor in blocks with scales, in one
// orientation or in both. The zero value is that of a format that has none.
type Quantizing struct {
	bytes float64 // of an element in blocks
	// reads is how often the source is read before both copies are written: NVFP4 must know the
	// largest magnitude of a tensor first.
	reads float64
	moved float64 // how many times the bytes that must be moved compiled programs move
	// Count is how many kernels there are: one for scales and one for codes, and for NVFP4 the
	// largest magnitude and its sum over devices besides.
	Count float64
}

// measuredMoves has, by format, how many times the bytes that must be moved compiled programs move
// (docs/precision.md, TestProductsAreCuDNNsOnBlackwell of lower): for NVFP4 the middle of 1.39 and
// 1.56. A format that was not measured is taken to move 1.5 times.
var measuredMoves = map[dtype.Format]float64{dtype.MXFP8: 1.54, dtype.NVFP4: 1.47}

// Quantizing is how our own programs write a format on the target.
func (s *Selector) Quantizing(f dtype.Format) Quantizing {
	if !f.Quantized() {
		return Quantizing{}
	}
	q := Quantizing{bytes: f.Bytes(), reads: 1, moved: cmp.Or(measuredMoves[f], 1.5), Count: 2}
	if f.TensorScale() { // amax of the tensor first: one more read, a kernel and an all-reduce
		q.reads, q.Count = 2, 4
	}
	return q
}

// Bytes is what moves through memory for so many elements of wide bytes in so many orientations.
func (q Quantizing) Bytes(elements, wide, sides float64) float64 {
	if sides == 0 {
		return 0
	}
	return q.moved * (elements * (q.reads*wide + sides*q.bytes))
}

// Written is the bytes of memory for each score of attention that writes its scores, in a type of
// elem bytes, as counted in compiled programs (llama3.1-8b on 8 B200, cp 4, in bf16): forward the
// product writes f32, its largest is sought, exponentials are written and summed, divided and
// rounded, and multiplied with values; back the scores and the gradients of their exponentials are
// products in f32, both are rounded, one of them turned, and all three products read what is
// rounded.
func (s *Selector) Written(elem float64) (forward, backward float64) {
	return 20 + 2*elem, 16 + 7*elem
}
