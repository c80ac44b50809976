// Package quantized turns quantization and block-scaled products into StableHLO.
//
// It has the rules that every target runs, and the numerics that the kernels of lower/gpu and
// lower/cpu share: rounding to E4M3 and E2M1 by integer arithmetic on float32 bits, power-of-two
// and E4M3 block scales, the Hadamard transform, stochastic rounding. Bytes are the same on every
// target and the same as package dtype/block writes.
package quantized
