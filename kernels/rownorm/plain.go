package rownorm

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// Plain computes the results in float64 of operands without their stacks: what a kernel is held to.
// Results in bfloat16 are rounded once; the weight's gradient is one row, the sum of its parts. Of
// codes it gives what they are codes of, and nothing for their scales.
func (n Norm) Plain(in [][]float32) (out [][]float64) {
	if n.Grads > 0 {
		return n.plainGradient(in)
	}
	size := n.Rows * n.Cols
	s, stats, y := make([]float64, size), make([]float64, n.Rows), make([]float64, size)
	for i := range s {
		if s[i] = float64(in[0][i]); n.Added {
			s[i] = rounded(s[i] + float64(in[1][i]))
		}
	}
	for row := range n.Rows {
		stats[row] = n.inverse(s[row*n.Cols:][:n.Cols])
	}
	if n.Normed || n.Codes {
		weight := in[n.Operands()-1]
		for i := range y {
			y[i] = rounded(s[i] * stats[i/n.Cols] * (float64(weight[i%n.Cols]) + n.Shift))
		}
	}
	for _, r := range []struct {
		is bool
		of []float64
	}{{n.Added, s}, {n.Normed || n.Codes, y}, {n.Codes, nil}, {n.Stats, stats}} {
		if r.is {
			out = append(out, r.of)
		}
	}
	return out
}

func rounded(f float64) float64 {
	return float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(f))))
}

// inverse is 1/√(mean(s²) + ε) of a row.
func (n Norm) inverse(row []float64) float64 {
	sum := 0.0
	for _, v := range row {
		sum += v * v
	}
	return 1 / math.Sqrt(sum/float64(n.Cols)+n.Eps)
}

func (n Norm) plainGradient(in [][]float32) [][]float64 {
	dx, dw := make([]float64, n.Rows*n.Cols), make([]float64, n.Cols)
	x, dy := make([]float64, n.Cols), make([]float64, n.Cols)
	for row := range n.Rows {
		mean := 0.0
		for c := range n.Cols {
			x[c], dy[c] = float64(in[0][row*n.Cols+c]), 0
			for _, part := range in[2 : 2+n.Grads] {
				dy[c] += float64(part[row*n.Cols+c])
			}
			mean += dy[c] * (float64(in[1][c]) + n.Shift) * x[c] / float64(n.Cols)
		}
		r := n.inverse(x)
		for c := range n.Cols {
			at := row*n.Cols + c
			dx[at] = r * (dy[c]*(float64(in[1][c])+n.Shift) - x[c]*r*r*mean)
			if n.Residual {
				dx[at] += float64(in[2+n.Grads][at])
			}
			dx[at], dw[c] = rounded(dx[at]), dw[c]+dy[c]*x[c]*r
		}
	}
	return [][]float64{dx, dw}
}
