package fused

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Form is what a quantizing kernel writes of its matrix. With neither orientation it is an error.
type Form struct {
	Along, Across bool // blocks along rows; blocks along columns, with codes transposed
	// Swizzled puts scales in the order of tensor cores, where a product reads them at once; else they
	// are in rows, as whatever splits, joins or sends them wants them.
	Swizzled bool
	Keep     bool // writes what is quantized, too
	// Columns are parts, by their numbers, of which only blocks along columns are written.
	Columns []int
	Stacks
}

// AlongOf tells whether a part is quantized along rows.
func (f Form) AlongOf(part int) bool { return f.Along && !slices.Contains(f.Columns, part) }

// Stacks are arrays of as many matrices as a loop has rounds, of which a kernel in the loop reads
// and writes one: what other rounds put there stays.
type Stacks struct {
	Rounds int   // 0 without stacks
	From   []int // operands that are stacks, by their numbers
	Into   []int // results that are written into stacks
	Saved  []int // operands that are written into stacks as they are read
}

// any tells whether there are stacks: then the round is an operand, after the source's.
func (s Stacks) any() bool { return s.Rounds > 0 }

// suffix is the part of a kernel's name that says what it writes.
func (f Form) suffix() string {
	switch {
	case f.Along && f.Across:
		return ""
	case f.Along:
		return "_rows"
	}
	return "_columns"
}

// A Matrix is the shape of what a kernel reads: a batch of matrices, one after the other.
type Matrix struct{ Batch, Rows, Cols int }

// MXFP8 quantizes what a source computes in one read. For each part of the source there are, in the
// order of the results:
//
//	the part itself in bfloat16 [batch·rows, cols], if the form keeps it,
//	codes [batch·rows, cols] and scales of blocks of 32 along rows,
//	codes [batch·cols, rows] and scales of blocks of 32 along columns
func MXFP8(m Matrix, s Source, f Form) (*tt.Kernel, error) {
	m.Batch = max(m.Batch, 1)
	args := f.from(s.args(m.Batch*m.Rows, m.Cols))
	operands := len(args)
	var results []tt.Arg
	result := func(part int, name string, e tt.Elem, shape ...int) {
		results = append(results, tt.Arg{Name: partName(name, part, s.Parts), Elem: e, Shape: shape,
			Result: true})
	}
	codes := func(part int, name string, rows, cols int) {
		shape := []int{m.Batch * rows, cols / 32}
		if f.Swizzled {
			shape = SwizzledShape(m.Batch*rows, cols/32)
		}
		result(part, name, tt.E4M3, m.Batch*rows, cols)
		result(part, name+"s", tt.I8, shape...)
	}
	for part := range s.Parts {
		if f.Keep {
			results = append(results, kept(m, part, s.Parts))
		}
		if f.AlongOf(part) {
			codes(part, "q", m.Rows, m.Cols)
		}
		if f.Across {
			codes(part, "t", m.Cols, m.Rows)
		}
	}
	args = f.into(args, results)
	b, v := tt.New(s.Name+"_mxfp8"+f.suffix(), args...)
	pad := tileRows
	if f.Swizzled {
		pad = 128
	}
	t, launch := newTile(b, m, pad)
	switch {
	case !f.Along && !f.Across || !f.Across && len(f.Columns) > 0:
		b.Fail("a form without an orientation")
	case f.Across && m.Rows%32 != 0 || f.Along && m.Cols%32 != 0:
		b.Fail("blocks of 32 do not divide %d×%d", m.Rows, m.Cols)
	case f.Swizzled && m.Batch > 1 && (f.Along && m.Rows%128 != 0 || f.Across && m.Cols%128 != 0):
		b.Fail("the scales of %d matrices of %d×%d are no whole tiles", m.Batch, m.Rows, m.Cols)
	}
	if s.matrices() > 2 { // or registers spill
		launch.Warps *= 2
	}
	out := f.shift(t, args, v)
	for part, y := range s.Compute(t, v[:operands]) {
		q := mxfp8{t, f.Swizzled, y.To(tt.BF16)}
		if f.Keep {
			t.keep(out[0], q.y)
			out = out[1:]
		}
		if f.AlongOf(part) {
			q.along(out[0], out[1])
			out = out[2:]
		}
		if f.Across {
			q.across(out[0], out[1])
			out = out[2:]
		}
	}
	k, err := b.Kernel(launch)
	if err == nil {
		k.Spec = Spec{Format: dtype.MXFP8, Matrix: m, NVFP4Form: NVFP4Form{Form: f},
			Expr: *s.Expr}.String()
	}
	return k, err
}

// An mxfp8 quantizes the tile y of bfloat16 [32, wide].
type mxfp8 struct {
	*tile
	swizzled bool
	y        tt.Value
}

// bits are the magnitudes of bfloat16.
func bits(y tt.Value) tt.Value { return y.Bits(tt.I16).To(tt.I32).And(0x7fff) }

// RowBlocks quantizes rows of bfloat16 [rows, cols]: codes of MXFP8 [rows, cols] and their scales
// [rows, cols/32].
func RowBlocks(y tt.Value, rows, cols int) (codes, scales tt.Value) {
	scale, factor := powerScales(bits(y).Reshape(rows, cols/32, 32).Largest(2))
	wide := y.To(tt.F32).Reshape(rows, cols/32, 32).Mul(factor.Expand(2)).Reshape(rows, cols)
	return wide.To(tt.E4M3), scale.To(tt.I8)
}

// along writes codes and scales along rows.
func (q mxfp8) along(codes, scales tt.Value) {
	n := q.wide / 32
	y, scale := RowBlocks(q.y, tileRows, q.wide)
	row := q.globalRow()
	q.store(codes.At(place(row, q.col, q.batch*q.rows, q.cols)), y, q.inside)
	block := q.b.Program(1).Mul(n).Add(q.b.Range(n)).Expand(0)
	r, k := q.scales(row.Expand(1), block, 32)
	at, last := r.Mul(q.cols/32).Add(k), q.cols/32
	if q.swizzled {
		at, last = swizzled(r, k, q.cols/32), ceil(q.cols, 128)*4
	}
	q.store(scales.At(at), scale, func() tt.Value {
		here := block.Is("lt", last)
		if q.swizzled {
			return here
		}
		return here.And(q.row.Is("lt", q.rows).Expand(1))
	})
}

// across writes codes and scales along columns, transposed.
func (q mxfp8) across(codes, scales tt.Value) {
	scale, factor := powerScales(bits(q.y).Largest(0))
	y := q.y.To(tt.F32).Mul(factor.Expand(0)).To(tt.E4M3).Trans(1, 0)
	col := q.col
	if q.batch > 1 {
		col = col.Add(q.b.Program(2).Mul(q.cols))
	}
	q.store(codes.At(place(col, q.row, q.batch*q.cols, q.rows)), y,
		func() tt.Value { return q.inside().Trans(1, 0) })
	block := q.b.Program(0)
	c, k := q.scales(col, block, 32)
	if q.swizzled {
		q.store(scales.At(swizzled(c, k, q.rows/32)), scale.To(tt.I8),
			func() tt.Value { return col.Is("lt", ceil(q.cols, 128)*128*q.batch) })
		return
	}
	q.store(scales.At(c.Mul(q.rows/32).Add(k)), scale.To(tt.I8), func() tt.Value {
		return q.col.Is("lt", q.cols).And(block.Is("lt", q.rows/32))
	})
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
