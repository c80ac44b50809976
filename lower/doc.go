// Package lower turns the graph of one device into the text of a StableHLO module.
//
// It composes what others do: package rewrite turns the graph into one that the target runs well,
// the printer in lower/stablehlo writes it, and kernels of lower/cpu and lower/gpu are rows of one
// table. The module has one operation or kernel for each of the rewritten graph, and is the program
// of one device, which all devices run. Collectives are
// written with their replica groups; a repeat is a while loop over its stacks, so that depth costs
// nothing to compile.
package lower
