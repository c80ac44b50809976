// Package footprint turns a model, a plan and a kind of device into what one device of each rank
// holds at the worst moment of a step, by cause, as the compiled programs will have it: without
// building a graph, so that a search can ask for every plan.
//
// What programs find on the device from step to step, what they give and what microbatches in flight
// keep follows from the sizes of parameters and activations, and is exact. What a program adds while
// it runs is the largest of some moments: a buffer is a size and the moments in which it lives, and
// what lives together is added up. The lists of buffers are what XLA 0.12 makes of our programs
// (docs/accuracy.md); bench/memory holds them to the compiler.
package footprint
