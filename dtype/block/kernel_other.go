//go:build !amd64 || purego

package block

// Without assembly every block is the business of Go.
const best = plain

func mxfp8Kernel[T Number](level, []byte, []byte, []T) int { return 0 }

func nvfp4Kernel[T Number](level, []byte, []byte, []T, grid) int { return 0 }

func amaxKernel[T Number](level, []T) (most uint32, read int) { return 0, 0 }
