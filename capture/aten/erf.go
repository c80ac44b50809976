package aten

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// erfTop and erfBottom are the coefficients of a quotient of polynomials in x² that is erf(x)/x to
// single precision for |x| below erfLimit, behind which erf is 1 (as in Eigen and XLA).
var (
	erfTop = []float64{0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861,
		0.18520832239976145, 1.128379143519084}
	erfBottom = []float64{-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885,
		0.014070470171167667, 0.11098505178285362, 0.49746925110067538, 1.0}
)

const erfLimit = 3.832506856900711

// erf is the error function: to single precision, or in f64 within 1e-14.
func erf(b *ir.Builder, z *ir.Value) *ir.Value {
	if z.Type.Elem == dtype.F64 {
		return erfDouble(b, z)
	}
	z, _ = bounded(b, z, "ge", erfLimit)
	z, low := bounded(b, z, "le", -erfLimit)
	square := b.Mul(z, z)
	poly := func(c []float64) *ir.Value {
		y := b.Shift(b.Scale(square, c[0]), c[1])
		for _, k := range c[2:] {
			y = b.Shift(b.Mul(y, square), k)
		}
		return y
	}
	erf := b.Div(b.Mul(z, poly(erfTop)), poly(erfBottom))
	return b.Select(low, b.Fill(ir.Type{Elem: z.Type.Elem}, -1), erf) // a large x shows any difference
}

// erfDouble is 2x/√π·exp(-x²)·(1 + 2x²/3·(1 + 2x²/5·(1 + …))), whose terms are all positive: behind
// |x| = 6, where erf is 1, the 120th is below 1e-17 of the sum.
func erfDouble(b *ir.Builder, x *ir.Value) *ir.Value {
	x, high := bounded(b, b.StopGradient(x), "ge", 6)
	x, low := bounded(b, x, "le", -6)
	square := b.Mul(x, x)
	sum := b.Fill(x.Type, 1)
	for k := 120; k > 0; k-- {
		sum = b.Shift(b.Mul(sum, b.Scale(square, 2/float64(2*k+1))), 1)
	}
	front := b.Scale(b.Mul(x, b.Exp(b.Neg(square))), 2/math.Sqrt(math.Pi))
	out := b.Select(high, b.Fill(x.Type, 1), b.Mul(front, sum))
	return b.Select(low, b.Fill(x.Type, -1), out)
}

// gelu is x·Φ(x), with Φ by the error function. Like torch's, it is NaN at infinity; in f64 it is
// infinite there.
func gelu(b *ir.Builder, x *ir.Value) *ir.Value {
	z := b.Scale(x, math.Sqrt2/2)
	if x.Type.Elem == dtype.F64 {
		return b.Mul(x, b.Scale(b.Shift(errorFunction(b, z), 1), 0.5))
	}
	y := b.Mul(x, b.Scale(b.Shift(erf(b, z), 1), 0.5))
	one := b.Fill(x.Type, 1)
	nan := b.Add(infinity(b, one), like(b, one, math.Inf(-1)))
	return b.Mul(y, b.StopGradient(b.Select(finite(b, x), one, nan)))
}
