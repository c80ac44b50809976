// Package ir turns a model, written as mathematics, into a typed graph and its gradient.
//
// A [Graph] is a list of operations in order, at the level people think in: linear, attention,
// norm, cross-entropy. Every [Value] has a [Type]: an element type, dimensions with names and
// sizes, and, for each axis of the mesh of devices, whether the value is replicated, sharded by one
// dimension, or a partial sum. The graph is one device's program. An operation knows what
// placements it can take, so a missing reduction is an error of the verifier and not a wrong
// number.
//
// A model is some operations, a repeat of one block over stacked parameters, and some more. A
// repeat is one operation with a body, however many layers it stands for: 126 layers and 500
// billion parameters are a few hundred lines.
//
// Graphs are made with a [Builder], which keeps the first error with the place in the caller's
// source and goes on, so that model code reads as mathematics and one check ends it. They print and
// parse themselves. What copies a graph with changes is a [Rewriter]; [Op.Loop] views a repeat.
//
// An operation is a row of a [Table]: its shape rule, its gradient, and its work. Operations of
// this package have one rule each in ir/eval and in lower/stablehlo; another package adds rows to a
// table of its own ([Table.With]), which say what they are in known operations.
//
// [Grad] takes the gradient of a graph as two graphs: forward, which also returns residuals, and
// backward. [Gradient.Split] splits backward into the gradient of the inputs and the gradient of
// the parameters, which may run later; [Gradient.Joint] joins forward and backward. Values that are
// not worth saving are recomputed, by tag.
//
// # Adding an operation
//
// Outside this module: one [Row] with Lower, see the example of [Table.With]. In this package:
//
//  1. a [Kind] in one of the groups (elementKinds, shapeKinds, blockKinds, ...): shape rule, VJP,
//     work; for an element-wise function of one argument, an entry of unaries instead. Its
//     attributes go into the table in attrs.go;
//  2. a [Builder] method;
//  3. a function in ir/eval, which computes the operation in float64;
//  4. a rule in lower/stablehlo, which prints it;
//  5. a probe in internal/irtest: tests compare its gradient with central differences, and its
//     program with the interpreter. An operation without a gradient needs tests of its own in
//     ir and lower.
//
// go test ./ir/... ./lower runs them all; TestOperationsAreComplete in lower names what is missing.
//
// # Who may change what
//
// A value belongs to one graph and has one definition. Attributes and types are never changed in
// place. [Grad], [Rewrite], [Unroll], [Segment] and [WriteOut] return new graphs and leave their
// argument alone. [LowerQuantized], [Table.Edit] and builders from [ExtendGraph] change the graph
// that they are given, and after an error leave it unusable. Names of inputs and results are the
// interface between graphs: passes keep them.
//
// # Placements
//
// Along an axis of n devices a value [batch=8, embed=64] is replicated (the type as it is), sharded
// ([batch=8/n, embed=64]{axis: batch}) or a partial sum ({axis: +}), whose terms add up to the
// value. The gradient of a replicated value is replicated, and of a partial sum replicated as well;
// so a row-parallel linear gives {tp: +}, and forgetting its all-reduce does not verify.
//
// # Glossary
//
//   - VJP: vector-Jacobian product, the rule that turns gradients of an operation's results into
//     gradients of its arguments.
//   - GEMM: a matrix product. A linear layer y = x·w has three: fprop (y), dgrad (dx = dy·wᵀ) and
//     wgrad (dw = xᵀ·dy).
//   - amax: the largest magnitude of a tensor or block, from which its scale follows.
//   - Hadamard: the random Hadamard transform that spreads outliers over a block before NVFP4
//     rounding.
//   - carry: a value that a repeat hands from one round to the next.
//   - stack: values of all layers in one tensor [layer, ...]; each round of a repeat gets a slice.
//   - residual: a forward value that the backward graph reads; a saved activation.
//   - placement: how a value is distributed along each axis of the mesh.
//   - partial: a placement in which devices have terms of a sum that is still to be reduced.
package ir
