// Package expr turns what a kernel computes for each element of a matrix into text, and back: the
// operands, the steps in float32, and the values that are results.
//
//	bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4
//
// is SwiGLU. Operands are numbered from 0 and steps go on from there. The text is an attribute of
// the rewritten operation, and of the call in the compiled program, so that whoever replays that
// knows what the kernel computes.
package expr
