package replay

import (
	"cmp"
	"fmt"
)

// An elemType is an element type as XLA numbers it (PrimitiveType of xla/xla_data.proto).
type elemType int64

const (
	typePred  elemType = 1
	typeS8    elemType = 2
	typeS16   elemType = 3
	typeS32   elemType = 4
	typeS64   elemType = 5
	typeU8    elemType = 6
	typeU16   elemType = 7
	typeU32   elemType = 8
	typeU64   elemType = 9
	typeF16   elemType = 10
	typeF32   elemType = 11
	typeF64   elemType = 12
	typeTuple elemType = 13
	typeBF16  elemType = 16
	typeToken elemType = 17
	typeE5M2  elemType = 19
	typeE4M3  elemType = 20
	typeE2M1  elemType = 32
	typeE8M0  elemType = 33
)

// An elemRow is what replay knows of an element type. Types without a row are refused.
type elemRow struct {
	name string
	bits int64
	// codes: XLA:CPU does not compute with the type, and its elements are held as codes, one in each
	// byte. Only instructions that move elements may have operands of the type.
	codes bool
	float bool
}

var elemRows = map[elemType]elemRow{
	typePred: {name: "pred", bits: 8},
	typeS8:   {name: "s8", bits: 8}, typeS16: {name: "s16", bits: 16},
	typeS32: {name: "s32", bits: 32}, typeS64: {name: "s64", bits: 64},
	typeU8: {name: "u8", bits: 8}, typeU16: {name: "u16", bits: 16},
	typeU32: {name: "u32", bits: 32}, typeU64: {name: "u64", bits: 64},
	typeF16: {name: "f16", bits: 16, float: true}, typeBF16: {name: "bf16", bits: 16, float: true},
	typeF32: {name: "f32", bits: 32, float: true}, typeF64: {name: "f64", bits: 64, float: true},
	typeE5M2:  {name: "f8e5m2", bits: 8, float: true},
	typeE4M3:  {name: "f8e4m3fn", bits: 8, float: true},
	typeE2M1:  {name: "f4e2m1fn", bits: 4, float: true, codes: true},
	typeE8M0:  {name: "f8e8m0fnu", bits: 8, float: true, codes: true},
	typeTuple: {name: "tuple"}, typeToken: {name: "token"},
}

func (t elemType) String() string {
	if row, ok := elemRows[t]; ok {
		return row.name
	}
	return fmt.Sprintf("type%d", int64(t))
}

func (t elemType) bits() int64 { return elemRows[t].bits }

// hold is the type in which elements of type t are held: codes as bytes, and bf16 as f32 where the
// replay is wide. Rounding to bf16 differs between two correct programs, which hides small errors
// among its noise. The wide replay rounds only where the bits of a bf16 number are read.
func (r *rewriter) hold(t elemType) elemType {
	switch {
	case elemRows[t].codes:
		return typeU8
	case r.options.Wide && t == typeBF16:
		return typeF32
	}
	return t
}

// held is a shape as it is held: row-major, in device memory.
func (r *rewriter) held(s *shape) *shape {
	if _, ok := elemRows[s.typ]; !ok || s.odd != "" {
		what := cmp.Or(s.odd, "elements of "+s.typ.String())
		r.refuseLayout("a shape has %s, which replay does not know", what)
	}
	if !s.isTuple() {
		return r.array(s.typ, s.dims...)
	}
	t := &shape{typ: typeTuple}
	for _, e := range s.elems {
		t.elems = append(t.elems, r.held(e))
	}
	return t
}

// array is the shape of an array of elements of type t as it is held.
func (r *rewriter) array(t elemType, dims ...int64) *shape { return exact(r.hold(t), dims...) }

// exact is a shape of just this type.
func exact(t elemType, dims ...int64) *shape { return &shape{typ: t, dims: dims} }

// fromCodes decodes a number that is held as a code into f32; other numbers are converted.
func (w *writer) fromCodes(x *value, t elemType) *value {
	switch t {
	case typeE2M1:
		return w.fromE2M1(x)
	case typeE8M0:
		return w.fromE8M0(x)
	}
	return w.convert(x, typeF32)
}

// fromE2M1 decodes the low four bits of bytes: a sign, two bits of exponent, one of mantissa. Codes
// 2 to 7 are normal numbers, whose bits go into a float32 of the same value; 0 and 1 are 0 and 0.5,
// which is what 1 and 1.5 are minus 1.
func (w *writer) fromE2M1(x *value) *value {
	code := w.convert(x, typeU32)
	dims := code.shape.dims
	u32 := func(v uint32) *value { return w.fullInt(typeU32, dims, int64(v)) }
	magnitude := w.elementwise("and", code, u32(7))
	small := w.compare("LT", magnitude, u32(2))
	exponent := w.choose(small, u32(127<<23), u32(126<<23))
	v := w.bitcastConvert(w.elementwise("add", w.elementwise("shift-left", magnitude, u32(22)),
		exponent), typeF32)
	v = w.elementwise("subtract", v, w.choose(small, w.full(typeF32, dims, 1),
		w.full(typeF32, dims, 0)))
	negative := w.compare("NE", w.elementwise("and", code, u32(8)), u32(0))
	return w.choose(negative, w.elementwise("negate", v), v)
}

// fromE8M0 decodes bytes that are exponents with a bias of 127; 255 is NaN. Code 0, 2^-127, is
// subnormal in float32 and becomes 0, as the CPU engine flushes it.
func (w *writer) fromE8M0(x *value) *value {
	code := w.convert(x, typeU32)
	u32 := func(v int64) *value { return w.fullInt(typeU32, code.shape.dims, v) }
	bits := w.choose(w.compare("EQ", code, u32(255)), u32(0x7fc00000),
		w.elementwise("shift-left", code, u32(23)))
	return w.bitcastConvert(bits, typeF32)
}
