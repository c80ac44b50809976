package golden

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A failed keeps what a test would have said.
type failed struct {
	testing.TB
	said string
}

func (f *failed) Helper()                        {}
func (f *failed) Errorf(format string, a ...any) { f.said = fmt.Sprintf(format, a...) }

// A file that differs fails the test, and becomes what the test got with -update alone.
func TestCompare(t *testing.T) {
	path := filepath.Join(t.TempDir(), "testdata", "a.txt")
	defer func(was bool) { *update = was }(*update)
	*update = true
	Compare(t, path, []byte("one\n"))
	*update = false
	f := &failed{TB: t}
	if want := Compare(f, path, []byte("one\n")); string(want) != "one\n" || f.said != "" {
		t.Errorf("the same: %q, %s", want, f.said)
	}
	Compare(f, path, []byte("two\n"))
	if text, err := os.ReadFile(path); err != nil || string(text) != "one\n" ||
		!strings.Contains(f.said, "a.txt") || !strings.Contains(f.said, "two") {
		t.Errorf("another: %q, %v, %s", text, err, f.said)
	}
}
