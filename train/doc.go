// Package train turns compiled programs and rows of tokens into a trained state: it is the loop,
// with the guards around it.
//
// A step takes rows from the data, adds up their gradients part by part, looks at the loss, and
// updates. The update is told whether the step counts and decides itself whether the gradient is
// fit for use; a step that is rejected leaves every bit of the state, is written down so that it
// can be replayed, and the run goes on with the next rows.
//
// What a run needs to go on after a crash is in its checkpoints: parameters, optimizer state, one
// number for each source of data, and what the guard remembers. A run that was killed and resumed
// ends with the same bits as one that was not.
package train
