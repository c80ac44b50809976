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

// A loss's gradient takes the place of its logits.
func TestLoss(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 9))
	for _, size := range [][2]int{{3, 8192}, {2, 9000}, {4, 100}, {1, 24576}, {5, 8191}} {
		rows, cols := size[0], size[1]
		l := fused.Loss{Rows: rows, Cols: cols}
		k, err := l.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		x, xs := normal(r, rows*cols, 6)
		labels, d := make([]int32, rows), make([]float64, rows)
		for i := range labels {
			labels[i] = int32(r.IntN(cols))
			d[i] = float64(float32(r.NormFloat64()))
		}
		labels[rows-1] = -1 // has no loss
		all := arrays(k, x, ints(labels...), floats(d))
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		loss, lse, grad := make([]float64, rows), make([]float64, rows), make([]float64, rows*cols)
		for n := range rows {
			total := 0.0
			for _, f := range xs[n*cols:][:cols] {
				total += math.Exp(f)
			}
			lse[n] = math.Log(total)
			if labels[n] < 0 {
				continue
			}
			loss[n] = lse[n] - xs[n*cols+int(labels[n])]
			for c := range cols {
				grad[n*cols+c] = math.Exp(xs[n*cols+c]-lse[n]) * d[n]
			}
			grad[n*cols+int(labels[n])] -= d[n]
		}
		near(t, "log-sum-exp", values(k.Args[4], all[4]), lse, float32Bound)
		got := values(k.Args[5], all[5])
		if rows > 1 {
			near(t, "loss", values(k.Args[3], all[3]), loss, float32Bound)
			near(t, "gradient", got, grad, bf16Bound)
		}
		for i, g := range got[(rows-1)*cols:] {
			if g != 0 {
				t.Fatalf("%v: column %d of a row without a label has the gradient %g", size, i, g)
			}
		}
	}
}

// A row of which a logit is not a number, or infinite, has no loss that is a number; one whose
// logits are minus infinity but for some has the loss of the others.
func TestLossOfInfinities(t *testing.T) {
	k, err := fused.Loss{Rows: 4, Cols: 64}.Kernel()
	if err != nil {
		t.Fatal(err)
	}
	x := make([]byte, 4*64*2)
	put := func(n int, f float64) {
		binary.LittleEndian.PutUint16(x[2*n:], dtype.BF16FromF32(float32(f)))
	}
	put(0*64+9, math.NaN())
	put(1*64+9, math.Inf(1))
	for c := range 64 {
		put(2*64+c, math.Inf(-1))
		put(3*64+c, math.Inf(-1))
	}
	put(3*64+1, 2)
	put(3*64+2, 2)
	all := arrays(k, x, ints(1, 1, 1, 1), floats([]float64{1, 1, 1, 1}))
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	loss := values(k.Args[3], all[3])
	for n := range 3 {
		if !math.IsNaN(loss[n]) {
			t.Errorf("row %d has the loss %g", n, loss[n])
		}
	}
	near(t, "loss", loss[3:], []float64{math.Ln2}, float32Bound)
	near(t, "gradient", values(k.Args[5], all[5])[3*64:][:4], []float64{0, -0.5, 0.5, 0}, bf16Bound)
}

func TestParseLoss(t *testing.T) {
	l := fused.Loss{Rows: 8192, Cols: 128256}
	if back, err := fused.ParseLoss(l.String()); err != nil || back != l {
		t.Errorf("%s is read as %s: %v", l, back, err)
	}
	for _, bad := range []string{"", "loss", "loss 8x", "loss 0x8", "loss 8x8 ", "loss +8x8",
		"loss -8x8", "grouped 8x8"} {
		if l, err := fused.ParseLoss(bad); err == nil {
			t.Errorf("%q is read as %s", bad, l)
		}
	}
}
