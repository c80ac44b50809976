package triton_test

import (
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// store is a kernel of one program that writes a number.
func store(t *testing.T, n any, e triton.Elem, grid [3]int) (*triton.Kernel, error) {
	t.Helper()
	b, v := triton.New("store", triton.Arg{Name: "y", Elem: e, Shape: []int{1}, Result: true})
	b.Store(v[0], b.Full(n, e))
	return b.Kernel(triton.Launch{Grid: grid, Warps: 1})
}

// A grid that a GPU does not launch is an error of the kernel, not of a run.
func TestGrids(t *testing.T) {
	for _, c := range []struct {
		grid [3]int
		ok   bool
	}{
		{[3]int{1<<31 - 1, 65535, 65535}, true}, {[3]int{1 << 31}, false}, {[3]int{1, 65536}, false},
		{[3]int{1, 1, 65536}, false}, {[3]int{}, true},
	} {
		if _, err := store(t, 1, triton.I32, c.grid); (err == nil) != c.ok {
			t.Errorf("a grid of %v: %v", c.grid, err)
		}
	}
	b, v := triton.New("copy", triton.Arg{Name: "y", Elem: triton.BF16, Shape: []int{16, 16}, Result: true})
	zero := b.Program(0).Const(0)
	b.Describe(v[0], []int{16, 16}, []int{16, 16}).Store(b.Full(0.0, triton.BF16, 16, 16), zero, zero)
	if _, err := b.Kernel(triton.Launch{Grid: [3]int{1 << 24}, Warps: 1}); err == nil {
		t.Error("2^24 programs have 2^31 bytes of descriptors, which are counted by 32 bits")
	}
}

// A constant that its type does not have is an error, and an infinity or a NaN is spelled by bits.
func TestConstants(t *testing.T) {
	for _, n := range []int{1 << 31, -1<<31 - 1, 126 * 8192 * 53248} {
		if _, err := store(t, n, triton.I32, [3]int{}); err == nil {
			t.Errorf("%d is an i32", n)
		}
	}
	for _, c := range []struct {
		n    float64
		elem triton.Elem
		bits string
		want []byte
	}{
		{1e300, triton.F32, "0x7F800000", []byte{0, 0, 0x80, 0x7f}},
		{math.Inf(-1), triton.F32, "0xFF800000", []byte{0, 0, 0x80, 0xff}},
		{math.Inf(-1), triton.BF16, "0xFF80", []byte{0x80, 0xff}},
	} {
		k, err := store(t, c.n, c.elem, [3]int{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(k.Text, "arith.constant "+c.bits+" : "+string(c.elem)) {
			t.Errorf("%g of %s is in %s", c.n, c.elem, k.Text)
		}
		y := make([]byte, len(c.want))
		if err := run.Kernel(k, [][]byte{y}); err != nil || string(y) != string(c.want) {
			t.Errorf("%g of %s is %x: %v", c.n, c.elem, y, err)
		}
	}
}
