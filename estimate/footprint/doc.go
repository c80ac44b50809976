// Package footprint turns a model, a plan and a kind of device into the peak memory of each
// pipeline rank, by cause, as XLA will report it for the compiled programs.
//
// State that lives from step to step follows from the sharding of parameters (package spmd), and
// saved activations from the cost of the graph (package cost): both are exact. What a program
// allocates while it runs, XLA's temp, is a model. A buffer is a size and a live range over a few
// points of the program (liveness.go); the temp is the largest sum of live buffers. Which buffers
// exist was read from the buffer assignments of XLA 0.12 for our programs. The number of values
// that a layer has live at once depends on XLA's schedule; those factors are rounded means over
// compiled programs. The update is scheduled as XLA's latency-hiding scheduler does it
// (xla_schedule.go). bench/memory compares the sums with the compiler, so an engine that schedules
// differently shows up there.
//
// All sizes are bytes on one device.
package footprint
