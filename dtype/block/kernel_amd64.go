//go:build !purego

package block

import "golang.org/x/sys/cpu"

//go:generate go run -C _asm . -out ../asm_amd64.s -stubs ../asm_amd64.go -pkg block

// best is what this processor has.
var best = func() level {
	switch {
	case cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL:
		return avx512
	case cpu.X86.HasAVX2:
		return avx2
	}
	return plain
}()

// mxfp8Kernel quantizes blocks until one that is not finite, and gives how many it did.
func mxfp8Kernel[T Number](on level, q, scales []byte, src []T) int {
	n := len(scales)
	if n == 0 || on == plain {
		return 0
	}
	switch src := any(src).(type) {
	case []float32:
		if on == avx2 {
			return mxfp8F32AVX2(&q[0], &scales[0], &src[0], n)
		}
		return mxfp8F32AVX512(&q[0], &scales[0], &src[0], n)
	case []uint16:
		if on == avx2 {
			return mxfp8BF16AVX2(&q[0], &scales[0], &src[0], n)
		}
		return mxfp8BF16AVX512(&q[0], &scales[0], &src[0], n)
	}
	return 0
}

// nvfp4Kernel quantizes blocks until one that holds a NaN, and gives how many it did.
func nvfp4Kernel[T Number](on level, q, scales []byte, src []T, g grid) int {
	n := len(scales)
	if n == 0 || on == plain || g.sixth != g.sixth {
		return 0
	}
	switch src := any(src).(type) {
	case []float32:
		if on == avx2 {
			return nvfp4F32AVX2(&q[0], &scales[0], &src[0], n, g.sixth, g.out)
		}
		return nvfp4F32AVX512(&q[0], &scales[0], &src[0], n, g.sixth, g.out)
	case []uint16:
		if on == avx2 {
			return nvfp4BF16AVX2(&q[0], &scales[0], &src[0], n, g.sixth, g.out)
		}
		return nvfp4BF16AVX512(&q[0], &scales[0], &src[0], n, g.sixth, g.out)
	}
	return 0
}

// amaxKernel gives the greatest magnitude of the first numbers as bits, and how many it read.
func amaxKernel[T Number](on level, src []T) (most uint32, read int) {
	n := len(src) / 32
	if n == 0 || on == plain {
		return 0, 0
	}
	switch src := any(src).(type) {
	case []float32:
		if on == avx2 {
			return amaxF32AVX2(&src[0], n), n * 32
		}
		return amaxF32AVX512(&src[0], n), n * 32
	case []uint16:
		if on == avx2 {
			return amaxBF16AVX2(&src[0], n), n * 32
		}
		return amaxBF16AVX512(&src[0], n), n * 32
	}
	return 0, 0
}
