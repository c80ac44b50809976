package block

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
)

// signs are the signs of the rows of the transform, the same in every run: those that
// TransformerEngine uses.
var signs = [NVFP4Size]float32{1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1}

// Hadamard multiplies every 16 bfloat16 numbers by the signed 16×16 Hadamard matrix over 4, which
// spreads an outlier over its block and cancels in a product of two such operands. Both dst and src
// are bits, and may be the same slice. Sums are float32, in stages of stride 1, 2, 4 and 8.
func Hadamard(dst, src []uint16) error {
	if len(src)%NVFP4Size != 0 || len(dst) != len(src) {
		return fmt.Errorf("block: %d numbers, to %d, are no whole blocks of %d",
			len(src), len(dst), NVFP4Size)
	}
	var x [NVFP4Size]float32
	for at := 0; at < len(src); at += NVFP4Size {
		for i, b := range src[at : at+NVFP4Size] {
			x[i] = dtype.F32FromBF16(b) * signs[i]
		}
		for stride := 1; stride < NVFP4Size; stride *= 2 {
			for i := range x {
				if i&stride == 0 {
					x[i], x[i+stride] = x[i]+x[i+stride], x[i]-x[i+stride]
				}
			}
		}
		for i, f := range x {
			dst[at+i] = dtype.BF16FromF32(f * .25)
		}
	}
	return nil
}

// Transpose writes a matrix of rows×cols as cols×rows, in squares that fit the nearest cache.
func Transpose[T any](dst, src []T, rows, cols int) error {
	if err := checkMatrix("", rows, cols, 1, 1, len(src)); err != nil {
		return err
	}
	if len(dst) != len(src) {
		return fmt.Errorf("block: %d numbers do not go into %d", len(src), len(dst))
	}
	const side = 32
	for r0 := 0; r0 < rows; r0 += side {
		for c0 := 0; c0 < cols; c0 += side {
			n := min(side, cols-c0)
			for r := r0; r < min(r0+side, rows); r++ {
				for c, v := range src[r*cols+c0:][:n] {
					dst[(c0+c)*rows+r] = v
				}
			}
		}
	}
	return nil
}

// Tensor cores read scales in tiles of 128 rows and 4 columns, 512 bytes each.
const (
	tileRows = 128
	tileCols = 4
)

// SwizzledLen is the number of bytes that Swizzle writes for scales of rows×cols.
func SwizzledLen(rows, cols int) int {
	return (rows + tileRows - 1) / tileRows * tileRows * ((cols + tileCols - 1) / tileCols * tileCols)
}

// Swizzle writes scales of rows×cols in the order in which cuBLASLt, cuDNN and tensor cores read
// them. Tiles that are not full are filled with zeros.
func Swizzle(dst, scales []byte, rows, cols int) error {
	if err := checkSwizzle(dst, scales, rows, cols); err != nil {
		return err
	}
	clear(dst)
	for i := range rows {
		for j := range cols {
			dst[swizzled(i, j, cols)] = scales[i*cols+j]
		}
	}
	return nil
}

// Unswizzle is the way back.
func Unswizzle(scales, src []byte, rows, cols int) error {
	if err := checkSwizzle(src, scales, rows, cols); err != nil {
		return err
	}
	for i := range rows {
		for j := range cols {
			scales[i*cols+j] = src[swizzled(i, j, cols)]
		}
	}
	return nil
}

func checkSwizzle(tiled, scales []byte, rows, cols int) error {
	if err := checkMatrix("", rows, cols, 1, 1, len(scales)); err != nil {
		return err
	}
	if len(tiled) != SwizzledLen(rows, cols) {
		return fmt.Errorf("block: %d×%d scales take %d bytes in tiles, not %d",
			rows, cols, SwizzledLen(rows, cols), len(tiled))
	}
	return nil
}

// swizzled is where the scale of row i and column j goes. A tile holds its 128 rows as 32 lines of
// 16 bytes: rows i, i+32, i+64 and i+96 side by side.
func swizzled(i, j, cols int) int {
	tile := i/tileRows*((cols+tileCols-1)/tileCols) + j/tileCols
	return tile*tileRows*tileCols + i%32*16 + i%tileRows/32*4 + j%tileCols
}
