package firstuse

import (
	"encoding/binary"
	"errors"
	"math"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
)

// The operands of NVFP4 kernels beside their sources: the largest magnitudes of layers, seed, step
// and layer of random bits, and places from a number on.
const (
	firstAmax            = 64
	seed, training, deep = 5, 7, 3
	firstPlace           = 1024
)

// amaxOf is the largest magnitude that a layer is said to have.
func amaxOf(layer int) float32 { return firstAmax + 16*float32(layer) }

// beside gives an operand of NVFP4 kernels.
func beside(a triton.Arg) (b []byte) {
	for i := range elements(a.Shape) {
		n := uint32(firstPlace + i)
		switch {
		case strings.HasPrefix(a.Name, "amax"):
			n = math.Float32bits(amaxOf(i))
		case a.Name == "noise":
			n = [3]uint32{seed, training, deep}[i]
		}
		b = binary.LittleEndian.AppendUint32(b, n)
	}
	return b
}

// largest are the bits of the largest magnitudes of each program's tile.
func largest(s fused.Spec, k *triton.Kernel, bits []uint16) (list []result, err error) {
	rows, cols := k.Grid[0], k.Grid[1]
	high, wide := 32, 128
	if s.Cols%256 == 0 {
		wide = 256
	}
	for way, is := range []bool{s.Along, s.Across} {
		if !is {
			continue
		}
		tops := make([]uint32, s.Batch*rows*cols)
		for b := range s.Batch {
			x := bits[b*s.Rows*s.Cols:][:s.Rows*s.Cols]
			if way == 1 {
				t, err := transformed(s, x)
				if err != nil {
					return nil, err
				}
				x = make([]uint16, len(t))
				if err := block.Transpose(x, t, s.Cols, s.Rows); err != nil {
					return nil, err
				}
			}
			for i, w := range x {
				at := (b*rows+i/s.Cols/high)*cols + i%s.Cols/wide
				tops[at] = max(tops[at], uint32(w&0x7fff)<<16)
			}
		}
		var r result
		for _, top := range tops {
			r.bytes = binary.LittleEndian.AppendUint32(r.bytes, top)
			r.values = append(r.values, math.Float32frombits(top))
		}
		list = append(list, r)
	}
	return list, nil
}

// transformed is a matrix with columns as rows, each 16 elements of which went through the Hadamard
// transform.
func transformed(s fused.Spec, x []uint16) ([]uint16, error) {
	t := make([]uint16, len(x))
	err := block.Transpose(t, x, s.Rows, s.Cols)
	if !s.Tile {
		err = errors.Join(err, block.Hadamard(t, t))
	}
	return t, err
}

// four are codes and scales of NVFP4.
func four(s fused.Spec, part int, bits []uint16) (list []result, err error) {
	size := s.Rows * s.Cols
	for way, is := range []bool{s.Along, s.Across} {
		if !is {
			continue
		}
		var q, scales []byte
		for b := range s.Batch {
			x, rows, cols := bits[b*size:][:size], s.Rows, s.Cols
			if way == 1 {
				rows, cols = cols, rows
				if x, err = transformed(s, x); err != nil {
					return nil, err
				}
			}
			codes, tops := make([]byte, size/2), make([]byte, size/16)
			amax := amaxOf(b / (s.Batch / max(s.Layers, 1)))
			if s.Tile {
				err = block.NVFP4Tiles(codes, tops, x, rows, cols, amax)
			} else {
				err = block.NVFP4(codes, tops, x, amax)
			}
			if err != nil {
				return nil, err
			}
			if s.Stochastic[way] {
				key := block.NewKey(seed, training, deep*64+uint32(s.Tensors[part][way]))
				dither(s, codes, tops, x, amax, key, way, b)
			}
			q, scales = append(q, codes...), append(scales, tops...)
		}
		list = append(list, codes(s.Format, q, scales)...)
	}
	return list, nil
}

// dither rounds codes by random bits, which depend on the places of elements in the matrix before
// it was transposed.
func dither(s fused.Spec, q, scales []byte, x []uint16, amax float32, key block.Key, way, b int) {
	_, back := block.Global(amax)
	for i, w := range x {
		row, col := b*s.Rows+i/s.Cols, i%s.Cols/4*4
		if way == 1 {
			row, col = b*s.Rows+i%s.Rows/4*4, i/s.Rows
		}
		factor := min(1/(dtype.F32FromE4M3(scales[i/16])*back), math.MaxFloat32)
		code := block.Round(dtype.F32FromBF16(w)*factor, i%4, key.Draw(uint32(firstPlace+row),
			uint32(firstPlace+col)))
		q[i/2] = q[i/2]&^(15<<(4*(i%2))) | code<<(4*(i%2))
	}
}
