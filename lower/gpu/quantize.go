package gpu

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/quantized"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// quantizeKernels print the codes of quantize, given its scales; the scales have rules of their
// own.
func quantizeKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Triton, Kinds: []string{rewrite.QuantizeOnce}, Print: on(quantizeOnce),
		Applies: kernels.OnGPU("one kernel reads the source once, for both orientations"),
	}, {
		Name: kernels.Triton, Kinds: []string{rewrite.AmaxOnce}, Print: on(amaxOnce),
		Applies: kernels.OnGPU("one kernel reads the source once, for both orientations"),
	}, {
		Name: kernels.Windowed, Kinds: []string{rewrite.QuantizeWith}, Print: on(windowed),
		Applies: kernels.OnGPU("two kernels of plain operations; one of Triton's would read once"),
	}}
}

// Rules print the parts of quantize that package rewrite makes for GPUs, by kind.
func Rules() map[string]stablehlo.Rule {
	return map[string]stablehlo.Rule{
		rewrite.BlockAmax:    on(blockAmax),
		rewrite.BlockScale:   on(blockScale),
		rewrite.AmaxOfBlocks: on(amaxOfBlocks),
	}
}

// A quantizer prints the quantization of one source, of any shape [..., n, ...] with blocks along
// n.
type quantizer struct {
	quantized.Quantizer
	w writer
}

func newQuantizer(w writer, op *ir.Op) quantizer {
	return quantizer{*quantized.NewQuantizer(w.Writer, op), w}
}

// windowed prints the codes of quantize from a source and its scales. Scales come from block maxima
// by reduce_window (in 16 bits where the source has no more) and are behind a barrier, so that
// XLA:GPU makes two kernels, one for scales and one for codes, and keeps nothing wide in memory
// between them.
func windowed(w writer, op *ir.Op, in []val) []val {
	q := newQuantizer(w, op)
	x, scale := in[0], q.repeatTileScale(in[1])
	order := append(ir.Names(ir.Without(x.Type.Dims, q.Along...)), q.Along...)
	var codes val
	switch {
	case !q.Format.TensorScale() && q.Format.Codes().Bits() == 8:
		codes = q.convertElements(q.SplitBlocks(x), scale)
	case !q.Format.TensorScale():
		factor := w.Float(w.powerFactor(scale))
		codes = q.packElements(q.SplitBlocks(x), factor)
	case q.Transform:
		codes = q.pack64(x, scale, w.tensorScale(in[2]))
	default:
		factor := w.elementFactor(scale, w.tensorScale(in[2]))
		codes = q.packElements(q.SplitBlocks(x), factor)
	}
	return []val{w.MergeBlocks(codes, order, op.Out[0].Type), w.MergeBlocks(scale, order,
		op.Out[1].Type)}
}

// window is the number of elements that share a scale, by dimension: a block, or a square tile.
func (q quantizer) window() map[string]int64 {
	size := map[string]int64{q.BlockDim(): q.Block}
	if q.Tile {
		size[q.TileDim().Name] = q.Block
	}
	return size
}

// blockAmax prints the bits of the largest magnitude of each block or tile, in the layout of the
// source: [..., n/block, ...].
func blockAmax(w writer, op *ir.Op, in []val) []val {
	q, x := newQuantizer(w, op), in[0]
	if q.Transform {
		return []val{q.hadamardAmax(x)}
	}
	as, mask := dtype.U32, uint32(quantized.MagnitudeBits)
	if x.Type.Elem == dtype.BF16 {
		as, mask = dtype.U16, quantized.MagnitudeBits>>16
	}
	return []val{w.window(w.WithInt(w.Bitcast(x, as), "and", mask), q.window())}
}

// amaxOfBlocks prints a tensor's largest magnitude from its block maxima.
func amaxOfBlocks(w writer, op *ir.Op, in []val) []val {
	return []val{w.AmaxOf(op, op.Out[0].Type, w.widenBits(in[0]))}
}

// widenBits gives the float32 bits of bf16 bits.
func (w writer) widenBits(top val) val {
	if top.Type.Elem == dtype.U32 {
		return top
	}
	return w.WithInt(w.Convert(top, dtype.U32), "shift_left", 16)
}

// blockScale prints the scales of one quantize as bytes, in the layout of the source.
func blockScale(w writer, op *ir.Op, in []val) []val {
	if f := ir.Format(op.Attrs.Text("format")); !f.TensorScale() {
		e, _ := quantized.EncodingOf(f.Codes())
		return []val{w.Convert(w.PowerOfTwoScale(in[0], e), dtype.U8)}
	}
	top := w.Float(w.widenBits(in[0]))
	return []val{w.Convert(w.e4m3Scale(top, w.tensorScale(in[1])), dtype.U8)}
}

