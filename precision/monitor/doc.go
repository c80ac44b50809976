// Package monitor turns what the steps of a run report into decisions: which product of which layer
// falls back to a wider format, and when it may return.
//
// A [Monitor] is shown a [Sample] after each step and answers with [Decision] values: to refuse an
// update, to compute a product in MXFP8 or BF16 from now on, to go back to what it was in, or only
// to tell somebody. It knows no graph and no device. Every decision carries the number that led to
// it, what is usual for it, and the bound it crossed.
//
// What is usual comes from the history of each tensor, not from a table: NVFP4 turns half of the
// inputs of a down-projection to zero in health. The bounds around it are those of reference/
// parity_notes.md 4, measured on clean runs, and 5 says which of them see which fault. A first
// strange sample is only remembered and the second in a row is acted on, except where one is
// proof: a number that is not finite, MXFP8 that saturates, rows of zeros, scales that are not the
// bytes that were made.
//
// What fell stays fallen for some time, returns after its signal was healthy for some samples, and
// waits twice as long after each relapse. History and falls survive in a checkpoint: a Watch
// marshals to JSON and back.
package monitor
