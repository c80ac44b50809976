// Package run turns a kernel's text and its arrays into what the kernel writes: it parses Triton IR
// and executes it, one program of the grid after the other.
//
// It reads the text that a GPU's compiler reads and shares no formula with the package that printed
// it. What it computes is IEEE arithmetic in the order of the text; sums and maxima over an axis
// are taken in pairs. It refuses what a GPU would do in silence: a load or store outside an array,
// an element that two programs write, a result that nobody writes or that is read before it is
// written.
//
// It says nothing of layouts and registers, of races inside a program, of contractions of a product
// and a sum, and of the last bits of approximate instructions (ex2.approx, tanh.approx, rsqrt):
// those the package takes as exact.
package run
