package lower

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/rewrite"
)

// quantizeRules are the operations of products with few bits. Scales are made of the bits of
// numbers, as whole numbers: XLA:CPU takes subnormal numbers for zero, and its maximum drops what
// is no number, while the largest bits of a block keep it.
func quantizeRules() map[string]rule {
	return map[string]rule{rewrite.QuantizeBlocks: quantizeBlocks, rewrite.OrderBlocks: orderBlocks,
		rewrite.BlockAmax: blockAmax, rewrite.BlockScale: blockScale,
		rewrite.AmaxOfBlocks: amaxOfBlocks, "amax": amax, "block_dot": blockDot,
		"scale_stats": scaleStats, "join_stats": joinStats, "quantize_stats": quantizeStats}
}

const (
	magnitude = 0x7fffffff // the bits of a float32 but for its sign
	infinity  = 0x7f800000
	noNumber  = 0x7fc00000
	mostFloat = 0x7f7fffff // the largest float32
)

// inside is the name of the dimension that counts within a block.
const inside = rewrite.InBlock

// with joins a value of whole numbers with a constant.
func (w *writer) with(v val, how string, n uint32) val {
	return w.elementwise(how, v, w.constant(v.t, float64(n)))
}

// float sees bits as a float32.
func (w *writer) float(v val) val { return w.bits(v, dtype.F32) }

// quantizeBlocks writes codes and scales for a CPU: it rounds a source as it lies.
func quantizeBlocks(w *writer, op *ir.Op, in []val) []val {
	q := newQuantizer(w, op)
	order := append(ir.Names(ir.Without(in[0].t.Dims, q.along...)), q.along...)
	x := in[0]
	if q.hadamard {
		x = w.held(w.hadamard(x, q.last()))
	}
	turned := !slices.Equal(ir.Names(x.t.Dims), order)
	x = q.blocks(x)
	var codes, scales val
	switch q.format {
	case ir.MXFP8:
		codes, scales = q.mxfp8(x)
	case ir.NVFP4:
		codes, scales = q.nvfp4(x, in[1])
	default:
		w.fail("there is no format %s", q.format)
		return in
	}
	if turned {
		codes, scales = w.held(codes), w.held(scales)
	}
	return []val{codes, scales}
}

// orderBlocks puts codes and scales in order.
func orderBlocks(w *writer, op *ir.Op, in []val) []val {
	codes, order := in[0], ir.Names(op.Out[0].Type.Dims)
	if ir.Format(op.Attrs.Text("format")) == ir.NVFP4 {
		codes = w.packed(codes)
	}
	return []val{w.merged(codes, order, op.Out[0].Type), w.merged(in[1], order, op.Out[1].Type)}
}

// oneResult tells a target that writes one result at a time.
func (w *writer) oneResult() bool { return w.kernels == nil || w.kernels.FusesOneOutput() }

// merged joins the dimension inside blocks with the one that it was cut from, and puts all in
// order.
func (w *writer) merged(v val, order []string, t ir.Type) val {
	dims := ir.Without(v.t.Dims, inside)
	for i, d := range dims {
		dims[i].Size = t.Size(d.Name)
	}
	return w.transpose(w.reshape(v, ir.Type{Dims: dims}), order)
}

// A quantizer writes one quantize.
type quantizer struct {
	w              *writer
	op             *ir.Op
	format         ir.Format
	block          int64
	along          []string
	tile, hadamard bool
}

func newQuantizer(w *writer, op *ir.Op) *quantizer {
	f := ir.Format(op.Attrs.Text("format"))
	return &quantizer{w, op, f, f.Block(), op.Attrs.List("along"), op.Attrs.Bool("tile"),
		op.Attrs.Bool("hadamard")}
}

// last is the dimension that blocks lie along.
func (q *quantizer) last() string { return q.along[len(q.along)-1] }

// lastKept is the last dimension of the source that is not summed over: tiles lie along it, too.
func (q *quantizer) lastKept() ir.Dim {
	kept := ir.Without(q.op.In[0].Type.Dims, q.along...)
	return kept[len(kept)-1]
}

// blocks views a value with one dimension more, that inside blocks.
func (q *quantizer) blocks(x val) val {
	at := x.t.Index(q.last())
	return q.w.reshape(x, ir.Type{Dims: cutDim(x.t.Dims, at, q.block, inside)})
}

// cutDim cuts a dimension in parts of a size, which get a name.
func cutDim(dims []ir.Dim, at int, size int64, name string) []ir.Dim {
	d := dims[at]
	return slices.Concat(dims[:at], []ir.Dim{{Name: d.Name, Size: d.Size / size},
		{Name: name, Size: size}}, dims[at+1:])
}

// wideBits sees a value as the bits of float32 numbers.
func (w *writer) wideBits(x val) val { return w.bits(w.convert(x, dtype.F32), dtype.U32) }

