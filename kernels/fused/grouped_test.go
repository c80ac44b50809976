package fused_test

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	codec "github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// ints gives the bytes of 32-bit integers.
func ints(list ...int32) (b []byte) {
	for _, n := range list {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	return b
}

// swizzle puts scales of rows and blocks into the order of tensor cores.
func swizzle(scales []byte, rows, blocks int) []byte {
	s := fused.SwizzledShape(rows, blocks)
	out := make([]byte, s[0]*s[1]*s[2])
	for r := range rows {
		for c := range blocks {
			out[(r/128*s[1]+c/4)*512+r%32*16+r%128/32*4+c%4] = scales[r*blocks+c]
		}
	}
	return out
}

// draw gives an operand of a grouped GEMM: its arrays, and the numbers that they stand for.
func draw(t *testing.T, r *rand.Rand, f dtype.Format, rows, cols int) (list [][]byte, numbers []float32) {
	t.Helper()
	x, numbers := make([]uint16, rows*cols), make([]float32, rows*cols)
	for i := range x {
		x[i] = dtype.BF16FromF32(float32(r.NormFloat64()))
		numbers[i] = dtype.F32FromBF16(x[i])
	}
	n := rows * cols
	switch f {
	case dtype.MXFP8:
		q, s := make([]byte, n), make([]byte, n/32)
		if err := codec.MXFP8(q, s, x); err != nil {
			t.Fatal(err)
		}
		if err := codec.FromMXFP8(numbers, q, s); err != nil {
			t.Fatal(err)
		}
		return [][]byte{q, swizzle(s, rows, cols/32)}, numbers
	case dtype.NVFP4:
		q, s := make([]byte, n/2), make([]byte, n/16)
		const amax = 6 * 448 // so that the tensor's scale is 1
		if err := codec.NVFP4(q, s, x, amax); err != nil {
			t.Fatal(err)
		}
		if err := codec.FromNVFP4(numbers, q, s, 1); err != nil {
			t.Fatal(err)
		}
		return [][]byte{q, swizzle(s, rows, cols/16)}, numbers
	}
	return [][]byte{words(x)}, numbers
}

// Sums are float32 and results bfloat16, whose rounding is 2^-9 of a number; the bound is of the
// whole matrix.
const groupedBound, groupedGradBound = 2.5e-3, 1e-6

func TestGrouped(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 3))
	for _, f := range []dtype.Format{"", dtype.MXFP8, dtype.NVFP4} {
		for _, small := range []bool{false, true} {
			g := fused.Group{Rows: 512, Out: 384, In: 256, Experts: 3, Format: f, Small: small}
			k, err := g.Kernel()
			if err != nil {
				t.Fatal(err)
			}
			x, xs := draw(t, r, f, g.Rows, g.In)
			w, ws := draw(t, r, f, g.Experts*g.Out, g.In)
			experts := []int32{2, 0, -1, 2} // expert 1 has no rows, and one tile none at all
			in := append(append(x, w...), ints(experts...))
			all := arrays(k, in...)
			if err := run.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			var off, size float64
			for i := range g.Rows * g.Out {
				e, sum := experts[i/g.Out/128], 0.0
				for j := range g.In {
					if e >= 0 {
						sum += float64(xs[i/g.Out*g.In+j]) * float64(ws[(int(e)*g.Out+i%g.Out)*g.In+j])
					}
				}
				got := float64(dtype.F32FromBF16(binary.LittleEndian.Uint16(all[len(in)][2*i:])))
				off, size = off+(got-sum)*(got-sum), size+sum*sum
			}
			t.Logf("%s, small %t: %.2g", k.Name, small, math.Sqrt(off/size))
			if math.Sqrt(off/size) > groupedBound {
				t.Errorf("%s is off by %g", k.Name, math.Sqrt(off/size))
			}
		}
	}
}

func TestGroupedWeightGrad(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 4))
	for _, f := range []dtype.Format{"", dtype.MXFP8} {
		g := fused.Group{Rows: 384, Out: 128, In: 256, Experts: 3, Format: f}
		k, err := g.WeightGrad()
		if err != nil {
			t.Fatal(err)
		}
		dy, dys := draw(t, r, f, g.Out, g.Rows)
		x, xs := draw(t, r, f, g.In, g.Rows)
		starts := []int32{0, 256, 256, 384}
		in := append(append(dy, x...), ints(starts...))
		all := arrays(k, in...)
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		var off, size float64
		for i := range g.Experts * g.Out * g.In {
			e, n, c, sum := i/g.In/g.Out, i/g.In%g.Out, i%g.In, 0.0
			for m := starts[e]; m < starts[e+1]; m++ {
				sum += float64(dys[n*g.Rows+int(m)]) * float64(xs[c*g.Rows+int(m)])
			}
			got := float64(math.Float32frombits(binary.LittleEndian.Uint32(all[len(in)][4*i:])))
			off, size = off+(got-sum)*(got-sum), size+sum*sum
		}
		t.Logf("%s: %.2g", k.Name, math.Sqrt(off/size))
		if math.Sqrt(off/size) > groupedGradBound {
			t.Errorf("%s is off by %g", k.Name, math.Sqrt(off/size))
		}
	}
}
