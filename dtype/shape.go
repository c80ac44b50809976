package dtype

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A Shape is an element type and the length of each dimension; a scalar has none.
type Shape struct {
	Type DType
	Dims []int64
}

// Elements is the product of the dimensions: 1 for a scalar.
func (s Shape) Elements() int64 {
	n := int64(1)
	for _, d := range s.Dims {
		n *= d
	}
	return n
}

// Bytes is the dense size in memory.
func (s Shape) Bytes() int64 { return s.Type.Bytes(s.Elements()) }

// Equal reports whether both have the same type and dimensions.
func (s Shape) Equal(t Shape) bool { return s.Type == t.Type && slices.Equal(s.Dims, t.Dims) }

// String writes the shape as HLO does: f32[8,128].
func (s Shape) String() string {
	return s.Type.String() + List(s.Dims)
}

// List prints dimensions as [8,128], which JSON reads as well.
func List(dims []int64) string { return strings.ReplaceAll(fmt.Sprint(dims), " ", ",") }

// MLIR writes the shape as StableHLO does: tensor<8x128xf32>.
func (s Shape) MLIR() string {
	var b strings.Builder
	b.WriteString("tensor<")
	for _, d := range s.Dims {
		b.WriteString(strconv.FormatInt(d, 10))
		b.WriteByte('x')
	}
	return b.String() + s.Type.MLIR() + ">"
}

// MarshalText writes the shape into JSON as one short string.
func (s Shape) MarshalText() ([]byte, error) {
	if !s.Type.Valid() {
		return nil, fmt.Errorf("dtype: a shape needs an element type")
	}
	return []byte(s.String()), nil
}

// UnmarshalText reads what String writes.
func (s *Shape) UnmarshalText(text []byte) error {
	name, rest, ok := strings.Cut(string(text), "[")
	list, end := strings.CutSuffix(rest, "]")
	if !ok || !end {
		return fmt.Errorf("dtype: %q is not a shape like f32[8,128]", text)
	}
	d, err := Parse(name)
	if err != nil {
		return err
	}
	read := Shape{Type: d}
	if list == "" {
		*s = read
		return nil
	}
	for part := range strings.SplitSeq(list, ",") {
		n, err := strconv.ParseInt(part, 10, 64)
		if err != nil || n < 0 {
			return fmt.Errorf("dtype: %q has a dimension %q", text, part)
		}
		read.Dims = append(read.Dims, n)
	}
	*s = read
	return nil
}
