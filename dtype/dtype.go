package dtype

import "fmt"

// A DType is an element type. The zero value is Invalid.
type DType uint8

// The element types, in the order of the table below.
const (
	Invalid DType = iota
	Pred
	S4
	S8
	S16
	S32
	S64
	U4
	U8
	U16
	U32
	U64
	F16
	BF16
	F32
	F64
	C64
	C128
	F8E5M2
	F8E4M3FN
	F8E8M0FNU
	F4E2M1FN
)

// A Kind says what sort of number an element is.
type Kind uint8

// The kinds.
const (
	Bool Kind = iota + 1
	Signed
	Unsigned
	Float
	Complex
	Scale // an exponent alone: a factor for other elements, never a value by itself
)

type info struct {
	name string // lower case, as people and HLO text write it
	mlir string // as StableHLO writes it
	bits int
	kind Kind
}

var table = [...]info{
	Invalid:   {"invalid", "", 0, 0},
	Pred:      {"pred", "i1", 8, Bool}, // one bit of meaning, one byte of memory in XLA
	S4:        {"s4", "i4", 4, Signed},
	S8:        {"s8", "i8", 8, Signed},
	S16:       {"s16", "i16", 16, Signed},
	S32:       {"s32", "i32", 32, Signed},
	S64:       {"s64", "i64", 64, Signed},
	U4:        {"u4", "ui4", 4, Unsigned},
	U8:        {"u8", "ui8", 8, Unsigned},
	U16:       {"u16", "ui16", 16, Unsigned},
	U32:       {"u32", "ui32", 32, Unsigned},
	U64:       {"u64", "ui64", 64, Unsigned},
	F16:       {"f16", "f16", 16, Float},
	BF16:      {"bf16", "bf16", 16, Float},
	F32:       {"f32", "f32", 32, Float},
	F64:       {"f64", "f64", 64, Float},
	C64:       {"c64", "complex<f32>", 64, Complex},
	C128:      {"c128", "complex<f64>", 128, Complex},
	F8E5M2:    {"f8e5m2", "f8E5M2", 8, Float},
	F8E4M3FN:  {"f8e4m3fn", "f8E4M3FN", 8, Float},
	F8E8M0FNU: {"f8e8m0fnu", "f8E8M0FNU", 8, Scale},
	F4E2M1FN:  {"f4e2m1fn", "f4E2M1FN", 4, Float},
}

// All lists every valid element type.
func All() []DType {
	all := make([]DType, 0, len(table)-1)
	for d := Pred; int(d) < len(table); d++ {
		all = append(all, d)
	}
	return all
}

// Parse finds the type of a name in either spelling: "bf16", "f8e4m3fn" or StableHLO's "f8E4M3FN".
func Parse(name string) (DType, error) {
	for d, row := range table {
		if d != int(Invalid) && (row.name == name || row.mlir == name) {
			return DType(d), nil
		}
	}
	return Invalid, fmt.Errorf("dtype: no element type is called %q", name)
}

func (d DType) row() info {
	if int(d) >= len(table) {
		return table[Invalid]
	}
	return table[d]
}

// String gives the name as people write it.
func (d DType) String() string { return d.row().name }

// MLIR gives the name as StableHLO writes it.
func (d DType) MLIR() string { return d.row().mlir }

// Bits is the size of one element in memory.
func (d DType) Bits() int { return d.row().bits }

// Kind says what sort of number the type is; 0 for Invalid.
func (d DType) Kind() Kind { return d.row().kind }

// Valid reports whether d is a type of the table.
func (d DType) Valid() bool { return d.row().bits > 0 }

// Bytes is the memory that n densely packed elements take: 4-bit elements go two to a byte.
func (d DType) Bytes(n int64) int64 { return (n*int64(d.Bits()) + 7) / 8 }

// MarshalText writes the name into JSON and TOML.
func (d DType) MarshalText() ([]byte, error) {
	if !d.Valid() {
		return nil, fmt.Errorf("dtype: %d is not an element type", d)
	}
	return []byte(d.String()), nil
}

// UnmarshalText reads a name from JSON and TOML.
func (d *DType) UnmarshalText(text []byte) error {
	parsed, err := Parse(string(text))
	if err == nil {
		*d = parsed
	}
	return err
}
