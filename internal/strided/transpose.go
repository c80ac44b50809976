package strided

import "encoding/binary"

// tile is how many rows are transposed at once: four lines of the cache in the destination, for
// elements of four bytes. The rows are first copied next to each other: where the source's rows are
// a power of two apart, their lines would share one set of the cache and evict each other before
// they are read to their end.
const tile = 64

// transposes tells whether there is a loop for the width of elements.
func (c *copier) transposes() bool { return c.width == 2 || c.width == 4 }

// panelBytes is how much of a row is copied at once, so that the processor sees that it is read in
// order and fetches ahead; the rest of a line of the panel keeps lines out of each other's sets.
const panelBytes, panelLine = 1024, 1024 + 64

func (c *copier) transpose(dst, src []byte) {
	w := c.width
	dstStride, srcStride := c.cols.Dst*w, c.rows.Src*w
	panel := make([]byte, tile*panelLine)
	for i := int64(0); i < c.rows.N; i += tile {
		rows := min(tile, c.rows.N-i)
		for j := int64(0); j < c.cols.N; j += panelBytes / w {
			cols := min(panelBytes/w, c.cols.N-j)
			for k := range rows {
				copy(panel[k*panelLine:][:cols*w], src[(i+k)*srcStride+j*w:])
			}
			c.tiles(dst[j*dstStride+i*w:], panel, rows, cols, dstStride)
		}
	}
}

// tiles transposes a panel of rows.
func (c *copier) tiles(dst, panel []byte, rows, cols, dstStride int64) {
	w := c.width
	j := int64(0)
	for ; rows == tile && j+4 <= cols; j += 4 {
		if w == 4 {
			transpose4(dst[j*dstStride:], panel[j*w:], dstStride)
		} else {
			transpose2(dst[j*dstStride:], panel[j*w:], dstStride)
		}
	}
	if j < cols {
		edge(dst[j*dstStride:], panel[j*w:], w, rows, cols-j, dstStride)
	}
}

// transpose4 moves four columns of a panel of elements of four bytes: (i, j) lies at i·panelLine +
// 4j of the source and at j·dstStride + 4i of the destination. Two rows are read at a time: two
// elements are a word of 64 bits in either array. Arrays of a constant length need no checks of
// bounds.
func transpose4(dst, src []byte, dstStride int64) {
	d0 := (*[4 * tile]byte)(dst)
	d1 := (*[4 * tile]byte)(dst[dstStride:])
	d2 := (*[4 * tile]byte)(dst[2*dstStride:])
	d3 := (*[4 * tile]byte)(dst[3*dstStride:])
	rows := (*[(tile-1)*panelLine + 16]byte)(src)
	for i := range tile / 2 {
		a, b := rows[2*i*panelLine:][:16], rows[2*i*panelLine+panelLine:][:16]
		a0, a1 := binary.LittleEndian.Uint64(a[:8]), binary.LittleEndian.Uint64(a[8:])
		b0, b1 := binary.LittleEndian.Uint64(b[:8]), binary.LittleEndian.Uint64(b[8:])
		binary.LittleEndian.PutUint64(d0[8*i:], a0&0xffffffff|b0<<32)
		binary.LittleEndian.PutUint64(d1[8*i:], a0>>32|b0&^0xffffffff)
		binary.LittleEndian.PutUint64(d2[8*i:], a1&0xffffffff|b1<<32)
		binary.LittleEndian.PutUint64(d3[8*i:], a1>>32|b1&^0xffffffff)
	}
}

// transpose2 is transpose4 for elements of two bytes.
func transpose2(dst, src []byte, dstStride int64) {
	d0 := (*[2 * tile]byte)(dst)
	d1 := (*[2 * tile]byte)(dst[dstStride:])
	d2 := (*[2 * tile]byte)(dst[2*dstStride:])
	d3 := (*[2 * tile]byte)(dst[3*dstStride:])
	rows := (*[(tile-1)*panelLine + 8]byte)(src)
	for i := range tile / 2 {
		a := binary.LittleEndian.Uint64(rows[2*i*panelLine:])
		b := binary.LittleEndian.Uint64(rows[2*i*panelLine+panelLine:])
		binary.LittleEndian.PutUint32(d0[4*i:], uint32(a&0xffff|b<<16))
		binary.LittleEndian.PutUint32(d1[4*i:], uint32(a>>16&0xffff|b&0xffff0000))
		binary.LittleEndian.PutUint32(d2[4*i:], uint32(a>>32&0xffff|b>>16&0xffff0000))
		binary.LittleEndian.PutUint32(d3[4*i:], uint32(a>>48|b>>32&0xffff0000))
	}
}

// edge moves what is less than a tile.
func edge(dst, src []byte, width, rows, cols, dstStride int64) {
	for j := range cols {
		for i := range rows {
			copy(dst[j*dstStride+i*width:][:width], src[i*panelLine+j*width:])
		}
	}
}
