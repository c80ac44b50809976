package model

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/ir"
)

// initStd is the deviation of weights at the start, as in GPT-2 and as transformers assumes where a
// configuration does not say otherwise (initializer_range).
const initStd = 0.02

// Init fills dst with a parameter as it is before training: matrices are normal with a deviation of
// 0.02; those that end attention and the MLP are smaller by √(2·layers), so that the sum over
// layers keeps its size (GPT-2; Megatron-LM); norms multiply by 1; biases are 0.
//
// A value depends on the seed, the name of the tensor in a checkpoint and the place in that tensor,
// and on nothing else: stacked or not, sharded or whole, on any processor, weights are the same
// bits.
func (c *Config) Init(p *Param, seed uint64, dst []float32) error {
	if int64(len(dst)) != p.Size() {
		return diag.New(diag.BufferMismatch, "parameter %s has %d elements, its buffer %d",
			p.Name, p.Size(), len(dst))
	}
	if p.Vector() {
		value := float32(0)
		if strings.HasSuffix(p.Source, ".weight") {
			value = float32(1 - c.Norm.Shift)
		}
		for i := range dst {
			dst[i] = value
		}
		return nil
	}
	std := initStd
	if p.ends() {
		std /= math.Sqrt(2 * float64(c.Layers))
	}
	for t, name := range p.Tensors() {
		stream := newStream(seed, name, std)
		p.fill(stream, dst[int64(t)*p.part():][:p.part()])
	}
	return nil
}

// Vector reports whether the parameter multiplies or is added, element by element: a norm, a bias.
func (p *Param) Vector() bool {
	return len(p.Shape) == 1 || slices.Contains(strings.Split(p.Name, "."), "bias")
}

// ends reports whether the parameter is the last layer of attention or of an MLP, whose output is
// added to what all layers share. Its name is BLOCK.o or BLOCK.down, of experts shared_down and
// expert_down, with a number after it for one layer of a stack.
func (p *Param) ends() bool {
	words := strings.Split(p.Name, ".")
	return len(words) > 1 && (p.Tag == ir.Attn && words[1] == "o" ||
		slices.Contains([]string{"down", "shared_down", "expert_down"}, words[1]))
}

// initBlock is the least work that is worth a goroutine: about a millisecond.
const initBlock = 1 << 16

// fill writes the part of a tensor that is the parameter's, some rows on each processor.
func (p *Param) fill(s *stream, dst []float32) {
	b := p.box()
	workers := min(int64(runtime.GOMAXPROCS(0)), b.rows, 1+b.rows*b.width/initBlock)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for m := range b.count {
				p.fillRows(s, m, dst[m*b.rows*b.width:], w*b.rows/workers, (w+1)*b.rows/workers)
			}
		})
	}
	wg.Wait()
}

// fillRows writes rows from to to of the box of matrix m. Where the parameter goes down columns it
// turns squares, as move does.
func (p *Param) fillRows(s *stream, m int64, dst []float32, from, to int64) {
	b := p.box()
	// at is the place in the tensor of row r and column c of the box.
	at := func(r, c int64) int64 {
		return ((b.matrix0+m)*b.height+b.row0+r*b.rowStep)*b.cols + b.col0 + c*b.colStep
	}
	if !p.Transposed {
		for r := from; r < to; r++ {
			s.every(dst[r*b.width:][:b.width], at(r, 0), b.colStep)
		}
		return
	}
	var square [tile][tile]float32
	for r0 := from; r0 < to; r0 += tile {
		height := min(tile, to-r0)
		for c0 := int64(0); c0 < b.width; c0 += tile {
			n := min(tile, b.width-c0)
			for r := range height {
				s.every(square[r][:n], at(r0+r, c0), b.colStep)
			}
			for c := range n {
				for r := range height {
					dst[(c0+c)*b.rows+r0+r] = square[r][c]
				}
			}
		}
	}
}

// A stream is an endless row of independent normal numbers that can be entered at any place.
//
// It is Philox 4x32-10 (Salmon et al., SC11), whose key is the seed and whose counter is the tensor
// and the place: four words of 32 bits for each count make four numbers.
type stream struct {
	key    [2]uint32
	tensor [2]uint32
	std    float64
}

// newStream starts the random numbers of one tensor: they depend on the seed and the tensor's name
// in the checkpoint, on nothing else.
func newStream(seed uint64, tensor string, std float64) *stream {
	sum := sha256.Sum256([]byte(tensor))
	return &stream{key: [2]uint32{uint32(seed), uint32(seed >> 32)},
		tensor: [2]uint32{binary.LittleEndian.Uint32(sum[:]), binary.LittleEndian.Uint32(sum[4:])},
		std:    std}
}

