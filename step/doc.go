// Package step turns a model, a recipe, a plan and a precision policy into the programs of a
// training step.
//
// [Build] runs one list of passes, whatever the plan: the loss becomes a graph, layers are unrolled
// or looped over, linear layers are marked with their formats, the graph is split into pipeline
// stages, each stage is sharded for one device and differentiated, quantized GEMMs are expanded,
// the graphs of the update are built, and all are lowered to StableHLO. A plan without a pipeline
// has one rank and one stage, whose forward and backward pass are one program.
//
// The result is a table: a [Program] is one row. Code that compiles, runs, counts or compares
// programs goes through [Programs.List]; the [program.Role] of an argument says what it is. A
// training step runs the rows in this order:
//
//	zero                              clears the gradient accumulators of several microbatches
//	gradient …                        or forward, backward (input, weight) … per microbatch
//	reduce, square, update            sums over the data axes, the global norm, the optimizer
//	quantize                          makes quantized copies when the state is filled
//
// The package builds text and graphs only; package train compiles and runs them, and
// [Programs.Footprints] predicts their memory.
package step
