package plainfile

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A link, a pipe, a folder and a device are refused by both, and what a link leads to stays.
func TestOnlyPlainFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	mine := filepath.Join(dir, "mine")
	must(t, os.WriteFile(mine, []byte("keep me"), 0o600))
	must(t, os.Symlink(mine, filepath.Join(dir, "link")))
	must(t, os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "dead")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "folder"), 0o700))
	for name, says := range map[string]string{"link": "symbolic link", "dead": "symbolic link",
		"pipe": "not a plain file", "folder": "a folder"} {
		path := filepath.Join(dir, name)
		for _, open := range []func() (*os.File, error){
			func() (*os.File, error) { return Open(path, os.O_RDWR|os.O_CREATE, 0o600) },
			func() (*os.File, error) { return Open(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600) },
			func() (*os.File, error) { return Create(path, 0o600) },
		} {
			_, err := open()
			e := diag.From(err)
			if e == nil || e.Code != diag.NotPlain || !strings.Contains(e.What, says) || e.Where != path ||
				e.Fix == "" {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if text, err := os.ReadFile(mine); err != nil || string(text) != "keep me" {
		t.Errorf("%q %v", text, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("a file was made through a link")
	}
}

func TestCreateLeavesOtherNames(t *testing.T) {
	dir := t.TempDir()
	path, backup := filepath.Join(dir, "f"), filepath.Join(dir, "backup")
	must(t, os.WriteFile(path, []byte("old"), 0o600))
	must(t, os.Link(path, backup))
	f, err := Create(path, 0o600)
	must(t, err)
	_, err = f.WriteString("new")
	must(t, err)
	must(t, f.Close())
	for name, want := range map[string]string{path: "new", backup: "old"} {
		if text, err := os.ReadFile(name); err != nil || string(text) != want {
			t.Errorf("%s holds %q, %v", name, text, err)
		}
	}
	f, err = Open(path, os.O_RDWR, 0)
	must(t, err)
	info, err := f.Stat()
	must(t, err)
	if Links(info) != 1 {
		t.Error("the new file has a second name")
	}
	must(t, f.Close())
}
