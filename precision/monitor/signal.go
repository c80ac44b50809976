package monitor

import "math"

// A signal is a figure that is followed for every operand, or for every linear layer.
type signal struct {
	name string
	// tensor says that the figure describes the tensor, whatever its format: its history outlives a
	// change of format, and both GEMMs that read the tensor are concerned.
	tensor bool
	judge  func(m *measured) verdict
}

// measured is a value and what is known about its origin.
type measured struct {
	value   float64
	usual   float64 // from its history
	learned bool    // the history is long enough to speak
	format  string  // of the quantized copy, or of the GEMM
	operand int     // -1 for a linear layer's own signals
	// rung is how many times the GEMM has fallen. A property of the tensor looks the same in every
	// format, so it has to get worse by the same factor again before the next fall.
	rung int
}

// A verdict is the bound of a value, and whether it was crossed.
type verdict struct {
	out   bool
	bound float64
	now   bool // one sample is proof
	warn  bool // not to be acted on
}

// above is a verdict with an upper bound.
func above(m *measured, bound float64) verdict {
	return verdict{out: m.value > bound, bound: bound}
}

// rises is above, once there is enough history.
func rises(m *measured, bound float64) verdict {
	return verdict{out: m.learned && m.value > bound, bound: bound}
}

// below is a verdict with a lower bound.
func below(m *measured, bound float64) verdict {
	return verdict{out: m.value < bound, bound: bound}
}

// The signals of operands, and below of linear layers. The numbers in the functions below were set
// from the values of clean runs.
var operandSignals = []signal{
	{"amax", true, judgeAmax},
	{"spread", true, judgeSpread},
	{"range", false, judgeRange},
	{"saturated", false, judgeSaturated},
	{"underflow", false, judgeUnderflow},
	{"snr", false, judgeSNR},
}

var linearSignals = []signal{
	{"dw norm", true, judgeNorm},
	{"dw zeros", false, judgeZeros},
	{"gradient to noise", false, judgeNoise},
	{"fprop error", false, judgeError},
	{"dgrad error", false, judgeError},
	{"wgrad error", false, judgeError},
}

// measuredAlways is how many operand signals every sample has: the first ones. The others, and the
// noise of gradients, need rounding errors, which only inspections measure.
const measuredAlways = 2

// Places in linearSignals.
const (
	dwNorm = iota
	dwZeros
	dwNoise
	dwErrors // of fprop, then dgrad, then wgrad
)

// values are the signals of an operand, in the order of operandSignals.
func (o *Operand) values() [6]float64 {
	return [...]float64{o.Amax, o.Spread, o.Range, o.Saturated, o.Underflow, o.SNR}
}

// values are the signals of a linear layer, in the order of linearSignals.
func (l *Linear) values() [6]float64 {
	zeros := math.NaN()
	if l.Count > 0 {
		zeros = float64(l.Zeros) / float64(l.Count)
	}
	return [...]float64{l.Norm, zeros, l.GradToNoise, l.FpropError, l.DgradError, l.WgradError}
}

// judgeAmax: largest of clean runs 1.6, 1.14 and 3.8 times the median.
func judgeAmax(m *measured) verdict {
	factor := [tensors]float64{opX: 4, opW: 1.5, opDY: 16}[m.operand%tensors]
	v := rises(m, m.usual*math.Pow(factor, float64(1+m.rung)))
	v.out = v.out && m.usual > 0
	return v
}

// judgeSpread: largest drift of clean runs 2.6, of dy.
func judgeSpread(m *measured) verdict { return rises(m, m.usual+3.5*float64(1+m.rung)) }

// judgeRange: three more powers of two than usual between the largest and the smallest elements.
func judgeRange(m *measured) verdict { return rises(m, m.usual+3) }

// judgeSaturated: a scale that is rounded up never clamps, so MXFP8 that does is broken. NVFP4
// scales are rounded to nearest and clamp 3.0 to 5.6 % of healthy tensors, and 0.2 to 0.3 % of
// weights, whose scales cover 256 elements. The factor of the own median is for tensors of another
// kind.
func judgeSaturated(m *measured) verdict {
	if m.format == mxfp8 {
		v := above(m, 0)
		v.now = true
		return v
	}
	least := 0.08
	if m.operand%tensors == opW {
		least = 0.01
	}
	return rises(m, max(least, 1.5*m.usual))
}

// judgeUnderflow: NVFP4 has healthy tensors with 5 to 8 %, and others with 29 to 53 %, such as the
// product inside a SwiGLU; nothing was seen between.
func judgeUnderflow(m *measured) verdict {
	switch {
	case m.format == mxfp8 && m.operand == opDY+tensors:
		return rises(m, max(0.03, 10*m.usual))
	case m.format == mxfp8:
		return rises(m, max(0.005, 10*m.usual))
	case m.usual < 0.10:
		return rises(m, 0.15)
	}
	return rises(m, max(0.65, m.usual+0.20))
}

// judgeSNR: in MXFP8 it hardly depends on the data (31.0 to 32.0 dB for all operands), so a fixed
// floor serves until there is a history. In NVFP4 it does. Noise larger than the tensor is proof in
// any case: scales are broken.
func judgeSNR(m *measured) verdict {
	if m.value < 0 {
		return verdict{out: true, now: true}
	}
	less := 1.5
	if m.operand%tensors == opW {
		less = 0.5
	}
	switch {
	case m.learned:
		return below(m, m.usual-less)
	case m.format == mxfp8:
		return below(m, 29.5)
	}
	return verdict{}
}

// judgeNorm: clean runs stay within 0.35 and 2.8 over 50 steps.
func judgeNorm(m *measured) verdict {
	factor := math.Pow(16, float64(1+m.rung))
	v := above(m, m.usual*factor)
	if m.value < m.usual {
		v = below(m, m.usual/factor)
	}
	v.out = v.out && m.learned && m.usual > 0
	return v
}

// judgeZeros: at most 0.006 % in clean runs with SwiGLU. Models whose activation is zero for half
// of its arguments have zeros of their own, which the median knows.
func judgeZeros(m *measured) verdict { return rises(m, max(0.001, 3*m.usual)) }

// judgeNoise: below √3 the error of FP4 outweighs what it learns (arXiv 2505.19115). Clean runs
// have 23 or more in MXFP8, and in NVFP4 5.4, falling as training goes on.
func judgeNoise(m *measured) verdict {
	if v := below(m, math.Sqrt(3)); v.out {
		return v
	}
	bound := 3.5
	if m.format == mxfp8 {
		bound = 12
	}
	v := below(m, bound)
	v.warn = true
	return v
}

// judgeError: relative errors of the GEMMs, below a fixed bound until there is a history.
func judgeError(m *measured) verdict {
	most := 0.35
	if m.format == mxfp8 {
		most = 0.08
	}
	if m.learned {
		most = min(2.5*m.usual, max(most, 1.5*m.usual))
	}
	return above(m, most)
}
