package replay

import (
	"regexp"

	"github.com/deepwell/deepwell/diag"
)

// tritonName finds the name of a kernel in the configuration of its call, a dictionary of MLIR.
var tritonName = regexp.MustCompile(`\bname = "(\w+)"`)

// triton rewrites the call of a kernel of our own by what its name says it computes; package
// kernels/triton/run holds the text of each kernel to that, byte by byte.
func (w *writer) triton(s *site) []*value {
	found := tritonName.FindSubmatch(s.config)
	if found == nil {
		w.refuse(diag.ReplayCall, "a call of %s without a name", s.target)
	}
	switch name := string(found[1]); name {
	case "quantize_mxfp8":
		return append(w.mxfp8(s, false, 0), w.mxfp8(s, true, 2)...)
	case "quantize_mxfp8_rows":
		return w.mxfp8(s, false, 0)
	case "quantize_mxfp8_columns":
		return w.mxfp8(s, true, 0)
	default:
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s", name)
	}
	return nil
}

// mxfp8 quantizes a matrix [batch·rows, cols] along its rows, or along the columns of each of the
// batch's matrices, whose codes are transposed: [batch·cols, rows]. It gives codes and scales as
// bytes; the result with the codes has the number at.
func (w *writer) mxfp8(s *site, columns bool, at int) []*value {
	const block = 32
	from, results := s.from[0].shape, s.shape.results()
	if len(s.values) != 1 || len(from.dims) != 2 || !from.rowMajor() || len(results) < at+2 ||
		len(results[at].dims) != 2 || results[at].dims[1]%block != 0 {
		w.refuse(diag.ReplayCall, "a quantization of %v", from.dims)
	}
	x, codes := w.convert(s.values[0], typeF32), results[at].dims
	if columns {
		batch := from.dims[0] / codes[1]
		x = w.transpose(w.reshape(x, batch, codes[1], from.dims[1]), 0, 2, 1)
	}
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
	y := w.elementwise("multiply", x, w.broadcast(w.bitcastConvert(factor, typeF32), blocks, 0, 1))
	most := w.full(typeF32, blocks, 448)
	y = w.choose(w.compare("GT", y, most), most, y) // an infinity; the conversion does not saturate
	least := w.full(typeF32, blocks, -448)
	y = w.choose(w.compare("LT", y, least), least, y)
	q := w.bitcastConvert(w.convertExactly(y, typeE4M3), typeU8)
	return []*value{w.reshape(q, codes...), w.convertExactly(scale, typeU8)}
}
