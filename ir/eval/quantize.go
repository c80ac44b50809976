package eval

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// Codes and scales are held as their codes, one to a place: 0x7e is the largest E4M3.

// quantizeKernels compute quantized GEMMs with the codecs of package dtype/block.
var quantizeKernels = map[string]kernel{"quantize": quantize, "block_dot": blockDot,
	"dequantize": func(op *ir.Op, in, out []*Array) {
		copy(out[0].Data, numbers(ir.Format(op.Attrs.Text("format")), in[0], in[1]).Data)
	},
	"scale_stats": scaleStats, "quantize_stats": quantizeStats}

// source gives a value as a quantizer sees it, in float32 and in the order of the result.
func source(op *ir.Op, x *Array, order []string) []float32 {
	t := ir.Type{Elem: x.Type.Elem}
	for _, name := range order {
		t.Dims = append(t.Dims, ir.Dim{Name: name, Size: x.Type.Size(name)})
	}
	out := make([]float32, len(x.Data))
	walk(t, func(at []int64, i int) {
		out[i] = float32(pick(x, t, at))
		if x.Type.Elem == dtype.BF16 {
			out[i] = dtype.F32FromBF16(dtype.BF16FromF32(out[i]))
		}
	})
	if op.Attrs.Bool("hadamard") {
		bits := lists.Map(out, dtype.BF16FromF32)
		if err := block.Hadamard(bits, bits); err != nil {
			return nil
		}
		for i, b := range bits {
			out[i] = dtype.F32FromBF16(b)
		}
	}
	return out
}

func quantize(op *ir.Op, in, out []*Array) {
	format, n := ir.Format(op.Attrs.Text("format")), int64(len(in[0].Data))
	dims := out[0].Type.Dims
	src := source(op, in[0], ir.Names(dims))
	scales := make([]byte, n/format.Block())
	if !format.TensorScale() {
		codes := make([]byte, n)
		must(block.Encode(format, codes, scales, src))
		put(out[0], codes)
		put(out[1], scales)
		return
	}
	stacks := len(in[1].Data) // each layer of a stack has a scale of its own
	part := len(src) / stacks
	for i := range stacks {
		x, s := src[i*part:(i+1)*part], scales[i*part/16:(i+1)*part/16]
		codes, amax := make([]byte, part/2), float32(in[1].Data[i])
		if op.Attrs.Bool("tile") {
			tiles(codes, s, x, dims, op.Attrs.List("along"), amax)
		} else {
			must(block.NVFP4(codes, s, x, amax))
		}
		for k, b := range codes {
			out[0].Data[i*part+2*k], out[0].Data[i*part+2*k+1] = float64(b&15), float64(b>>4)
		}
		if op.Attrs.Bool("stochastic") {
			dither(op, in, out[0], i*part, x, s, amax)
		}
	}
	put(out[1], scales)
}

// must is for lengths, which the graph has checked.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func put(to *Array, bytes []byte) {
	for i, b := range bytes {
		to.Data[i] = float64(b)
	}
}

// tiles quantizes matrices of the tiles' other side and the last dimension that is summed over.
// What lies between them makes more matrices, whose rows do not follow each other.
func tiles(codes, scales []byte, src []float32, dims []ir.Dim, along []string, amax float32) {
	n, t := len(dims), ir.Type{Dims: dims}
	at := t.Index(t.TileDim(along).Name)
	rows, cols := int(dims[at].Size), int(dims[n-1].Size)
	between := 1
	for _, d := range dims[at+1 : n-1] {
		between *= int(d.Size)
	}
	one, q, s := make([]float32, rows*cols), make([]byte, rows*cols/2), make([]byte, rows*cols/16)
	for m := range len(src) / (rows * cols) {
		at := func(row int) int { return ((m/between*rows+row)*between + m%between) * cols }
		for r := range rows {
			copy(one[r*cols:], src[at(r):at(r)+cols])
		}
		must(block.NVFP4Tiles(q, s, one, rows, cols, amax))
		for r := range rows {
			copy(codes[at(r)/2:], q[r*cols/2:(r+1)*cols/2])
			copy(scales[at(r)/16:], s[r*cols/16:(r+1)*cols/16])
		}
	}
}

// dither rounds by the places that elements have in the whole, whichever way they are stored: four
// that follow each other in a block share the bits of the first one's place.
func dither(op *ir.Op, in []*Array, out *Array, from int, x []float32, scales []byte,
	amax float32) {
	noise, rows, cols := in[len(in)-3], in[len(in)-2], in[len(in)-1]
	word := func(i int) uint32 { return uint32(int64(noise.Data[i])) }
	key := block.NewKey(word(0), word(1), word(2)*64+uint32(op.Attrs.Int("tensor")))
	_, back := block.Global(amax)
	var draw uint32
	walk(out.Type, func(at []int64, i int) {
		if i < from || i >= from+len(x) {
			return
		}
		if i%4 == 0 {
			draw = key.Draw(uint32(int64(pick(rows, out.Type, at))),
				uint32(int64(pick(cols, out.Type, at))))
		}
		factor := min(1/(dtype.F32FromE4M3(scales[(i-from)/16])*back), math.MaxFloat32)
		out.Data[i] = float64(block.Round(x[i-from]*factor, i%4, draw))
	})
}

