// Package table turns the compiled programs of a model into a table of the kernels of one layer:
// what runs for each operation, who provides it and why, and what the same layer costs without
// kernels of our own.
//
// The programs are compiled for the cluster with names of their operations ([kernels.Options]).
// Both have a loop over layers for each pass; a round of it is a layer. Bytes and FLOPs are counted
// in the compiled program; seconds are what package overlap expects of the GPU, and were not
// measured.
package table
