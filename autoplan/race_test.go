//go:build race

package autoplan

// raced says that the detector of races is on.
const raced = true
