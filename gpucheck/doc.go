// Package gpucheck turns the GPUs of a host into a table of what was confirmed on them: every
// custom call against its plain form, attention, block-scaled GEMMs, collectives, a training step
// in each precision against CPU devices, and predicted times beside measured ones.
//
// A check compares a program on the live client with the same mathematics written without special
// kernels, on CPU devices, with the same random inputs. Checks run in a child process: a crash of
// XLA, an error of CUDA or a deadline is the result of one check, and the next one gets a new
// process. What cannot run here is skipped, and says why.
//
// The replay of programs without a GPU trusts some readings of libraries ([replay.Conventions]).
// Here each of them is confirmed, refuted or not tested. The report has no path and no name of the
// host: it is to be attached to an issue.
package gpucheck
