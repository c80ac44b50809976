// Package rownorm turns RMS norm of rows, or its gradient, into a kernel of our own.
//
// A program has whole rows in registers, so that a norm's statistics, its result and the sum that
// it is a norm of take one read, and so does the gradient, for which XLA reads three times: for the
// sums of rows, for the weight's gradient and for the gradient of what was normalized.
// Specifications are text in the call of a kernel, as in package kernels/fused.
package rownorm
