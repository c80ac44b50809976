package fused

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Group is a grouped GEMM: the rows of tokens stand one expert behind the other, each expert has
// whole tiles of 128, and each tile is multiplied by its expert's weight. Tiles without a token are
// skipped.
type Group struct {
	Rows, Out, In int // y [Rows, Out] = x [Rows, In] · w[expert] [Out, In]ᵀ
	Experts       int
	// Format is what both operands are in: "" for bfloat16, dtype.MXFP8 or dtype.NVFP4.
	Format dtype.Format
	// Grad tells the gradient of the weights: dw[expert] [Out, In] = dyᵀ·x over the expert's rows.
	Grad bool
	// Weights is the order in memory of the weights' dimensions, e for experts, o for Out and k for
	// In: of the operand, or of the gradient. "" is eok.
	Weights string
	// Shards is in how many parts In is gathered, one behind the other and each with all experts and
	// all of Out: FSDP's gather of packed numbers that are summed over. 0 is one.
	Shards int
	// Wide gives the gradient in float32, else it is rounded to bfloat16.
	Wide bool
	// Filled is how many rows are expected to be in tiles with a token; what is computed does not
	// depend on it.
	Filled int
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

// A side is where an operand of a grouped GEMM lies: its dimensions are experts (e), what the
// product keeps (o) and what it sums over (k).
type side struct {
	order                 string
	experts, kept, summed int
	high                  int // rows of a tile
	parts                 int // of the sum, each with all experts; 0 is one
}

// step is how many numbers a step of the sum takes. Tensor cores take NVFP4 in 64; with 128 a step
// the three or four stages of a loop would not last until the next tile has come from L2.
func (g Group) step() int {
	return map[dtype.Format]int{"": 64, dtype.MXFP8: 128, dtype.NVFP4: 256}[g.Format]
}

// An operand of a grouped GEMM is read in tiles: codes, and scales where the format has them.
type operand struct {
	side
	codes, scales tt.Descriptor
	scaled        bool
	step          int // of the sum, in numbers
	perByte       int
	blocks        int // scales of a tile's row, over 4
}

// orders are the orders of dimensions that a matrix of two dimensions describes.
var orders = map[string]bool{"eok": true, "oek": true, "eko": true, "keo": true}

// summedFirst tells whether tiles are read with the summed dimension first.
func summedFirst(order string) bool { return strings.Index(order, "k") < strings.Index(order, "o") }

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

// describe makes the descriptors of an operand. Scales are in the order eok whatever the order of
// codes is. Where a step reaches beyond the sum, scales are zeros.
func (g Group) describe(b *tt.Builder, v []tt.Value, at side) operand {
	o := operand{side: at, step: g.step(), perByte: 1}
	switch g.Format {
	case dtype.MXFP8:
		o.scaled, o.blocks = true, 1
	case dtype.NVFP4:
		o.scaled, o.perByte, o.blocks = true, 2, 4
	}
	o.parts = max(o.parts, 1)
	bytes := o.summed / o.perByte
	size := map[string][]int{"eok": {o.parts * o.experts * o.kept, bytes / o.parts},
		"oek": {o.kept, o.experts * bytes}, "eko": {o.experts * bytes, o.kept},
		"keo": {bytes, o.experts * o.kept}}
	block := []int{o.high, o.step / o.perByte}
	if summedFirst(o.order) {
		block = []int{o.step / o.perByte, o.high}
	}
	o.codes = b.Describe(v[0], size[o.order], block)
	if o.scaled {
		s := SwizzledShape(o.experts*o.kept, o.blocks*4*o.summed/o.step)
		o.scales = b.Describe(v[1], []int{1, s[0], s[1], 2, 256},
			[]int{1, o.high / 128, o.blocks, 2, 256})
	}
	return o
}

// tile reads the tile of an expert that begins at a row, in a step of the sum: [rows, step].
func (o operand) tile(expert, row, step tt.Value) tt.Scaled {
	at := step.Mul(o.step / o.perByte)
	var t tt.Scaled
	switch o.order {
	case "eok":
		first := expert
		if o.parts > 1 {
			each := o.summed / o.parts / o.step // steps of a part
			first = step.Div(each).Mul(o.experts).Add(expert)
			at = step.Rem(each).Mul(o.step / o.perByte)
		}
		t.Codes = o.codes.Load(first.Mul(o.kept).Add(row), at)
	case "oek":
		t.Codes = o.codes.Load(row, expert.Mul(o.summed/o.perByte).Add(at))
	case "eko":
		t.Codes = o.codes.Load(expert.Mul(o.summed/o.perByte).Add(at), row).Trans(1, 0)
	default:
		t.Codes = o.codes.Load(at, expert.Mul(o.kept).Add(row)).Trans(1, 0)
	}
	if o.scaled {
		zero := step.Const(0)
		first := expert.Mul(o.kept).Add(row).Div(128)
		t.Scales = o.scales.Load(zero, first, step.Mul(o.blocks), zero, zero).Unswizzle()
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

// check refuses sizes that tiles do not divide, and orders that the kernel does not read.
func (g Group) check() error {
	switch {
	case g.Experts < 1 || g.Rows%(groupRows*g.Experts) != 0 || g.Out%128 != 0 || g.In%128 != 0 ||
		g.Rows < 1 || g.Out < 1 || g.In < 1 || g.Filled < 0 || g.Filled > g.Rows:
		return fmt.Errorf("a product of %d×%d by %d experts of %d", g.Rows, g.In, g.Experts, g.Out)
	case !orders[g.order()] || g.Grad && summedFirst(g.order()):
		return fmt.Errorf("weights in the order %q", g.Weights)
	case g.Format == dtype.NVFP4 && summedFirst(g.order()):
		return fmt.Errorf("numbers of NVFP4 that are packed across rows: tensor cores read them along")
	case g.Shards != 0 && (g.Shards < 2 || !g.TakesShards(g.Shards)):
		return fmt.Errorf("a sum of %d in %d shards", g.In, g.Shards)
	case g.Format != "" && g.Format != dtype.MXFP8 && g.Format != dtype.NVFP4:
		return fmt.Errorf("a grouped product of %q", g.Format)
	}
	return nil
}

// TakesShards tells whether the kernel reads weights of which FSDP gathers what is summed over in a
// number of shards: each has whole steps.
func (g Group) TakesShards(n int) bool {
	return !g.Grad && g.order() == "eok" && n > 0 && g.In%(n*g.step()) == 0
}

func (g Group) order() string { return cmp.Or(g.Weights, "eok") }

// Kernel prints the product, or the gradient of the weights.
func (g Group) Kernel() (*tt.Kernel, error) {
	if err := g.check(); err != nil {
		return nil, err
	}
	print := g.product
	if g.Grad {
		print = g.weightGrad
	}
	k, err := print()
	if err == nil {
		k.Spec = g.String()
	}
	return k, err
}

// product is y. The operand "experts" names the expert of each tile of 128 rows; where it is
// negative, the tile has no rows, and its results are zeros.
//
//	x, w [Experts, Out, In], experts [Rows/128] → y [Rows, Out] in bfloat16
//
// NVFP4 has the scales of the two tensors as its last operands, by which sums are multiplied one
// after the other: their product may underflow.
func (g Group) product() (*tt.Kernel, error) {
	args := append(g.args("x", g.Rows, g.In), g.args("w", g.Experts*g.Out, g.In)...)
	n := len(args)
	args = append(args, tt.Arg{Name: "experts", Elem: tt.I32, Shape: []int{g.Rows / groupRows}})
	args = append(args, g.tensors()...)
	args = append(args, tt.Arg{Name: "y", Elem: tt.BF16, Shape: []int{g.Rows, g.Out}, Result: true})
	b, v := tt.New(g.Name(), args...)
	cols, stages := g.wide()
	row, col := g.place(b, cols)
	expert := b.Load(v[n].At(row))
	x := g.describe(b, v, side{order: "eok", experts: 1, kept: g.Rows, summed: g.In, high: groupRows})
	w := g.describe(b, v[n/2:], side{g.order(), g.Experts, g.Out, g.In, cols, g.Shards})
	y := b.Describe(v[len(v)-1], []int{g.Rows, g.Out}, []int{groupRows, cols})

	zero, some := row.Const(0), expert.Max(0)
	steps := expert.Const(ceil(g.In, x.step)).Select(expert.Is("ge", 0), 0)
	sum := b.For(zero, steps, row.Const(1), []tt.Value{b.Full(0.0, tt.F32, groupRows, cols)},
		func(k tt.Value, sum []tt.Value) []tt.Value {
			return []tt.Value{g.multiply(b, x.tile(zero, row.Mul(groupRows), k),
				w.tile(some, col.Mul(cols), k), sum[0])}
		})
	y.Store(g.unscaled(b, v[n+1:], sum[0]).To(tt.BF16), row.Mul(groupRows), col.Mul(cols))
	return b.Kernel(tt.Launch{Grid: [3]int{g.Rows / groupRows * ceil(g.Out, cols)}, Warps: 8,
		Stages: stages})
}

// tensors are the scales of whole tensors, if the format has them.
func (g Group) tensors() []tt.Arg {
	if !g.Format.TensorScale() {
		return nil
	}
	return []tt.Arg{{Name: "tensor0", Elem: tt.F32, Shape: []int{1}},
		{Name: "tensor1", Elem: tt.F32, Shape: []int{1}}}
}

// unscaled multiplies a sum by the scales of tensors, which come next.
func (g Group) unscaled(b *tt.Builder, next []tt.Value, sum tt.Value) tt.Value {
	for i := range g.tensors() {
		sum = sum.Mul(b.Load(next[i]).Broadcast(sum.Shape()...))
	}
	return sum
}

// place gives a program's tile: 8 tiles of rows are taken together, so that the weights they share
// stay in the L2 cache.
func (g Group) place(b *tt.Builder, cols int) (row, col tt.Value) {
	const together = 8
	id, across, down := b.Program(0), ceil(g.Out, cols), g.Rows/groupRows
	first := id.Div(together * across).Mul(together)
	high := first.Const(down).Sub(first).Min(together)
	rest := id.Rem(together * across)
	return first.Add(rest.Rem(high)), rest.Div(high)
}

// Name is the kernel's.
func (g Group) Name() string {
	kind := "grouped"
	if g.Grad {
		kind = "grouped_dw"
	}
	return kind + "_" + cmp.Or(string(g.Format), "bf16")
}

// weightGrad is dw: each expert's rows of dy and x, in bfloat16 as they are, quantized as the
// transposed copies that quantizing kernels write. The operand "filled" has the rows of each expert
// up to its last tile with a token, multiples of 128. Rows behind it are zeros, of which NVFP4 adds
// a tile where the number of tiles is odd.
//
//	dy [Experts, rows, Out], x [Experts, rows, In], or dyᵀ [Experts, Out, rows], xᵀ [Experts, In,
//	rows], filled [Experts] → dw [Experts, Out, In]
func (g Group) weightGrad() (*tt.Kernel, error) {
	rows, order := g.Rows/g.Experts, "eko"
	if g.Format != "" {
		order = "eok"
	}
	shape := func(name string, kept int) []tt.Arg {
		if g.Format == "" {
			return g.args(name, g.Rows, kept)
		}
		return g.args(name, g.Experts*kept, rows)
	}
	args := append(shape("dy", g.Out), shape("x", g.In)...)
	n := len(args)
	elem := tt.BF16
	if g.Wide {
		elem = tt.F32
	}
	at := []int{g.Experts * g.Out, g.In}
	if g.order() == "oek" {
		at = []int{g.Out, g.Experts * g.In}
	}
	args = append(args, tt.Arg{Name: "filled", Elem: tt.I32, Shape: []int{g.Experts}})
	args = append(args, g.tensors()...)
	args = append(args, tt.Arg{Name: "dw", Elem: elem, Shape: at, Result: true})
	b, v := tt.New(g.Name(), args...)
	const cols = 128 // a sum of 128×256 in float32 and its copy on the way out do not fit
	across := ceil(g.In, cols)
	id, expert := b.Program(0), b.Program(1)
	row, col := id.Div(across).Mul(128), id.Rem(across).Mul(cols)
	dy := g.describe(b, v, side{order, g.Experts, g.Out, rows, 128, 1})
	x := g.describe(b, v[n/2:], side{order, g.Experts, g.In, rows, cols, 1})
	dw := b.Describe(v[len(v)-1], at, []int{128, cols})
	steps := b.Load(v[n].At(expert))
	if dy.step > groupRows {
		steps = steps.Add(dy.step - groupRows)
	}
	sum := b.For(row.Const(0), steps.Div(dy.step), row.Const(1),
		[]tt.Value{b.Full(0.0, tt.F32, 128, cols)},
		func(k tt.Value, sum []tt.Value) []tt.Value {
			return []tt.Value{g.multiply(b, dy.tile(expert, row, k), x.tile(expert, col, k), sum[0])}
		})
	sum[0] = g.unscaled(b, v[n+1:], sum[0])
	if !g.Wide {
		sum[0] = sum[0].To(tt.BF16)
	}
	if g.order() == "oek" {
		dw.Store(sum[0], row, expert.Mul(g.In).Add(col))
	} else {
		dw.Store(sum[0], expert.Mul(g.Out).Add(row), col)
	}
	return b.Kernel(tt.Launch{Grid: [3]int{g.Out / 128 * across, g.Experts}, Warps: 8, Stages: 3})
}
