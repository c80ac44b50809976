package fused

import (
	"github.com/deepwell/deepwell/dtype"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Group is a grouped GEMM: rows of tokens sorted by expert, each expert's rows padded to whole
// tiles of 128, times the expert's weight.
type Group struct {
	Rows, Out, In int // y [Rows, Out] = x [Rows, In] · w[expert] [Out, In]ᵀ
	Experts       int
	// Format is what both operands are in: "" for bfloat16, dtype.MXFP8 or dtype.NVFP4, whose tensor
	// scales are the caller's.
	Format dtype.Format
	// Small tiles fit GPUs without tensor memory, whose sums are in registers (rtx6000pro).
	Small bool
}

const groupRows = 128 // of a tile: one instruction of tensor cores, and 128 rows of scales

// wide gives the columns of a tile and the stages of its loop: what was seen to compile without
// spills and to fill shared memory (reference/moe_lowering.md 2).
func (g Group) wide() (cols, stages int) {
	if g.Small {
		return 128, 3
	}
	return 256, 4
}

// An operand of a grouped GEMM is read in tiles: codes, and scales where the format has them. Rows
// are what the product keeps, and columns what it sums over.
type operand struct {
	codes, scales tt.Descriptor
	scaled        bool
	step          int // columns of a tile, in numbers
	perByte       int
	blocks        int // scales of a tile's row, over 4
}

// args are the arrays of an operand with that many rows and columns.
func (g Group) args(name string, rows, cols int) []tt.Arg {
	switch g.Format {
	case dtype.MXFP8:
		return []tt.Arg{{Name: name, Elem: tt.E4M3, Shape: []int{rows, cols}},
			{Name: name + "s", Elem: tt.I8, Shape: SwizzledShape(rows, cols/32)}}
	case dtype.NVFP4:
		return []tt.Arg{{Name: name, Elem: tt.I8, Shape: []int{rows, cols / 2}},
			{Name: name + "s", Elem: tt.E4M3, Shape: SwizzledShape(rows, cols/16)}}
	}
	return []tt.Arg{{Name: name, Elem: tt.BF16, Shape: []int{rows, cols}}}
}

// describe makes the descriptors of an operand, whose tiles have that many rows.
func (g Group) describe(b *tt.Builder, v []tt.Value, rows, cols, high int) operand {
	o := operand{step: 64, perByte: 1}
	switch g.Format {
	case dtype.MXFP8:
		o.scaled, o.step, o.blocks = true, 128, 1
	case dtype.NVFP4:
		o.scaled, o.step, o.perByte, o.blocks = true, 256, 2, 4
	}
	o.codes = b.Describe(v[0], []int{rows, cols / o.perByte}, []int{high, o.step / o.perByte})
	if o.scaled {
		s := SwizzledShape(rows, o.blocks*4*cols/o.step)
		o.scales = b.Describe(v[1], []int{1, s[0], s[1], 2, 256}, []int{1, high / 128, o.blocks, 2, 256})
	}
	return o
}

// tile reads the tile that begins at a row, in a step of the sum.
func (o operand) tile(row, step tt.Value) tt.Scaled {
	t := tt.Scaled{Codes: o.codes.Load(row, step.Mul(o.step/o.perByte))}
	if o.scaled {
		zero := step.Const(0)
		t.Scales = o.scales.Load(zero, row.Div(128), step.Mul(o.blocks), zero, zero).Unswizzle()
	}
	return t
}

// multiply adds x·yᵀ to a sum.
func (g Group) multiply(b *tt.Builder, x, y tt.Scaled, sum tt.Value) tt.Value {
	y.Codes = y.Codes.Trans(1, 0)
	switch g.Format {
	case dtype.MXFP8:
		return b.DotScaled(x, y, sum, "e4m3")
	case dtype.NVFP4:
		return b.DotScaled(x, y, sum, "e2m1")
	}
	return x.Codes.Dot(y.Codes, sum)
}

// check refuses sizes that tiles of scales do not divide.
func (g Group) check(b *tt.Builder) {
	if g.Rows%groupRows != 0 || g.Out%128 != 0 || g.In%128 != 0 || g.Experts < 1 {
		b.Fail("a product of %d×%d by %d experts of %d", g.Rows, g.In, g.Experts, g.Out)
	}
}

// Kernel prints the product. The operand "experts" names the expert of each tile of 128 rows; where
// it is negative, the tile has no rows, and its results are zeros.
//
//	x, w [Experts, Out, In], experts [Rows/128] → y [Rows, Out] in bfloat16
func (g Group) Kernel() (*tt.Kernel, error) {
	args := append(g.args("x", g.Rows, g.In), g.args("w", g.Experts*g.Out, g.In)...)
	n := len(args)
	args = append(args, tt.Arg{Name: "experts", Elem: tt.I32, Shape: []int{g.Rows / groupRows}},
		tt.Arg{Name: "y", Elem: tt.BF16, Shape: []int{g.Rows, g.Out}, Result: true})
	b, v := tt.New(g.name("grouped"), args...)
	g.check(b)
	cols, stages := g.wide()
	row, col := g.order(b, cols)
	expert := b.Load(v[n].At(row))
	x := g.describe(b, v, g.Rows, g.In, groupRows)
	w := g.describe(b, v[n/2:], g.Experts*g.Out, g.In, cols)
	y := b.Describe(v[n+1], []int{g.Rows, g.Out}, []int{groupRows, cols})

	first := expert.Max(0).Mul(g.Out).Add(col.Mul(cols))
	steps := expert.Const(ceil(g.In, x.step)).Select(expert.Is("ge", 0), 0)
	sum := b.For(row.Const(0), steps, row.Const(1), []tt.Value{b.Full(0.0, tt.F32, groupRows, cols)},
		func(k tt.Value, sum []tt.Value) []tt.Value {
			return []tt.Value{g.multiply(b, x.tile(row.Mul(groupRows), k), w.tile(first, k), sum[0])}
		})
	y.Store(sum[0].To(tt.BF16), row.Mul(groupRows), col.Mul(cols))
	return b.Kernel(tt.Launch{Grid: [3]int{g.Rows / groupRows * ceil(g.Out, cols)}, Warps: 8,
		Stages: stages})
}

// order gives a program's tile: 8 tiles of rows are taken together, so that the weights they share
// stay in the L2 cache.
func (g Group) order(b *tt.Builder, cols int) (row, col tt.Value) {
	const together = 8
	id, across, down := b.Program(0), ceil(g.Out, cols), g.Rows/groupRows
	first := id.Div(together * across).Mul(together)
	high := first.Const(down).Sub(first).Min(together)
	rest := id.Rem(together * across)
	return first.Add(rest.Rem(high)), rest.Div(high)
}

func (g Group) name(kind string) string {
	switch g.Format {
	case dtype.MXFP8, dtype.NVFP4:
		return kind + "_" + string(g.Format)
	}
	return kind + "_bf16"
}

// WeightGrad prints the gradient of the weights: each expert's rows of dy and x, as the transposed
// copies that quantizing kernels write. The operand "starts" has the first row of each expert, and
// behind the last the number of rows; all are multiples of 128.
//
//	dyᵀ [Out, Rows], xᵀ [In, Rows], starts [Experts + 1] → dw [Experts, Out, In] in float32
func (g Group) WeightGrad() (*tt.Kernel, error) {
	args := append(g.args("dy", g.Out, g.Rows), g.args("x", g.In, g.Rows)...)
	n := len(args)
	args = append(args, tt.Arg{Name: "starts", Elem: tt.I32, Shape: []int{g.Experts + 1}},
		tt.Arg{Name: "dw", Elem: tt.F32, Shape: []int{g.Experts * g.Out, g.In}, Result: true})
	b, v := tt.New(g.name("grouped_dw"), args...)
	g.check(b)
	const cols = 128 // a sum of 128×256 in float32 and its copy on the way out do not fit
	across := ceil(g.In, cols)
	id, expert := b.Program(0), b.Program(1)
	row, col := id.Div(across).Mul(128), id.Rem(across).Mul(cols)
	dy, x := g.describe(b, v, g.Out, g.Rows, 128), g.describe(b, v[n/2:], g.In, g.Rows, cols)
	dw := b.Describe(v[n+1], []int{g.Experts * g.Out, g.In}, []int{128, cols})
	if dy.step > 128 { // a tile would reach into the next expert's rows
		b.Fail("groups of 128 rows are no multiples of %d", dy.step)
	}
	from, to := b.Load(v[n].At(expert)), b.Load(v[n].At(expert.Add(1)))
	sum := b.For(from.Div(dy.step), to.Div(dy.step), from.Const(1),
		[]tt.Value{b.Full(0.0, tt.F32, 128, cols)},
		func(k tt.Value, sum []tt.Value) []tt.Value {
			return []tt.Value{g.multiply(b, dy.tile(row, k), x.tile(col, k), sum[0])}
		})
	dw.Store(sum[0], expert.Mul(g.Out).Add(row), col)
	return b.Kernel(tt.Launch{Grid: [3]int{g.Out / 128 * across, g.Experts}, Warps: 8, Stages: 3})
}
