// Package program turns planned computations into files that an engine runs and people can read.
//
// A [Program] is a list of modules. A [Module] is the text of one StableHLO module, written for one
// device of a mesh, with its arguments and results. Each of these is an [Array]: a global name, a
// global shape, and the mesh axes that shard each dimension. The shard of device number 70,000
// follows from that, so the file is as long for 100,000 devices as for 8.
//
// The file is a txtar archive: a first line with the version, program.json, and one .mlir file per
// module, so that diff and grep work on it. The same program always has the same bytes.
//
// An engine needs nothing else: it never sees a graph or a plan.
package program
