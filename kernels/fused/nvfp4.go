package fused

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// An NVFP4Form is what a kernel writes of its matrix in NVFP4.
type NVFP4Form struct {
	Form
	// Tile gives one scale to 16×16 elements, as weights have it: codes are the same both ways, and
	// columns are not transformed.
	Tile bool
	// Stochastic rounds blocks along rows, and blocks along columns, by random bits. Tensors numbers
	// both among all tensors of a layer that are, for each part of the source.
	Stochastic [2]bool
	Tensors    [][2]int
	// Added is for targets whose conversion takes no random bits (sm_120): integers are added.
	Added bool
	// Layers is how many largest magnitudes there are of each part: a stack of layers, which the batch
	// has one after the other, has one for each. 0 is one for all matrices.
	Layers int
}

// operands are what the kernel reads beside its source: the largest magnitudes of each part and of
// what the transform makes of it; and for random bits seed, step and layer, and the places of rows
// and columns in the whole.
func (f NVFP4Form) operands(m Matrix, parts int) (list []tt.Arg) {
	add := func(name string, e tt.Elem, n int) {
		list = append(list, tt.Arg{Name: name, Elem: e, Shape: []int{n}})
	}
	for part := range parts {
		if f.Along || f.Tile {
			add(partName("amax", part, parts), tt.F32, max(f.Layers, 1))
		}
		if f.Across && !f.Tile {
			add(partName("amaxt", part, parts), tt.F32, max(f.Layers, 1))
		}
	}
	if f.Stochastic[0] || f.Stochastic[1] {
		add("noise", tt.I32, 3)
		add("rowplace", tt.I32, m.Batch*m.Rows)
		add("colplace", tt.I32, m.Cols)
	}
	return list
}

// partName is the name of an array of a part.
func partName(name string, part, parts int) string {
	if parts == 1 {
		return name
	}
	return fmt.Sprint(name, part)
}

// results are the kept source, codes and scales of each part, in the order of NVFP4.
func (f NVFP4Form) results(m Matrix, parts int) (list []tt.Arg) {
	for part := range parts {
		if f.Keep {
			list = append(list, kept(m, part, parts))
		}
		add := func(name string, rows, cols int) {
			shape := []int{m.Batch * rows, cols / 16}
			if f.Swizzled {
				shape = SwizzledShape(m.Batch*rows, cols/16)
			}
			list = append(list,
				tt.Arg{Name: partName(name, part, parts), Elem: tt.I8, Shape: []int{m.Batch * rows, cols / 2},
					Result: true},
				tt.Arg{Name: partName(name+"s", part, parts), Elem: tt.E4M3, Shape: shape, Result: true})
		}
		if f.Along {
			add("q", m.Rows, m.Cols)
		}
		if f.Across {
			add("t", m.Cols, m.Rows)
		}
	}
	return list
}

// kept is the result that a part of a source is written to.
func kept(m Matrix, part, parts int) tt.Arg {
	return tt.Arg{Name: partName("y", part, parts), Elem: tt.BF16,
		Shape: []int{m.Batch * m.Rows, m.Cols}, Result: true}
}

// NVFP4 quantizes what a source computes in one read: E2M1 codes, two to a byte, an E4M3 scale for
// every 16, and a scale of the whole tensor, whose largest magnitudes are operands (see
// [NVFP4Form]). Columns go through the random Hadamard transform first. For each part of the source
// there are, in the order of the results:
//
//	the part itself in bfloat16 [batch·rows, cols], if the form keeps it,
//	codes [batch·rows, cols/2] and scales of blocks of 16 along rows,
//	codes [batch·cols, rows/2] and scales of blocks of 16 along columns
func NVFP4(m Matrix, s Source, f NVFP4Form) (*tt.Kernel, error) {
	m.Batch = max(m.Batch, 1)
	operands := slices.Concat(f.from(s.args(m.Batch*m.Rows, m.Cols)), f.operands(m, s.Parts))
	args := f.into(operands, f.results(m, s.Parts))
	b, v := tt.New(s.Name+"_nvfp4"+f.suffix(), args...)
	pad := tileRows
	if f.Swizzled {
		pad = 128
	}
	t, launch := newTile(b, m, pad)
	if !f.check(b, m, s.Parts) {
		return b.Kernel(launch)
	}
	if s.matrices() > 1 || len(s.Operands) > 3 { // or registers spill on rtx6000pro
		launch.Warps *= 2
	}
	in, out := v[len(s.Operands):], f.shift(t, args, v)
	parts := make([]nvfp4, s.Parts)
	for i := range parts {
		parts[i] = nvfp4{tile: t, NVFP4Form: f}
		in = parts[i].grids(in)
	}
	if f.Stochastic[0] || f.Stochastic[1] {
		c := newStochastic(t, in[0], in[1], in[2])
		for i := range parts {
			parts[i].stochastic, parts[i].key = c, [2]key{c.key(f.Tensors[i][0]), c.key(f.Tensors[i][1])}
		}
	}
	for i, y := range s.Compute(t, v) {
		y = y.To(tt.BF16)
		if f.Keep {
			t.keep(out[0], y)
			out = out[1:]
		}
		out = parts[i].write(y, out)
	}
	k, err := b.Kernel(launch)
	if err == nil {
		k.Spec = Spec{Format: dtype.NVFP4, Matrix: m, NVFP4Form: f, Expr: *s.Expr}.String()
	}
	return k, err
}

