// Package cost turns the graph of a program into its cost on one device: GEMMs, attention,
// memory-bound kernels, quantizations and collectives with their shapes and bytes, and the
// activations that it saves.
//
// A [Book] has the costs of a model for a search over plans. It builds the graph of a loss as
// training does (Config.Graph, the policy's marks, spmd.Shard, ir.Grad) once for each way of
// sharding, and scales the [Bill] of a microbatch to any number of sequences and devices from it.
// The work of an operation is defined in its row of ir's table of kinds, as in XLA's
// HloCostAnalysis; seconds come from package price.
package cost
