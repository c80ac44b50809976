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

// A product is a grouped GEMM with operands: rows [Rows, In] and weights [Experts, Out, In].
type groupedProduct struct {
	fused.Group
	x, w    []float32
	experts []int32
	scale   float64
	in      [][]byte
}

// scalesOfTensors are of what NVFP4 multiplies.
var scalesOfTensors = [2]float32{3e-5, 0.037}

// tensors adds the scales of whole tensors to the operands of a format that has them, and gives
// their product.
func tensors(f dtype.Format, in *[][]byte) float64 {
	if !f.TensorScale() {
		return 1
	}
	for _, s := range scalesOfTensors {
		*in = append(*in, binary.LittleEndian.AppendUint32(nil, math.Float32bits(s)))
	}
	return float64(scalesOfTensors[0]) * float64(scalesOfTensors[1])
}

// in64 is a result as numbers.
func in64(data []byte, wide bool) []float64 {
	width := 2
	if wide {
		width = 4
	}
	list := make([]float64, len(data)/width)
	for i := range list {
		if list[i] = float64(dtype.F32FromBF16(binary.LittleEndian.Uint16(data[width*i:]))); wide {
			list[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:])))
		}
	}
	return list
}

// runGroup runs a kernel's text on operands.
func runGroup(t *testing.T, g fused.Group, in [][]byte) []float64 {
	t.Helper()
	k, err := g.Kernel()
	if err != nil {
		t.Fatal(err)
	}
	all := arrays(k, in...)
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	return in64(all[len(in)], g.Grad && g.Wide)
}

// relative is how far numbers are from others, of the whole.
func relative(got, want []float64) float64 {
	var off, size float64
	for i, w := range want {
		off, size = off+(got[i]-w)*(got[i]-w), size+w*w
	}
	return math.Sqrt(off / size)
}

func drawProduct(t *testing.T, g fused.Group, seed uint64, experts ...int32) groupedProduct {
	t.Helper()
	r := rand.New(rand.NewPCG(22, seed))
	p := groupedProduct{Group: g, experts: experts}
	x, xs := draw(t, r, g.Format, g.Rows, g.In)
	w, ws := draw(t, r, g.Format, g.Experts*g.Out, g.In)
	if g.Shards > 1 {
		each := len(w[0]) / (g.Experts * g.Out) / g.Shards // bytes of a row in a shard
		var gathered []byte
		for s := range g.Shards {
			for row := range g.Experts * g.Out {
				at := (row*g.Shards + s) * each
				gathered = append(gathered, w[0][at:at+each]...)
			}
		}
		w[0] = gathered
	}
	w[0] = laid(w[0], cmp.Or(g.Weights, "eok"), g.Experts, g.Out, g.In)
	p.x, p.w = xs, ws
	p.in = append(append(x, w...), ints(experts...))
	p.scale = tensors(g.Format, &p.in)
	return p
}

// want is the product in float64.
func (p groupedProduct) want() []float64 {
	list := make([]float64, p.Rows*p.Out)
	for i := range list {
		e, sum := p.experts[i/p.Out/128], 0.0
		for j := range p.In {
			if e >= 0 {
				sum += float64(p.x[i/p.Out*p.In+j]) * float64(p.w[(int(e)*p.Out+i%p.Out)*p.In+j])
			}
		}
		list[i] = sum * p.scale
	}
	return list
}

func TestGrouped(t *testing.T) {
	for _, f := range []dtype.Format{"", dtype.MXFP8, dtype.NVFP4} {
		for i, order := range []string{"", "oek", "keo", "eko"} {
			g := fused.Group{Rows: 768, Out: 384, In: 256, Experts: 3, Format: f, Small: i%2 == 1,
				Weights: order}
			if f == dtype.NVFP4 && i > 1 { // bytes hold two numbers along k
				if _, err := g.Kernel(); err == nil {
					t.Errorf("%s is printed", g)
				}
				continue
			}
			p := drawProduct(t, g, uint64(3+i), 2, 0, -1, 2, -1, 1) // two tiles have no rows
			far := relative(runGroup(t, g, p.in), p.want())
			t.Logf("%s: %.2g", g, far)
			if far > groupedBound {
				t.Errorf("%s is off by %g", g, far)
			}
		}
	}
}

// Sums of NVFP4 that are no whole steps, weights in the shards that FSDP gathers, and rows of one
// tile, of one expert, or of none.
func TestGroupedNVFP4(t *testing.T) {
	for _, row := range []struct {
		g       fused.Group
		experts []int32
	}{
		{fused.Group{Rows: 256, Out: 128, In: 384, Experts: 2}, []int32{1, 0}},
		{fused.Group{Rows: 256, Out: 128, In: 384, Experts: 2, Weights: "oek"}, []int32{0, 1}},
		{fused.Group{Rows: 128, Out: 256, In: 128, Experts: 1, Small: true}, []int32{0}},
		{fused.Group{Rows: 256, Out: 256, In: 512, Experts: 2, Shards: 2}, []int32{1, -1}},
		{fused.Group{Rows: 256, Out: 128, In: 1024, Experts: 2, Shards: 2, Small: true}, []int32{0, 1}},
	} {
		g := row.g
		g.Format = dtype.NVFP4
		p := drawProduct(t, g, 5, row.experts...)
		far := relative(runGroup(t, g, p.in), p.want())
		t.Logf("%s: %.2g", g, far)
		if far > groupedBound {
			t.Errorf("%s is off by %g", g, far)
		}
	}
	for _, g := range []fused.Group{
		{Rows: 256, Out: 128, In: 384, Experts: 2, Shards: 3}, // shards of half a step
		{Rows: 256, Out: 128, In: 512, Experts: 2, Shards: 1},
		{Rows: 256, Out: 128, In: 512, Experts: 2, Shards: 2, Weights: "oek"},
		{Rows: 256, Out: 128, In: 512, Experts: 2, Shards: 2, Grad: true},
	} {
		if g.Format = dtype.NVFP4; g.TakesShards(2) && g.Shards == 2 {
			t.Errorf("%s takes shards", g)
		}
		if _, err := g.Kernel(); err == nil {
			t.Errorf("%s is printed", g)
		}
	}
}

