// Package rewrite turns a graph into one that a target runs well.
//
// A pass changes a graph in place. The results stay the same; what changes is that the graph says
// what a target's kernels need to know: which GEMMs write a transposed result, which softmax values
// a backward pass reads back, which quantizations share a pass over their source. [Apply] runs the
// passes on a copy. Passes add operations by rows of their own (rows.go), which package ir does not
// know. Package lower then only picks a kernel for each operation and prints it.
//
// The order of passes is one list per target, in rewrite.go. A pass may rely on the passes before
// it; none relies on how operations are printed. Rows that have a meaning in operations of package
// ir (Lower) can be interpreted by ir/eval, which tests use to compare a graph before and after a
// pass.
package rewrite
