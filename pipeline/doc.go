// Package pipeline turns a schedule and the programs of stages into a run: it interprets one
// process's part of a [schedule.Schedule] on the devices of the process.
//
// A model is split into virtual stages. Each is a [Stage]: an executable for each kind of action,
// on the devices of the stage's rank. A process hosts some ranks, all of them or one;
// [Pipeline.Run] gives each a goroutine that goes through the rank's steps, and ranks send arrays
// to each other over one [engine.Link] per pair. Device queues are asynchronous, so that a
// goroutine is some actions ahead of its devices, and waits only for what another rank sends.
//
// Values go from program to program by name, as in [engine.Executable.Step]. An argument is, in
// this order,
//
//   - what the microbatch has by that name: what the stage before or after sent, listed in
//     Stage.Inputs and Stage.OutputGrads, and what an earlier program of the same stage gave
//     for the same microbatch, its residuals;
//   - what the rank's [engine.State] keeps by that name: parameters, accumulators of gradients, and
//     whatever else is the same for all microbatches, such as the seed of a loss;
//   - what the caller's data function places for the microbatch: ids, labels, positions.
//
// A result that takes the place of a donated argument goes where the argument was, so that a
// gradient is added to its accumulator in the state. Of the others, those in Stage.Outputs and
// Stage.Gradients are sent, those in Stage.Results are the caller's, and those that a later program
// of the stage takes are kept for it. Everything is freed as soon as no later action needs it;
// [Usage] reports the peak, which [schedule.Schedule.Peak] predicts.
//
// [Differentiate] makes the graphs of a stage from its forward graph, with these names.
package pipeline
