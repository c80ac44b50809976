//go:build !long

package long

// Enabled tells whether the tag is given.
const Enabled = false
