package dtype

// A Format is a way to write numbers with few bits: codes in blocks that share a scale. This is the
// one place that says how large these are; other names of formats stand for none.
type Format string

// The formats.
const (
	MXFP8 Format = "mxfp8" // E4M3, 32 to a scale that is a power of two
	NVFP4 Format = "nvfp4" // E2M1, 16 to a scale in E4M3, under a scale for the tensor
)

// formats has a block's elements, and the types of its elements and of its scale.
var formats = map[Format]struct {
	block         int64
	codes, scales DType
}{
	MXFP8: {32, F8E4M3FN, F8E8M0FNU},
	NVFP4: {16, F4E2M1FN, F8E4M3FN},
}

// Block is the number of elements that share a scale, 1 where there are no blocks. Both sides of a
// weight must be multiples of it: the forward product sums over one, that of the input's gradient
// over the other.
func (f Format) Block() int64 { return max(1, formats[f].block) }

// Codes is the type of elements. Values of this type and of [Format.Scales] travel as bytes, and
// nothing is computed with them but a block_dot.
func (f Format) Codes() DType { return formats[f].codes }

// Scales is the type of scales.
func (f Format) Scales() DType { return formats[f].scales }

// Bytes is what an element takes with its part of the scale.
func (f Format) Bytes() float64 {
	return (float64(f.Codes().Bits()) + float64(f.Scales().Bits())/float64(f.Block())) / 8
}
