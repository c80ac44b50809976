// Package footprint turns a model, a plan and a kind of device into what one device of each rank
// holds at the worst moment of a step, by cause, as the compiled programs will have it.
//
// What programs find on the device from step to step follows from the layouts of parameters
// (package spmd), and what microbatches keep and hand on from the bill of the graph (package cost):
// both are exact. What a program adds while it runs, XLA's temp, is a model: the largest of some
// moments, where a buffer is a size and the moments in which it lives, and what lives together is
// added up. Which buffers there are was read from the buffer assignments of XLA 0.12 for our
// programs; the counts of values that a layer has at once, which its schedule decides, are rounded
// means of them, and the schedule of an update is gone through as XLA makes it. bench/memory holds
// the sums to the compiler: an engine that schedules otherwise shows there.
package footprint
