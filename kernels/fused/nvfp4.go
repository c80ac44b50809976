package fused

import (
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// NVFP4 quantizes what a source computes, both ways in one read: E2M1 codes, two to a byte, an E4M3
// scale for every 16, and a scale of the whole tensor, whose largest magnitudes are operands: amax
// of the matrix, and amaxt of what the transform makes of it. Columns go through the random
// Hadamard transform first.
//
//	→ codes [rows, n·cols/2] and scales of blocks along rows,
//	  codes [n·cols, rows/2] and scales of blocks along columns
func NVFP4(rows, cols int, s Source) (*tt.Kernel, error) {
	all := s.Parts * cols
	args := append(s.args(rows, cols),
		tt.Arg{Name: "amax", Elem: tt.F32, Shape: []int{1}},
		tt.Arg{Name: "amaxt", Elem: tt.F32, Shape: []int{1}},
		tt.Arg{Name: "q", Elem: tt.I8, Shape: []int{rows, all / 2}, Result: true},
		tt.Arg{Name: "qs", Elem: tt.E4M3, Shape: SwizzledShape(rows, all/16), Result: true},
		tt.Arg{Name: "t", Elem: tt.I8, Shape: []int{all, rows / 2}, Result: true},
		tt.Arg{Name: "ts", Elem: tt.E4M3, Shape: SwizzledShape(all, rows/16), Result: true})
	b, v := tt.New(s.Name+"_nvfp4", args...)
	t, launch := newTile(b, Matrix{1, rows, cols}, 128)
	if rows%32 != 0 || cols%32 != 0 {
		b.Fail("blocks of 32 do not divide %d×%d", rows, cols)
	}
	if s.Parts > 1 && cols%128 != 0 { // the padding of one part's scales is the next part's
		b.Fail("%d parts of %d columns", s.Parts, cols)
	}
	if s.matrices() > 1 { // or registers spill on rtx6000pro
		launch.Warps *= 2
	}
	n := len(v) - 6
	m := nvfp4{t, all, v[n+2:], newGrid(b.Load(v[n])), newGrid(b.Load(v[n+1]))}
	for i, y := range s.Compute(t, v) {
		m.along(i*cols, y.To(tt.BF16))
		m.across(i*cols, y.To(tt.BF16))
	}
	return b.Kernel(launch)
}

// An nvfp4 writes the results of a kernel: codes and scales along rows, and transposed.
type nvfp4 struct {
	*tile
	all               int // columns of all parts
	out               []tt.Value
	plain, transposed grid
}

// A grid holds what all blocks of a tensor share, as in dtype/block: the scale in, over the largest
// element, and the scale out.
type grid struct{ sixth, out tt.Value }

// newGrid computes the tensor's scales from its largest magnitude.
func newGrid(amax tt.Value) grid {
	in := finite(amax.Const(6 * 448.0).DivExact(amax))
	one := in.Const(1.0)
	in = one.Select(amax.Is("eq", 0.0).Or(in.Is("eq", 0.0)), in)
	return grid{in.Mul(float64(float32(1.0 / 6))), one.DivExact(in)}
}

// scales gives the E4M3 scales of blocks whose largest magnitudes have these bits of bfloat16, and
// the factors of their elements. A small block has the scale 0, and then its factor is the largest
// number; a NaN makes both NaN.
func (g grid) scales(amax tt.Value) (scale, factor tt.Value) {
	s := amax.Shl(16).Bits(tt.F32).Mul(g.sixth)
	scale = s.To(tt.E4M3)
	return scale, finite(s.Const(1.0).DivExact(scale.To(tt.F32).Mul(g.out)))
}

// finite is the largest float32 where x is more, and keeps a NaN.
func finite(x tt.Value) tt.Value {
	most := x.Const(float64(math.MaxFloat32))
	return most.Select(x.Is("gt", most), x)
}

// codes rounds blocks [n, k, 16] times their factors [n, k] to E2M1, packed to bytes [n, 8k].
func codes(blocks, factor tt.Value) tt.Value {
	n, k := blocks.Shape()[0], blocks.Shape()[1]
	first, second := blocks.Mul(factor.Expand(2)).Reshape(n, 8*k, 2).Split()
	return first.Pack("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; "+
		"mov.b32 $0, {t, t, t, t}; }", second).To(tt.I8)
}

// magnitude gives the bits of bfloat16 magnitudes.
func magnitude(y tt.Value) tt.Value { return y.Bits(tt.I16).To(tt.I32).And(0x7fff) }

// along writes the tile y of bfloat16 [32, wide], quantized along rows.
func (m nvfp4) along(from int, y tt.Value) {
	n := m.wide / 16
	scale, factor := m.plain.scales(magnitude(y).Reshape(tileRows, n, 16).Largest(2))
	q := codes(y.To(tt.F32).Reshape(tileRows, n, 16), factor)
	byteOf := m.b.Program(1).Mul(m.wide / 2).Add(m.b.Range(m.wide / 2))
	m.store(m.out[0].At(place(m.row, byteOf.Add(from/2), m.rows, m.all/2)), q, func() tt.Value {
		return m.row.Is("lt", m.rows).Expand(1).And(byteOf.Is("lt", m.cols/2).Expand(0))
	})
	block := m.b.Program(1).Mul(n).Add(m.b.Range(n)).Add(from / 16).Expand(0)
	m.store(m.out[1].At(swizzled(m.row.Expand(1), block, m.all/16)), scale,
		func() tt.Value { return block.Is("lt", ceil(m.all/16, 4)*4) })
}

// across writes the tile transposed, transformed and quantized along columns.
func (m nvfp4) across(from int, y tt.Value) {
	h := m.transform(y)
	scale, factor := m.transposed.scales(magnitude(h).Largest(2))
	q := codes(h.To(tt.F32), factor)
	col := m.col.Add(from)
	byteOf := m.b.Program(0).Mul(tileRows / 2).Add(m.b.Range(tileRows / 2))
	m.store(m.out[2].At(place(col, byteOf, m.all, m.rows/2)), q, func() tt.Value {
		return m.col.Is("lt", m.cols).Expand(1).And(byteOf.Is("lt", m.rows/2).Expand(0))
	})
	block := m.b.Program(0).Mul(2).Add(m.b.Range(2)).Expand(0)
	m.store(m.out[3].At(swizzled(col.Expand(1), block, m.rows/16)), scale, func() tt.Value {
		return col.Is("lt", ceil(m.all, 128)*128).Expand(1).And(block.Is("lt", ceil(m.rows/16, 4)*4))
	})
}

// hadamardSigns are the signs of the transform's rows, as dtype/block has them: bit i is set where
// row i is negative.
const hadamardSigns = 0b1101_0111_1110_1000

// transform multiplies every 16 rows of a tile [32, wide] by the signed Hadamard matrix over 4, on
// tensor cores, and gives bfloat16 [wide, 2, 16]. Element (i, j) of the matrix is negative where i
// and j have an odd number of bits in common, or else where row i is.
func (m nvfp4) transform(y tt.Value) tt.Value {
	i := m.b.Range(16)
	j := i.Expand(0)
	common := i.Expand(1).And(j)
	common = common.Xor(common.Shr(2))
	common = common.Xor(common.Shr(1))
	sign := i.Const(hadamardSigns).Shr(i).Expand(1)
	odd := common.Xor(sign).And(1)
	matrix := m.b.Full(-0.25, tt.F32, 16, 16).Select(odd.Is("eq", 1), 0.25).To(tt.BF16)
	t := y.Trans(1, 0).Reshape(2*m.wide, 16)
	return t.Dot(matrix, m.b.Full(0.0, tt.F32, 2*m.wide, 16)).To(tt.BF16).Reshape(m.wide, 2, 16)
}
