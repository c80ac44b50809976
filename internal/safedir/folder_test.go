package safedir

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// What is in the folder is read; nothing that leads out of it is, nor what is no file.
func TestFilesDoNotLeadOut(t *testing.T) {
	base := t.TempDir()
	dir, repo := filepath.Join(base, "dir"), filepath.Join(base, "repo")
	snapshot := filepath.Join(repo, "snapshots", "rev")
	for _, d := range []string{filepath.Join(dir, "sub"), filepath.Join(repo, "blobs"), snapshot} {
		must(t, os.MkdirAll(d, 0o777))
	}
	for _, name := range []string{"out", "dir/plain", "dir/once", "repo/blobs/b"} {
		must(t, os.WriteFile(filepath.Join(base, name), []byte("12345"), 0o666))
	}
	must(t, os.Symlink("plain", filepath.Join(dir, "link")))
	must(t, os.Symlink("../out", filepath.Join(dir, "leaves")))
	must(t, os.Symlink("../../blobs/b", filepath.Join(snapshot, "blob")))
	must(t, os.Symlink("../../../out", filepath.Join(snapshot, "leaves")))
	must(t, os.Link(filepath.Join(dir, "once"), filepath.Join(base, "twice")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o666))
	for _, row := range []struct {
		dir, name string
		limit     int64
		code      diag.Code
		words     string
	}{
		{dir, "plain", 5, "", ""},
		{dir, "link", 5, "", ""},
		{snapshot, "blob", 5, "", ""},
		{dir, "plain", 4, diag.BadInput, "more than 4 bytes"},
		{dir, "none", 5, diag.FileError, "there is no none"},
		{dir, "leaves", 5, diag.FileError, "leaves the folder: name the folder that it leads to, " + base},
		{snapshot, "leaves", 5, diag.FileError, "leaves the folder"},
		{dir, "once", 5, diag.BadInput, "second name"},
		{dir, "pipe", 5, diag.BadInput, "but a pipe"},
		{dir, "sub", 5, diag.BadInput, "but a folder"},
		{filepath.Join(base, "gone"), "x", 5, diag.FileError, "cannot read"},
	} {
		text, err := read(row.dir, row.name, row.limit)
		if row.code == "" {
			if err != nil || string(text) != "12345" {
				t.Errorf("%s: %q, %v", row.name, text, err)
			}
			continue
		}
		e := diag.From(err)
		if said := e.What + e.Fix; e.Code != row.code || !strings.Contains(said, row.words) {
			t.Errorf("%s: %v, want %s and %q", row.name, err, row.code, row.words)
		}
		if missing := row.name == "none" || row.name == "x"; errors.Is(err, fs.ErrNotExist) != missing {
			t.Errorf("%s: missing is %v: %v", row.name, !missing, err)
		}
	}
}

func read(dir, name string, limit int64) ([]byte, error) {
	f, err := Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Read(name, limit)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Each reason that a file cannot be opened has its own way out.
func TestMendPermission(t *testing.T) {
	f, err := Open(t.TempDir())
	must(t, err)
	defer f.Close()
	if fix := f.mend("x", &fs.PathError{Op: "openat", Path: "x", Err: syscall.EACCES}); !strings.Contains(fix, "chmod") {
		t.Error(fix)
	}
}
