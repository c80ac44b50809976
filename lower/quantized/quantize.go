package quantized

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/rewrite"
)

// Bits of float32: magnitudes compare as unsigned integers, with infinity and NaN above all
// numbers.
const (
	MagnitudeBits = 0x7fffffff // the bits of a float32 but for its sign
	InfBits       = 0x7f800000
	NaNBits       = 0x7fc00000
	MaxFloatBits  = 0x7f7fffff // the largest float32
)

// inside is the dimension that counts elements within a block.
const inside = rewrite.InBlock

// WithInt applies an integer instruction to a value and a constant.
func (w Writer) WithInt(v val, how string, n uint32) val {
	return w.Elementwise(how, v, w.Constant(v.Type, float64(n)))
}

// Float views 32 bits as a float32.
func (w Writer) Float(v val) val { return w.Bitcast(v, dtype.F32) }

// quantizeBlocks prints codes and scales in the layout of the source. Scales are computed from
// magnitude bits as integers: XLA:CPU flushes subnormals and its maximum drops NaN, while the
// largest bits of a block keep both.
func quantizeBlocks(w Writer, op *ir.Op, in []val) []val {
	q := NewQuantizer(w, op)
	order := append(ir.Names(ir.Without(in[0].Type.Dims, q.Along...)), q.Along...)
	x := in[0]
	if q.Transform {
		x = w.Materialize(w.Hadamard(x, q.BlockDim()))
	}
	transposed := !slices.Equal(ir.Names(x.Type.Dims), order)
	x = q.SplitBlocks(x)
	var codes, scales val
	switch e, ok := EncodingOf(q.Format.Codes()); {
	case !ok:
		w.Fail("there is no format %s", q.Format)
		return in
	case q.Format.TensorScale():
		codes, scales = q.nvfp4(x, in[1])
	default:
		codes, scales = q.powerScaled(x, e)
	}
	if transposed {
		codes, scales = w.Materialize(codes), w.Materialize(scales)
	}
	return []val{codes, scales}
}

// orderBlocks transposes codes and scales so that summed dimensions come last, and packs 4-bit
// codes in pairs.
func orderBlocks(w Writer, op *ir.Op, in []val) []val {
	codes, order := in[0], ir.Names(op.Out[0].Type.Dims)
	if ir.Format(op.Attrs.Text("format")).Codes().Bits() == 4 {
		codes = w.PackPairs(codes)
	}
	return []val{w.MergeBlocks(codes, order, op.Out[0].Type), w.MergeBlocks(in[1], order,
		op.Out[1].Type)}
}

// FusesOneOutput tells a target whose fusions have one output, see
// [kernels.Selector.FusesOneOutput].
func (w Writer) FusesOneOutput() bool { return w.Target == nil || w.Target.FusesOneOutput() }

// MergeBlocks merges the dimension inside blocks with the one that it was split from, and
// transposes.
func (w Writer) MergeBlocks(v val, order []string, t ir.Type) val {
	dims := ir.Without(v.Type.Dims, inside)
	for i, d := range dims {
		dims[i].Size = t.Size(d.Name)
	}
	return w.Transpose(w.Reshape(v, ir.Type{Dims: dims}), order)
}

// A Quantizer prints one quantize, or a part of it.
type Quantizer struct {
	W               Writer
	Op              *ir.Op
	Format          ir.Format
	Block           int64
	Along           []string
	Tile, Transform bool
}

// NewQuantizer reads the attributes of a quantize, or of an operation that package rewrite made of
// one.
func NewQuantizer(w Writer, op *ir.Op) *Quantizer {
	f := ir.Format(op.Attrs.Text("format"))
	return &Quantizer{w, op, f, f.Block(), op.Attrs.List("along"), op.Attrs.Bool("tile"),
		op.Attrs.Bool("hadamard")}
}

// BlockDim is the dimension that blocks lie along: the last that the product sums over.
func (q *Quantizer) BlockDim() string { return q.Along[len(q.Along)-1] }

// TileDim is the other dimension of tiles.
func (q *Quantizer) TileDim() ir.Dim { return q.Op.In[0].Type.TileDim(q.Along) }

// SplitBlocks views [..., n, ...] as [..., n/block, block, ...].
func (q *Quantizer) SplitBlocks(x val) val {
	at := x.Type.Index(q.BlockDim())
	return q.W.Reshape(x, ir.Type{Dims: SplitDim(x.Type.Dims, at, q.Block, inside)})
}

// SplitDim splits a dimension into parts of a size; the inner one gets a name.
func SplitDim(dims []ir.Dim, at int, size int64, name string) []ir.Dim {
	d := dims[at]
	return slices.Concat(dims[:at], []ir.Dim{{Name: d.Name, Size: d.Size / size},
		{Name: name, Size: size}}, dims[at+1:])
}

// WideBits gives the float32 bits of a value.
func (w Writer) WideBits(x val) val { return w.Bitcast(w.Convert(x, dtype.F32), dtype.U32) }

// blockTop gives the largest magnitude along a dimension, as bits. Where the dimension is not the
// innermost, slices are compared pairwise, which XLA:CPU vectorizes over columns.
func (w Writer) blockTop(x val, dim string) val {
	if x.Type.Index(dim) == len(x.Type.Dims)-1 || !w.FusesOneOutput() {
		return w.Reduce(w.WithInt(w.WideBits(x), "and", MagnitudeBits), "maximum", 0, dim)
	}
	rest := ir.Type{Dims: ir.Without(x.Type.Dims, dim)}
	var parts []val
	for i := range x.Type.Size(dim) {
		part := w.Reshape(w.Slice(x, dim, i, i+1), rest)
		parts = append(parts, w.WithInt(w.WideBits(part), "and", MagnitudeBits))
	}
	return w.MaxOf(parts)
}

