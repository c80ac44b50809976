// Package enginetest turns a graph into numbers on the CPU engine, for the tests of what makes
// graphs, and of what makes programs of them.
//
// Open gives an engine. Compile lowers a graph for it; the Program that comes back is run like
// eval.Run, or step by step on a state that stays on the devices, as training does. All numbers
// are float64 on the outside, and rounded to what a program takes.
package enginetest