// amax is the largest magnitude on all devices; NaN and infinity make it NaN.
func (m *machine) amax(op *ir.Op, in []*Array) []*Array {
	local := m.each(func(d int) *Array {
		out := New(op.Out[0].Type)
		x := &Array{op.In[0].Type, in[d].Data}
		order := ir.Names(x.Type.Dims)
		if along := op.Attrs.List("along"); len(along) > 0 {
			last := along[len(along)-1]
			order = append(slices.DeleteFunc(order, func(s string) bool { return s == last }), last)
		}
		src := source(op, x, order)
		part := len(src) / len(out.Data)
		for i := range out.Data {
			out.Data[i] = float64(block.Amax(src[i*part : (i+1)*part]))
		}
		return out
	})
	return m.each(func(d int) *Array {
		out := New(op.Out[0].Type)
		for _, from := range m.group(op, d) {
			for i, v := range local[from].Data {
				if out.Data[i] = math.Max(out.Data[i], v); math.IsInf(v, 0) {
					out.Data[i] = math.NaN()
				}
			}
		}
		return out
	})
}

// numbers gives what codes and scales stand for, but for the scale of the tensor.
func numbers(format ir.Format, codes, scales *Array) *Array {
	out := &Array{codes.Type, make([]float64, len(codes.Data))}
	for i, c := range codes.Data {
		s := byte(scales.Data[int64(i)/format.Block()])
		out.Data[i] = float64(format.Codes().FromCode(byte(c))) * float64(format.Scales().FromCode(s))
	}
	return out
}

// rounded gives what an array becomes if it is quantized along its last dimension.
func rounded(f ir.Format, x *Array) *Array {
	codes, scales := make([]byte, len(x.Data)), make([]byte, int64(len(x.Data))/f.Block())
	src := source(&ir.Op{}, x, ir.Names(x.Type.Dims))
	must(block.Encode(f, codes, scales, src))
	list := []*Array{{x.Type, make([]float64, len(codes))}, {x.Type, make([]float64, len(scales))}}
	put(list[0], codes)
	put(list[1], scales)
	return numbers(f, list[0], list[1])
}

func blockDot(op *ir.Op, in, out []*Array) {
	format, n := ir.Format(op.Attrs.Text("format")), len(in)/2
	dot(op, []*Array{numbers(format, in[0], in[1]), numbers(format, in[n], in[n+1])}, out)
	if !format.TensorScale() {
		return
	}
	_, a := block.Global(float32(in[2].Data[0]))
	_, b := block.Global(float32(in[n+2].Data[0]))
	for i := range out[0].Data {
		out[0].Data[i] *= float64(a) * float64(b)
	}
}

// scaleStats reports the scales of one device.
func scaleStats(_ *ir.Op, in, out []*Array) {
	n, at := len(out[0].Data)/3, 0
	for _, v := range in {
		layers := int(v.Type.StackDepth())
		for i, b := range v.Data {
			k := at + i/(len(v.Data)/layers)
			out[0].Data[k] = max(out[0].Data[k], b)
			out[0].Data[n+k] += b
			out[0].Data[2*n+k] += min(b, 1)
		}
		at += layers
	}
}

// joinStats gives of every number the largest, then the sum; or the sum alone.
func (m *machine) joinStats(op *ir.Op, in []*Array) []*Array {
	return m.each(func(d int) *Array {
		total := sum(in, m.group(op, d), op.In[0].Type)
		if op.Attrs.Bool("sum") {
			return total
		}
		out := New(op.Out[0].Type)
		for _, from := range m.group(op, d) {
			for i, v := range in[from].Data {
				out.Data[i] = max(out.Data[i], v)
			}
		}
		copy(out.Data[len(total.Data):], total.Data)
		return out
	})
}

// quantizeStats compares a source with the numbers that codes and scales stand for.
func quantizeStats(op *ir.Op, in, out []*Array) {
	format := ir.Format(op.Attrs.Text("format"))
	src, got := source(op, in[0], ir.Names(in[1].Type.Dims)), numbers(format, in[1], in[2])
	layers, most := int(in[0].Type.StackDepth()), int(format.Codes().MaxCode())
	part, size := len(src)/layers, int(format.Block())
	for l := range layers {
		back := 1.0
		if format.TensorScale() {
			_, g := block.Global(float32(in[3].Data[l]))
			back = float64(g)
		}
		add := func(number int, v float64) { out[0].Data[number*layers+l] += v }
		for from := l * part; from < (l+1)*part; from += size {
			top, low := 0.0, math.Inf(1)
			for i := from; i < from+size; i++ {
				x, q := math.Abs(float64(src[i])), math.Abs(got.Data[i])*back
				switch {
				case x != 0 && q == 0:
					add(0, 1)
				case int(in[1].Data[i])&most == most && x > q*(1+0x1p-20):
					add(1, 1)
				}
				add(2, x*x)
				add(3, (x-q)*(x-q))
				if x != 0 {
					top, low = max(top, x), min(low, x)
				}
			}
			if top > 0 {
				add(4, math.Log2(top/low))
				add(5, 1)
			}
		}
	}
}
