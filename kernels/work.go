package kernels

import "github.com/deepwell/deepwell/dtype"

// A Quantizing is the work of the kernels that write a tensor in blocks with scales, in one
// orientation or in both. The zero value is that of a format that has none.
type Quantizing struct {
	bytes float64 // of an element in blocks
	// reads is how often the source is read before both copies are written: NVFP4 must know the
	// largest magnitude of a tensor first.
	reads float64
	// moved is how many times the bytes that must be moved compiled programs move (docs/precision.md,
	// TestProductsAreCuDNNsOnBlackwell of lower): for NVFP4 the middle of 1.39 and 1.56.
	moved float64
	// Count is how many kernels there are: one for scales and one for codes, and for NVFP4 the
	// largest magnitude and its sum over devices besides.
	Count float64
}

// Quantizing is how our own programs write a format on the target.
func (s *Selector) Quantizing(f dtype.Format) Quantizing {
	switch f {
	case dtype.MXFP8:
		return Quantizing{f.Bytes(), 1, 1.54, 2}
	case dtype.NVFP4:
		return Quantizing{f.Bytes(), 2, 1.47, 4}
	}
	return Quantizing{}
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
