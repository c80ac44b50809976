// Package optim turns the types of a model's parameters into the graph that updates them.
//
// The update is a program of its own, apart from the gradient. It takes the optimizer state and the
// gradients, a flag by which the host commits the step, and the largest gradient norm that is
// accepted. If the flag is false, a gradient is not finite, or the norm is too large, all state
// comes out as it went in, bit for bit. Since the choice is made on the device, state can be
// donated and a rejected step costs no second copy. Numbers that change from step to step (learning
// rate, bias corrections) are inputs, so that one compiled program serves the whole run.
//
// An [Optimizer] is [AdamW], [Muon] or [SGD]; the training loop does not know which.
package optim
