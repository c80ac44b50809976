// Package preflight turns the GPUs of a host into a verdict before a run: what the driver tells of
// each, a GEMM on each and a sum over all of them, right numbers and times beside each other, and
// the GPU that is slow or wrong by its number.
package preflight
