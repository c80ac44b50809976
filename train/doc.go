// Package train turns compiled programs and batches of tokens into trained parameters: it is the
// training loop, with the guards around it.
//
// [New] compiles the programs of a step and fills the state from the newest checkpoint, or with
// initial parameters. [Trainer.Run] trains to the last step; [Trainer.Step], [Trainer.Eval],
// [Trainer.Save] and [Trainer.Load] are its parts, for a loop of one's own. The data is a
// [Dataset]: a [data.Loader], or any type that returns a batch for a position.
//
// A step takes a batch, accumulates the gradients of its microbatches, checks the loss, and
// updates. The update programs take a flag, whether to apply the step, as an input, and also
// check on the devices that the gradient is finite and no spike; a rejected step leaves every
// bit of the state as it was, is kept on disk so that it can be rerun, and the run goes on with
// the next batch.
//
// Checkpoints hold all that a run needs after a crash: parameters, optimizer moments, one number
// for each source of data, and the history of the guard and of the precision monitor. A run that
// was killed and resumed ends with the same bits as one that was not.
//
// # Files
//
//	options.go, train.go, loop.go, manual.go  the API: Options, New, Step, Run, Gradients, Update
//	executor.go, inputfeed.go                 programs on devices
//	forward_backward.go                       gradients, reduction, update, validation of a batch
//	state.go, checkpoint.go, save.go          the state, and how it is saved and resumed
//	identity.go                               what must not change between a save and a resume
//	precision.go, report.go                   quantized GEMMs: statistics, fallback, return
//	guard.go, rerun.go, watchdog.go           spikes, rejected steps, stalls
//	replicas.go, digest.go                    devices that must have the same bits
//	peers.go, together.go                     runs over several processes
//	memory.go, disk.go                        what fits
//	branch.go                                 short runs beside a run, for comparisons
package train
