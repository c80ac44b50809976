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
