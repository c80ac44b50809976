// Package price turns operations and collectives on a machine into seconds.
//
// The time of an operation follows from the GPU's peaks and memory bandwidth, corrected by tables
// of measurements and by the constants of the software that runs it: a [Profile]. The same plan
// takes different times on different stacks and releases, so a profile has a name and states where
// its constants come from.
package price
