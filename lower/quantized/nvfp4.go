package quantized

import (
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// A TensorScale is what all blocks of an NVFP4 tensor share: Encode, 2688 over the largest
// magnitude (the largest element, 6, times the largest block scale, 448), and Decode, its
// reciprocal. Both are float32 values; on XLA:CPU, which flushes subnormals, they are held in
// float64.
type TensorScale struct{ Encode, Decode val }

// tensorScale is 1 for a tensor of zeros.
func (w Writer) tensorScale(top val) TensorScale {
	bits := w.Bitcast(top, dtype.U32)
	reach := w.Constant(ir.Type{Elem: dtype.F64, Dims: top.Type.Dims}, 2688)
	in := w.roundToF32(w.Elementwise("divide", reach, w.exact(bits)))
	most := w.Constant(in.Type, math.MaxFloat32)
	in = w.Select(w.Compare("GT", in, most), most, in)
	none := w.Elementwise("or", w.Compare("EQ", in, w.Constant(in.Type, 0)),
		w.Compare("EQ", bits, w.Constant(bits.Type, 0)))
	in = w.Select(none, w.Constant(in.Type, 1), in)
	return TensorScale{in, w.roundToF32(w.Elementwise("divide", w.Constant(in.Type, 1), in))}
}

// exact gives in float64 the numbers that magnitude bits stand for, subnormals included.
func (w Writer) exact(bits val) val {
	small := w.Convert(w.Bitcast(bits, dtype.S32), dtype.F64)
	small = w.Elementwise("multiply", small, w.Constant(small.Type, 0x1p-149))
	return w.Select(w.AtLeast(bits, 0x800000), w.Convert(w.Float(bits), dtype.F64), small)
}

// roundToF32 rounds float64 values to float32 ones, as multiples of 2^-149 where they are
// subnormal.
func (w Writer) roundToF32(v val) val {
	wide := w.Convert(w.Convert(v, dtype.F32), dtype.F64)
	small := w.Elementwise("multiply", v, w.Constant(v.Type, 0x1p149))
	small = w.Elementwise("round_nearest_even", small)
	small = w.Elementwise("multiply", small, w.Constant(v.Type, 0x1p-149))
	return w.Select(w.Compare("LT", v, w.Constant(v.Type, 0x1p-126)), small, wide)
}

// nvfp4 rounds blocks x [..., n/16, 16, ...]: each block or tile gets an E4M3 scale under the
// tensor's, each element an E2M1 code, one per byte.
func (q *Quantizer) nvfp4(x, tensorTop val) (codes, scales val) {
	w := q.W
	bits, top := w.WideBits(x), w.blockTop(x, inside)
	sizes := w.WithInt(bits, "and", MagnitudeBits)
	if q.Tile {
		top = q.tileTops(top)
	}
	g := w.tensorScale(tensorTop)
	// in/6 is rounded once: (top/6)*in would round twice and give other bytes.
	sixth := w.Elementwise("multiply", g.Encode, w.Constant(g.Encode.Type, float64(float32(1.0/6))))
	sixth = w.roundToF32(sixth)
	y := w.Elementwise("multiply", w.exact(top), w.BroadcastTo(sixth, top.Type))
	y = w.Convert(y, dtype.F32)
	none := w.Compare("NE", y, y)
	scale := w.Select(none, w.Constant(top.Type, 0x7f), w.RoundToNearest(y, E4M3))
	step := w.Convert(w.wideE4M3(scale), dtype.F64)
	step = w.roundToF32(w.Elementwise("multiply", step, w.BroadcastTo(g.Decode, top.Type)))
	factor := w.Convert(w.Elementwise("divide", w.Constant(step.Type, 1), step), dtype.F32)
	most := w.Float(w.Constant(scale.Type, MaxFloatBits))
	factor = w.Select(w.Compare("GT", factor, most), most, factor)
	small := w.WithInt(w.Bitcast(factor, dtype.U32), "maximum", 149<<23)
	small = w.Float(w.WithInt(small, "subtract", 149<<23)) // times 2^-149
	v := w.Elementwise("multiply", w.Float(sizes), w.BroadcastTo(factor, sizes.Type))
	v = w.liftSubnormals(v, sizes, small)
	code := w.Elementwise("or", w.E2M1(v, q.RandomBits(v.Type)), w.SignBits(bits, 28))
	code = w.Select(w.BroadcastTo(none, code.Type), w.Constant(code.Type, 7), code)
	return w.Convert(code, dtype.U8), w.Convert(scale, dtype.U8)
}

// tileTops gives the largest of 16 rows to each of them; rows are the innermost dimension that is
// not summed over.
func (q *Quantizer) tileTops(top val) val {
	w := q.W
	at := top.Type.Index(q.TileDim().Name)
	all := w.Reshape(top, ir.Type{Dims: SplitDim(top.Type.Dims, at, q.Block, "row")})
	return w.Reshape(w.BroadcastTo(w.Reduce(all, "maximum", 0, "row"), all.Type), top.Type)
}

// wideE4M3 decodes E4M3 codes without a sign to float32. The lower eight codes have no leading one:
// they get one, less its value, so that no processor flushes them.
func (w Writer) wideE4M3(code val) val {
	low := w.Compare("LT", code, w.Constant(code.Type, 8))
	bits := w.Elementwise("add", w.WithInt(code, "shift_left", 20),
		w.Select(low, w.Constant(code.Type, 121<<23), w.Constant(code.Type, 120<<23)))
	v := w.Float(bits)
	zero, one := w.Constant(v.Type, 0), w.Constant(v.Type, 0x1p-6)
	v = w.Elementwise("subtract", v, w.Select(low, one, zero))
	nan := w.Float(w.Constant(code.Type, NaNBits))
	return w.Select(w.Compare("EQ", code, w.Constant(code.Type, 0x7f)), nan, v)
}

// E2M1 rounds magnitudes v to E2M1 codes: to the nearest, or stochastically by the random bits of
// each, 0 to 255.
func (w Writer) E2M1(v val, random *val) val {
	if random == nil {
		return w.RoundToNearest(v, E2M1)
	}
	v = w.Float(w.WithInt(w.Bitcast(v, dtype.U32), "minimum", E2M1.most))
	two := w.Compare("LT", v, w.Constant(v.Type, 2))
	four := w.Compare("LT", v, w.Constant(v.Type, 4))
	by := func(low, middle, high float64, elem dtype.DType) val {
		t := ir.Type{Elem: elem, Dims: v.Type.Dims}
		return w.Select(two, w.Constant(t, low),
			w.Select(four, w.Constant(t, middle), w.Constant(t, high)))
	}
	// In 256ths of a step of the grid, of which the bits are added and what is left over dropped.
	parts := w.Elementwise("multiply", v, by(512, 256, 128, dtype.F32))
	count := w.Elementwise("add", w.Convert(w.Elementwise("floor", parts), dtype.U32), *random)
	count = w.WithInt(count, "shift_right_logical", 8)
	return w.Elementwise("add", count, by(0, 2, 4, dtype.U32))
}

// PackPairs packs two 4-bit codes of a block into a byte, the first in the lower half.
func (w Writer) PackPairs(code val) val {
	at := code.Type.Index(inside)
	pairs := w.Reshape(code, ir.Type{Dims: SplitDim(code.Type.Dims, at, 2, "half")})
	half := ir.Type{Dims: ir.Without(pairs.Type.Dims, "half")}
	low := w.Reshape(w.Slice(pairs, "half", 0, 1), half)
	high := w.Reshape(w.Slice(pairs, "half", 1, 2), half)
	return w.Elementwise("or", low, w.WithInt(high, "shift_left", 4))
}

// tensors is how many tensors of one layer may be rounded stochastically.
const tensors = 64

// RandomShifts say where the 8 bits of four elements are in the 32 that they share (see
// dtype/block).
var RandomShifts = [4]int64{0, 16, 8, 24}

// RandomBits gives the 8 random bits of every element of blocks of type t, [..., n/16, 16, ...], or
// nil where rounding is to the nearest.
func (q *Quantizer) RandomBits(t ir.Type) *val {
	if !q.Op.Attrs.Bool("stochastic") {
		return nil
	}
	w := q.W
	dims := q.Op.In[0].Type.Dims
	at := slices.IndexFunc(dims, func(d ir.Dim) bool { return d.Name == q.BlockDim() })
	dims = SplitDim(dims, at, 4, "of4")
	draw := q.Draws(func(v val) val {
		if v.Type.Index(q.BlockDim()) < 0 {
			return v
		}
		all := SplitDim(v.Type.Dims, v.Type.Index(q.BlockDim()), 4, "of4")
		first := w.Slice(w.Reshape(v, ir.Type{Dims: all}), "of4", 0, 1)
		return w.Reshape(first, ir.Type{Dims: ir.Without(all, "of4")})
	}, ir.Type{Dims: ir.Without(dims, "of4")})
	all := ir.Type{Elem: dtype.U32, Dims: dims}
	shift := w.Emit(ir.Type{Elem: dtype.U32, Dims: []ir.Dim{{Name: "of4", Size: 4}}},
		"stablehlo.constant dense<[%s]> : tensor<4xui32>", stablehlo.List(RandomShifts[:]))
	bits := w.Elementwise("shift_right_logical", w.BroadcastTo(draw, all), w.BroadcastTo(shift, all))
	bits = w.Reshape(w.WithInt(bits, "and", 0xff), ir.Type{Dims: t.Dims})
	return &bits
}

// Draws hashes the places (row, column) of the first of each four elements, which first selects
// from the numbers of rows and columns, with the key of the tensor in this step of this run: 32
// bits which depend on nothing else, so that sharding does not change them.
func (q *Quantizer) Draws(first func(val) val, t ir.Type) val {
	w := q.W
	in := q.Op.In[len(q.Op.In)-3:]
	noise, rows, cols := w.Use(in[0]), w.Use(in[1]), w.Use(in[2])
	word := func(at int64) val {
		v := w.Slice(noise, noise.Type.Dims[0].Name, at, at+1)
		return w.Bitcast(w.Reshape(v, ir.Type{}), dtype.U32)
	}
	number := w.WithInt(w.WithInt(word(2), "multiply", tensors), "add",
		uint32(q.Op.Attrs.Int("tensor")))
	key := w.hashMix(w.Elementwise("xor", word(1), w.hashMix(number)))
	key = w.hashMix(w.Elementwise("xor", word(0), key))
	other := w.hashMix(w.WithInt(key, "xor", 0x85ebca6b))
	row := first(w.Bitcast(rows, dtype.U32))
	row = w.hashMix(w.Elementwise("xor", row, w.BroadcastTo(key, row.Type)))
	col := first(w.Bitcast(cols, dtype.U32))
	col = w.Elementwise("xor", col, w.BroadcastTo(other, col.Type))
	return w.hashMix(w.Elementwise("xor", w.BroadcastTo(row, t), w.BroadcastTo(col, t)))
}

// hashMix is MurmurHash3's finalizer.
func (w Writer) hashMix(h val) val {
	fold := func(by uint32) {
		h = w.Elementwise("xor", h, w.WithInt(h, "shift_right_logical", by))
	}
	fold(16)
	h = w.WithInt(h, "multiply", 0x85ebca6b)
	fold(13)
	h = w.WithInt(h, "multiply", 0xc2b2ae35)
	fold(16)
	return h
}

// HadamardSigns tells which of 16 elements change their sign before the transform
// (TransformerEngine's).
const HadamardSigns = "+++-+------+-+--"

// Hadamard transforms each 16 elements along a dimension, to spread outliers. Inputs are bf16, sums
// float32 in a fixed order (neighbours first), the result bf16. Every element is a sum of all 16 in
// which the second of two terms is added or subtracted: no term is computed twice, and XLA fuses
// one loop.
func (w Writer) Hadamard(x val, dim string) val {
	x = w.Convert(x, dtype.BF16)
	groups := w.Reshape(x, ir.Type{Dims: SplitDim(x.Type.Dims, x.Type.Index(dim), 16, "of16")})
	all := ir.Type{Elem: dtype.F32, Dims: groups.Type.Dims}
	one := ir.Type{Dims: ir.Without(groups.Type.Dims, "of16")}
	terms := make([]val, 16)
	for i := range terms {
		v := w.Convert(w.Reshape(w.Slice(groups, "of16", int64(i), int64(i)+1), one), dtype.F32)
		if HadamardSigns[i] == '-' {
			v = w.Elementwise("negate", v)
		}
		terms[i] = w.BroadcastTo(v, all)
	}
	for bit := 1; len(terms) > 1; bit *= 2 {
		signs := w.BroadcastTo(w.signVector("of16", func(i int) bool { return i&bit == 0 }), all)
		for i := range len(terms) / 2 {
			second := w.Elementwise("multiply", terms[2*i+1], signs)
			terms[i] = w.Elementwise("add", terms[2*i], second)
		}
		terms = terms[:len(terms)/2]
	}
	y := w.Elementwise("multiply", terms[0], w.Constant(all, 0.25))
	return w.Reshape(w.Convert(y, dtype.BF16), x.Type)
}

// signVector is a constant of 16 numbers along a dimension: 1 where positive, else -1.
func (w Writer) signVector(dim string, positive func(i int) bool) val {
	list := make([]string, 16)
	for i := range list {
		list[i] = w.Number(dtype.F32, -1)
		if positive(i) {
			list[i] = w.Number(dtype.F32, 1)
		}
	}
	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: dim, Size: int64(len(list))}}}
	return w.Emit(t, "stablehlo.constant dense<[%s]> : %s", strings.Join(list, ", "),
		stablehlo.Tensor(t))
}

