// Package engine turns a program into results: it opens the devices of this host, compiles modules
// for them with a cache on disk, keeps arrays on the devices, and runs. Its compiler does the first
// half for clusters that are not at hand.
//
// An [Engine] is one PJRT client of one platform with all the devices this process can use. Compile
// gives an [Executable] on the devices that a module names; executables on disjoint devices run at
// the same time. An [Array] is an argument or a result on all devices of a module, one shard on
// each. A [State] keeps arrays by their global name from one step to the next, and donation
// replaces them in place. Every run is asynchronous: Run returns when the work is queued, its
// results may be arguments of other runs at once, and Wait is for those who need to know.
//
// # Concurrency
//
// Engine, Executable, Array and Compiler may be used by several goroutines at the same time: two
// goroutines may run one Executable, also with the same arguments. So may a State, except that
// [Executable.Step] is for one goroutine at a time on one State. A run waits for the runs that
// compute its arguments; beyond that, the order of runs is the platform's. A donated array belongs
// to the run that takes it first; another run with it fails with [diag.BufferGone] and starts
// nothing. A [Run] belongs to one goroutine, but any goroutine may Wait for it. One goroutine may
// send on a [Link] while another receives.
//
// # Memory
//
// Device memory is not garbage collected. Arrays, runs and executables are freed by their owner,
// before their engine is closed. Free never waits: memory that a run still uses is released when
// the run is done.
//
// After [Engine.Close], every use of the engine, and of its arrays and executables, is an error
// with the code [diag.BufferGone], but for Free. The client and its memory go with the last array,
// executable and run that is freed; what is never freed keeps them to the end of the process.
//
// A [Link] carries arrays from one pipeline stage to another: between devices of one client,
// between processes over a [link.Wire], or inside a program that both stages run.
//
// A [Compiler] needs no device: it takes a [machine.Cluster] and compiles the real step for the
// real cluster, and a [Report] says what the compiler made of it.
//
// The engine never sees a graph or a plan.
package engine