// A block whose scale is NaN spoils its row and no other; blocks of zeros, and a tensor whose scale
// is NaN, are what the plain form makes of them.
func TestGroupedNVFP4Specials(t *testing.T) {
	g := fused.Group{Rows: 256, Out: 128, In: 256, Experts: 2, Format: dtype.NVFP4}
	p := drawProduct(t, g, 6, 0, 1)
	marks := make([]byte, g.Rows*g.In/16)
	marks[5*g.In/16+3] = 1 // row 5, block 3
	for i, is := range swizzle(marks, g.Rows, g.In/16) {
		if is != 0 {
			p.in[1][i] = 0x7f
		}
	}
	clear(p.in[0][7*g.In/2 : 8*g.In/2]) // row 7 is zeros
	want := p.want()
	got := runGroup(t, g, p.in)
	for i := range got {
		switch row := i / g.Out; {
		case row == 5 && !math.IsNaN(got[i]):
			t.Fatalf("element %d is %g", i, got[i])
		case row == 7 && got[i] != 0:
			t.Fatalf("element %d of zeros is %g", i, got[i])
		case row == 5 || row == 7:
			got[i], want[i] = 0, 0
		}
	}
	if far := relative(got, want); far > groupedBound {
		t.Errorf("others are off by %g", far)
	}
	copy(p.in[len(p.in)-1], []byte{0, 0, 0xc0, 0x7f})
	for i, x := range runGroup(t, g, p.in) {
		if !math.IsNaN(x) {
			t.Fatalf("element %d is %g beside a scale that is NaN", i, x)
		}
	}
}

func TestGroupedWeightGrad(t *testing.T) {
	type row struct {
		slots  int
		filled []int32
	}
	for _, f := range []dtype.Format{"", dtype.MXFP8, dtype.NVFP4} {
		for i, order := range []string{"", "oek"} {
			list := []row{{256, []int32{256, 0, 128}}}
			if f == dtype.NVFP4 { // of steps of 256 rows the last is half, or behind the slots
				list = append(list, row{384, []int32{384, 128, 0}}, row{128, []int32{128, 0, 128}})
			}
			for _, r := range list {
				g := fused.Group{Rows: 3 * r.slots, Out: 128, In: 256, Experts: 3, Format: f, Grad: true,
					Weights: order, Wide: i == 0}
				weightGrad(t, g, r.slots, r.filled)
			}
		}
	}
}

// weightGrad compares a gradient of weights with sums in float64.
func weightGrad(t *testing.T, g fused.Group, rows int, filled []int32) {
	t.Helper()
	r := rand.New(rand.NewPCG(22, 4))
	dy, dys := draw(t, r, g.Format, g.Experts*g.Out, rows)
	x, xs := draw(t, r, g.Format, g.Experts*g.In, rows)
	if g.Format == "" { // tokens are rows
		dy[0] = laid(dy[0], "eko", g.Experts, g.Out, rows)
		x[0] = laid(x[0], "eko", g.Experts, g.In, rows)
	}
	if g.Format == dtype.NVFP4 { // empty slots are zeros, in one of the two
		for i := range x[0] {
			if at := i % (rows / 2); 2*at >= int(filled[i/(rows/2)/g.In]) {
				x[0][i] = 0
			}
		}
	}
	in := append(append(dy, x...), ints(filled...))
	scale := tensors(g.Format, &in)
	got, bound := runGroup(t, g, in), groupedGradBound
	if !g.Wide {
		bound = groupedBound
	}
	want := make([]float64, len(got))
	for i := range want {
		e, n, c, sum := i/g.In/g.Out, i/g.In%g.Out, i%g.In, 0.0
		for m := range int(filled[e]) {
			sum += float64(dys[(e*g.Out+n)*rows+m]) * float64(xs[(e*g.In+c)*rows+m])
		}
		at := i
		if g.Weights == "oek" {
			at = (n*g.Experts+e)*g.In + c
		}
		want[at] = sum * scale
	}
	far := relative(got, want)
	t.Logf("%s: %.2g", g, far)
	if far > bound {
		t.Errorf("%s is off by %g", g, far)
	}
}

// What a call says of a grouped product is read as it was meant, and nothing else is read.
func TestGroupedSpecification(t *testing.T) {
	for _, g := range []fused.Group{
		{Rows: 24576, Out: 14336, In: 4096, Experts: 8, Format: dtype.MXFP8, Weights: "keo", Filled: 16896},
		{Rows: 24576, Out: 14336, In: 4096, Experts: 8, Format: dtype.NVFP4, Weights: "eok", Shards: 8,
			Small: true},
		{Rows: 24576, Out: 14336, In: 4096, Experts: 8, Format: dtype.NVFP4, Weights: "oek", Grad: true},
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
