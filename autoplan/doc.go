// Package autoplan turns a model, a cluster and a goal into the plans that serve it best.
//
// [Search] covers the sizes of all mesh axes, ZeRO stages, pipeline schedules with their virtual
// stages, microbatch sizes, activation checkpointing and offload. Package estimate prices plans in
// closed form; the simulator (package dryrun) reruns the best hundred, and the best of these are
// listed with what each one trades.
//
// # Why pruning is exact
//
// Plans are grouped by mesh option: the sizes of the axes and the sequences of a microbatch. Three
// rules leave plans unpriced, and none drops a plan that would have been among the best:
//
//   - A mesh option has a lower bound on the time of its plans: the mean work of a pipeline rank
//     over all microbatches, with nothing recomputed, no bubble and all FSDP communication hidden.
//     No step is shorter than its slowest rank. Options are visited in the order of their bounds,
//     and the search ends at the first whose bound is above the best found. The same bound, plus
//     the cost of the ZeRO stage, holds for all schedules of a mesh option.
//   - A layout option (mesh, ZeRO stage, schedule) has several recompute options. Recomputing and
//     offloading only add time, so the plan that does neither is a lower bound for all of them.
//     Once a plan fits, or is too slow, options that do all it does and more need not be priced.
//     The mean work of the ranks bounds a recompute option for all schedules of a ZeRO stage.
//   - Recomputing does not change the parameters, gradients and optimizer state of a rank. A layout
//     option in which these do not fit has no plan that fits; nor has one in which the smallest
//     activations of each stage, over all recompute options that are fast enough, do not fit.
//
// "The best found" is the last mesh that will be listed, plus [Margin], because the simulator may
// order plans differently than the closed forms; a test bounds the difference.
package autoplan
