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
// [Grad] takes the gradient of a graph as three graphs: forward, which also gives what the others
// need; the gradient of the inputs; and the gradient of the parameters, which may run later. Values
// that are not worth saving are recomputed, by tag.
package ir
