package firstuse

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
)

// groupedSlots is the slots of an expert in a comparison: two tiles.
const groupedSlots = 256

// SmallGroup gives a smaller grouped GEMM, whose last tiles are as full.
func SmallGroup(g fused.Group) fused.Group {
	shrunk := func(n int) int {
		if n > 512 {
			return 256 + n%256
		}
		return n
	}
	g.Experts, g.Filled = min(g.Experts, 3), 0
	g.Rows, g.Out, g.In = g.Experts*groupedSlots, shrunk(g.Out), shrunk(g.In)
	if g.Shards > 0 { // two, of two steps each
		g.Shards, g.In = 2, 1024
	}
	return g
}

// compareGroup is [Compare] of a grouped GEMM.
func compareGroup(ctx context.Context, e *engine.Engine, g fused.Group, seed uint64) (apart float64,
	err error) {
	k, err := g.Kernel()
	if err != nil {
		return 0, err
	}
	d, err := drawGroup(g, rand.New(rand.NewPCG(seed, 22)))
	if err != nil {
		return 0, err
	}
	got, err := run(ctx, e, k, d.operands)
	if err != nil {
		return 0, err
	}
	return d.apart(k, got[0]), nil
}

// A side is an operand of a grouped GEMM: its arrays, and the numbers [experts, kept, summed] that
// they stand for.
type side struct {
	arrays       [][]byte
	numbers      []float32
	kept, summed int
}

// drawSide makes a random operand in an order of its dimensions: experts (e), what is kept (o) and
// what is summed over (k).
func drawSide(f dtype.Format, r *rand.Rand, order string, shards, experts, kept,
	summed int) (s side, err error) {
	n := experts * kept * summed
	s = side{numbers: make([]float32, n), kept: kept, summed: summed}
	bits := make([]uint16, n)
	for i := range bits {
		bits[i] = dtype.BF16FromF32(float32(r.NormFloat64()))
		s.numbers[i] = dtype.F32FromBF16(bits[i])
	}
	codes, width := words(bits), 2
	var scales []byte
	each := summed // elements, or bytes of two numbers, along the sum
	switch f {
	case "":
	case dtype.MXFP8:
		codes, scales, width = make([]byte, n), make([]byte, n/block.MXFP8Size), 1
		if err = block.MXFP8(codes, scales, bits); err == nil {
			err = block.FromMXFP8(s.numbers, codes, scales)
		}
	case dtype.NVFP4:
		codes, scales, width, each = make([]byte, n/2), make([]byte, n/block.NVFP4Size), 1, summed/2
		const amax = 6 * 448 // the scale of the tensor is then 1
		if err = block.NVFP4(codes, scales, bits, amax); err == nil {
			err = block.FromNVFP4(s.numbers, codes, scales, 1)
		}
	default:
		err = fmt.Errorf("the host has no plain form of a grouped GEMM in %s", f)
	}
	if err != nil {
		return s, err
	}
	s.arrays = [][]byte{laidOut(codes, order, width, shards, experts, kept, each)}
	if scales != nil {
		s.arrays = append(s.arrays, swizzled(scales, experts*kept, len(scales)/(experts*kept)))
	}
	return s, nil
}

// laidOut puts codes [experts, kept, summed] of a width in bytes in an order of their dimensions,
// in shards along the sum, one behind the other.
func laidOut(codes []byte, order string, width, shards, experts, kept, summed int) (laid []byte) {
	each := summed / shards
	size, at := map[byte]int{'e': experts, 'o': kept, 'k': each}, map[byte]int{}
	for shard := range shards {
		for at[order[0]] = range size[order[0]] {
			for at[order[1]] = range size[order[1]] {
				for at[order[2]] = range size[order[2]] {
					i := ((at['e']*kept+at['o'])*summed + shard*each + at['k']) * width
					laid = append(laid, codes[i:i+width]...)
				}
			}
		}
	}
	return laid
}