// top gives the largest magnitude along a dimension, as bits. Where that is not the last one, the
// largest of rows is taken two by two, which XLA:CPU does for many columns at once.
func (w *writer) top(x val, dim string) val {
	if x.t.Index(dim) == len(x.t.Dims)-1 || !w.oneResult() {
		return w.reduce(w.with(w.wideBits(x), "and", magnitude), "maximum", 0, dim)
	}
	rest := ir.Type{Dims: ir.Without(x.t.Dims, dim)}
	var parts []val
	for i := range x.t.Size(dim) {
		part := w.reshape(w.slice(x, dim, i, i+1), rest)
		parts = append(parts, w.with(w.wideBits(part), "and", magnitude))
	}
	return w.highest(parts)
}

// highest takes the largest of values, two by two.
func (w *writer) highest(parts []val) val {
	for len(parts) > 1 {
		half := len(parts) / 2
		for i := range half {
			parts[i] = w.elementwise("maximum", parts[i], parts[i+half])
		}
		parts = parts[:half]
	}
	return parts[0]
}

// mxfp8 rounds the scale of a block up to a power of two, so that no element saturates: the largest
// element, 448, is 1.75 times a power, and a fraction above 1.75 carries when 2^21 less one is
// added to its bits. A block with something that is no number is no number, in all its elements.
func (q *quantizer) mxfp8(x val) (codes, scales val) {
	w := q.w
	bits, top := w.wideBits(x), w.top(x, inside)
	sizes := w.with(bits, "and", magnitude)
	scale := w.powers(top)
	codes = w.nearest(q.scaled(sizes, scale), e4m3)
	codes = w.elementwise("or", codes, w.signs(bits, 24))
	codes = w.choose(w.as(w.least(scale, 255), codes.t), w.constant(codes.t, 0x7f), codes)
	return w.convert(codes, dtype.U8), w.convert(scale, dtype.U8)
}

// scaled multiplies magnitudes by the reciprocal of the scale of their block, 2 to the power of 127
// less scale.
func (q *quantizer) scaled(sizes, scale val) val {
	w := q.w
	// The reciprocal of 2^127, the scale of infinity, is subnormal: it is half of the one before.
	most := w.with(scale, "minimum", 253)
	factor := w.with(w.elementwise("subtract", w.constant(scale.t, 254), most), "shift_left", 23)
	half := w.choose(w.least(scale, 254), w.constant(scale.t, 126<<23), w.constant(scale.t, 127<<23))
	// A subnormal number is its bits times 2^-149.
	small := w.elementwise("subtract", w.constant(scale.t, 254-149),
		w.with(scale, "minimum", 254-149))
	small = w.with(small, "shift_left", 23)
	y := w.elementwise("multiply", w.float(sizes), w.as(w.float(factor), sizes.t))
	y = w.elementwise("multiply", y, w.as(w.float(half), sizes.t))
	return w.lifted(y, sizes, w.float(small))
}

// lifted replaces products of numbers that count as zero by those of their bits.
func (w *writer) lifted(y, sizes, by val) val {
	counted := w.convert(w.bits(sizes, dtype.S32), dtype.F32)
	z := w.elementwise("multiply", counted, w.as(by, y.t))
	return w.choose(w.least(sizes, 0x800000), y, z)
}

// least tells which numbers are at least so large.
func (w *writer) least(v val, n uint32) val {
	return w.compare("GE", v, w.constant(v.t, float64(n)))
}

// signs gives the sign bits of numbers, moved right.
func (w *writer) signs(bits val, by uint32) val {
	return w.with(w.with(bits, "shift_right_logical", by), "and", 1<<(31-by))
}

// An encoding is how numbers of few bits are made of float32 bits (see dtype's narrow).
type encoding struct{ fraction, least, bias, most uint32 }

var (
	e4m3 = encoding{3, 0x3c800000, 141 << 3, 0x43e00000}
	e2m1 = encoding{1, 0x3f800000, 149 << 1, 0x40c00000}
)

// nearest gives the codes of magnitudes, to the nearest and ties to even, saturating. It adds the
// power of two whose last bit is the last bit of the code, so that the processor rounds.
func (w *writer) nearest(y val, e encoding) val {
	bits := w.with(w.bits(y, dtype.U32), "minimum", e.most)
	shift := 23 - e.fraction
	wide := w.with(w.with(w.with(bits, "maximum", e.least), "and", infinity), "add", shift<<23)
	sum := w.bits(w.elementwise("add", w.float(bits), w.float(wide)), dtype.U32)
	code := w.elementwise("subtract", sum, wide)
	code = w.elementwise("add", code, w.with(wide, "shift_right_logical", shift))
	return w.with(code, "subtract", e.bias)
}
