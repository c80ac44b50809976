// Package engine turns a program into results: it opens the devices at hand, compiles modules for
// them with a cache on disk, keeps arrays on the devices, and runs. Its compiler does the first
// half for machines that are not at hand.
//
// An [Engine] is one client of one platform with all the devices this process can use. Compile
// gives an [Executable] on the devices that a module names; executables on disjoint devices run at
// the same time. An [Array] is an argument or a result on all devices of a module, a piece on
// each; a [State] keeps arrays by their global name from one step to the next, and donation
// replaces them in place. Every run is asynchronous: Run returns when the work is queued, its
// results can be handed on at once, and Wait is for those who need to know.
//
// A [Link] hands arrays from one stage to another: between devices of one client, between processes
// over a [link.Wire], or inside a program that both stages run.
//
// A [Compiler] needs no device: it takes a [machine.Cluster] and compiles the real step for the
// real cluster, and a [Report] says what the compiler made of it.
//
// The engine never sees a graph or a plan.
package engine
