// Package firstuse turns a kernel of our own into a verdict: how far what a GPU computes with it is
// from its plain form.
//
// No kernel of ours has run on a real GPU before its users': what ptxas makes of it, approximate
// instructions and asynchronous copies are first seen there. So a run compares each of its kernels
// with the plain form, which the host computes, on a small matrix of random numbers, before it
// trains. A kernel that differs is not used.
package firstuse
