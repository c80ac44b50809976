// Package estimate turns a model, a plan and prices into the time and memory of a step, in closed
// form.
//
// What a block costs is worked out once for each way to cut it and kept, so that a search can price
// a hundred thousand plans in a second. The list of a schedule is not made: sums and maxima over
// stages stand for it, and the simulator of package dryrun is held to them.
package estimate
