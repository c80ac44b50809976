// Package kernels turns a target into what its compiler and its libraries take, and says why.
//
// What kernels there are is a table of package lower, whose rows ask here. What was taken is kept,
// so that a person can read what became of a model: which attention is cuDNN's and which is not,
// and for what reason.
package kernels
