// Package selftest turns an engine into a verdict: small programs whose answers are known, compiled
// and run for real.
//
// doctor runs them on a user's machine, the tests run them here, and both mean the same: the
// five collectives on numbers and on bytes, executables on disjoint devices at the same time, a
// Go function called from inside a program, and the block-scaled product and the attention of
// Blackwell compiled for GPUs that are not there.
package selftest
