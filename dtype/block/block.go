package block

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"sync"

	"github.com/deepwell/deepwell/dtype"
)

// The number of elements that share a scale.
const (
	MXFP8Size = 32
	NVFP4Size = 16
)

// A Number is an element of a source: a float32, or the bits of a bfloat16.
type Number interface{ float32 | uint16 }

const (
	signless = 0x7fffffff
	infinity = 0x7f800000 // larger bits are NaNs
)

// A level is a set of instructions that kernels are written for.
type level int

const (
	plain level = iota // Go alone
	avx2
	avx512
)

// Widen brings numbers to float32.
func Widen[T Number](dst []float32, src []T) {
	switch src := any(src).(type) {
	case []float32:
		copy(dst, src)
	case []uint16:
		for i, b := range src[:len(dst)] {
			dst[i] = dtype.F32FromBF16(b)
		}
	}
}

// largest is the greatest magnitude as bits, in which a NaN is greater than infinity.
func largest(src []float32) uint32 {
	var most uint32
	for _, f := range src {
		most = max(most, math.Float32bits(f)&signless)
	}
	return most
}

// Amax is the greatest magnitude of all, or NaN if there is one.
func Amax[T Number](src []T) float32 { return amax(best, src) }

func amax[T Number](on level, src []T) float32 {
	most, read := amaxKernel(on, src)
	switch rest := any(src[read:]).(type) {
	case []float32:
		most = max(most, largest(rest))
	case []uint16:
		for _, b := range rest {
			most = max(most, uint32(b&0x7fff)<<16)
		}
	}
	return math.Float32frombits(most)
}

// check compares the lengths of what a quantizer was given; perByte is how many elements a byte
// of q holds.
func check(format string, src, q, scales, size, perByte int) error {
	switch {
	case src%size != 0:
		return fmt.Errorf("block: %d numbers are no whole %s blocks of %d", src, format, size)
	case q != src/perByte || scales != src/size:
		return fmt.Errorf("block: %d numbers in %s take %d bytes and %d scales, not %d and %d",
			src, format, src/perByte, src/size, q, scales)
	}
	return nil
}

// checkMatrix does the same for a matrix, whose rows or columns must be whole blocks.
func checkMatrix(format string, rows, cols, row, col, src int) error {
	if rows < 0 || cols < 0 || src != rows*cols {
		return fmt.Errorf("block: %d numbers are not %d×%d", src, rows, cols)
	}
	if rows%row != 0 || cols%col != 0 {
		return fmt.Errorf("block: %d×%d numbers are no whole %s blocks of %d×%d",
			rows, cols, format, row, col)
	}
	return nil
}

// Spread splits n things into ranges that begin at multiples of size, and calls f for them on all
// processors at once. It gives the error of the lowest range that has one.
func Spread(n, size int, f func(from, to int) error) error {
	workers := min(runtime.GOMAXPROCS(0), (n+size-1)/size)
	if workers <= 1 {
		return f(0, n)
	}
	step := ((n+workers-1)/workers + size - 1) / size * size
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { errs[w] = f(min(w*step, n), min((w+1)*step, n)) })
	}
	wg.Wait()
	return cmp.Or(errs...) // the first
}
