// Package spmd turns the graph of a model's loss, a plan and an optimizer into the graphs that one
// device of a mesh runs to train it: a gradient, more gradient on top of it, an update, and the
// loss alone for validation.
//
// [Shard] rebuilds a loss for one device of the plan's mesh with every collective written down.
// Inputs are cut by the names of their dimensions, and the types of the graph carry the cuts along:
//
//	batch                    dp, fsdp
//	seq                      cp; between layers tp, too, with sequence parallelism
//	heads, kv, mlp, vocab    tp
//	parameters               fsdp, along the first dimension that is whole and divisible
//
// The gradient is taken of the device's graph, so that its collectives are the transposes of these:
// what was gathered is scattered, and sums of parameters' gradients stay terms until the update,
// which adds them up once for a step. [Stages] cuts a loss into stages first, each of which is cut
// by Shard. [Census] says from a graph alone what its collectives send.
//
// The graphs meet in the names of their inputs and results: parameter w has its gradient in "g.w"
// and, where the model computes in another type than f32 or with more of a parameter than a device
// keeps, its copy in "c.w". Gradient and update are apart, so that whoever runs them can look at
// the loss before the state changes, and add up the gradients of several parts of a step.
package spmd
