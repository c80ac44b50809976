// Package step turns a model, a recipe, a plan and a policy of precision into the programs of a
// training step.
//
// [Build] runs one list of passes, whatever the plan: the loss becomes a graph, layers are unrolled
// or looped over, linear layers are marked with what they are computed in, the graph is cut into
// pipeline stages, each stage is sharded for one device and differentiated, quantized GEMMs are
// written out, the graphs of the update are built, and all are lowered to StableHLO. A plan without
// a pipeline has one rank and one stage, whose forward and backward pass are one program.
//
// What comes out is a table: a [Program] is one row. Whoever compiles, runs, counts or compares
// programs goes through [Programs.List]; what an argument is, its [program.Role] says.
package step
