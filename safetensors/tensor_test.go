package safetensors

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
)

// pick gathers a box element by element, the slow and obvious way.
func pick(data []byte, shape dtype.Shape, start, size []int64) []byte {
	width := shape.Type.Bits()
	box := dtype.Shape{Type: shape.Type, Dims: size}
	out := make([]byte, box.Bytes())
	for i := range box.Elements() {
		rest, from, scale := i, int64(0), int64(1)
		for d, n := range slices.Backward(size) {
			from += (start[d] + rest%n) * scale
			rest /= n
			scale *= shape.Dims[d]
		}
		if width == 4 {
			nibble := data[from/2] >> (from % 2 * 4) & 15
			out[i/2] |= nibble << (i % 2 * 4)
			continue
		}
		n := int64(width / 8)
		copy(out[i*n:(i+1)*n], data[from*n:])
	}
	return out
}

func TestSlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		shape := dtype.Shape{Type: types[rapid.IntRange(0, len(types)-1).Draw(t, "type")].DType}
		shape.Dims = rapid.SliceOfN(rapid.Int64Range(0, 5), 0, 4).Draw(t, "dims")
		if rapid.Bool().Draw(t, "wide") { // gaps of more than a page
			shape.Dims = append(shape.Dims, rapid.Int64Range(4000, 6000).Draw(t, "columns")*2)
		}
		if shape.Elements()*int64(shape.Type.Bits())%8 != 0 {
			return
		}
		data := make([]byte, shape.Bytes())
		for i := range data {
			data[i] = byte(i*7 + i>>8)
		}
		start, size := make([]int64, len(shape.Dims)), make([]int64, len(shape.Dims))
		for i, d := range shape.Dims {
			start[i] = rapid.Int64Range(0, d).Draw(t, "start")
			size[i] = rapid.Int64Range(0, d-start[i]).Draw(t, "size")
		}
		tensor := memory(t, shape, data)
		want := pick(data, shape, start, size)
		got := make([]byte, len(want))
		err := tensor.ReadSlice(got, start, size)
		if err != nil {
			cut := false // whether a dimension is split within a byte
			for i, inner := len(size)-1, int64(4); i >= 0; i-- {
				cut = cut || inner%8 != 0 && (size[i] != shape.Dims[i] || start[i] != 0)
				inner *= shape.Dims[i]
			}
			if shape.Type.Bits() != 4 || !cut || !strings.Contains(err.Error(), "splits a byte") {
				t.Fatalf("%v from %d size %d: %v", shape, start, size, err)
			}
			return
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%v from %d size %d: %x, want %x", shape, start, size, got, want)
		}
	})
}

type fataler interface {
	Helper()
	Fatal(args ...any)
}

func memory(t fataler, shape dtype.Shape, data []byte) Tensor {
	t.Helper()
	var b bytes.Buffer
	if _, err := Write(&b, []Item{{"a", shape, FromBytes(data)}}, nil); err != nil {
		t.Fatal(err)
	}
	set, err := Parse("x", b.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	tensor, err := set.Tensor("a")
	if err != nil {
		t.Fatal(err)
	}
	return tensor
}

// Rows that fill more than one window of the copy.
func TestSliceOfManyWindows(t *testing.T) {
	shape := dtype.Shape{Type: dtype.BF16, Dims: []int64{3, 3000, 300}}
	data := make([]byte, shape.Bytes())
	for i := range data {
		data[i] = byte(i*7 + i>>8)
	}
	start, size := []int64{1, 5, 100}, []int64{2, 2990, 33}
	want := pick(data, shape, start, size)
	got := make([]byte, len(want))
	if err := memory(t, shape, data).ReadSlice(got, start, size); err != nil || !bytes.Equal(got, want) {
		t.Errorf("other bytes, %v", err)
	}
}

func TestSlicesThatAreRefused(t *testing.T) {
	tensor := memory(t, dtype.Shape{Type: dtype.F4E2M1FN, Dims: []int64{4, 6}}, make([]byte, 12))
	for _, row := range []struct {
		start, size []int64
		bytes       int
		words       string
	}{
		{[]int64{0}, []int64{4}, 12, "a slice of 1 by 1 numbers for f4e2m1fn[4,6]"},
		{[]int64{0, 0}, []int64{4}, 12, "a slice of 2 by 1 numbers"},
		{[]int64{-1, 0}, []int64{4, 6}, 12, "4 elements from -1 along dimension 0"},
		{[]int64{0, 0}, []int64{4, -6}, 12, "-6 elements from 0"},
		{[]int64{0, 1}, []int64{4, 6}, 12, "6 elements from 1 along dimension 1"},
		{[]int64{1 << 62, 0}, []int64{1 << 62, 6}, 12, "along dimension 0"},
		{[]int64{0, 1}, []int64{1, 2}, 1, "splits a byte"},
		{[]int64{0, 0}, []int64{1, 3}, 2, "splits a byte"},
		{[]int64{0, 0}, []int64{4, 6}, 11, "takes 12 bytes, the buffer has 11"},
		{[]int64{0, 0}, []int64{0, 6}, 1, "takes 0 bytes, the buffer has 1"},
	} {
		err := tensor.ReadSlice(make([]byte, row.bytes), row.start, row.size)
		if err == nil || !strings.Contains(err.Error(), row.words) || !strings.Contains(err.Error(), `tensor "a"`) {
			t.Errorf("%v %v: %v", row.start, row.size, err)
		}
	}
	if _, err := tensor.ReadAt(nil, -1); err == nil {
		t.Error("a negative offset was read")
	}
}

// counting tells how much of a file was read.
type counting struct {
	io.ReaderAt
	bytes, calls int
}

func (c *counting) ReadAt(p []byte, off int64) (int, error) {
	c.bytes += len(p)
	c.calls++
	return c.ReaderAt.ReadAt(p, off)
}

// One eighth of the columns of a 64 MB matrix, as tensor parallelism shards it; and one column.
func TestSlicesReadLittle(t *testing.T) {
	const rows, columns = 4096, 8192
	shape := dtype.Shape{Type: dtype.BF16, Dims: []int64{rows, columns}}
	tensor := memory(t, shape, make([]byte, shape.Bytes()))
	c := &counting{ReaderAt: tensor.e.shard.reader}
	tensor.e.shard.reader = c
	dst := make([]byte, rows*columns*2/8)
	must(t, tensor.ReadSlice(dst, []int64{0, columns / 8}, []int64{rows, columns / 8}))
	if c.bytes != len(dst) || c.calls != rows {
		t.Errorf("an eighth: %d bytes in %d calls", c.bytes, c.calls)
	}
	*c = counting{ReaderAt: c.ReaderAt}
	must(t, tensor.ReadSlice(dst[:rows/8*columns*2], []int64{rows / 2, 0}, []int64{rows / 8, columns}))
	if c.bytes != len(dst) || c.calls != 1 {
		t.Errorf("whole rows: %d bytes in %d calls", c.bytes, c.calls)
	}
	half := memory(t, dtype.Shape{Type: dtype.BF16, Dims: []int64{rows, 128}}, make([]byte, rows*256))
	c = &counting{ReaderAt: half.e.shard.reader}
	half.e.shard.reader = c
	must(t, half.ReadSlice(dst[:rows*2], []int64{0, 5}, []int64{rows, 1}))
	if c.bytes > rows*256 || c.calls != rows*256/stage {
		t.Errorf("a column: %d bytes in %d calls", c.bytes, c.calls)
	}
}
