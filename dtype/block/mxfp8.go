package block

import (
	"github.com/deepwell/deepwell/dtype"
)

// MXFP8 writes an E4M3 element to q for every number and an E8M0 scale to scales for every 32.
// Whole rows may follow each other.
func MXFP8[T Number](q, scales []byte, src []T) error {
	if err := check("MXFP8", len(src), len(q), len(scales), MXFP8Size, 1); err != nil {
		return err
	}
	mxfp8(best, q, scales, src)
	return nil
}

func mxfp8[T Number](on level, q, scales []byte, src []T) {
	for done := 0; done < len(scales); {
		// The kernel stops before a block that holds an infinity or a NaN, or at once.
		at := done * MXFP8Size
		done += mxfp8Kernel(on, q[at:], scales[done:], src[at:])
		if done < len(scales) {
			at = done * MXFP8Size
			scales[done] = mxfp8Block(q[at:at+MXFP8Size], src[at:at+MXFP8Size])
			done++
		}
	}
}

// mxfp8Block is what kernels are compared with.
func mxfp8Block[T Number](q []byte, src []T) (scale byte) {
	var x [MXFP8Size]float32
	Widen(x[:], src)
	scale, factor := powerScale(largest(x[:]), 448)
	if scale == 0xff {
		for i := range q {
			q[i] = 0x7f
		}
		return scale
	}
	for i, f := range x {
		q[i] = dtype.E4M3FromF32(f * factor)
	}
	return scale
}

// FromMXFP8 gives the numbers that MXFP8's blocks stand for. All are exact, but for those below
// float32's normal range.
func FromMXFP8(dst []float32, q, scales []byte) error {
	if err := check("MXFP8", len(dst), len(q), len(scales), MXFP8Size, 1); err != nil {
		return err
	}
	var values [256]float32
	for b := range values {
		values[b] = dtype.F32FromE4M3(byte(b))
	}
	for j, s := range scales {
		scale := dtype.F32FromE8M0(s)
		from, to := q[j*MXFP8Size:][:MXFP8Size], dst[j*MXFP8Size:][:MXFP8Size]
		for i, b := range from {
			to[i] = values[b] * scale
		}
	}
	return nil
}

// MXFP8Columns quantizes a matrix of rows×cols along its columns and writes the result transposed,
// as a product that contracts the rows reads it: q is cols×rows, scales are cols×(rows/32).
func MXFP8Columns[T Number](q, scales []byte, src []T, rows, cols int) error {
	if err := checkMatrix("MXFP8", rows, cols, MXFP8Size, 1, len(src)); err != nil {
		return err
	}
	if err := check("MXFP8", len(src), len(q), len(scales), MXFP8Size, 1); err != nil {
		return err
	}
	const strip = 64 // columns at once: a cache line of bfloat16, and 64 blocks for the kernel
	var (
		transposed [strip * MXFP8Size]T
		codes      [strip * MXFP8Size]byte
		marks      [strip]byte
	)
	for c0 := 0; c0 < cols; c0 += strip {
		n := min(strip, cols-c0)
		for r0 := 0; r0 < rows; r0 += MXFP8Size {
			for r := range MXFP8Size {
				for c, v := range src[(r0+r)*cols+c0:][:n] {
					transposed[c*MXFP8Size+r] = v
				}
			}
			err := MXFP8(codes[:n*MXFP8Size], marks[:n], transposed[:n*MXFP8Size])
			if err != nil {
				return err
			}
			for c := range n {
				copy(q[(c0+c)*rows+r0:], codes[c*MXFP8Size:(c+1)*MXFP8Size])
				scales[((c0+c)*rows+r0)/MXFP8Size] = marks[c]
			}
		}
	}
	return nil
}
