package fused_test

import (
	"cmp"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
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

// laid puts the codes of a matrix [experts, o, k] in another order.
func laid(codes []byte, order string, experts, o, k int) []byte {
	size := map[byte]int{'e': experts, 'o': o, 'k': k}
	width := len(codes) / (experts * o * k)
	if width == 0 { // two numbers in a byte, along k
		width, size['k'], k = 1, k/2, k/2
	}
	out := make([]byte, 0, len(codes))
	at := map[byte]int{}
	for at[order[0]] = range size[order[0]] {
		for at[order[1]] = range size[order[1]] {
			for at[order[2]] = range size[order[2]] {
				i := ((at['e']*o+at['o'])*k + at['k']) * width
				out = append(out, codes[i:i+width]...)
			}
		}
	}
	return out
}

func TestGrouped(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 3))
	for _, f := range []dtype.Format{"", dtype.MXFP8, dtype.NVFP4} {
		for i, order := range []string{"", "oek", "keo", "eko"} {
			g := fused.Group{Rows: 768, Out: 384, In: 256, Experts: 3, Format: f, Small: i%2 == 1,
				Weights: order}
			k, err := g.Kernel()
			if f == dtype.NVFP4 && i > 1 { // bytes hold two numbers along k
				if err == nil {
					t.Errorf("%s is printed", g)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			x, xs := draw(t, r, f, g.Rows, g.In)
			w, ws := draw(t, r, f, g.Experts*g.Out, g.In)
			w[0] = laid(w[0], cmp.Or(order, "eok"), g.Experts, g.Out, g.In)
			experts := []int32{2, 0, -1, 2, -1, 1} // of tiles; two have no rows
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
			t.Logf("%s: %.2g", k.Spec, math.Sqrt(off/size))
			if math.Sqrt(off/size) > groupedBound {
				t.Errorf("%s is off by %g", k.Spec, math.Sqrt(off/size))
			}
		}
	}
}

func TestGroupedWeightGrad(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 4))
	for _, f := range []dtype.Format{"", dtype.MXFP8} {
		for i, order := range []string{"", "oek"} {
			g := fused.Group{Rows: 768, Out: 128, In: 256, Experts: 3, Format: f, Grad: true,
				Weights: order, Wide: i == 0}
			k, err := g.Kernel()
			if err != nil {
				t.Fatal(err)
			}
			const rows = 256 // of an expert
			dy, dys := draw(t, r, f, g.Experts*g.Out, rows)
			x, xs := draw(t, r, f, g.Experts*g.In, rows)
			if f == "" { // tokens are rows
				dy[0] = laid(dy[0], "eko", g.Experts, g.Out, rows)
				x[0] = laid(x[0], "eko", g.Experts, g.In, rows)
			}
			filled := []int32{256, 0, 128}
			in := append(append(dy, x...), ints(filled...))
			all := arrays(k, in...)
			if err := run.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			got, bound := all[len(in)], groupedGradBound
			if !g.Wide {
				bound = groupedBound
			}
			var off, size float64
			for i := range g.Experts * g.Out * g.In {
				e, n, c, sum := i/g.In/g.Out, i/g.In%g.Out, i%g.In, 0.0
				for m := range int(filled[e]) {
					sum += float64(dys[(e*g.Out+n)*rows+m]) * float64(xs[(e*g.In+c)*rows+m])
				}
				at := i
				if order == "oek" {
					at = (n*g.Experts+e)*g.In + c
				}
				have := 0.0
				if g.Wide {
					have = float64(math.Float32frombits(binary.LittleEndian.Uint32(got[4*at:])))
				} else {
					have = float64(dtype.F32FromBF16(binary.LittleEndian.Uint16(got[2*at:])))
				}
				off, size = off+(have-sum)*(have-sum), size+sum*sum
			}
			t.Logf("%s: %.2g", k.Spec, math.Sqrt(off/size))
			if math.Sqrt(off/size) > bound {
				t.Errorf("%s is off by %g", k.Spec, math.Sqrt(off/size))
			}
		}
	}
}

// What a call says of a grouped product is read as it was meant, and nothing else is read.
func TestGroupedSpecification(t *testing.T) {
	for _, g := range []fused.Group{
		{Rows: 24576, Out: 14336, In: 4096, Experts: 8, Format: dtype.MXFP8, Weights: "keo", Filled: 16896},
		{Rows: 1024, Out: 256, In: 384, Experts: 4, Weights: "oek", Grad: true, Wide: true, Small: true},
	} {
		text := g.String()
		back, err := fused.ParseGroup(text)
		if err != nil || back != g || !fused.IsGroup(text) {
			t.Errorf("%q is read as %v: %v", text, back, err)
		}
		for _, bad := range []string{text + " more", text + " wide wide", "x" + text, text[:30],
			strings.Replace(text, "experts=", "experts=-", 1), strings.Replace(text, "weights=", "weights=o", 1)} {
			if g, err := fused.ParseGroup(bad); err == nil {
				t.Errorf("%q is read as %v", bad, g)
			}
		}
	}
	g := fused.Group{Rows: 24576, Out: 14336, In: 4096, Experts: 8, Filled: 16384}
	if want := int64(2) * 16384 * 14336 * 4096; g.FLOPs() != want {
		t.Errorf("%d FLOPs, not %d", g.FLOPs(), want)
	}
	if want := int64(2) * (16384*4096 + 8*14336*4096 + 24576*14336); g.Bytes() != want {
		t.Errorf("%d bytes, not %d", g.Bytes(), want)
	}
}
