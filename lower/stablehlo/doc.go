// Package stablehlo turns operations into lines of StableHLO.
//
// A [Writer] has one method per instruction; dimensions are matched by name, so that rules read
// like the mathematics. The plain rules of this package run on every target. Kernels of a target
// are rows ([Kernel]) in packages lower/cpu and lower/gpu, which print through the same writer.
//
// Conventions of rules:
//
//   - A rule gets the values of op.In and returns the values of op.Out, in order. Shapes must be
//     those that the graph has; names of dimensions may differ, since MLIR has none.
//   - Inside a rule, values may have dimensions of its own (in_block, half, share).
//   - Instructions that change nothing (a transpose to the same order, a reshape to the same
//     shape, a conversion to the same type) print nothing.
//   - Reductions and matmuls accumulate in f32; a result is rounded once, at the end.
//   - A rule prints only its own operation. Facts about others (who reads a result, what was
//     stored) are arguments or attributes that a pass of package rewrite has put into the graph.
//
// A new operation of package ir is one row in one of the rule tables. A new kernel is one row in a
// file of lower/cpu or lower/gpu.
package stablehlo
