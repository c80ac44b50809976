// Package lower turns the graph of one device into the text of a StableHLO module.
//
// It composes what others do: package rewrite turns the graph into one that the target runs well,
// the printer in lower/stablehlo writes it, and kernels of lower/cpu and lower/gpu are rows of one
// table. The module does exactly what the rewritten graph does, one replica of it. Collectives are
// written with their replica groups; a repeat is a while loop over its stacks, so that depth costs
// nothing to compile.
package lower
