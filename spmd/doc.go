// Package spmd turns the graph of a model's loss, a plan and an optimizer into the graphs that one
// device of a mesh runs to train it: the gradient of a microbatch, the same with accumulation, the
// update, and the loss alone for validation.
//
// [Shard] rebuilds a loss for one device of the plan's mesh and makes every collective explicit.
// Inputs are sharded by the names of their dimensions, and value types carry the placements through
// the graph:
//
//	batch                    dp, fsdp
//	seq                      cp; between layers tp, too, with sequence parallelism
//	heads, kv, mlp, vocab    tp
//	parameters               fsdp, along the first dimension that is unsharded and divisible
//
// The gradient is taken of the device's graph, so its collectives are the transposes of these: the
// VJP of an all-gather is a reduce-scatter. Gradients of replicated parameters stay unreduced
// (placement [ir.Partial]) until the update, which reduces them once a step. [Stages] splits a loss
// into pipeline stages, each of which is sharded by Shard. [CensusOf] counts a graph's collectives
// and their bytes; compiled programs are compared with that ([Census.Diff]).
//
// Graphs are connected by the names and roles of their inputs and results (package program):
// parameter w has its gradient in "g.w". Where the model computes in another type than f32, or with
// more of a parameter than a device stores, its compute copy is "c.w". Gradient and update are
// separate programs, so that the caller can reject a step by its loss before any state changes, and
// can accumulate the gradients of several microbatches.
package spmd
