package dtype

import "slices"

// A Format is the number format of a linear layer's GEMM operands, or of a stored weight. The IR,
// precision policies, plans, the cost model and the checkpoint quantizer all use this type; its
// text is the spelling in JSON files and on command lines. Quantized formats are block-scaled:
// elements of low precision, each block of which shares a scale. They have a row in the table
// below, which is the only place that says how a format is made.
type Format string

// The formats without a row: no block shares a scale.
const (
	FormatF32  Format = "f32"  // TF32 on GPUs
	FormatBF16 Format = "bf16" // the default: nothing is quantized
	FormatFP8  Format = "fp8"  // E4M3, a scale per tensor; only other stacks have it
)

// The quantized formats, which have a row.
const (
	MXFP8 Format = "mxfp8" // OCP MX: E4M3 elements, a power-of-two scale for 32 of them
	NVFP4 Format = "nvfp4" // E2M1 elements, an E4M3 scale for 16 of them, an f32 scale for the tensor
)

// formatRow describes one format. The last four say how training uses it (NVIDIA's NVFP4 recipe,
// arXiv 2509.25149; MXFP8 needs none of them).
type formatRow struct {
	name          Format
	block         int64 // elements that share a scale
	codes, scales DType
	tensorScale   bool // a second scale for the whole tensor, derived from its amax
	tile          bool // weights have block × block tiles, so that both orientations agree
	hadamard      bool // wgrad inputs go through a Hadamard transform first
	stochastic    bool // gradients are rounded stochastically
}

// formats lists the formats, the one with more bits first.
var formats = []formatRow{
	{name: MXFP8, block: 32, codes: F8E4M3FN, scales: F8E8M0FNU},
	{name: NVFP4, block: 16, codes: F4E2M1FN, scales: F8E4M3FN,
		tensorScale: true, tile: true, hadamard: true, stochastic: true},
}

// Formats lists the quantized formats, the one with more bits first.
func Formats() []Format {
	list := make([]Format, len(formats))
	for i, r := range formats {
		list[i] = r.name
	}
	return list
}

//
//go:noinline
func (f Format) row() formatRow {
	if i := slices.IndexFunc(formats, func(r formatRow) bool { return r.name == f }); i >= 0 {
		return formats[i]
	}
	return formatRow{block: 1}
}

// Quantized reports whether f is a format of this table.
func (f Format) Quantized() bool { return f.row().name != "" }

// Block is the number of elements that share a scale; 1 if f is not quantized. Both dimensions of a
// weight must be multiples of it: fprop sums over one, dgrad over the other.
func (f Format) Block() int64 { return f.row().block }

// Codes is the element type. Programs carry elements and scales as bytes; only block_dot computes
// with them.
func (f Format) Codes() DType { return f.row().codes }

// Scales is the type of a block's scale.
func (f Format) Scales() DType { return f.row().scales }

// TensorScale reports whether a tensor has a second scale, derived from its amax. A quantized
// operand is then three values: codes, scales and amax.
func (f Format) TensorScale() bool { return f.row().tensorScale }

// Tiles reports whether weights are quantized in block × block tiles.
func (f Format) Tiles() bool { return f.row().tile }

// Hadamard reports whether wgrad inputs are transformed before they are quantized.
func (f Format) Hadamard() bool { return f.row().hadamard }

// Stochastic reports whether gradients are rounded stochastically.
func (f Format) Stochastic() bool { return f.row().stochastic }

// Bytes is the size of an element with its share of the block's scale: 33/32 for MXFP8, 9/16 for
// NVFP4. A format that is not listed has the size of BF16.
func (f Format) Bytes() float64 {
	switch f {
	case FormatF32:
		return 4
	case FormatFP8:
		return 1
	}
	if !f.Quantized() {
		return 2
	}
	return (float64(f.Codes().Bits()) + float64(f.Scales().Bits())/float64(f.Block())) / 8
}