// normals fills dst with the numbers from place at on.
func (s *stream) normals(dst []float32, at int64) {
	count, skip := uint64(at)/4, at%4
	for len(dst) > 0 {
		if skip == 0 && len(dst) >= 4 {
			s.four(count, (*[4]float32)(dst))
			dst = dst[4:]
		} else {
			var four [4]float32
			s.four(count, &four)
			dst = dst[copy(dst, four[skip:]):]
			skip = 0
		}
		count++
	}
}

// every fills dst with the numbers at at, at+step, and so on.
func (s *stream) every(dst []float32, at, step int64) {
	if step == 1 {
		s.normals(dst, at)
		return
	}
	for i := range dst {
		s.normals(dst[i:i+1], at+int64(i)*step)
	}
}

// four gives the numbers of one count: two pairs by Box and Muller's transform (1958).
func (s *stream) four(count uint64, out *[4]float32) {
	x := philox([4]uint32{uint32(count), uint32(count >> 32), s.tensor[0], s.tensor[1]}, s.key)
	for i := 0; i < 4; i += 2 {
		r := s.std * math.Sqrt(2*minusLog(x[i]))
		sin, cos := sinCos(x[i+1])
		out[i], out[i+1] = float32(r*cos), float32(r*sin)
	}
}

// philox gives the four words of a counter.
func philox(c [4]uint32, key [2]uint32) [4]uint32 {
	a, b, d, e := c[0], c[1], c[2], c[3]
	for range 10 {
		left, right := uint64(a)*0xD2511F53, uint64(d)*0xCD9E8D57
		a, b = uint32(right>>32)^b^key[0], uint32(right)
		d, e = uint32(left>>32)^e^key[1], uint32(left)
		key[0] += 0x9E3779B9
		key[1] += 0xBB67AE85
	}
	return [4]uint32{a, b, d, e}
}

// The two functions below are written out because package math differs between processors in the
// last bit, and because a compiler may fuse a product and a sum where the processor can: a
// conversion around each product forbids it. Sums end where the remainder is below 10⁻¹⁰, far
// below the last bit of a float32.

// minusLog is -ln((x+½)/2³²), which is never 0.
func minusLog(x uint32) float64 {
	b := math.Float64bits(float64(2*int64(x) + 1)) // exact: it has 33 bits
	e := int64(b>>52) - 1023
	m := math.Float64frombits(b&(1<<52-1) | 1023<<52) // in [1, 2)
	if m > math.Sqrt2 {
		m, e = m/2, e+1
	}
	s := (m - 1) / (m + 1) // |s| ≤ 0.172, and ln m = 2·(s + s³/3 + s⁵/5 + …)
	q := float64(s * s)
	sum := 1.0/9 + float64(q*(1.0/11))
	sum = 1.0/7 + float64(q*sum)
	sum = 1.0/5 + float64(q*sum)
	sum = 1.0/3 + float64(q*sum)
	sum = 1 + float64(q*sum)
	return float64(float64(33-e)*math.Ln2) - float64(2*float64(s*sum))
}

// sinCos gives both of the angle 2π·(x+½)/2³²: a quarter of the circle by the highest bits, and the
// rest, at most π/4 from its middle, by power series.
func sinCos(x uint32) (sin, cos float64) {
	a := float64((float64(int64(x&(1<<30-1))-1<<29) + 0.5) * (math.Pi / (1 << 31)))
	q := float64(a * a)
	s := 1.0/362880 - float64(q*(1.0/39916800))
	s = -1.0/5040 + float64(q*s)
	s = 1.0/120 + float64(q*s)
	s = -1.0/6 + float64(q*s)
	s = float64(a * (1 + float64(q*s)))
	c := -1.0/3628800 + float64(q*(1.0/479001600))
	c = 1.0/40320 + float64(q*c)
	c = -1.0/720 + float64(q*c)
	c = 1.0/24 + float64(q*c)
	c = -1.0/2 + float64(q*c)
	c = 1 + float64(q*c)
	// The middles of the quarters stand at 45°, 135°, 225° and 315°.
	s, c = float64(math.Sqrt2/2*(c+s)), float64(math.Sqrt2/2*(c-s))
	switch x >> 30 {
	case 0:
		return s, c
	case 1:
		return c, -s
	case 2:
		return -s, -c
	}
	return -c, s
}
