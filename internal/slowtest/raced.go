//go:build race

package slowtest

// Raced tells whether the race detector is on: it takes five to ten times the memory and the time.
const Raced = true
