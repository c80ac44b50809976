// Package program turns what was planned into what an engine runs, as a file that people can
// read.
//
// A [Program] is a list of modules. A [Module] is the text of one StableHLO module, written for one
// device of a mesh, with the list of what it takes and gives. Every argument and result is an
// [Array]: a global name, a global shape, and the mesh axes that cut each dimension. What device
// number 70,000 holds is computed from that, so the file is as long for 100,000 devices as for 8.
//
// The file is a txtar archive: a first line with the version, program.json, and one .mlir file a
// module, so that diff and grep work on it and the same program always has the same bytes.
//
// An engine needs nothing else: it never sees a graph or a plan.
package program
