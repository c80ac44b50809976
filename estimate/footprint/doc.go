// Package footprint turns a model, a plan and a kind of device into what one device of each rank
// holds at the worst moment of a step, by cause, and what it sends, as the compiled programs will
// have it: without building a graph, so that a search can ask for every plan.
//
// What programs find on the device from step to step, what they give, what microbatches in flight
// keep and what collectives send follows from the sizes of parameters and activations: it is
// exact. What a program adds while it runs is the largest of some moments: a buffer is a size and
// the moments in which it lives, and what lives together is added up. Which buffers there are was
// read from the buffer assignments of XLA 0.12 for our programs; the counts of values that a layer
// has at once, which its schedule decides, are rounded means of them, and the schedule of an
// update is gone through as XLA makes it. bench/memory holds the sums to the compiler: an engine
// that schedules otherwise shows there.
package footprint
