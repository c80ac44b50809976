package block

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// Global gives the two scales of a whole NVFP4 tensor whose greatest magnitude is amax: what its
// numbers are multiplied by on the way in, 2688/amax, and on the way out, the reciprocal of that. A
// tensor that is shared out needs the amax of all its parts.
func Global(amax float32) (in, out float32) {
	in = min(6*448/amax, math.MaxFloat32)
	if amax == 0 || in == 0 {
		in = 1
	}
	return in, 1 / in
}

// A grid holds what all blocks of an NVFP4 tensor share.
type grid struct {
	sixth float32 // the scale in, over the largest element
	out   float32
}

func newGrid(amax float32) grid {
	in, out := Global(amax)
	// The product is rounded once here; (amax/6)·in would round twice and give other bytes.
	return grid{sixth: in * float32(1.0/6), out: out}
}

// scale gives a block's E4M3 scale and what its numbers are multiplied by. A small block gets the
// scale 0, and then its factor is the largest number.
func (g grid) scale(amax uint32) (scale byte, factor float32) {
	s := math.Float32frombits(amax) * g.sixth
	if s != s {
		return 0x7f, s
	}
	scale = dtype.E4M3FromF32(s) // saturates at 448
	return scale, min(1/(dtype.F32FromE4M3(scale)*g.out), math.MaxFloat32)
}

// NVFP4 writes E2M1 elements to q, two to a byte and the first in the low half, and an E4M3 scale
// for every 16. The greatest magnitude of the whole tensor is amax.
func NVFP4[T Number](q, scales []byte, src []T, amax float32) error {
	if err := check("NVFP4", len(src), len(q), len(scales), NVFP4Size, 2); err != nil {
		return err
	}
	nvfp4(best, q, scales, src, newGrid(amax))
	return nil
}

func nvfp4[T Number](on level, q, scales []byte, src []T, g grid) {
	for done := 0; done < len(scales); {
		// The kernel stops before a block that holds a NaN, or at once.
		at := done * NVFP4Size
		done += nvfp4Kernel(on, q[at/2:], scales[done:], src[at:], g)
		if done < len(scales) {
			at = done * NVFP4Size
			var x [NVFP4Size]float32
			Widen(x[:], src[at:at+NVFP4Size])
			scale, factor := g.scale(largest(x[:]))
			scales[done] = scale
			Pack(q[at/2:at/2+NVFP4Size/2], x[:], factor)
			done++
		}
	}
}

// Pack writes the elements of a block. A NaN in x makes factor one, and all elements 7.
func Pack(q []byte, x []float32, factor float32) {
	for i := range q {
		q[i] = dtype.E2M1FromF32(x[2*i]*factor) | dtype.E2M1FromF32(x[2*i+1]*factor)<<4
	}
}

// NVFP4Tiles quantizes a matrix of weights with one scale for every tile of 16×16, so that it and
// its transpose have the same elements. The scale is written for each row of the tile: scales are
// rows×(cols/16), as for NVFP4.
func NVFP4Tiles[T Number](q, scales []byte, src []T, rows, cols int, amax float32) error {
	if err := checkMatrix("NVFP4", rows, cols, NVFP4Size, NVFP4Size, len(src)); err != nil {
		return err
	}
	if err := check("NVFP4", len(src), len(q), len(scales), NVFP4Size, 2); err != nil {
		return err
	}
	g := newGrid(amax)
	for r0 := 0; r0 < rows; r0 += NVFP4Size {
		for c := 0; c < cols; c += NVFP4Size {
			var tile [NVFP4Size][NVFP4Size]float32
			var most uint32
			for r := range tile {
				Widen(tile[r][:], src[(r0+r)*cols+c:][:NVFP4Size])
				most = max(most, largest(tile[r][:]))
			}
			scale, factor := g.scale(most)
			for r := range tile {
				at := (r0+r)*cols + c
				scales[at/NVFP4Size] = scale
				Pack(q[at/2:at/2+NVFP4Size/2], tile[r][:], factor)
			}
		}
	}
	return nil
}

// FromNVFP4 gives the numbers that NVFP4's blocks stand for; out is the second scale that Global
// gives. Element times (scale times out): the product in brackets is what the quantizer divided by.
func FromNVFP4(dst []float32, q, scales []byte, out float32) error {
	if err := check("NVFP4", len(dst), len(q), len(scales), NVFP4Size, 2); err != nil {
		return err
	}
	for j, s := range scales {
		scale := dtype.F32FromE4M3(s) * out
		from, to := q[j*NVFP4Size/2:][:NVFP4Size/2], dst[j*NVFP4Size:][:NVFP4Size]
		for i, b := range from {
			to[2*i], to[2*i+1] = dtype.F32FromE2M1(b)*scale, dtype.F32FromE2M1(b>>4)*scale
		}
	}
	return nil
}
