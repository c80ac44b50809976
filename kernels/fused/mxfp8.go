package fused

import tt "github.com/deepwell/deepwell/kernels/triton"

// MXFP8 quantizes what a source computes, both ways in one read. A source that gives n parts
// [rows, cols] stands for the matrix [rows, n·cols] of all of them, side by side.
//
//	→ codes [rows, n·cols] and scales of blocks of 32 along rows,
//	  codes [n·cols, rows] and scales of blocks of 32 along columns
func MXFP8(rows, cols int, s Source) (*tt.Kernel, error) {
	all := s.Parts * cols
	args := append(s.args(rows, cols),
		tt.Arg{Name: "q", Elem: tt.E4M3, Shape: []int{rows, all}, Result: true},
		tt.Arg{Name: "qs", Elem: tt.I8, Shape: SwizzledShape(rows, all/32), Result: true},
		tt.Arg{Name: "t", Elem: tt.E4M3, Shape: []int{all, rows}, Result: true},
		tt.Arg{Name: "ts", Elem: tt.I8, Shape: SwizzledShape(all, rows/32), Result: true})
	b, v := tt.New(s.Name+"_mxfp8", args...)
	t, launch := newTile(b, rows, cols)
	if s.Parts > 1 && cols%128 != 0 { // the padding of one part's scales is the next part's
		b.Fail("%d parts of %d columns", s.Parts, cols)
	}
	m := mxfp8{t, all, v[len(v)-4:]}
	for n, y := range s.Compute(t, v) {
		m.part(n*cols, y.To(tt.BF16))
	}
	return b.Kernel(launch)
}

// An mxfp8 writes the results of a kernel: codes and scales along rows, and transposed.
type mxfp8 struct {
	*tile
	all int // columns of all parts
	out []tt.Value
}

// part writes the tile y of bfloat16 [32, wide], whose columns begin at from in the results.
func (m mxfp8) part(from int, y tt.Value) {
	bits := y.Bits(tt.I16).To(tt.I32).And(0x7fff)
	f, n := y.To(tt.F32), m.wide/32

	scale, factor := powerScales(bits.Reshape(tileRows, n, 32).Largest(2))
	codes := f.Reshape(tileRows, n, 32).Mul(factor.Expand(2)).Reshape(tileRows, m.wide)
	block := m.b.Program(1).Mul(n).Add(m.b.Range(n)).Add(from / 32).Expand(0)
	m.store(m.out[0].At(place(m.row, m.col.Add(from), m.rows, m.all)), codes.To(tt.E4M3), m.inside)
	m.store(m.out[1].At(swizzled(m.row.Expand(1), block, m.all/32)), scale.To(tt.I8),
		func() tt.Value { return block.Is("lt", ceil(m.all, 128)*4) })

	scale, factor = powerScales(bits.Largest(0))
	codes = f.Mul(factor.Expand(0)).To(tt.E4M3).Trans(1, 0)
	col := m.col.Add(from)
	m.store(m.out[2].At(place(col, m.row, m.all, m.rows)), codes,
		func() tt.Value { return m.inside().Trans(1, 0) })
	m.store(m.out[3].At(swizzled(col, m.b.Program(0), m.rows/32)), scale.To(tt.I8),
		func() tt.Value { return col.Is("lt", ceil(m.all, 128)*128) })
}

// powerScales gives the E8M0 scales of blocks whose largest magnitudes have these bits of bfloat16,
// and the factors of their elements: the largest over 448, rounded up to a power of two (see
// dtype/block). A block with an infinity has the scale 254, one with a NaN 255.
func powerScales(amax tt.Value) (scale, factor tt.Value) {
	s := amax.Add(0x1f).Shr(7).Max(8).Sub(8)
	s = s.Const(254).Select(amax.Is("ge", 0x7f80), s)
	s = s.Const(255).Select(amax.Is("gt", 0x7f80), s)
	f := s.Const(254).Sub(s).Shl(23)
	f = f.Const(0x400000).Select(s.Is("ge", 254), f) // 2^-127
	f = f.Const(0x7fc00000).Select(s.Is("ge", 255), f)
	return s, f.Bits(tt.F32)
}
