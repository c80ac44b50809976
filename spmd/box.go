package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strided"
	"github.com/deepwell/deepwell/ir"
)

// A Box is where a device's piece of an array lies in the whole. The piece may have its dimensions
// in another order, and may be longer than what is left of the whole: that stays zero.
type Box struct {
	// Start and Size are the box in the dimensions of the whole.
	Start, Size []int64
	// piece has the strides of the piece along the dimensions of the whole, in elements.
	piece []int64
}

// BoxOf finds the box of a device. A dimension that several axes cut is cut by the first axis of
// the mesh first.
func BoxOf(mesh []ir.Axis, whole []ir.Dim, piece ir.Type, device int) Box {
	n := len(whole)
	b := Box{Start: make([]int64, n), Size: make([]int64, n), piece: make([]int64, n)}
	stride := int64(1)
	for _, d := range slices.Backward(piece.Dims) {
		i := slices.IndexFunc(whole, func(w ir.Dim) bool { return w.Name == d.Name })
		at := int64(0)
		for _, a := range mesh {
			if piece.Place.On(a.Name) == d.Name {
				size, stride := ir.Along(mesh, a.Name)
				at = at*size + int64(device)/stride%size
			}
		}
		b.Start[i] = at * d.Size
		b.Size[i] = max(min(d.Size, whole[i].Size-b.Start[i]), 0)
		b.piece[i] = stride
		stride *= d.Size
	}
	return b
}

// axes are those of a copy from a dense array of some shape, whose elements begin at start, to the
// piece; at is the first element of the box in that array.
func (b Box) axes(shape, start []int64) (at int64, axes []strided.Axis) {
	stride := int64(1)
	axes = make([]strided.Axis, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		axes[i] = strided.Axis{N: b.Size[i], Src: stride, Dst: b.piece[i]}
		at += (b.Start[i] - start[i]) * stride
		stride *= shape[i]
	}
	return at, axes
}

// Take fills a piece from the dense bytes of its box, row by row; elements have width bytes.
func (b Box) Take(piece, box []byte, width int64) {
	_, axes := b.axes(b.Size, b.Start)
	strided.Copy(piece, box, width, axes)
}

func sizes(dims []ir.Dim) (list, zeros []int64) {
	list = lists.Map(dims, func(d ir.Dim) int64 { return d.Size })
	return list, make([]int64, len(dims))
}

// CutBytes fills a device's piece of the dense bytes of a whole array.
func CutBytes(piece, data []byte, mesh []ir.Axis, whole []ir.Dim, part ir.Type, device int) {
	if at, axes := BoxOf(mesh, whole, part, device).axes(sizes(whole)); len(piece) > 0 {
		width := int64(len(piece)) / part.Shape().Elements()
		strided.Copy(piece, data[at*width:], width, axes)
	}
}

// JoinBytes puts a device's piece into its place in the whole.
func JoinBytes(data, piece []byte, mesh []ir.Axis, whole []ir.Dim, part ir.Type, device int) {
	if at, axes := BoxOf(mesh, whole, part, device).axes(sizes(whole)); len(piece) > 0 {
		width := int64(len(piece)) / part.Shape().Elements()
		strided.Copy(data[at*width:], piece, width, strided.Swap(axes))
	}
}

// Cut takes a device's piece of something that is laid out as whole, an element at a time.
func Cut[E any](mesh []ir.Axis, whole []ir.Dim, data []E, piece ir.Type, device int) []E {
	out := make([]E, piece.Shape().Elements())
	at, axes := BoxOf(mesh, whole, piece, device).axes(sizes(whole))
	strided.Each(axes, func(from, to int64) { out[to] = data[at+from] })
	return out
}

// Join puts a device's piece into its place in the whole, an element at a time.
func Join[E any](mesh []ir.Axis, whole []ir.Dim, data []E, piece ir.Type, device int, part []E) {
	at, axes := BoxOf(mesh, whole, piece, device).axes(sizes(whole))
	strided.Each(axes, func(to, from int64) { data[at+to] = part[from] })
}
