// Package eval turns a graph and numbers into numbers: an interpreter in float64 that is slow,
// plain and right, against which gradients and lowerings are tested.
//
// A graph of one device of a mesh is run for all devices of the mesh at once, so that collectives
// are what they are on devices, and a sum that was never reduced is a wrong number here too.
package eval
