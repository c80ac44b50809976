package fused

import (
	"math"

	"github.com/deepwell/deepwell/kernels/expr"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A tile is the part of a matrix [rows, cols] that one program computes: 32 rows, a block of scales
// high, and 128 or 256 columns.
type tile struct {
	b          *tt.Builder
	batch      int                   // matrices, one after the other
	rows, cols int                   // of each matrix
	wide       int                   // columns of the tile
	row, col   tt.Value              // the numbers of its rows and columns, [32] and [wide]
	masked     bool                  // some tiles lie partly outside
	saved      map[tt.Value]tt.Value // where operands are written as they are read, by pointer
}

// tileRows is the height of tiles: the blocks of MXFP8 along columns, and two of NVFP4.
const tileRows = 32

// tileCols is the width of tiles: with 256 columns there are half the programs.
func tileCols(m Matrix) int {
	if m.Cols%256 == 0 {
		return 256
	}
	return 128
}

// newTile makes the programs of a grid the tiles of a matrix whose rows are padded to a multiple:
// swizzled scales are laid out for 128 rows at a time, and the padding is written. Tiles of 32×256
// with 4 warps and 32×128 with 2 take the same registers and nearly the same instructions;
// reference/quantize_fusion.md has larger ones, which need more.
func newTile(b *tt.Builder, m Matrix, pad int) (*tile, tt.Launch) {
	t := &tile{b: b, batch: m.Batch, rows: m.Rows, cols: m.Cols, wide: tileCols(m)}
	warps := t.wide / 64
	if !m.counted() {
		b.Fail("%d matrices of %d×%d", m.Batch, m.Rows, m.Cols)
	}
	t.masked = m.Rows%pad != 0 || m.Cols%t.wide != 0
	t.row = b.Program(0).Mul(tileRows).Add(b.Range(tileRows))
	t.col = b.Program(1).Mul(t.wide).Add(b.Range(t.wide))
	grid := [3]int{ceil(m.Rows, pad) * pad / tileRows, ceil(m.Cols, t.wide), m.Batch}
	return t, tt.Launch{Grid: grid, Warps: warps}
}

// counted tells whether 32 bits count the rows and columns of all matrices. Elements and scales are
// counted by 64 bits where that is needed.
func (m Matrix) counted() bool {
	const most = math.MaxInt32 - 128 // tiles may lie partly outside
	for _, n := range []int{m.Batch, m.Rows, m.Cols} {
		if n < 1 || n > most {
			return false
		}
	}
	return m.Batch*m.Rows <= most && m.Batch*m.Cols <= most
}

// scales gives the numbers of rows and of blocks of a size, whose scales are stored, 64 bits where
// there are more scales than 32 bits count.
func (t *tile) scales(row, block tt.Value, size int) (r, k tt.Value) {
	if t.batch*t.rows*t.cols/size >= 1<<31 {
		return row.To(tt.I64), block.To(tt.I64)
	}
	return row, block
}

// globalRow counts rows through all matrices.
func (t *tile) globalRow() tt.Value {
	if t.batch == 1 {
		return t.row
	}
	return t.row.Add(t.b.Program(2).Mul(t.rows))
}

func ceil(n, by int) int { return (n + by - 1) / by }

// place is where elements [len(row), len(col)] stand in a matrix with that many rows and columns:
// 64 bits wide where the matrix has more elements than 32 bits count.
func place(row, col tt.Value, rows, cols int) tt.Value {
	r, c := row.Expand(1), col.Expand(0)
	if rows*cols >= 1<<31 {
		r, c = r.To(tt.I64), c.To(tt.I64)
	}
	return r.Mul(cols).Add(c)
}

// inside tells which elements of the tile the matrix has, [32, wide].
func (t *tile) inside() tt.Value {
	return t.row.Is("lt", t.rows).Expand(1).And(t.col.Is("lt", t.cols).Expand(0))
}

// load reads the tile of a matrix of the same shape; zeros outside.
func (t *tile) load(x tt.Value) tt.Value {
	at := place(t.globalRow(), t.col, t.batch*t.rows, t.cols)
	var v tt.Value
	if t.masked {
		v = t.b.LoadIf(t.inside(), x.At(at), 0)
	} else {
		v = t.b.Load(x.At(at))
	}
	if to := t.saved[x]; to != nil {
		t.store(to.At(at), v, t.inside)
	}
	return v
}

// operand reads what an expression takes: a value for each element, row or column, or one.
func (t *tile) operand(x tt.Value, over expr.Over) tt.Value {
	switch over {
	case expr.Rows:
		return t.perRow(x)
	case expr.Cols:
		return t.perColumn(x)
	case expr.Scalar:
		return t.b.Load(x).Broadcast(1, 1)
	}
	return t.load(x)
}

// store writes everything, or what a mask lets through where tiles lie partly outside.
func (t *tile) store(p, v tt.Value, mask func() tt.Value) {
	if t.masked {
		t.b.StoreIf(mask(), p, v)
		return
	}
	t.b.Store(p, v)
}

// keep writes the tile y of a matrix of the same shape.
func (t *tile) keep(to, y tt.Value) {
	t.store(to.At(place(t.globalRow(), t.col, t.batch*t.rows, t.cols)), y, t.inside)
}

// perRow reads a number for each row, [32, 1].
func (t *tile) perRow(x tt.Value) tt.Value {
	if t.masked {
		return t.b.LoadIf(t.row.Is("lt", t.rows), x.At(t.globalRow()), 0).Expand(1)
	}
	return t.b.Load(x.At(t.globalRow())).Expand(1)
}

// perColumn reads a number for each column, [1, wide].
func (t *tile) perColumn(x tt.Value) tt.Value {
	if t.masked {
		return t.b.LoadIf(t.col.Is("lt", t.cols), x.At(t.col), 0).Expand(0)
	}
	return t.b.Load(x.At(t.col)).Expand(0)
}

// SwizzledShape is the shape of the scales of a matrix of rows and blocks, in the order that tensor
// cores read them: 512 bytes for 128 rows and 4 blocks, padded with zeros.
func SwizzledShape(rows, blocks int) []int { return []int{ceil(rows, 128), ceil(blocks, 4), 512} }

// swizzled is where the scale of a row and block stands (PTX ISA, tcgen05 scale factor layout 4X;
// cuDNN's block-scaled matmul takes the same).
func swizzled(row, block tt.Value, blocks int) tt.Value {
	at := row.Div(128).Mul(ceil(blocks, 4) * 512).Add(block.Div(4).Mul(512))
	return at.Add(row.Rem(32).Mul(16)).Add(row.Rem(128).Div(32).Mul(4)).Add(block.Rem(4))
}
