// Package optim turns the types of a model's parameters into the graph that updates them.
//
// The update is a program of its own, apart from the gradient. It takes the state and the
// gradients, a flag that says whether the step counts, and the largest norm of the gradients with
// which it may. If the flag is down, or a gradient is not finite, or the norm is too large, every
// part of the state comes out as it went in, bit for bit. Since the choice is made inside, state
// can be donated, and a rejected step costs no second copy. Numbers that change from step to step
// (rate, bias corrections) are inputs, so that one compiled program serves the whole run.
//
// An [Optimizer] is [AdamW], [Muon] or [SGD]; a loop that trains does not know which.
package optim