// MaxOf takes the largest of values, pairwise.
func (w Writer) MaxOf(parts []val) val {
	for len(parts) > 1 {
		half := len(parts) / 2
		for i := range half {
			parts[i] = w.Elementwise("maximum", parts[i], parts[i+half])
		}
		parts = parts[:half]
	}
	return parts[0]
}

// powerScaled rounds the scale of a block up to a power of two, so that no element saturates
// (MXFP8 and other MX formats). A NaN in a block makes all of its elements NaN.
func (q *Quantizer) powerScaled(x val, e Encoding) (codes, scales val) {
	w := q.W
	bits, top := w.WideBits(x), w.blockTop(x, inside)
	sizes := w.WithInt(bits, "and", MagnitudeBits)
	scale := w.PowerOfTwoScale(top, e)
	codes = w.RoundToNearest(q.scaled(sizes, scale), e)
	codes = w.Elementwise("or", codes, w.SignBits(bits, e.signShift()))
	codes = w.Select(w.BroadcastTo(w.AtLeast(scale, 255), codes.Type),
		w.Constant(codes.Type, float64(e.nan)), codes)
	return w.Convert(codes, dtype.U8), w.Convert(scale, dtype.U8)
}

// scaled multiplies magnitudes by 2^(127−scale), the reciprocal of their block's scale, without a
// subnormal factor.
func (q *Quantizer) scaled(sizes, scale val) val {
	w := q.W
	// The reciprocal of 2^127, the scale of infinity, is subnormal: it is half of the one before.
	most := w.WithInt(scale, "minimum", 253)
	factor := w.WithInt(w.Elementwise("subtract", w.Constant(scale.Type, 254), most), "shift_left", 23)
	half := w.Select(w.AtLeast(scale, 254), w.Constant(scale.Type, 126<<23), w.Constant(scale.Type,
		127<<23))
	// A subnormal number is its bits times 2^-149.
	small := w.Elementwise("subtract", w.Constant(scale.Type, 254-149),
		w.WithInt(scale, "minimum", 254-149))
	small = w.WithInt(small, "shift_left", 23)
	y := w.Elementwise("multiply", w.Float(sizes), w.BroadcastTo(w.Float(factor), sizes.Type))
	y = w.Elementwise("multiply", y, w.BroadcastTo(w.Float(half), sizes.Type))
	return w.liftSubnormals(y, sizes, w.Float(small))
}

// liftSubnormals replaces the results for magnitudes that XLA:CPU flushes to zero: a
// subnormal is its bits, as an integer, times 2^-149.
func (w Writer) liftSubnormals(y, sizes, by val) val {
	counted := w.Convert(w.Bitcast(sizes, dtype.S32), dtype.F32)
	z := w.Elementwise("multiply", counted, w.BroadcastTo(by, y.Type))
	return w.Select(w.AtLeast(sizes, 0x800000), y, z)
}

// AtLeast compares unsigned integers with a constant.
func (w Writer) AtLeast(v val, n uint32) val {
	return w.Compare("GE", v, w.Constant(v.Type, float64(n)))
}

// SignBits gives the sign bits of float32 bits, shifted right.
func (w Writer) SignBits(bits val, by uint32) val {
	return w.WithInt(w.WithInt(bits, "shift_right_logical", by), "and", 1<<(31-by))
}

// RoundToNearest gives the codes of magnitudes, ties to even, saturating. It adds the power of two
// whose last mantissa bit is the code's last bit, so that the processor rounds.
func (w Writer) RoundToNearest(y val, e Encoding) val {
	bits := w.WithInt(w.Bitcast(y, dtype.U32), "minimum", e.most)
	shift := 23 - e.fraction
	wide := w.WithInt(w.WithInt(w.WithInt(bits, "maximum", e.least), "and", InfBits), "add", shift<<23)
	sum := w.Bitcast(w.Elementwise("add", w.Float(bits), w.Float(wide)), dtype.U32)
	code := w.Elementwise("subtract", sum, wide)
	code = w.Elementwise("add", code, w.WithInt(wide, "shift_right_logical", shift))
	return w.WithInt(code, "subtract", e.bias)
}

// PowerOfTwoScale gives the E8M0 scale of a block from the bits of its amax, in as many bits: amax
// over the largest element, rounded up to a power of two. With the largest element m·2ᵉ (E4M3:
// 448 = 1.75·2⁸) the exponent grows by one where the fraction of amax is above m.
func (w Writer) PowerOfTwoScale(top val, e Encoding) val {
	fraction, none := uint32(23), uint32(InfBits)
	if top.Type.Elem == dtype.U16 {
		fraction, none = 7, InfBits>>16
	}
	carry, exponent := e.powerOf(fraction)
	scale := w.WithInt(w.WithInt(top, "add", carry), "shift_right_logical", fraction)
	scale = w.WithInt(w.WithInt(scale, "maximum", exponent), "subtract", exponent)
	scale = w.Select(w.AtLeast(top, none), w.Constant(top.Type, 254), scale)
	return w.Select(w.AtLeast(top, none+1), w.Constant(top.Type, 255), scale)
}
