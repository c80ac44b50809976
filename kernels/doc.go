// Package kernels turns a target into choices: which kernel an operation becomes, in which shape
// and with which compile options, and why.
//
// The kernels themselves are rows in packages lower/cpu and lower/gpu, whose conditions ask here;
// the cost model asks here too, before there is a graph. Choices are recorded, so that a person can
// read which attention is cuDNN's and which is not, and for what reason.
package kernels
