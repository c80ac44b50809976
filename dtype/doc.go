// Package dtype turns the name of an element type into what the rest of Deepwell must know of
// it: how many bits it has, what kind of number it is, and how StableHLO spells it.
//
// The list goes from PRED down to the block formats' parts: F8E8M0FNU (the scale of MXFP8, an
// exponent and nothing else) and F4E2M1FN (the element of NVFP4, two to a byte). The numbers
// that the engine's C interfaces use for the same types are not here: they belong to the
// packages that speak those interfaces.
package dtype
