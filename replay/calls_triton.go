package replay

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/wire"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
)

// triton rewrites the call of a kernel of our own by what it says it computes; tests of package
// kernels/fused hold the text of each kernel to that, byte by byte.
func (w *writer) triton(s *site) (out []*value) {
	found := fused.SpecsIn(string(s.config))
	if len(found) != 1 {
		w.refuse(diag.ReplayCall, "a call of %s that does not say what it computes", s.target)
	}
	if fused.IsGroup(found[0]) {
		return w.grouped(s, found[0])
	}
	if l, err := fused.ParseLoss(found[0]); err == nil {
		return w.loss(s, l)
	}
	if rownorm.Is(found[0]) {
		return w.rowNorm(s, found[0])
	}
	if flash.Is(found[0]) {
		return w.flash(s, found[0])
	}
	spec, err := fused.ParseSpec(found[0])
	operands := spec.Operands()
	if spec.Rounds > 0 {
		operands += 1 + len(spec.Into) + len(spec.Saved)
	}
	if err != nil || spec.Format != dtype.MXFP8 && spec.Format != dtype.NVFP4 || spec.Swizzled ||
		len(s.values) != operands {
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s: %v", found[0], err)
	}
	rows := int64(spec.Batch) * int64(spec.Rows)
	dims := []int64{rows, int64(spec.Cols)}
	k := &ownKernel{w, s, spec.Stacks, spec.Operands()}
	in := make([]*value, len(spec.Expr.In))
	for i, o := range spec.Expr.In {
		in[i] = k.spread(i, o.Over, dims)
	}
	parts := expr.Do(&spec.Expr, in, func(step expr.Step, args []*value) *value {
		return w.step(step, args, dims)
	})
	for i, y := range parts {
		parts[i] = w.convert(y, typeBF16)
	}
	if spec.Format == dtype.NVFP4 {
		out = newNVFP4(k, spec).results(parts)
	} else {
		out = w.eights(spec, parts)
	}
	out = k.stacked(out)
	results := s.shape.results()
	if len(out) != len(results) {
		w.refuse(diag.ReplayCall, "%s has %d results", found[0], len(results))
	}
	for i, v := range out {
		out[i] = w.reshape(v, results[i].dims...)
	}
	return out
}

// eights are what a kernel of MXFP8 makes of the parts of its source.
func (w *writer) eights(spec fused.Spec, parts []*value) (out []*value) {
	for part, y := range parts {
		if spec.Keep {
			out = append(out, y)
		}
		if spec.AlongOf(part) {
			out = append(out, w.mxfp8(y)...)
		}
		if spec.Across {
			batch, r, c := int64(spec.Batch), int64(spec.Rows), int64(spec.Cols)
			t := w.transpose(w.reshape(y, batch, r, c), 0, 2, 1)
			out = append(out, w.mxfp8(w.reshape(t, batch*c, r))...)
		}
	}
	return out
}

// An ownKernel is the call of a kernel of our own: operands of its expression and of its format,
// and, if it has stacks, the round and the stacks that it writes to.
type ownKernel struct {
	*writer
	*site
	fused.Stacks
	operands int // before the round
}

// round is the number of the loop's round, an index.
func (k *ownKernel) round() *value { return k.reshape(k.values[k.operands]) }

// part is the round's part of a stack.
func (k *ownKernel) part(stack *value, dims ...int64) *value {
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	x := k.reshape(stack, int64(k.Rounds), n)
	x = k.add("dynamic-slice", exact(x.shape.typ, 1, n), wire.Msg(nil).Packed(20, 1, n), x, k.round(),
		k.scalarInt(typeS32, 0))
	return k.reshape(x, dims...)
}

// stacked puts results into their stacks, and operands that are saved into theirs, after all
// results.
func (k *ownKernel) stacked(out []*value) []*value {
	for n, i := range k.Into {
		if i >= len(out) {
			k.refuse(diag.ReplayCall, "a kernel of %d results has a stack for number %d", len(out), i)
		}
		out[i] = k.updated(k.operands+1+n, out[i])
	}
	for n, i := range k.Saved {
		out = append(out, k.updated(k.operands+1+len(k.Into)+n, k.values[i]))
	}
	return out
}