// swizzled puts scales of rows and blocks into the order of tensor cores.
func swizzled(scales []byte, rows, blocks int) []byte {
	s := fused.SwizzledShape(rows, blocks)
	out := make([]byte, s[0]*s[1]*s[2])
	for r := range rows {
		for c := range blocks {
			out[(r/128*s[1]+c/4)*512+r%32*16+r%128/32*4+c%4] = scales[r*blocks+c]
		}
	}
	return out
}

// A drawnGroup is a grouped GEMM with operands: the first expert's slots are full, of the others
// one tile is empty, of the last both.
type drawnGroup struct {
	fused.Group
	operands [][]byte
	x, w     side
	filled   []int // rows of each expert
	scale    float64
}

// scalesOfTensors are of what NVFP4 multiplies.
var scalesOfTensors = [2]float32{0.037, 3e-3}

func drawGroup(g fused.Group, r *rand.Rand) (d drawnGroup, err error) {
	d.Group = g
	for e := range g.Experts {
		d.filled = append(d.filled, []int{groupedSlots, groupedSlots / 2, 0}[e])
	}
	var list []int32
	if g.Grad {
		order := "eko"
		if g.Format != "" {
			order = "eok"
		}
		if d.x, err = drawSide(g.Format, r, order, 1, g.Experts, g.Out, groupedSlots); err == nil {
			d.w, err = drawSide(g.Format, r, order, 1, g.Experts, g.In, groupedSlots)
		}
		for _, n := range d.filled {
			list = append(list, int32(n))
		}
	} else {
		if d.x, err = drawSide(g.Format, r, "eok", 1, g.Experts, groupedSlots, g.In); err == nil {
			d.w, err = drawSide(g.Format, r, g.Weights, max(g.Shards, 1), g.Experts, g.Out, g.In)
		}
		for e, n := range d.filled {
			for row := 0; row < groupedSlots; row += 128 {
				if list = append(list, int32(e)); row >= n {
					list[len(list)-1] = -1
				}
			}
		}
	}
	var numbers []byte
	for _, n := range list {
		numbers = binary.LittleEndian.AppendUint32(numbers, uint32(n))
	}
	d.operands = append(slices.Concat(d.x.arrays, d.w.arrays), numbers)
	if d.scale = 1; g.Format.TensorScale() {
		for _, s := range scalesOfTensors {
			d.scale *= float64(s)
			d.operands = append(d.operands, binary.LittleEndian.AppendUint32(nil, math.Float32bits(s)))
		}
	}
	return d, err
}

// apart gives how far a result is from the plain form.
func (d drawnGroup) apart(k *triton.Kernel, got []byte) float64 {
	elem := k.Args[len(k.Args)-1].Elem
	have := numbersOf(elem, got)
	want := make([]float32, d.Experts*d.x.kept*d.w.kept)
	if len(have) != len(want) {
		return wholly
	}
	for e, filled := range d.filled {
		for i := range d.x.kept {
			for j := range d.w.kept {
				at := (e*d.x.kept+i)*d.w.kept + j
				if d.Grad && d.Weights == "oek" {
					at = (i*d.Experts+e)*d.w.kept + j
				}
				v := float32(d.scale * d.sum(e, i, j, filled))
				if elem != triton.F32 {
					v = dtype.F32FromBF16(dtype.BF16FromF32(v))
				}
				want[at] = v
			}
		}
	}
	return distance(have, want)
}

// sum is one element of an expert's result, of which that many rows are filled.
func (d drawnGroup) sum(e, i, j, filled int) (sum float64) {
	n := d.x.summed
	if d.Grad && d.Format == dtype.NVFP4 {
		n = (filled + 255) / 256 * 256 // two tiles at a time; behind tokens they are zeros in programs
	} else if d.Grad {
		n = filled
	} else if i >= filled {
		return 0
	}
	x, w := d.x.numbers[(e*d.x.kept+i)*d.x.summed:], d.w.numbers[(e*d.w.kept+j)*d.w.summed:]
	for k := range n {
		sum += float64(x[k]) * float64(w[k])
	}
	return sum
}