// repeatTileScale repeats the scale of a tile for each of its rows, as block_dot wants them.
func (q quantizer) repeatTileScale(scale val) val {
	if !q.Tile {
		return scale
	}
	at := scale.Type.Index(q.TileDim().Name)
	t := ir.Type{Dims: quantized.SplitDim(scale.Type.Dims, at, 1, "row")}
	one := q.w.Reshape(scale, ir.Type{Dims: ir.Without(t.Dims, "row")})
	t.Dims[at+1].Size = q.Block
	dims := ir.Without(t.Dims, "row")
	dims[at].Size *= q.Block
	return q.w.Reshape(q.w.BroadcastTo(one, t), ir.Type{Dims: dims})
}

// window prints the largest in windows that do not overlap.
func (w writer) window(v val, size map[string]int64) val {
	t := ir.Type{Elem: v.Type.Elem}
	sizes := make([]int64, len(v.Type.Dims))
	for i, d := range v.Type.Dims {
		sizes[i] = max(size[d.Name], 1)
		t.Dims = append(t.Dims, ir.Dim{Name: d.Name, Size: d.Size / sizes[i]})
	}
	return w.Apply(t, `"stablehlo.reduce_window"(`, fmt.Sprintf(
		`) <{window_dimensions = array<i64: %s>, window_strides = array<i64: %[1]s>}> (%s)`,
		stablehlo.List(sizes), stablehlo.Reducer("maximum", v.Type.Elem)), v,
		w.Constant(ir.Type{Elem: v.Type.Elem}, 0))
}

// convertElements rounds 8-bit elements under power-of-two scales by the GPU's own conversion. A
// GPU computes with subnormal numbers, and a NaN makes its whole block NaN.
func (q quantizer) convertElements(x, scale val) val {
	w := q.w
	factor := w.powerFactor(scale)
	x = w.Convert(x, dtype.F32)
	y := w.Elementwise("multiply", x, w.BroadcastTo(w.Float(factor), x.Type))
	return w.Bitcast(w.Convert(y, q.Format.Codes()), dtype.U8)
}

// powerFactor gives the bits of 2^(127-scale), by which the elements of a block are multiplied.
func (w writer) powerFactor(scale val) val {
	s := w.Convert(scale, dtype.U32)
	factor := w.WithInt(w.Elementwise("subtract", w.Constant(s.Type, 254), s), "shift_left", 23)
	factor = w.Select(w.AtLeast(s, 254), w.Constant(s.Type, 0x400000), factor)
	return w.Select(w.AtLeast(s, 255), w.Constant(s.Type, quantized.NaNBits), factor)
}

// packElements rounds 4-bit elements and packs two to a byte in the source's layout: XLA:GPU would
// transpose the two halves of bytes one after the other. A factor that is NaN gives the largest
// code, since E2M1 has no NaN; the block's scale is NaN then.
func (q quantizer) packElements(x, factor val) val {
	w := q.w
	codes := q.encodeE2M1(x, factor, q.RandomBits(x.Type))
	nan := w.BroadcastTo(w.Compare("NE", factor, factor), codes.Type)
	codes = w.Select(nan, w.Constant(codes.Type, 7), codes)
	return w.rowMajor(w.PackPairs(w.Convert(codes, dtype.U8)))
}

// tensorScale is NVFP4's scale of a whole tensor in float32: 2688 / amax on the way in, its
// reciprocal on the way out; 1 for a tensor of zeros.
func (w writer) tensorScale(top val) quantized.TensorScale {
	in := w.Elementwise("divide", w.Constant(top.Type, 2688), top)
	most := w.Constant(in.Type, math.MaxFloat32)
	in = w.Select(w.Compare("GT", in, most), most, in)
	zero := w.Constant(in.Type, 0)
	none := w.Elementwise("or", w.Compare("EQ", in, zero), w.Compare("EQ", top, zero))
	in = w.Select(none, w.Constant(in.Type, 1), in)
	return quantized.TensorScale{Encode: in,
		Decode: w.Elementwise("divide", w.Constant(in.Type, 1), in)}
}

// e4m3Scale rounds block maxima, over 6 and times the tensor's scale, to E4M3.
func (w writer) e4m3Scale(top val, g quantized.TensorScale) val {
	sixth := w.Elementwise("multiply", g.Encode, w.Constant(g.Encode.Type, float64(float32(1.0/6))))
	y := w.Elementwise("multiply", top, w.BroadcastTo(sixth, top.Type))
	scale := w.RoundToNearest(y, quantized.E4M3)
	return w.Select(w.Compare("NE", y, y), w.Constant(scale.Type, 0x7f), scale)
}

// elementFactor is what the elements of blocks are multiplied by: one over the decoded scale, at
// most the largest float32.
func (w writer) elementFactor(scale val, g quantized.TensorScale) val {
	wide := w.Convert(w.Bitcast(scale, dtype.F8E4M3FN), dtype.F32)
	step := w.Elementwise("multiply", wide, w.BroadcastTo(g.Decode, wide.Type))
	factor := w.Elementwise("divide", w.Constant(step.Type, 1), step)
	return w.Elementwise("minimum", factor, w.Constant(factor.Type, math.MaxFloat32))
}

