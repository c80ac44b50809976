// Package lower turns the graph of one device into the text of a StableHLO module.
//
// It only prints: package rewrite first turns the graph into one that the target runs well; then
// every operation becomes the text that one row of a table says, and the module does exactly what
// the rewritten graph does, one replica of it. Collectives are written with their replica groups; a
// repeat is a while loop over its stacks, so that depth costs nothing to compile.
package lower
