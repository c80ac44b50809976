package firstuse

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/kernels/triton"
)

// SmallNorm gives a norm of fewer rows: of 4,096 columns and more, some programs of a gradient have
// two of them.
func SmallNorm(n rownorm.Norm) rownorm.Norm {
	n.Rows = min(n.Rows, 1000)
	if n.Rounds > 0 {
		n.Rounds = 3
	}
	return n
}

// compareNorm is [Compare] of a norm of rows or of its gradient.
func compareNorm(ctx context.Context, e *engine.Engine, n rownorm.Norm, seed uint64) (
	apart float64, err error) {
	k, err := n.Kernel()
	if err != nil {
		return 0, err
	}
	d := drawNorm(n, k, rand.New(rand.NewPCG(seed, 22)))
	got, err := run(ctx, e, k, d.operands)
	if err != nil {
		return 0, err
	}
	return d.apartNorm(n, k, got), nil
}

// drawNorm makes random operands, in the order of the kernel's arguments.
func drawNorm(n rownorm.Norm, k *triton.Kernel, r *rand.Rand) (d drawn) {
	for i, a := range k.Args {
		size := elements(a.Shape)
		switch {
		case a.Result:
			return d
		case i < n.Operands():
			if slices.Contains(n.From, i) {
				size /= n.Rounds
			}
			bits, values := make([]uint16, size), make([]float32, size)
			for at := range bits {
				bits[at] = dtype.BF16FromF32(float32(r.NormFloat64() * 2))
				values[at] = dtype.F32FromBF16(bits[at])
			}
			b := words(bits)
			if slices.Contains(n.From, i) {
				rest := bytes.Repeat([]byte{untouched}, len(b)*(n.Rounds-1))
				b = slices.Concat(rest[:round*len(b)], b, rest[round*len(b):])
			}
			d.operands, d.values = append(d.operands, b), append(d.values, values)
		case a.Elem == triton.I32:
			d.operands = append(d.operands, binary.LittleEndian.AppendUint32(nil, round))
		default:
			d.operands = append(d.operands, bytes.Repeat([]byte{untouched}, size*a.Elem.Bits()/8))
		}
	}
	return d
}

// quantized gives what the codes of MXFP8 of some numbers stand for; nil is a difference.
func quantized(x []float32) []float32 {
	q, scales := make([]byte, len(x)), make([]byte, len(x)/block.MXFP8Size)
	if err := block.MXFP8(q, scales, x); err != nil {
		return nil
	}
	return decoded(dtype.MXFP8, q, scales)
}

// apartNorm gives how far results are from the plain form.
func (d drawn) apartNorm(n rownorm.Norm, k *triton.Kernel, got [][]byte) (apart float64) {
	var want [][]float32
	for _, list := range n.Plain(d.values) {
		w := make([]float32, len(list))
		for i, v := range list {
			w[i] = float32(v)
		}
		want = append(want, w)
	}
	for _, i := range n.Saved {
		want = append(want, d.values[i])
	}
	for _, i := range n.Kept {
		want = append(want, want[i])
	}
	results := k.Args[len(k.Args)-len(got):]
	if len(want) != len(got) {
		return wholly
	}
	for i, b := range got {
		if results[i].Elem == triton.I8 { // scales, compared with their codes
			continue
		}
		kind := dtype.BF16
		if results[i].Elem == triton.F32 {
			kind = dtype.F32
		}
		if results[i].InPlace != "" {
			size := len(b) / n.Rounds
			rest := slices.Concat(slices.Clone(b[:round*size]), b[(round+1)*size:])
			if slices.ContainsFunc(rest, func(b byte) bool { return b != untouched }) {
				return wholly // it wrote into what is another round's
			}
			b = b[round*size:][:size]
		}
		if results[i].Elem == triton.E4M3 {
			apart = max(apart, distance(decoded(dtype.MXFP8, b, got[i+1]), quantized(want[i])))
			continue
		}
		sum := make([]float32, len(want[i])) // of parts, if there are any
		for at, v := range kind.Values(b) {
			sum[at%len(sum)] += float32(v)
		}
		apart = max(apart, distance(sum, want[i]))
	}
	return apart
}
