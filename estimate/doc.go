// Package estimate turns a plan, the cost of its graph and a cost model into the time and memory
// of a step.
//
// The cost of a block is computed once for each way to shard it and cached, so that a search
// prices tens of thousands of plans per second. Our own programs are priced by their graphs
// (package cost). Models without a graph yet, with experts or latent attention, and other stacks
// are priced by closed forms of the same blocks. Where a closed form of the makespan exists, no
// schedule is built; tests hold it to the simulator of package dryrun.
//
// Times are seconds, sizes bytes, per device unless stated otherwise.
package estimate