// updated is a stack with the round's part replaced.
func (k *ownKernel) updated(stack int, part *value) *value {
	n := int64(1)
	for _, d := range part.shape.dims {
		n *= d
	}
	x := k.reshape(k.values[stack], int64(k.Rounds), n)
	return k.add("dynamic-update-slice", x.shape, nil, x, k.reshape(part, 1, n), k.round(),
		k.scalarInt(typeS32, 0))
}

// spread gives an operand of an expression an element for each of a matrix, in float32.
func (k *ownKernel) spread(i int, over expr.Over, dims []int64) *value {
	w := k.writer
	if !k.from[i].shape.rowMajor() {
		w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
	}
	x := k.values[i]
	if slices.Contains(k.From, i) {
		x = k.part(x, dims...)
	}
	x = w.convert(x, typeF32)
	switch over {
	case expr.Rows:
		return w.broadcast(w.reshape(x, dims[0]), dims, 0)
	case expr.Cols:
		return w.broadcast(w.reshape(x, dims[1]), dims, 1)
	case expr.Scalar:
		return w.broadcast(w.reshape(x), dims)
	}
	return w.reshape(x, dims...)
}

// stepOpcodes are the steps that HLO has as instructions.
var stepOpcodes = map[string]string{"add": "add", "sub": "subtract", "mul": "multiply",
	"div": "divide", "neg": "negate", "exp": "exponential", "log": "log", "sqrt": "sqrt",
	"rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "logistic"}

// step computes one step of an expression.
func (w *writer) step(s expr.Step, args []*value, dims []int64) *value {
	number := func() *value { return w.full(typeF32, dims, s.By) }
	switch {
	case stepOpcodes[s.Op] != "":
		return w.elementwise(stepOpcodes[s.Op], args...)
	case expr.Compares(s.Op):
		return w.compare(strings.ToUpper(s.Op), args[0], args[1])
	}
	switch s.Op {
	case "scale":
		return w.elementwise("multiply", args[0], number())
	case "shift":
		return w.elementwise("add", args[0], number())
	case "fill":
		return number()
	case "select":
		return w.choose(args[0], args[1], args[2])
	case "relu":
		return w.elementwise("maximum", args[0], w.full(typeF32, dims, 0))
	}
	w.refuse(diag.ReplayCall, "replay has no rule for the step %s", s.Op)
	return nil
}

// mxfp8 quantizes a matrix [rows, n] along its rows and gives codes and scales as bytes.
func (w *writer) mxfp8(y *value) []*value {
	const block = 32
	codes := y.shape.dims
	x := w.convert(y, typeF32)
	blocks := []int64{codes[0], codes[1] / block, block}
	x = w.reshape(x, blocks...)
	scales := blocks[:2]
	u32 := func(dims []int64, v int64) *value { return w.fullInt(typeU32, dims, v) }
	bits := w.elementwise("and", w.bitcastConvert(x, typeU32), u32(blocks, 0x7fffffff))
	top := w.reduce(bits, "maximum", 0, 2)
	// The largest over 448, rounded up to a power of two; infinities and NaNs have the last two codes.
	scale := w.elementwise("shift-right-logical", w.elementwise("add", top, u32(scales, 0x1fffff)),
		u32(scales, 23))
	scale = w.elementwise("subtract", w.elementwise("maximum", scale, u32(scales, 8)), u32(scales, 8))
	scale = w.choose(w.compare("GE", top, u32(scales, 0x7f800000)), u32(scales, 254), scale)
	scale = w.choose(w.compare("GT", top, u32(scales, 0x7f800000)), u32(scales, 255), scale)
	factor := w.elementwise("shift-left", w.elementwise("subtract", u32(scales, 254), scale),
		u32(scales, 23))
	factor = w.choose(w.compare("EQ", scale, u32(scales, 254)), u32(scales, 0x400000), factor)
	factor = w.choose(w.compare("EQ", scale, u32(scales, 255)), u32(scales, 0x7fc00000), factor)
	y = w.elementwise("multiply", x, w.broadcast(w.bitcastConvert(factor, typeF32), blocks, 0, 1))
	most := w.full(typeF32, blocks, 448)
	y = w.choose(w.compare("GT", y, most), most, y) // an infinity; the conversion does not saturate
	least := w.full(typeF32, blocks, -448)
	y = w.choose(w.compare("LT", y, least), least, y)
	q := w.bitcastConvert(w.convertExactly(y, typeE4M3), typeU8)
	return []*value{w.reshape(q, codes...), w.convertExactly(scale, typeU8)}
}
