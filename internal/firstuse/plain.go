package firstuse

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
)

// A result is what a kernel must write, in the order of its results: a matrix in bfloat16, or the
// codes of one, which are followed by their scales.
type result struct {
	bytes  []byte
	values []float32 // that codes and scales stand for; nil of scales
}

// plain computes what a kernel writes of matrices, one after the other, without its stacks.
func plain(s fused.Spec, k *triton.Kernel, in [][]float32) (list []result, err error) {
	if s.Format != dtype.MXFP8 && s.Format != dtype.NVFP4 || s.Swizzled {
		return nil, fmt.Errorf("the host has no plain form of %s", s)
	}
	n := s.Batch * s.Rows * s.Cols
	for part, y := range expr.Do(&s.Expr, in, func(step expr.Step, args [][]float32) []float32 {
		return each(step, args, n)
	}) {
		bits := make([]uint16, n)
		for i, v := range y {
			bits[i] = dtype.BF16FromF32(v)
			y[i] = dtype.F32FromBF16(bits[i])
		}
		if s.Keep {
			list = append(list, result{bytes: words(bits), values: y})
		}
		var more []result
		switch {
		case s.Amax:
			more, err = largest(s, k, bits)
		case s.Format == dtype.NVFP4:
			more, err = four(s, part, bits)
		default:
			more, err = eight(s, part, bits)
		}
		if err != nil {
			return nil, err
		}
		list = append(list, more...)
	}
	return list, nil
}

// eight are codes and scales of MXFP8.
func eight(s fused.Spec, part int, bits []uint16) (list []result, err error) {
	n := len(bits)
	if s.AlongOf(part) {
		q, scales := make([]byte, n), make([]byte, n/block.MXFP8Size)
		if err := block.MXFP8(q, scales, bits); err != nil {
			return nil, err
		}
		list = append(list, codes(s.Format, q, scales)...)
	}
	if s.Across {
		q, scales := make([]byte, n), make([]byte, n/block.MXFP8Size)
		for b := range s.Batch {
			size := s.Rows * s.Cols
			at, scale := b*size, b*size/block.MXFP8Size
			if err := block.MXFP8Columns(q[at:at+size], scales[scale:scale+size/block.MXFP8Size],
				bits[at:at+size], s.Rows, s.Cols); err != nil {
				return nil, err
			}
		}
		list = append(list, codes(s.Format, q, scales)...)
	}
	return list, nil
}

func codes(f dtype.Format, q, scales []byte) []result {
	return []result{{bytes: q, values: decoded(f, q, scales)}, {bytes: scales}}
}

// decoded gives the numbers that codes and scales stand for.
func decoded(f dtype.Format, q, scales []byte) []float32 {
	if f == dtype.NVFP4 {
		values := make([]float32, 2*len(q))
		if err := block.FromNVFP4(values, q, scales, 1); err != nil {
			return nil
		}
		return values
	}
	values := make([]float32, len(q))
	if err := block.FromMXFP8(values, q, scales); err != nil {
		return nil // a difference, which the caller sees
	}
	return values
}

// words gives the bytes of bfloat16 bits.
func words(x []uint16) []byte {
	b := make([]byte, 0, 2*len(x))
	for _, w := range x {
		b = binary.LittleEndian.AppendUint16(b, w)
	}
	return b
}

// each computes one step for every element. Booleans are 1 and 0.
func each(s expr.Step, args [][]float32, n int) []float32 {
	out := make([]float32, n)
	at := func(k, i int) float32 { return args[k][i] }
	for i := range out {
		switch s.Op {
		case "fill":
			out[i] = float32(s.By)
		case "select":
			if out[i] = at(2, i); at(0, i) != 0 {
				out[i] = at(1, i)
			}
		default:
			var b float32
			if len(args) > 1 {
				b = at(1, i)
			}
			out[i] = one(s, at(0, i), b)
		}
	}
	return out
}

// one computes a step of one or two numbers, in float32.
func one(s expr.Step, a, b float32) float32 {
	wide := float64(a)
	is := func(yes bool) float32 {
		if yes {
			return 1
		}
		return 0
	}
	switch s.Op {
	case "add":
		return a + b
	case "sub":
		return a - b
	case "mul":
		return a * b
	case "div":
		return a / b
	case "neg":
		return -a
	case "scale":
		return a * float32(s.By)
	case "shift":
		return a + float32(s.By)
	case "exp":
		return float32(math.Exp(wide))
	case "log":
		return float32(math.Log(wide))
	case "sqrt":
		return float32(math.Sqrt(wide))
	case "rsqrt":
		return float32(1 / math.Sqrt(wide))
	case "tanh":
		return float32(math.Tanh(wide))
	case "sigmoid":
		return float32(1 / (1 + math.Exp(-wide)))
	case "relu":
		return max(a, 0)
	case "eq":
		return is(a == b)
	case "ne":
		return is(a != b)
	case "lt":
		return is(a < b)
	case "le":
		return is(a <= b)
	case "gt":
		return is(a > b)
	case "ge":
		return is(a >= b)
	}
	return float32(math.NaN()) // a step that package expr has and this list lacks: a test finds it
}
