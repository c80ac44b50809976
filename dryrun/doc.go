// Package dryrun turns a schedule and the prices of its stages into a timeline: when every rank of
// a pipeline does what, what it waits for, and what it holds, before there is a machine to run it.
//
// It is the second interpreter of the lists of package schedule; the first is the runtime. A
// [Step] is a schedule with the price of each virtual stage; [Step.Run] gives its [Timeline]. The
// rules are those of the runtime: a rank runs its list in order, an action begins when its rank is
// free and what it needs has arrived, a result travels while both ranks work, a link carries one
// result at a time, and what is left of reductions, the optimizer and the host follow a rank's
// list.
//
// A [WhatIf] changes what a run meets: a rank that is slow, links that are slow, actions whose
// times vary. [Budget] turns a step's time into days and money, and [Report] into a page that needs
// nothing else; [Timeline.Trace] writes what Perfetto shows.
package dryrun
