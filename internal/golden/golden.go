// Package golden turns what a test has made into a comparison with a committed file, which
// `go test PACKAGE -update` rewrites.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the committed files that tests compare with")

// Update tells whether committed files are to be rewritten.
func Update() bool { return *update }

// Compare fails a test if a committed file is not what the test got, and gives the file. With
// -update the file becomes what the test got.
func Compare(t testing.TB, path string, got []byte) (want []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s is not what comes out now; go test -update if that is meant (-file +now):\n%s",
			path, diff)
	}
	return want
}
