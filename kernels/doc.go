// Package kernels turns an operation and a target into the kernel that computes it, and says why.
//
// The choice is made here and nowhere else, so that a lowering only prints and a person can read
// what became of a model: which attention is cuDNN's and which is not, and for what reason.
package kernels
