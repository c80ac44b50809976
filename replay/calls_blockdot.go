package replay

import (
	"slices"

	"github.com/deepwell/deepwell/diag"
)

// Tensor cores read scales in tiles of 128 rows and 4 columns (see lower/gpu).
const (
	tileRows = 128
	tileCols = 4
)

// blockOf is the number of elements that share a scale, by the scale's type: MXFP8 and NVFP4.
var blockOf = map[elemType]int64{typeE8M0: 32, typeE4M3: 16}

// blockScaledDot rewrites cuDNN's product of two quantized matrices [rows, sum], given as codes and
// scales: A, B, scales of A, scales of B. Every element is multiplied by the scale of its block.
// Where an operand has fewer rows or blocks than its scales have, the scales are padding. Matrices
// may go side by side, [batch, rows, sum], each with tiles of scales of its own.
func (w *writer) blockScaledDot(s *site) []*value {
	if len(s.values) != 4 {
		w.refuse(diag.ReplayCall, "%s has %d operands", s.target, len(s.values))
	}
	rank := int64(len(s.from[0].shape.dims))
	var sides [2]*value
	for k := range sides {
		codes, scales := s.from[k].shape, s.from[k+2].shape
		block, n := blockOf[scales.typ], rank-1
		switch {
		case !codes.rowMajor() || !scales.rowMajor() || rank < 2 || rank > 3 ||
			int64(len(codes.dims)) != rank || int64(len(scales.dims)) != rank:
			w.refuseLayout("%s takes matrices in row-major layout", s.target)
		case block == 0 || codes.typ != typeE4M3 && codes.typ != typeE2M1 ||
			codes.dims[n]%block != 0:
			w.refuse(diag.ReplayCall, "%s of %v of %s with scales of %s", s.target, codes.dims,
				codes.typ, scales.typ)
		}
		blocks := append(slices.Clone(codes.dims[:n]), codes.dims[n]/block)
		at := make([]int64, rank)
		for i := range at {
			at[i] = int64(i)
		}
		scale := w.fromCodes(w.untiled(s, s.values[k+2]), scales.typ)
		scale = w.broadcast(w.slice(scale, blocks...), append(slices.Clone(blocks), block), at...)
		x := w.elementwise("multiply", w.fromCodes(s.values[k], codes.typ),
			w.reshape(scale, codes.dims...))
		sides[k] = w.convert(x, typeBF16)
	}
	d := dotDims{contracting: [2][]int64{{rank - 1}, {rank - 1}}}
	if rank == 3 {
		d.batch = [2][]int64{{0}, {0}}
	}
	v := w.dot(sides[0], sides[1], d)
	return []*value{w.convert(v, s.shape.results()[0].typ)}
}

// untiled puts scales, as tensor cores read them, in the order of rows and columns. A tile has 32
// lines of 16 bytes, with rows i, i+32, i+64 and i+96 side by side in line i. Matrices of a batch
// are whole tiles, and so follow each other as rows do.
func (w *writer) untiled(s *site, scales *value) *value {
	n := len(scales.shape.dims) - 1
	rows, cols := scales.shape.dims[n-1], scales.shape.dims[n]
	if rows%tileRows != 0 || cols%tileCols != 0 {
		w.refuse(diag.ReplayCall, "%s has scales %v, which are no whole tiles", s.target,
			scales.shape.dims)
	}
	tiles := elements(scales.shape.dims) / (tileRows * cols)
	x := w.reshape(scales, tiles, cols/tileCols, tileRows/4, 4, tileCols)
	return w.reshape(w.transpose(x, 0, 3, 2, 1, 4), scales.shape.dims...)
}
