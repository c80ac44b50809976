// Package stablehlo turns operations into lines of StableHLO.
//
// A [Writer] has one method per instruction; dimensions are matched by name, so that rules read
// like the mathematics. The plain rules of this package run on every target. Kernels of a target
// are rows ([Kernel]) in packages lower/cpu and lower/gpu, which print through the same writer.
package stablehlo
