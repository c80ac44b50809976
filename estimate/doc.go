// Package estimate turns a plan, the bill of its graph and prices into the time and memory of a
// step.
//
// What a block costs is worked out once for each way to cut it and kept, so that a search prices
// tens of thousands of plans in a second. Our own programs are priced by the bill of their graph
// (package cost); models that have no graph yet, with experts or latent attention, and other stacks
// are priced by closed forms of the same blocks. The list of a schedule is not made where sums and
// maxima over stages stand for it, and the simulator of package dryrun is held to them.
package estimate
