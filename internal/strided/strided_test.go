package strided

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// slow is Copy, an element at a time.
func slow(dst, src []byte, width int64, axes []Axis) {
	if len(axes) == 0 {
		copy(dst[:width], src)
		return
	}
	for i := range axes[0].N {
		slow(dst[i*axes[0].Dst*width:], src[i*axes[0].Src*width:], width, axes[1:])
	}
}

// box draws an array of some dimensions, a part of it, and the part with its dimensions in another
// order, within a larger array as well.
func box(dims, sizes []int64, order []int, room int64) []Axis {
	axes := make([]Axis, len(dims))
	stride := int64(1)
	for i := len(dims) - 1; i >= 0; i-- {
		axes[i] = Axis{N: sizes[i], Src: stride}
		stride *= dims[i]
	}
	stride = 1
	for _, i := range slices.Backward(order) {
		axes[i].Dst = stride
		stride *= sizes[i] + room
	}
	return axes
}

func length(axes []Axis, width int64, stride func(Axis) int64) int64 {
	n := int64(1)
	for _, a := range axes {
		n += max(a.N-1, 0) * stride(a)
	}
	return n * width
}

func TestCopyIsAnElementAtATime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 4).Draw(t, "dimensions")
		dims, sizes, order := make([]int64, n), make([]int64, n), make([]int, n)
		for i := range dims {
			dims[i] = rapid.Int64Range(1, 70).Draw(t, "length")
			sizes[i] = rapid.Int64Range(0, dims[i]).Draw(t, "size")
			order[i] = i
			if i > 1 {
				dims[i], sizes[i] = min(dims[i], 9), min(sizes[i], 9)
			}
		}
		order = rapid.Permutation(order).Draw(t, "order")
		width := rapid.SampledFrom([]int64{1, 2, 3, 4, 8, 16}).Draw(t, "width")
		check(t, box(dims, sizes, order, rapid.Int64Range(0, 3).Draw(t, "room")), width)
	})
	// Large enough to be dealt to several goroutines.
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {2, 0, 1}, {1, 0, 2}, {2, 1, 0}} {
		check(t, box([]int64{7, 301, 655}, []int64{6, 299, 653}, order, 1), 4)
	}
	check(t, box([]int64{1301, 1155}, []int64{1299, 1153}, []int{1, 0}, 1), 4)
	// Whole tiles and panels, to the last byte of either array.
	for _, n := range []int64{4, 32, 64, 1024, 2048, 4096} {
		for _, width := range []int64{2, 4, 8} {
			check(t, box([]int64{3, 64, n}, []int64{3, 64, n}, []int{0, 2, 1}, 0), width)
			check(t, box([]int64{n, 96}, []int64{n, 32}, []int{1, 0}, 0), width)
		}
	}
}

func check(t interface{ Fatalf(string, ...any) }, axes []Axis, width int64) {
	src := make([]byte, length(axes, width, func(a Axis) int64 { return a.Src }))
	for i := range src {
		src[i] = byte(rand.Uint32())
	}
	got := make([]byte, length(axes, width, func(a Axis) int64 { return a.Dst }))
	want := bytes.Clone(got)
	Copy(got, src, width, axes)
	slow(want, src, width, axes)
	if !bytes.Equal(got, want) {
		t.Fatalf("%v elements of %d bytes are not copied as one by one", axes, width)
	}
}

// BenchmarkCopy is a stack of 4 matrices of 1,024 × 4,096 f32, of which a device takes a part;
// plain is copy of as many bytes.
func BenchmarkCopy(b *testing.B) {
	dims := []int64{4, 1024, 4096}
	for _, c := range []struct {
		name  string
		sizes []int64
		order []int
	}{
		{"rows", []int64{4, 256, 4096}, []int{0, 1, 2}},
		{"columns", []int64{4, 1024, 1024}, []int{0, 1, 2}},
		{"transposed", []int64{4, 1024, 1024}, []int{0, 2, 1}},
	} {
		axes := box(dims, c.sizes, c.order, 0)
		src, dst := make([]byte, 4*4*1024*4096), make([]byte, 4*4*1024*1024)
		for _, width := range []int64{4, 2} {
			b.Run(fmt.Sprintf("%s/%d", c.name, width), func(b *testing.B) {
				b.SetBytes(4 * 1024 * 1024 * width)
				for b.Loop() {
					Copy(dst, src, width, axes)
				}
			})
		}
	}
	b.Run("plain", func(b *testing.B) {
		src, dst := make([]byte, 16<<20), make([]byte, 16<<20)
		b.SetBytes(16 << 20)
		for b.Loop() {
			copy(dst, src)
		}
	})
}
