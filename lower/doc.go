// Package lower turns the graph of one device into the text of a StableHLO module.
//
// It only prints: what an operation becomes is a row of one table, and the module says exactly what
// the graph says, one replica of it. Collectives are written with their replica groups; a repeat is
// a while loop over its stacks, so that depth costs nothing to compile.
package lower
