// Package monitor turns the statistics of a run's quantized GEMMs into decisions: which GEMM of
// which layer falls back to a wider format, and when it may return.
//
// A [Monitor] takes a [Sample] after each step and answers with [Decision] values: to refuse an
// update, to compute a GEMM (fprop, dgrad or wgrad) in MXFP8 or BF16 from now on, to return it to
// its format, or only to warn. It knows no graph and no device. Every decision carries the figure
// that led to it, what is usual for it, and the bound it crossed.
//
// What is usual comes from the history of each tensor, not from a table: in a healthy run NVFP4
// flushes half of the inputs of a down-projection to zero. Bounds are taken from reference/
// parity_notes.md 4, measured on clean runs; 5 says which of them see which fault. A first sample
// out of bounds is only remembered and the second in a row is acted on, except where one is proof:
// a NaN or an infinity, MXFP8 that saturates, rows of zeros, scales that are not the bytes that
// were written.
//
// A GEMM that fell stays fallen for some time, returns after its signal was healthy for some
// samples, and waits twice as long after each relapse. History and falls survive in a checkpoint: a
// Monitor marshals to JSON and back.
package monitor
