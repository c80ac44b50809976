package safetensors

import (
	"io"
	"math/bits"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Tensor is one tensor of a set. It is an [io.ReaderAt] over its own bytes.
type Tensor struct{ e *entry }

// Name is the tensor's name in the set.
func (t Tensor) Name() string { return t.e.name }

// File is the base name of the file that holds the tensor.
func (t Tensor) File() string { return base(t.e.shard.name) }

// Shape is the tensor's element type and dimensions. Elements of 4 bits are packed two to a byte,
// the first in the low half; the dimensions count elements.
func (t Tensor) Shape() dtype.Shape {
	return dtype.Shape{Type: t.e.shape.Type, Dims: slices.Clone(t.e.shape.Dims)}
}

// Size is the tensor's length in bytes.
func (t Tensor) Size() int64 { return t.e.end - t.e.begin }

const (
	// maxCopy bounds what Bytes allocates where a file cannot be mapped: twice the largest
	// tensor of a published model (the 4.2 GB embedding of Llama 3.1 405B).
	maxCopy = 8 << 30
	// page is the unit in which a disk is read anyway, so that a gap below it costs nothing.
	page = 4 << 10
	// window bounds the buffers that whole tensors go through.
	window = 1 << 20
	// stage bounds the buffer that rows with gaps are picked from: 128 KiB stay in the
	// processor's cache, and a megabyte of fresh memory for each slice took seven times as long.
	stage = 128 << 10
)

// Bytes gives the tensor's bytes without a copy where the file is mapped: read only, perhaps not
// aligned, and valid until the set is closed. After that, Bytes is an error and an older view
// must not be touched. The package comment tells when a copy is the safer way.
func (t Tensor) Bytes() ([]byte, error) {
	view, err := t.e.shard.view(t.e.begin, t.e.end)
	if view != nil || err != nil {
		return view, err
	}
	if t.Size() > maxCopy {
		return nil, diag.New(diag.NotSupported,
			"tensor %s has %d bytes and its file cannot be mapped", human.Quote(t.Name()), t.Size()).
			At("%s", t.e.shard.name).Try("read it in slices")
	}
	p := make([]byte, t.Size())
	return p, t.e.shard.read(p, t.e.begin)
}

// ReadAt copies bytes of the tensor through the file, so that a file that has become shorter is
// an error and no signal.
func (t Tensor) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, diag.New(codeCaller, "offset %d is negative", off)
	}
	rest := max(0, t.Size()-off)
	n := int(min(int64(len(p)), rest))
	if err := t.e.shard.read(p[:n], t.e.begin+min(off, t.Size())); err != nil {
		return 0, err
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// CopyTo writes the tensor's bytes to w, through the file. It is a [Source].
func (t Tensor) CopyTo(w io.Writer) error {
	buf := make([]byte, min(window, t.Size()))
	for at := int64(0); at < t.Size(); at += int64(len(buf)) {
		n, err := t.ReadAt(buf, at)
		if err != nil && n == 0 {
			return err
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// ReadSlice copies the box that begins at start and has the given size along each dimension. It
// reads the box and what shares a page with it, not the rest of the tensor. dst must have exactly
// the box's bytes. A box that would split a byte of 4-bit elements is refused.
func (t Tensor) ReadSlice(dst []byte, start, size []int64) error {
	b, err := t.box(start, size)
	if err == nil && int64(len(dst)) != b.bytes {
		err = diag.New(codeCaller, "the slice takes %d bytes, the buffer has %d", b.bytes, len(dst))
	}
	if err != nil {
		return locate(within(err, t.Name()), t.e.shard.name)
	}
	if b.bytes == 0 {
		return t.e.shard.read(nil, 0)
	}
	return b.read(dst, func(p []byte, at int64) error {
		return t.e.shard.read(p, t.e.begin+at)
	})
}

// A box is a slice as bytes: rows of run bytes each, one every stride bytes, in planes whose
// places count up like an odometer.
type box struct {
	bytes  int64
	run    int64   // length of one row
	rows   int64   // rows in a plane
	stride int64   // from one row to the next
	begin  int64   // first byte of the first row
	count  []int64 // planes along each outer dimension
	step   []int64 // from one plane to the next along each
}

// box checks a slice and finds its rows. Dimensions that are taken whole, and the innermost that
// is not, make one row.
func (t Tensor) box(start, size []int64) (box, error) {
	dims, width := t.e.shape.Dims, int64(t.e.shape.Type.Bits())
	if len(start) != len(dims) || len(size) != len(dims) {
		return box{}, diag.New(codeCaller, "a slice of %d by %d numbers for %v",
			len(start), len(size), t.e.shape)
	}
	elements := int64(1)
	for i, d := range dims {
		if start[i] < 0 || size[i] < 0 || start[i] > d || size[i] > d-start[i] {
			return box{}, diag.New(codeCaller, "%d elements from %d along dimension %d of %v",
				size[i], start[i], i, t.e.shape)
		}
		elements *= size[i]
	}
	b := box{bytes: t.e.shape.Type.Bytes(elements)}
	if elements == 0 {
		return b, nil
	}
	// Sizes are in bits until the end: nothing overflows, because span did not.
	inner, run, begin := width, width, int64(0)
	whole, bits := true, elements*width
	var count, step []int64 // innermost first
	for i, d := range slices.Backward(dims) {
		begin += start[i] * inner
		if whole {
			run = size[i] * inner
		} else if size[i] > 1 {
			count, step = append(count, size[i]), append(step, inner)
			bits |= inner
		}
		whole = whole && size[i] == d
		inner *= d
	}
	if (bits|begin|run)%8 != 0 {
		return box{}, diag.New(codeCaller, "the slice splits a byte of %d-bit elements", width)
	}
	for i := range step {
		step[i] /= 8
	}
	b.run, b.begin, b.rows, b.stride = run/8, begin/8, 1, run/8
	if len(count) > 0 {
		b.rows, b.stride, count, step = count[0], step[0], count[1:], step[1:]
	}
	slices.Reverse(count)
	slices.Reverse(step)
	b.count, b.step = count, step
	return b, nil
}

// read fills dst plane by plane.
func (b box) read(dst []byte, read func([]byte, int64) error) error {
	at := make([]int64, len(b.count))
	var buf []byte
	if b.rows > 1 && b.stride-b.run < page && b.stride <= stage {
		buf = make([]byte, min(stage/b.stride, b.rows)*b.stride)
	}
	for {
		begin := b.begin
		for i, n := range at {
			begin += n * b.step[i]
		}
		if err := b.plane(dst, buf, begin, read); err != nil {
			return err
		}
		dst = dst[b.rows*b.run:]
		i := len(at) - 1
		for ; i >= 0; i-- {
			if at[i]++; at[i] < b.count[i] {
				break
			}
			at[i] = 0
		}
		if i < 0 {
			return nil
		}
	}
}

// plane reads rows of one stride. Where the gaps are smaller than a page it reads many rows with
// their gaps through buf and picks them out: one call instead of thousands.
func (b box) plane(dst, buf []byte, begin int64, read func([]byte, int64) error) error {
	if buf == nil {
		for r := range b.rows {
			if err := read(dst[r*b.run:(r+1)*b.run], begin+r*b.stride); err != nil {
				return err
			}
		}
		return nil
	}
	per := int64(len(buf)) / b.stride
	for r := int64(0); r < b.rows; r += per {
		n := min(per, b.rows-r)
		part := buf[:(n-1)*b.stride+b.run]
		if err := read(part, begin+r*b.stride); err != nil {
			return err
		}
		for i := range n {
			copy(dst[(r+i)*b.run:(r+i+1)*b.run], part[i*b.stride:])
		}
	}
	return nil
}

type elementType struct {
	name string
	dtype.DType
}

// types are the element types of the format and ours. The order follows the enumeration in the
// reference library (safetensors 0.8.0, tensor.rs), which sorts a file's tensors by it: an
// element type never stands before one that needs less alignment.
var types = []elementType{
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
	if i := slices.IndexFunc(types, func(t elementType) bool { return t.name == name }); i >= 0 {
		return types[i].DType, nil
	}
	if slices.Contains(foreign, name) {
		return dtype.Invalid, diag.New(codeFormat,
			"element type %s has no counterpart in Deepwell", name).
			Try("convert the tensor to another element type")
	}
	err := damaged("%s is not an element type of the format", human.Quote(name))
	names := lists.Map(types, func(t elementType) string { return t.name })
	if near := diag.Nearest(name, names); near != "" {
		err = err.Because("the format spells one %s", near)
	}
	return dtype.Invalid, err
}

// typeRank gives an element type's place in the table, -1 where the format has no such type.
func typeRank(t dtype.DType) int {
	return slices.IndexFunc(types, func(row elementType) bool { return row.DType == t })
}

// maxRank bounds the dimensions of a tensor; NumPy 2 has the same bound (NPY_MAXDIMS).
const maxRank = 64

// span computes the bytes of a tensor. The product is taken over the dimensions that are not
// zero, so that no partial size of an accepted shape overflows either, in whatever order.
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
