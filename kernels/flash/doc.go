// Package flash turns attention that cuDNN has no call for into kernels of our own: scores with a
// soft cap, and sizes of heads that cuDNN refuses.
//
// The kernels are FlashAttention-2's (Dao, 2023): a program has a block of queries, goes through
// the keys that they see, and keeps the largest score, the sum of exponentials and the sum of
// values; scores are never written. The gradient is two kernels, one for each block of queries
// (dQ) and one for each block of keys (dK and dV), which recompute the probabilities from the
// log-sum-exp.
package flash
