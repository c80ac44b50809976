// Package optim turns the types of a model's parameters into the graph that updates them.
//
// The update is a program of its own, apart from the gradient. It takes the state and the
// gradients, and a flag that says whether the step counts: if not, every part of the state comes
// out as it went in, bit for bit. Since the choice is made inside, state can be donated, and a
// rejected step costs no second copy. Numbers that change from step to step (rate, bias
// corrections) are inputs, so that one compiled program serves the whole run.
package optim