// check refuses what the kernel cannot write.
func (f NVFP4Form) check(b *tt.Builder, m Matrix, parts int) bool {
	switch across := f.Across || f.Tile; {
	case !f.Along && !f.Across:
		b.Fail("a form without an orientation")
	case across && m.Rows%16 != 0 || (f.Along || f.Tile) && m.Cols%16 != 0:
		b.Fail("blocks of 16 do not divide %d×%d", m.Rows, m.Cols)
	case f.Swizzled && m.Batch > 1 && (f.Along && m.Rows%128 != 0 || f.Across && m.Cols%128 != 0):
		b.Fail("the scales of %d matrices of %d×%d are no whole tiles", m.Batch, m.Rows, m.Cols)
	case f.Layers > 1 && m.Batch%f.Layers != 0:
		b.Fail("%d matrices are no %d layers", m.Batch, f.Layers)
	case f.Stochastic != [2]bool{} && len(f.Tensors) != parts:
		b.Fail("%d parts have %d pairs of numbers", parts, len(f.Tensors))
	default:
		return true
	}
	return false
}

// An nvfp4 quantizes one part of a source.
type nvfp4 struct {
	*tile
	NVFP4Form
	plain, transposed grid
	stochastic        *stochastic // nil if nothing is rounded by random bits
	key               [2]key
}

// grids takes the part's largest magnitudes off the kernel's values.
func (k *nvfp4) grids(in []tt.Value) []tt.Value {
	largest := func(p tt.Value) tt.Value {
		if k.Layers > 1 {
			p = p.At(k.b.Program(2).Div(k.batch / k.Layers))
		}
		return k.b.Load(p)
	}
	if k.Along || k.Tile {
		k.plain, in = newGrid(largest(in[0])), in[1:]
	}
	if k.transposed = k.plain; k.Across && !k.Tile {
		k.transposed, in = newGrid(largest(in[0])), in[1:]
	}
	return in
}

