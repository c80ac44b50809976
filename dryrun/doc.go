// Package dryrun turns a schedule and the times of its stages into a timeline: what every rank of
// a pipeline does when, what it waits for, and its memory, before there is a machine to run it.
//
// It is the second interpreter of the lists of package schedule; the first is the runtime. A
// [Step] is a schedule with the cost of each virtual stage; [Step.Run] returns its [Timeline]. The
// rules are the runtime's: a rank runs its list in order, an action begins when its rank is free
// and its inputs have arrived, a result travels while both ranks work, a link carries one result
// at a time, and exposed reductions, the optimizer and host time follow a rank's list.
//
// A [WhatIf] changes the conditions: a slow rank, slow links, varying times. [Budget] converts a
// step's time to days and dollars, and [Report] to a self-contained page; [Timeline.Trace] writes
// a trace for Perfetto.
package dryrun
