// Package gpu turns operations into the StableHLO that XLA:GPU and its libraries run fast on NVIDIA
// GPUs: cuDNN's attention and block-scaled matmuls as custom calls, and quantization in two fused
// kernels.
//
// Each kernel is a row with its condition and its reason. Nothing here was timed on a GPU: choices
// are checked on compiled programs (bytes moved, kernels launched; docs/precision.md).
package gpu
