// Package slowtest turns the build tags long and race into decisions of tests: what takes minutes
// runs where `go test -tags long` is given, as in CI; the rest alone stays within three minutes.
package slowtest

import "testing"

// Only skips a test unless the tag is given.
func Only(t testing.TB) {
	t.Helper()
	if !Enabled {
		t.Skip("runs with -tags long")
	}
}
