// Package irtest turns a seed into graphs that use every operation, for the tests of what reads
// graphs: gradients, the interpreter, lowerings.
package irtest
