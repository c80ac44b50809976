package monitor

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// A Sample is what one step reports. A step without statistics has no Linears.
type Sample struct {
	Step     int
	Loss     float64
	GradNorm float64 // over all parameters
	// Finite says that no NaN or infinity was found. It is tested on sums and norms: the largest
	// element of a tensor does not show a NaN on every engine.
	Finite bool
	// Linears are in the order in which the forward pass runs them: where something that is not
	// finite came from is read off the order.
	Linears []Linear
}

// A Linear is one linear layer of one layer of the model in a step. Figures that were not measured
// are NaN, counts 0; [Unmeasured] returns one with nothing measured.
type Linear struct {
	Layer int
	Name  string // of its weight, such as block.down

	// Fprop, Dgrad and Wgrad are the formats of its GEMMs: bf16, mxfp8 or nvfp4. Empty means bf16.
	Fprop, Dgrad, Wgrad string

	Norm      float64 // of the weight's gradient dW
	NonFinite int64   // elements of dW
	// Zeros are the elements of dW that are exactly zero, of Count.
	Zeros, Count int64
	// GradToNoise is the norm of dW over the norm of the error that quantization adds to it.
	GradToNoise float64
	// FpropError, DgradError and WgradError are relative errors of the GEMMs: the norm of the
	// difference to the exact result over the norm of the result.
	FpropError, DgradError, WgradError float64

	Operands []Operand
}

// An Operand is one quantized copy of a tensor that a GEMM reads.
type Operand struct {
	// Name is x, w or dy for the copy with blocks along rows, as fprop reads x and w and dgrad
	// reads dy, or xT, wT or dyT for the other one, as wgrad reads xT and dyT and dgrad reads wT.
	Name string

	Amax      float64 // the largest magnitude of the tensor
	Spread    float64 // log2 of the largest over the median block's amax
	Range     float64 // log2 of amax over the smallest nonzero, the mean over blocks
	Saturated float64 // share of elements that were clamped
	Underflow float64 // share of elements that became zero and were not
	SNR       float64 // in dB

	NonFinite int64 // elements
	// Made and Used are checksums of the scale bytes where they were written and where the product
	// reads them, after gathers and transposes back; both 0 where they were not taken.
	Made, Used uint64
}

// Unmeasured returns a linear layer without measurements, with operands of some names, to fill in.
func Unmeasured(layer int, name string, operands ...string) Linear {
	nan := math.NaN()
	l := Linear{Layer: layer, Name: name, Norm: nan, GradToNoise: nan, FpropError: nan,
		DgradError: nan, WgradError: nan}
	for _, o := range operands {
		l.Operands = append(l.Operands, Operand{Name: o, Amax: nan, Spread: nan, Range: nan,
			Saturated: nan, Underflow: nan, SNR: nan})
	}
	return l
}

// The products, and the copies of operands that they read. A tensor is read by two of them.
const (
	fprop = iota
	dgrad
	wgrad
)

var gemms = []string{"fprop", "dgrad", "wgrad"}

var operands = []string{"x", "w", "dy", "xT", "wT", "dyT"}

const (
	opX = iota
	opW
	opDY
	tensors // xT is at opX + tensors, and so on
)

// readers returns the GEMMs that read the two copies of an operand: the row-wise copy's first.
func readers(operand int) [2]int {
	return [tensors][2]int{{fprop, wgrad}, {fprop, dgrad}, {dgrad, wgrad}}[operand%tensors]
}

// reader is the GEMM that reads one copy.
func reader(operand int) int { return readers(operand)[operand/tensors] }

// formats are the formats of the three GEMMs.
func (l *Linear) formats() [3]string {
	f := [3]string{l.Fprop, l.Dgrad, l.Wgrad}
	for i := range f {
		if f[i] == "" {
			f[i] = bf16
		}
	}
	return f
}

// The formats whose statistics the bounds were measured on; a format that is neither is held to
// the bounds of NVFP4.
const bf16, mxfp8, nvfp4 = "bf16", "mxfp8", "nvfp4"

// moreBits returns the format that a GEMM falls back to: NVFP4 to MXFP8, MXFP8 to BF16.
func moreBits(format string) string {
	next := bf16
	for _, f := range dtype.Formats() {
		if string(f) == format {
			return next
		}
		next = string(f)
	}
	return bf16
}
