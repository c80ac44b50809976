package block

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
)

// Along columns is along the rows of the transpose.
func TestColumns(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		rows := 32 * rapid.IntRange(1, 4).Draw(r, "rows")
		cols := rapid.IntRange(1, 150).Draw(r, "cols")
		src := source(rapid.Uint32().Draw(r, "seed"), rows*cols, 10, false)
		transposed := make([]float32, len(src))
		must(t, Transpose(transposed, src, rows, cols))
		if transposed[(cols-1)*rows] != src[cols-1] {
			r.Fatal("not transposed")
		}
		want, got := make([]byte, len(src)), make([]byte, len(src))
		s1, s2 := make([]byte, len(src)/32), make([]byte, len(src)/32)
		must(t, MXFP8(want, s1, transposed))
		must(t, MXFP8Columns(got, s2, src, rows, cols))
		if !slices.Equal(got, want) || !slices.Equal(s1, s2) {
			r.Fatal("they differ")
		}
	})
}

// A matrix of weights and its transpose have the same elements.
func TestTilesTranspose(t *testing.T) {
	const rows, cols = 48, 80
	src := source(4, rows*cols, 10, false)
	transposed := make([]float32, len(src))
	must(t, Transpose(transposed, src, rows, cols))
	back := func(x []float32, rows, cols int) []float32 {
		q, s, out := make([]byte, len(x)/2), make([]byte, len(x)/16), make([]float32, len(x))
		must(t, NVFP4Tiles(q, s, x, rows, cols, Amax(x)))
		must(t, FromNVFP4(out, q, s, .5))
		return out
	}
	a, b := back(src, rows, cols), back(transposed, cols, rows)
	must(t, Transpose(transposed, a, rows, cols))
	if !slices.Equal(transposed, b) {
		t.Error("they differ")
	}
}

// However a matrix is split, its elements get the same random bits.
func TestChanceKnowsNoShards(t *testing.T) {
	const rows, cols = 24, 64
	src := source(5, rows*cols, 6, true)
	most, key := Amax(src), NewKey(1, 2, 3)
	whole, s := make([]byte, len(src)/2), make([]byte, len(src)/16)
	must(t, Stochastic(whole, s, src, most, key, Window{Row: 8, Col: 16, Cols: cols}))
	for r := range rows {
		for c := 0; c < cols; c += 32 {
			at := r*cols + c
			q, s := make([]byte, 16), make([]byte, 2)
			w := Window{Row: uint32(8 + r), Col: uint32(16 + c), Cols: 32}
			must(t, Stochastic(q, s, src[at:at+32], most, key, w))
			differ(t, fmt.Sprintf("part %d, %d", r, c), q, whole[at/2:at/2+16])
		}
	}
	other := make([]byte, len(whole))
	must(t, Stochastic(other, s, src, most, NewKey(1, 3, 3), Window{Row: 8, Col: 16, Cols: cols}))
	if slices.Equal(other, whole) {
		t.Error("another step has the same bits")
	}
}

// What is rounded by chance lies beside the number, and the largest sum does not pass 6.
func TestRoll(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		v := rapid.Float32Range(-7, 7).Draw(r, "v")
		bits := rapid.Uint32Max(255).Draw(r, "bits")
		code := roll(v, bits)
		got := float64(dtype.F32FromE2M1(code))
		want := math.Max(-6, math.Min(6, float64(v)))
		step := 2.0
		if a := math.Abs(want); a < 2 {
			step = .5
		} else if a < 4 {
			step = 1
		}
		if math.Abs(got-want) > step || math.Signbit(got) != math.Signbit(want) {
			r.Fatalf("%v became %v", v, got)
		}
	})
	if got := roll(6, 255); got != 7 {
		t.Errorf("6 became %d", got)
	}
}

func TestSpread(t *testing.T) {
	for _, n := range []int{0, 1, 31, 32, 1000} {
		var sum atomic.Int64
		err := Spread(n, 32, func(from, to int) error {
			if from%32 != 0 && from != n {
				t.Errorf("a range begins at %d", from)
			}
			sum.Add(int64(to - from))
			return nil
		})
		if err != nil || sum.Load() != int64(n) {
			t.Errorf("%d of %d: %v", sum.Load(), n, err)
		}
	}
	wrong := errors.New("wrong")
	if err := Spread(100, 1, func(int, int) error { return wrong }); !errors.Is(err, wrong) {
		t.Errorf("%v", err)
	}
}

func ExampleMXFP8() {
	src := make([]float32, 32)
	src[0], src[1] = 1000, -3
	q, scales := make([]byte, 32), make([]byte, 1)
	if err := MXFP8(q, scales, src); err != nil {
		fmt.Println(err)
		return
	}
	back := make([]float32, 32)
	if err := FromMXFP8(back, q, scales); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(dtype.F32FromE8M0(scales[0]), back[:3])
	// Output: 4 [1024 -3 0]
}