// encodeE2M1 rounds elements to E2M1, by random bits where they are not nil. A NaN is found in its
// block's factor, since it is the block's maximum.
func (q quantizer) encodeE2M1(x, factor val, random *val) val {
	w := q.w
	bits := w.WideBits(x)
	v := w.Elementwise("multiply", w.Float(w.WithInt(bits, "and", quantized.MagnitudeBits)),
		w.BroadcastTo(factor, bits.Type))
	return w.Elementwise("or", w.E2M1(v, random), w.SignBits(bits, 28))
}

// Blocks of NVFP4 that are transformed first mostly lie across rows. They are written as words of
// 64 bits, one per block: each of a block's 16 elements is a value of its own with one element per
// block, so that a GPU thread computes every sum once, loads of neighbouring threads coalesce, XLA
// transposes whole words, and the transform never reaches memory. Without a transform this saves
// hardly any bytes and doubles compile time.

// blockElement takes the i-th element of each block, [..., n/block, 1, ...]; a value without the
// blocks' dimension stays as it is. The dimension of 1 is kept: XLA counts a value that is read
// through a reshape once per reader, and then splits the kernel.
func (q quantizer) blockElement(v val, i int) val {
	at := v.Type.Index(q.BlockDim())
	if at < 0 {
		return v
	}
	cut := q.w.Reshape(v, ir.Type{Dims: quantized.SplitDim(v.Type.Dims, at, q.Block, rewrite.InBlock)})
	return q.w.Slice(cut, rewrite.InBlock, int64(i), int64(i)+1)
}

// hadamard16 gives the elements of blocks after the Hadamard transform, each [..., n/16, 1, ...]:
// the sums of the plain rule in the same order, each computed once.
func (q quantizer) hadamard16(x val) []val {
	w := q.w
	x = w.Convert(x, dtype.BF16)
	list := make([]val, q.Block)
	for i := range list {
		if list[i] = w.Convert(q.blockElement(x, i), dtype.F32); quantized.HadamardSigns[i] == '-' {
			list[i] = w.Elementwise("negate", list[i])
		}
	}
	for step := 1; step < len(list); step *= 2 {
		for i := range list {
			if i&step == 0 {
				a, b := list[i], list[i+step]
				list[i], list[i+step] = w.Elementwise("add", a, b), w.Elementwise("subtract", a, b)
			}
		}
	}
	for i, v := range list {
		list[i] = w.Convert(w.Elementwise("multiply", v, w.Constant(v.Type, 0.25)), dtype.BF16)
	}
	return list
}

// hadamardAmax is blockAmax after the Hadamard transform.
func (q quantizer) hadamardAmax(x val) val {
	list := q.hadamard16(x)
	for i, v := range list {
		list[i] = q.w.WithInt(q.w.Bitcast(v, dtype.U16), "and", quantized.MagnitudeBits>>16)
	}
	return q.dropUnit(q.w.MaxOf(list))
}

// dropUnit drops the dimension of 1 that blockElement keeps.
func (q quantizer) dropUnit(v val) val {
	return q.w.Reshape(v, ir.Type{Dims: ir.Without(v.Type.Dims, rewrite.InBlock)})
}

// pack64 gives the E2M1 codes of transformed blocks as bytes [..., n/16, 8], with the summed
// dimension last.
func (q quantizer) pack64(x, scale val, g quantized.TensorScale) val {
	w, factor := q.w, q.w.elementFactor(scale, g)
	var word, draw val
	for i, v := range q.hadamard16(x) {
		var random *val
		if q.Op.Attrs.Bool("stochastic") {
			if i%4 == 0 {
				draw = q.Draws(func(v val) val { return q.blockElement(v, i) }, ir.Type{Dims: v.Type.Dims})
			}
			bits := w.WithInt(draw, "shift_right_logical", uint32(quantized.RandomShifts[i%4]))
			bits = w.WithInt(bits, "and", 0xff)
			random = &bits
		}
		code := q.encodeE2M1(v, factor, random)
		if code = w.Convert(code, dtype.U64); i == 0 {
			word = code
			continue
		}
		word = w.Elementwise("or", word, w.WithInt(code, "shift_left", uint32(4*i)))
	}
	none, sevens := w.Compare("NE", factor, factor), w.Constant(word.Type, 0x77777777)
	sevens = w.Elementwise("or", sevens, w.WithInt(sevens, "shift_left",
		32)) // one constant would not fit a float64
	word = w.Select(w.BroadcastTo(none, word.Type), sevens, word)
	// In the source's layout first, or XLA:GPU would transpose each of the 16 elements.
	word = w.rowMajor(q.dropUnit(word))
	order := append(ir.Names(ir.Without(word.Type.Dims, q.Along...)), q.Along...)
	word = w.rowMajor(w.Transpose(word, order))
	t := ir.Type{Elem: dtype.U8, Dims: append(slices.Clone(word.Type.Dims),
		ir.Dim{Name: rewrite.InBlock, Size: q.Block / 2})}
	return w.Apply(t, "stablehlo.bitcast_convert ", "", word)
}
