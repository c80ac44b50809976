// Package rewrite turns a graph into one that a target runs well.
//
// A pass takes a graph whose operations mean what package ir says and returns one that computes the
// same results, with the facts that a target's kernels need written into the graph: which products
// come out transposed, which softmax values a backward pass reads back, which quantizations share a
// pass over their source. Passes add operations by rows of their own ([Rows]), so that package ir
// does not know them and the printer in package lower decides nothing.
//
// The order of passes is one list per target, see [For]. A pass may rely on the passes before it;
// none relies on how operations are printed. Rows that have a meaning in operations of package ir
// (Lower) can be interpreted by ir/eval, which tests use to compare a graph before and after a
// pass.
package rewrite
