// Package autoplan turns a model, a cluster and a goal into the plans that serve it best.
//
// [Search] goes over the sizes of all axes, how state is cut, virtual stages and schedules, the
// size of a microbatch, what is recomputed and what is kept on the host. Closed forms (package
// estimate) price plans; the simulator (package dryrun) runs the best hundred again, and the best
// of those are told with what each one trades.
//
// # Why what is left out cannot be best
//
// Plans are dealt to nodes: the sizes of the axes and the rows of a microbatch. Three rules let
// plans go unpriced, and none loses a plan that would have been among the best:
//
//   - A node has a bound that none of its plans can beat: the time that all microbatches take one
//     rank of the pipeline in the mean, with nothing recomputed, no bubble and all communication of
//     the data axes hidden. A step is the time of the slowest rank and more. Nodes are taken in the
//     order of their bounds, and the search ends at the first whose bound is above the best found.
//     The same bound, with what cutting the state adds to it, holds for all schedules of a node.
//   - Plans of a node that differ only in what is recomputed or offloaded are a family. Both can
//     only add time, so the plan of the family that does neither bounds all of it, and once a plan
//     fits, or is too slow, those that do all that it does and more need not be looked at. What the
//     ranks have to do in the mean bounds the time of a variant for all schedules of a cut.
//   - Recomputing changes nothing about the parameters, gradients and state that a rank keeps. A
//     family in which these do not fit has no plan that does; nor has one that does not fit with
//     each stage holding the least that it holds in any variant which is not too slow.
//
// "The best found" is the worst of the meshes that will be told, and a margin of [Margin] on top,
// since the simulator may put plans in another order than the closed forms: what it can move by is
// tested to be less.
package autoplan
