package ckpt

import (
	"fmt"
	"iter"
	"math/bits"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Tensor is a name and the global shape, however it is sharded.
type Tensor struct {
	Name  string      `json:"name"`
	DType dtype.DType `json:"dtype"`
	Shape []int64     `json:"shape"`
}

// Box is the box that covers the whole tensor.
func (t Tensor) Box() Box { return Box{make([]int64, len(t.Shape)), slices.Clone(t.Shape)} }

// String writes the tensor as f32[8,128].
func (t Tensor) String() string { return dtype.Shape{Type: t.DType, Dims: t.Shape}.String() }

// same reports whether two tensors have the same type and shape.
func (t Tensor) same(u Tensor) bool { return t.DType == u.DType && slices.Equal(t.Shape, u.Shape) }

// Bytes is the size of the whole tensor, packed densely.
func (t Tensor) Bytes() int64 { return t.sized(t.Shape) }

// sized is the number of bytes of a box of the given size.
func (t Tensor) sized(size []int64) int64 {
	n := int64(t.DType.Bits())
	for _, d := range size {
		n *= d
	}
	return n / 8
}

// A Box is a rectangle of elements: where it begins and how long it is along each dimension.
type Box struct {
	Start []int64 `json:"start"`
	Size  []int64 `json:"size"`
}

// String writes the box as [0:32,64:128].
func (b Box) String() string {
	var s strings.Builder
	s.WriteByte('[')
	for i := range b.Start {
		if i > 0 {
			s.WriteByte(',')
		}
		fmt.Fprintf(&s, "%d:%d", b.Start[i], b.Start[i]+b.Size[i])
	}
	return s.String() + "]"
}

// A Slice is one box of one tensor.
type Slice struct {
	Name string
	Box  Box
}

// A Source gives slices of tensors. Save asks it from several goroutines at once, but asks for the
// chunks of one slice in order and from one of them, so a source that fetches a tensor from a
// device may keep it until the next is asked for.
type Source interface {
	// Tensors lists what the source holds, each name once.
	Tensors() []Tensor
	// ReadSlice fills dst, which has exactly the bytes of the box, row by row and little-endian.
	ReadSlice(name string, box Box, dst []byte) error
}

// checkTensor refuses what no part file could hold. Its sizes are checked here once, so that
// multiplying them cannot overflow anywhere else.
func checkTensor(t Tensor) error {
	if err := checkName(t.Name); err != nil {
		return err
	}
	if !t.DType.Valid() {
		return fmt.Errorf("tensor %s has no element type", human.Quote(t.Name))
	}
	if len(t.Shape) > maxRank {
		return fmt.Errorf("tensor %s has %d dimensions; at most %d are held",
			human.Quote(t.Name), len(t.Shape), maxRank)
	}
	total := uint64(t.DType.Bits())
	for _, d := range t.Shape {
		hi, lo := bits.Mul64(total, uint64(max(d, 1))) // a 0 must not hide an overflow beside it
		if d < 0 || hi != 0 || lo > 1<<62 {
			return fmt.Errorf("tensor %s: %v is not a shape that memory could hold", human.Quote(t.Name), t)
		}
		total = lo
	}
	return t.checkBytes(t.Box())
}

// checkBox refuses a box that is not inside the tensor.
func (t Tensor) checkBox(b Box) error {
	if len(b.Start) != len(t.Shape) || len(b.Size) != len(t.Shape) {
		return fmt.Errorf("tensor %s: a box of %d by %d numbers for %v",
			human.Quote(t.Name), len(b.Start), len(b.Size), t)
	}
	for i, d := range t.Shape {
		if b.Start[i] < 0 || b.Size[i] < 0 || b.Start[i] > d || b.Size[i] > d-b.Start[i] {
			return fmt.Errorf("tensor %s: %d elements from %d along dimension %d of %v",
				human.Quote(t.Name), b.Size[i], b.Start[i], i, t)
		}
	}
	return t.checkBytes(b)
}

// checkBytes refuses a box that splits a byte of 4-bit elements.
func (t Tensor) checkBytes(b Box) error {
	if t.DType.Bits() >= 8 {
		return nil
	}
	last := len(t.Shape) - 1
	if last < 0 || t.Shape[last]%2 != 0 || b.Start[last]%2 != 0 || b.Size[last]%2 != 0 {
		return fmt.Errorf("tensor %s: %v of %v splits a byte of %d-bit elements",
			human.Quote(t.Name), b, t, t.DType.Bits())
	}
	return nil
}

// chunks splits a box into chunks of at most limit bytes that follow each other in its row-by-row
// form; one element is the least.
func (t Tensor) chunks(b Box, limit int64) iter.Seq[Box] {
	return func(yield func(Box) bool) {
		if slices.Contains(b.Size, 0) {
			return
		}
		// Dimensions after the split one are taken whole; earlier ones one index at a time.
		split, inner := len(b.Size)-1, int64(t.DType.Bits())
		for split > 0 && inner*b.Size[split] <= limit*8 {
			inner *= b.Size[split]
			split--
		}
		if split < 0 {
			yield(b)
			return
		}
		step := max(limit*8/inner, 1)
		if inner < 8 {
			step = max(step/2*2, 2)
		}
		at := slices.Clone(b.Start)
		end := func(i int) int64 { return b.Start[i] + b.Size[i] }
		for {
			part := Box{slices.Clone(at), slices.Clone(b.Size)}
			for i := range split {
				part.Size[i] = 1
			}
			part.Size[split] = min(step, end(split)-at[split])
			if !yield(part) {
				return
			}
			at[split] += part.Size[split]
			for i := split; at[i] >= end(i); i-- {
				if i == 0 {
					return
				}
				at[i] = b.Start[i]
				at[i-1]++
			}
		}
	}
}

// overlap gives the box that a and b share.
func overlap(a, b Box) (Box, bool) {
	c := Box{make([]int64, len(a.Start)), make([]int64, len(a.Start))}
	for i := range a.Start {
		c.Start[i] = max(a.Start[i], b.Start[i])
		c.Size[i] = min(a.Start[i]+a.Size[i], b.Start[i]+b.Size[i]) - c.Start[i]
		if c.Size[i] <= 0 {
			return Box{}, false
		}
	}
	return c, true
}

// eachRun visits the stretches of box c that are contiguous both in the row-by-row form of box
// from and of box to, which both contain it: byte offsets in each, and the length. Offsets
// in from only grow.
func (t Tensor) eachRun(c, from, to Box, visit func(from, to, n int64) error) error {
	run := int64(t.DType.Bits())
	outer := len(c.Size)
	for outer > 0 {
		i := outer - 1
		run *= c.Size[i]
		outer--
		if c.Size[i] != from.Size[i] || c.Size[i] != to.Size[i] {
			break
		}
	}
	if run == 0 || slices.Contains(c.Size[:outer], 0) {
		return nil
	}
	at := slices.Clone(c.Start)
	for {
		if err := visit(t.offset(at, from), t.offset(at, to), run/8); err != nil {
			return err
		}
		i := outer - 1
		for ; i >= 0; i-- {
			if at[i]++; at[i] < c.Start[i]+c.Size[i] {
				break
			}
			at[i] = c.Start[i]
		}
		if i < 0 {
			return nil
		}
	}
}

// offset is the place of one element in the row-by-row form of a box, in bytes.
func (t Tensor) offset(at []int64, within Box) int64 {
	n := int64(0)
	for i := range at {
		n = n*within.Size[i] + at[i] - within.Start[i]
	}
	return n * int64(t.DType.Bits()) / 8
}

// absent is the error of a tensor that a source does not have; it suggests a similar name.
func absent(name string, known []Tensor) *diag.Error {
	err := diag.New(diag.CheckpointTensor, "no tensor is called %s", human.Quote(name))
	// Edit distance is for lists that a person could read.
	if len(known) <= 5000 && len(name) <= 200 {
		names := lists.Map(known, func(t Tensor) string { return t.Name })
		if near := diag.Nearest(name, names); near != "" {
			err = err.Try("did you mean %s?", human.Quote(near))
		}
	}
	return err
}
