package fused_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// normal draws bfloat16 numbers.
func normal(r *rand.Rand, n int, size float64) (b []byte, numbers []float64) {
	for range n {
		w := dtype.BF16FromF32(float32(r.NormFloat64() * size))
		b = binary.LittleEndian.AppendUint16(b, w)
		numbers = append(numbers, float64(dtype.F32FromBF16(w)))
	}
	return b, numbers
}

// floats gives the bytes of float32 numbers.
func floats(list []float64) (b []byte) {
	for _, f := range list {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(f)))
	}
	return b
}

// results runs a kernel and gives its results as numbers.
func results(t *testing.T, k *triton.Kernel, in ...[]byte) (list [][]float64) {
	t.Helper()
	all := arrays(k, in...)
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	for i, a := range k.Args[len(in):] {
		list = append(list, values(a, all[len(in)+i]))
	}
	return list
}

// values gives the numbers of an array.
func values(a triton.Arg, b []byte) []float64 {
	d := map[triton.Elem]dtype.DType{triton.BF16: dtype.BF16, triton.F32: dtype.F32}
	return d[a.Elem].Values(b)
}

// near holds a result to float64 by the norm of the difference.
func near(t *testing.T, what string, got, want []float64, bound float64) {
	t.Helper()
	var off, size float64
	for i, w := range want {
		off, size = off+(got[i]-w)*(got[i]-w), size+w*w
	}
	if e := math.Sqrt(off / size); !(e <= bound) {
		t.Errorf("%s is off by %.2g of %.2g", what, e, bound)
	}
}

// float32Bound is for sums of thousands of float32 terms, bf16Bound for results in bfloat16.
const float32Bound, bf16Bound = 2e-6, 3e-3

var rowShapes = [][2]int{{3, 256}, {5, 96}, {1, 4096}, {7, 1000}, {600, 64}}

func TestResidualNorm(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 7))
	for _, d := range rowShapes {
		rows, cols := d[0], d[1]
		k, err := fused.ResidualNorm(rows, cols, 1e-5)
		if err != nil {
			t.Fatal(err)
		}
		x, xs := normal(r, rows*cols, 1)
		y, ys := normal(r, rows*cols, 3)
		got := results(t, k, x, y)
		sum, stat := make([]float64, rows*cols), make([]float64, rows)
		for i := range sum {
			sum[i] = xs[i] + ys[i]
			rounded := float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(sum[i]))))
			if got[0][i] != rounded {
				t.Fatalf("%v: element %d is %g, want %g", d, i, got[0][i], rounded)
			}
			stat[i/cols] += rounded * rounded / float64(cols)
		}
		for i, m := range stat {
			stat[i] = 1 / math.Sqrt(m+1e-5)
		}
		near(t, "r", got[1], stat, float32Bound)
	}
}

func TestRMSNormGrad(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 8))
	for _, d := range rowShapes {
		rows, cols := d[0], d[1]
		k, err := fused.RMSNormGrad(rows, cols)
		if err != nil {
			t.Fatal(err)
		}
		x, xs := normal(r, rows*cols, 2)
		dy, dys := normal(r, rows*cols, 1)
		w, ws := normal(r, cols, 1)
		stat := make([]float64, rows)
		for i := range xs {
			stat[i/cols] += xs[i] * xs[i] / float64(cols)
		}
		for i, m := range stat {
			stat[i] = float64(float32(1 / math.Sqrt(m+1e-5)))
		}
		got := results(t, k, x, dy, w, floats(stat))
		dx, dw := make([]float64, rows*cols), make([]float64, cols)
		for n := range rows {
			mean := 0.0
			for c := range cols {
				h := xs[n*cols+c] * stat[n]
				mean += dys[n*cols+c] * ws[c] * h / float64(cols)
				dw[c] += dys[n*cols+c] * h
			}
			for c := range cols {
				h := xs[n*cols+c] * stat[n]
				dx[n*cols+c] = (dys[n*cols+c]*ws[c] - h*mean) * stat[n]
			}
		}
		near(t, "dx", got[0], dx, bf16Bound)
		total := make([]float64, cols)
		for i, v := range got[1] {
			total[i%cols] += v
		}
		near(t, "dw", total, dw, float32Bound)
	}
}

func TestCrossEntropy(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 9))
	for _, d := range [][2]int{{3, 4096}, {2, 5000}, {4, 100}, {1, 12288}, {5, 8191}} {
		rows, cols := d[0], d[1]
		k, err := fused.CrossEntropy(rows, cols)
		if err != nil {
			t.Fatal(err)
		}
		x, xs := normal(r, rows*cols, 6)
		labels := make([]int32, rows)
		for i := range labels {
			labels[i] = int32(r.IntN(2*cols)) - int32(cols)/2 // some are no columns
		}
		got := results(t, k, x, ints(labels...))
		top, total, at := make([]float64, rows), make([]float64, rows), make([]float64, rows)
		for n := range rows {
			top[n] = math.Inf(-1)
			for _, f := range xs[n*cols:][:cols] {
				top[n] = max(top[n], f)
			}
			for _, f := range xs[n*cols:][:cols] {
				total[n] += math.Exp(f - top[n])
			}
			if l := int(labels[n]); l >= 0 && l < cols {
				at[n] = xs[n*cols+l]
			}
			// What counts is the log-sum-exp: the largest is off by a rounding, which the sum makes up for.
			top[n] += math.Log(total[n])
			got[0][n] += math.Log(got[1][n])
			if got[2][n] != at[n] {
				t.Errorf("%v: the label's logit is %g, want %g", d, got[2][n], at[n])
			}
		}
		near(t, "log-sum-exp", got[0], top, float32Bound)
	}
}
