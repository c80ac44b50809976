package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strided"
	"github.com/deepwell/deepwell/ir"
)

// A Box is the region of a global array that one device's shard covers. The shard may order its
// dimensions differently, and may be padded beyond the global size: the padding stays zero.
type Box struct {
	// Start and Size are the region in the global array's dimensions, in elements.
	Start, Size []int64
	// strides are the shard's strides along the global array's dimensions, in elements.
	strides []int64
}

// BoxOf computes the region of a device's shard.
func BoxOf(mesh []ir.Axis, whole []ir.Dim, shard ir.Type, device int) Box {
	n := len(whole)
	b := Box{Start: make([]int64, n), Size: make([]int64, n), strides: make([]int64, n)}
	stride := int64(1)
	for _, d := range slices.Backward(shard.Dims) {
		i := slices.IndexFunc(whole, func(w ir.Dim) bool { return w.Name == d.Name })
		at := int64(0)
		for _, a := range shard.Place.Nested(mesh, d.Name) {
			size, stride := ir.Along(mesh, a.Name)
			at = at*size + int64(device)/stride%size
		}
		b.Start[i] = at * d.Size
		b.Size[i] = max(min(d.Size, whole[i].Size-b.Start[i]), 0)
		b.strides[i] = stride
		stride *= d.Size
	}
	return b
}

// axes returns the loop nest that copies from a dense array (of the given shape, whose first
// element has the global index start) to the shard. at is the box's first element in that array.
func (b Box) axes(shape, start []int64) (at int64, axes []strided.Axis) {
	stride := int64(1)
	axes = make([]strided.Axis, len(shape))
	for i := len(shape) - 1; i >= 0; i-- {
		axes[i] = strided.Axis{N: b.Size[i], Src: stride, Dst: b.strides[i]}
		at += (b.Start[i] - start[i]) * stride
		stride *= shape[i]
	}
	return at, axes
}

// Take fills a shard from the dense, row-major bytes of its box; elements have width bytes.
func (b Box) Take(shard, box []byte, width int64) {
	_, axes := b.axes(b.Size, b.Start)
	strided.Copy(shard, box, width, axes)
}

// Overlap is the region that the box and another share; ok is false if they share nothing.
func (b Box) Overlap(start, size []int64) (shared Box, ok bool) {
	shared = Box{Start: make([]int64, len(start)), Size: make([]int64, len(start))}
	for i := range start {
		shared.Start[i] = max(b.Start[i], start[i])
		shared.Size[i] = min(b.Start[i]+b.Size[i], start[i]+size[i]) - shared.Start[i]
		if shared.Size[i] <= 0 {
			return shared, false
		}
	}
	return shared, true
}

// Span is where a region that the box contains lies in its shard, from the region's first element
// to behind its last. dense tells that nothing else lies between, and rows follow each other.
func (b Box) Span(start, size []int64) (from, to int64, dense bool) {
	last, row := int64(0), int64(1)
	dense = true
	for i, n := range slices.Backward(size) {
		from += (start[i] - b.Start[i]) * b.strides[i]
		last += (n - 1) * b.strides[i]
		dense = dense && (n == 1 || b.strides[i] == row)
		row *= n
	}
	return from, from + last + 1, dense
}

// Give copies a region that the box contains from its shard into the dense, row-major bytes of a
// larger one. shard begins at the shard's element first; elements have width bytes.
func (b Box) Give(larger []byte, of, region Box, shard []byte, first, width int64) {
	from, to, dense := -first, int64(0), int64(1)
	axes := make([]strided.Axis, len(region.Size))
	for i := len(region.Size) - 1; i >= 0; i-- {
		axes[i] = strided.Axis{N: region.Size[i], Src: b.strides[i], Dst: dense}
		from += (region.Start[i] - b.Start[i]) * b.strides[i]
		to += (region.Start[i] - of.Start[i]) * dense
		dense *= of.Size[i]
	}
	if dense > 0 {
		strided.Copy(larger[to*width:], shard[from*width:], width, axes)
	}
}

// sizes returns the lengths of dimensions, and as many zeros: a shape and its origin.
func sizes(dims []ir.Dim) (list, zeros []int64) {
	list = lists.Map(dims, func(d ir.Dim) int64 { return d.Size })
	return list, make([]int64, len(dims))
}

// TakeShardBytes fills a device's shard from the dense bytes of the global array.
func TakeShardBytes(shard, data []byte, mesh []ir.Axis, whole []ir.Dim, t ir.Type, device int) {
	if at, axes := BoxOf(mesh, whole, t, device).axes(sizes(whole)); len(shard) > 0 {
		width := int64(len(shard)) / t.Shape().Elements()
		strided.Copy(shard, data[at*width:], width, axes)
	}
}

// PutShardBytes copies a device's shard to its region of the global array; padding is dropped.
func PutShardBytes(data, shard []byte, mesh []ir.Axis, whole []ir.Dim, t ir.Type, device int) {
	if at, axes := BoxOf(mesh, whole, t, device).axes(sizes(whole)); len(shard) > 0 {
		width := int64(len(shard)) / t.Shape().Elements()
		strided.Copy(data[at*width:], shard, width, strided.Swap(axes))
	}
}

// TakeShard returns a device's shard of data, which has the dense layout of whole. It copies
// element by element: TakeShardBytes is the fast way.
func TakeShard[E any](mesh []ir.Axis, whole []ir.Dim, data []E, t ir.Type, device int) []E {
	out := make([]E, t.Shape().Elements())
	at, axes := BoxOf(mesh, whole, t, device).axes(sizes(whole))
	strided.Each(axes, func(from, to int64) { out[to] = data[at+from] })
	return out
}

// PutShard copies a device's shard to its region of data, element by element.
func PutShard[E any](mesh []ir.Axis, whole []ir.Dim, data []E, t ir.Type, device int, shard []E) {
	at, axes := BoxOf(mesh, whole, t, device).axes(sizes(whole))
	strided.Each(axes, func(to, from int64) { data[at+to] = shard[from] })
}
