// Package plantest turns the axes of a plan into the plans that tests run: one table of ways to use
// an axis, and one generator that combines them.
package plantest
