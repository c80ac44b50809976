// Package overlap turns a scheduled GPU program into an estimate of how much of its communication
// is hidden behind compute.
//
// [Read] walks the program in the order in which XLA:GPU scheduled it. One stream computes, in
// order: each kernel takes the longer of its operations at the rate of its kind and its bytes at
// that of the memory. Collectives run beside it, each after the one before it on its stream: there
// is one stream for all, and one more for those inside an NVLink domain if the compiler assigned it
// so. A collective starts when the compute stream comes to its start and the stream is free; where
// the compute stream comes to its end first, it waits, and those seconds are exposed. A synchronous
// collective is all exposed. A loop is run until two rounds are alike, and the rest is multiplied.
//
// What is hidden is 1 − exposed / wire. The wire takes what a ring takes: (n−1)/n of a gathered or
// scattered tensor, twice that of a sum.
//
// The schedule, the bytes and the operations are facts of the compiled program; the seconds are
// those of the model. It knows no launch overhead, no latency of the network, and no contention of
// NCCL for memory or multiprocessors, so it ranks programs and options and does not foretell the
// seconds of a step.
package overlap
