//go:build !long

package slowtest

// Enabled tells whether the tag is given.
const Enabled = false
