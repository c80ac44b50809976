// Package schedule turns the shape of a pipeline into the list of what each of its ranks does, in
// order.
//
// A model is split into virtual stages, and a step's batch into microbatches. A [Schedule] has,
// for each rank, a list of actions: run stage s forward for microbatch m, take its gradient, or
// take the gradient of its input (kind Input: dgrad, B or I in papers) and of its weights (W)
// apart. Call [New], or [Parse] a list of your own; [Schedule.Validate] checks it, and
// [Schedule.Simulate] returns when each action runs, in whole ticks. [Schedule.Peak] is the most
// that a rank holds, [Schedule.Steps] adds sends and receives for the runtime, and
// [Timeline.SVG] draws a timeline. Callers with many schedules to time keep a [Player] and its
// [Order].
//
// [New] makes the published ones. With P ranks, M microbatches, V virtual stages on a rank, and F,
// I, W the times of one virtual stage, a step takes longer than the work of one rank by
//
//	gpipe        (P-1)(F+I+W)        and a rank holds M microbatches
//	1f1b         (P-1)(F+I+W)        rank r holds P-r
//	interleaved  (P-1)(F+I+W)        rank r holds 2(P-r-1)+(V-1)P+1, each of one virtual stage
//	zb-h1        (P-1)max(F,I,F+I-W) a rank holds P, as the first one of 1f1b, for M >= P
//	zb-v         (P-1)F if F=I=W     a rank holds 2P, each of half a rank, for M >= 2P-2
//
// and tests hold the simulation to these forms exactly ([Schedule.Bubble], [Schedule.Holds]). In
// zb-v with F=I=W and M >= 2P-1 no rank is idle between its own first and last action
// ([Timeline.Stalled]), which is why its authors call its bubble zero: the (P-1)F is the time until
// the last rank can begin, and the next step's start can fill it if ranks do not wait for each
// other between steps.
//
// Times are whole numbers of ticks, so that results are exact and the same on every machine.
package schedule