// write writes codes and scales of the tile y, bfloat16 [32, wide], to the first of some results,
// and gives the others.
func (k *nvfp4) write(y tt.Value, out []tt.Value) []tt.Value {
	n := k.wide / 16
	var top tt.Value
	if k.Tile { // the largest magnitudes of 16×16 elements, [2, n]
		top = magnitude(y).Reshape(2, 16, n, 16).Largest(3).Largest(1)
	}
	if k.Along {
		rows := top
		if k.Tile {
			rows = rows.Expand(1).Broadcast(2, 16, n).Reshape(tileRows, n)
		} else {
			rows = magnitude(y).Reshape(tileRows, n, 16).Largest(2)
		}
		k.along(y, rows, out[0], out[1])
		out = out[2:]
	}
	if !k.Across {
		return out
	}
	if k.Tile {
		k.across(y.Trans(1, 0).Reshape(k.wide, 2, 16),
			top.Trans(1, 0).Expand(1).Broadcast(n, 16, 2).Reshape(k.wide, 2), out[0], out[1])
		return out[2:]
	}
	h := hadamard(k.tile, y)
	k.across(h, magnitude(h).Largest(2), out[0], out[1])
	return out[2:]
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

// codes rounds blocks [n, k, 16] times their factors [n, k] to E2M1, packed to bytes [n, 8k]. draw
// gives the random bits of each four elements, [n, 4k]; nil rounds to the nearest.
func (k *nvfp4) codes(blocks, factor tt.Value, draw func() tt.Value) tt.Value {
	rows, n := blocks.Shape()[0], blocks.Shape()[1]
	v := blocks.Mul(factor.Expand(2))
	if draw == nil {
		first, second := v.Reshape(rows, 8*n, 2).Split()
		return first.Pack("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; "+
			"mov.b32 $0, {t, t, t, t}; }", second).To(tt.I8)
	}
	even, odd := v.Reshape(rows, 4*n, 2, 2).Split()
	var four [4]tt.Value
	four[0], four[2] = even.Split()
	four[1], four[3] = odd.Split()
	word := roundFour(four, draw(), k.Added)
	return word.To(tt.I8).Join(word.ShrU(8).To(tt.I8)).Reshape(rows, 8*n)
}

// magnitude gives the bits of bfloat16 magnitudes.
func magnitude(y tt.Value) tt.Value { return y.Bits(tt.I16).To(tt.I32).And(0x7fff) }

// along writes codes and scales along rows, of blocks with these largest magnitudes, [32, n].
func (k *nvfp4) along(y, top, codes, scales tt.Value) {
	n := k.wide / 16
	scale, factor := k.plain.scales(top)
	var draw func() tt.Value
	if k.Stochastic[0] {
		draw = func() tt.Value { return k.stochastic.along(k.key[0]) }
	}
	q := k.codes(y.To(tt.F32).Reshape(tileRows, n, 16), factor, draw)
	row := k.globalRow()
	byteOf := k.b.Program(1).Mul(k.wide / 2).Add(k.b.Range(k.wide / 2))
	k.store(codes.At(place(row, byteOf, k.batch*k.rows, k.cols/2)), q, func() tt.Value {
		return k.row.Is("lt", k.rows).Expand(1).And(byteOf.Is("lt", k.cols/2).Expand(0))
	})
	block := k.b.Program(1).Mul(n).Add(k.b.Range(n)).Expand(0)
	r, c := k.scales(row.Expand(1), block, 16)
	if k.Swizzled {
		k.store(scales.At(swizzled(r, c, k.cols/16)), scale,
			func() tt.Value { return block.Is("lt", ceil(k.cols/16, 4)*4) })
		return
	}
	k.store(scales.At(r.Mul(k.cols/16).Add(c)), scale, func() tt.Value {
		return k.row.Is("lt", k.rows).Expand(1).And(block.Is("lt", k.cols/16))
	})
}

// across writes codes and scales along columns, transposed, of what becomes of the tile, [wide, 2,
// 16], and the largest magnitudes of its blocks, [wide, 2].
func (k *nvfp4) across(h, top, codes, scales tt.Value) {
	scale, factor := k.transposed.scales(top)
	var draw func() tt.Value
	if k.Stochastic[1] {
		draw = func() tt.Value { return k.stochastic.across(k.key[1]) }
	}
	q := k.codes(h.To(tt.F32), factor, draw)
	col := k.col
	here := func() tt.Value { return k.col.Is("lt", k.cols).Expand(1) }
	if k.batch > 1 {
		col = col.Add(k.b.Program(2).Mul(k.cols))
	}
	byteOf := k.b.Program(0).Mul(tileRows / 2).Add(k.b.Range(tileRows / 2))
	k.store(codes.At(place(col, byteOf, k.batch*k.cols, k.rows/2)), q, func() tt.Value {
		return here().And(byteOf.Is("lt", k.rows/2).Expand(0))
	})
	block := k.b.Program(0).Mul(2).Add(k.b.Range(2)).Expand(0)
	r, c := k.scales(col.Expand(1), block, 16)
	if k.Swizzled {
		k.store(scales.At(swizzled(r, c, k.rows/16)), scale, func() tt.Value {
			return col.Is("lt", ceil(k.cols, 128)*128*k.batch).Expand(1).
				And(block.Is("lt", ceil(k.rows/16, 4)*4))
		})
		return
	}
	k.store(scales.At(r.Mul(k.rows/16).Add(c)), scale, func() tt.Value {
		return here().And(block.Is("lt", k.rows/16))
	})
}

// hadamardSigns are the signs of the transform's rows, as dtype/block has them: bit i is set where
// row i is negative.
const hadamardSigns = 0b1101_0111_1110_1000

// hadamard multiplies every 16 rows of a tile [32, wide] by the signed Hadamard matrix over 4, on
// tensor cores, and gives bfloat16 [wide, 2, 16]. Element (i, j) of the matrix is negative where i
// and j have an odd number of bits in common, or else where row i is.
func hadamard(m *tile, y tt.Value) tt.Value {
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
