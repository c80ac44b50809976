// Package overlap turns a scheduled GPU program into an estimate of how much of its communication
// is hidden behind compute.
//
// [Read] walks the program in the order in which XLA:GPU scheduled it. One stream computes, in
// order: each kernel takes max(FLOPs / FLOP rate, bytes / memory bandwidth). Collectives run
// asynchronously, one after another on their stream: one stream for all, and a second one for
// collectives inside an NVLink domain if the compiler assigned it. A collective starts when the
// compute stream reaches its -start and its stream is free. If the compute stream reaches the -done
// first, it waits, and those seconds are exposed. A synchronous collective is all
// exposed. A loop is simulated until two iterations take the same time, and the rest is multiplied.
//
// The hidden share is 1 − exposed / wire. Wire time is a ring's: (n−1)/n of the tensor for an
// all-gather or reduce-scatter, twice as much for an all-reduce.
//
// The schedule, the bytes and the operations are facts of the compiled program; the seconds
// come from the model. It has no launch overhead, no network latency, and no contention of NCCL for
// memory or SMs: it ranks programs and compile options, and does not predict the step time.
package overlap
