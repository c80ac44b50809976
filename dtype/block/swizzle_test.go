package block

import "fmt"

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
