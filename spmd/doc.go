// Package spmd turns the graph of a model's loss and an optimizer into the graphs that one device
// of a mesh runs to train it: a gradient, more gradient on top of it, an update, and the loss alone
// for validation.
//
// The graphs meet in the names of their inputs and results: parameter w has its gradient in "g.w"
// and, where the model computes in another type than f32, its copy in "c.w". Gradient and update
// are apart, so that whoever runs them can look at the loss before the state changes, and add up
// the gradients of several parts of a step.
package spmd
