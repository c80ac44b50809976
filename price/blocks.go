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

// reads is how often a source is read before both of its copies are written: NVFP4 must know the
// largest magnitude of a tensor first.
func (prec Precision) reads() float64 {
	if prec == NVFP4 {
		return 2
	}
	return 1
}

// moved is how many times the bytes that must be moved the compiled programs of our own stack move
// (docs/precision.md, TestProductsAreCuDNNsOnBlackwell of lower): 1.54 in MXFP8, and for NVFP4 the
// middle of 1.39 and 1.56.
func (prec Precision) moved() float64 {
	switch prec {
	case MXFP8:
		return 1.54
	case NVFP4:
		return 1.47
	}
	return 1
}

// Kernels is how many kernels of our own stack write one source in blocks: one for scales and one
// for codes, and for NVFP4 the largest magnitude and its sum over devices besides.
func (prec Precision) Kernels() float64 {
	switch prec {
	case MXFP8:
		return 2
	case NVFP4:
		return 4
	}
	return 0
}

// Blocks is the time in which our own programs write elements in blocks with scales: a source of
// wide bytes for each, in one orientation or in both.
func (p *Prices) Blocks(prec Precision, elements, wide, sides float64) float64 {
	if prec != MXFP8 && prec != NVFP4 || sides == 0 {
		return 0
	}
	bytes := elements * (prec.reads()*wide + sides*prec.Bytes())
	return p.profile.Quantize * prec.moved() * bytes / p.reached
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
