package safetensors

import (
	"math/bits"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
)

// types are the element types of the format and ours. The order is that of the enumeration in the
// reference library (safetensors 0.8.0, tensor.rs), which sorts a file's tensors by it: an
// element type never stands before one that needs less alignment.
var types = [...]struct {
	name string
	dtype.DType
}{
	{"BOOL", dtype.Pred},
	{"F4", dtype.F4E2M1FN},
	{"U8", dtype.U8},
	{"I8", dtype.S8},
	{"F8_E5M2", dtype.F8E5M2},
	{"F8_E4M3", dtype.F8E4M3FN},
	{"F8_E8M0", dtype.F8E8M0FNU},
	{"I16", dtype.S16},
	{"U16", dtype.U16},
	{"F16", dtype.F16},
	{"BF16", dtype.BF16},
	{"I32", dtype.S32},
	{"U32", dtype.U32},
	{"F32", dtype.F32},
	{"C64", dtype.C64},
	{"F64", dtype.F64},
	{"I64", dtype.S64},
	{"U64", dtype.U64},
}

// foreign are element types that the format has and Deepwell has not.
var foreign = []string{"F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}

// typeNamed finds the element type that a header names.
func typeNamed(name string) (dtype.DType, error) {
	for _, row := range types {
		if row.name == name {
			return row.DType, nil
		}
	}
	if slices.Contains(foreign, name) {
		return dtype.Invalid, diag.New(codeFormat,
			"element type %s has no counterpart in Deepwell", name).
			Try("convert the tensor to another element type")
	}
	err := damaged("%s is not an element type of the format", human.Quote(name))
	var names []string
	for _, row := range types {
		names = append(names, row.name)
	}
	if near := diag.Nearest(name, names); near != "" {
		err = err.Because("the format spells one %s", near)
	}
	return dtype.Invalid, err
}

// typeRank gives an element type's place in the table, -1 where the format has no such type.
func typeRank(t dtype.DType) int {
	for i, row := range types {
		if row.DType == t {
			return i
		}
	}
	return -1
}

// maxRank bounds the dimensions of a tensor; NumPy 2 has the same bound (NPY_MAXDIMS).
const maxRank = 64

// span computes the bytes of a tensor. The product is taken over the dimensions that are not
// zero, so that no partial product of an accepted shape overflows either, in whatever order.
func span(s dtype.Shape) (int64, error) {
	if len(s.Dims) > maxRank {
		return 0, damaged("a shape of %d dimensions; at most %d are read", len(s.Dims), maxRank)
	}
	n, empty := uint64(s.Type.Bits()), false
	for _, d := range s.Dims {
		switch {
		case d < 0:
			return 0, damaged("dimension %d of shape %v is negative", d, s)
		case d == 0:
			empty = true
			continue
		}
		high, low := bits.Mul64(n, uint64(d))
		if high != 0 || low > 1<<63-1 {
			return 0, damaged("the size of shape %v overflows", s)
		}
		n = low
	}
	switch {
	case empty:
		return 0, nil
	case n%8 != 0:
		return 0, damaged("shape %v does not end at a whole byte", s).
			Because("elements of %d bits are packed, and a tensor must fill its last byte",
				s.Type.Bits())
	}
	return int64(n / 8), nil
}
