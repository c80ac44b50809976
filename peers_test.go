package deepwell

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// A key that others may read is refused with what to type, as ssh does; so is one that is too short
// to be random enough, or no file.
func TestKeyFiles(t *testing.T) {
	dir := t.TempDir()
	good := bytes.Repeat([]byte("k"), 32)
	for name, c := range map[string]struct {
		content []byte
		mode    os.FileMode
		fix     string
	}{
		"good":  {good, 0o600, ""},
		"read":  {good, 0o400, ""},
		"group": {good, 0o640, "chmod 600"},
		"all":   {good, 0o604, "chmod 600"},
		"write": {good, 0o602, "chmod 600"},
		"short": {good[:31], 0o600, "head -c 32"},
		"large": {make([]byte, maxKey+1), 0o600, "head -c 32"},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, c.content, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		secret, err := readKey(path)
		if c.fix == "" {
			if err != nil || !bytes.Equal(secret, c.content) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if e := diag.From(err); err == nil || e.Code != diag.LinkKey || !strings.Contains(e.Fix, c.fix) {
			t.Errorf("%s: %v", name, err)
		}
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, dir, filepath.Join(dir, "nothing"), os.DevNull} {
		if _, err := readKey(path); err == nil || diag.From(err).Code != diag.LinkKey {
			t.Errorf("%s: %v", path, err)
		}
	}
}