// amax prints the largest magnitude of a tensor over all devices. NaN or infinity make it NaN,
// which then reaches everything that is scaled by it.
func amax(w Writer, op *ir.Op, in []val) []val {
	x, dim := in[0], ""
	if n := len(x.Type.Dims); n > 0 {
		dim = x.Type.Dims[n-1].Name
	}
	if op.Attrs.Bool("hadamard") {
		along := op.Attrs.List("along")
		dim = along[len(along)-1]
		if x = w.Hadamard(x, dim); w.FusesOneOutput() {
			x = w.Materialize(x)
		}
	}
	var top val
	switch n, size := x.Type.Size(dim), ir.NVFP4.Block(); {
	case n > 0 && n%size == 0 && w.FusesOneOutput():
		// By blocks first, as they are found for their scales.
		x = w.Reshape(x, ir.Type{Dims: SplitDim(x.Type.Dims, x.Type.Index(dim), size, inside)})
		top = w.Materialize(w.blockTop(x, inside))
	default:
		top = w.WithInt(w.WideBits(x), "and", MagnitudeBits)
	}
	return []val{w.AmaxOf(op, op.Out[0].Type, top)}
}

// AmaxOf reduces the bits of magnitudes to one number per tensor (per layer of a stack), and over
// the devices that hold shards of it.
func (w Writer) AmaxOf(op *ir.Op, out ir.Type, top val) val {
	top = w.Reduce(top, "maximum", 0, ir.Names(ir.Without(top.Type.Dims, ir.Names(out.Dims)...))...)
	if axes := op.Axes(); len(axes) > 0 {
		top = w.AllReduce(top, "maximum", axes...)
	}
	finite := w.Compare("LT", top, w.Constant(top.Type, InfBits))
	return w.Float(w.Select(finite, top, w.Constant(top.Type, NaNBits)))
}
