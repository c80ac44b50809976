package cas

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

func TestPutGet(t *testing.T) {
	s := Open(filepath.Join(t.TempDir(), "cache"))
	key := Key([]byte("program"), []byte("options"))
	if _, err := s.Get(key); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing entry: %v", err)
	}
	for _, data := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte("y"), 1<<20)} {
		if err := s.Put(key, data); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Get(key); err != nil || !bytes.Equal(got, data) {
			t.Errorf("got %d bytes, %v", len(got), err)
		}
	}
}

func TestKeyCountsTheCuts(t *testing.T) {
	if Key([]byte("ab"), []byte("c")) == Key([]byte("a"), []byte("bc")) {
		t.Error("two lists of parts have one key")
	}
}

func TestDamageIsFoundOut(t *testing.T) {
	for name, harm := range map[string]func([]byte) []byte{
		"flipped":   func(b []byte) []byte { b[40] ^= 1; return b },
		"truncated": func(b []byte) []byte { return b[:20] },
		"empty":     func([]byte) []byte { return nil },
	} {
		s := Open(t.TempDir())
		key := Key([]byte(name))
		if err := s.Put(key, []byte("some contents of an entry")); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(s.path(key))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.path(key), harm(b), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(key); !errors.Is(err, ErrDamaged) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(s.path(key)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the damaged file is still there", name)
		}
	}
}

func TestManyWriters(t *testing.T) {
	s := Open(t.TempDir())
	key, data := Key([]byte("k")), bytes.Repeat([]byte("z"), 100_000)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if err := s.Put(key, data); err != nil {
					t.Error(err)
				}
				if got, err := s.Get(key); err != nil || !bytes.Equal(got, data) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
}

func TestTrim(t *testing.T) {
	s := Open(t.TempDir())
	for _, k := range []string{"a", "b", "c"} {
		if err := s.Put(Key([]byte(k)), make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Trim(2500); err != nil {
		t.Fatal(err)
	}
	left := 0
	for _, k := range []string{"a", "b", "c"} {
		if _, err := s.Get(Key([]byte(k))); err == nil {
			left++
		}
	}
	if left != 2 {
		t.Errorf("%d entries are left, want 2", left)
	}
}

// What is not the store's own stays, and does not count: files of a user in the same folder,
// however large and old, and whatever links lead to.
func TestTrimRemovesOnlyEntries(t *testing.T) {
	base := t.TempDir()
	s := Open(filepath.Join(base, "cache"))
	key := Key([]byte("a"))
	if err := s.Put(key, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	hex := "ab" + key[2:]
	foreign := []string{"cache/thesis.tex", "cache/ab/notes", "cache/tokens/x.tokens",
		"cache/ab/" + key, "cache/AB/" + hex, "cache/ab/deep/" + hex, "cache/" + hex,
		"outside/cd" + key[2:], "outside/file"}
	for _, name := range foreign {
		path := filepath.Join(base, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, 5000), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"cache/cd": "outside", "cache/ab/" + hex: "outside/file"} {
		if err := os.Symlink(filepath.Join(base, to), filepath.Join(base, link)); err != nil {
			t.Fatal(err)
		}
		foreign = append(foreign, link)
	}
	for _, limit := range []int64{2000, 0} {
		if err := s.Trim(limit); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(key); (err == nil) != (limit > 0) {
			t.Errorf("limit %d: the entry: %v", limit, err)
		}
		for _, name := range foreign {
			if _, err := os.Stat(filepath.Join(base, name)); err != nil {
				t.Errorf("limit %d: %v", limit, err)
			}
		}
	}
}

func TestTrimOfNothing(t *testing.T) {
	for _, dir := range []string{"", filepath.Join(t.TempDir(), "none")} {
		if err := Open(dir).Trim(0); err != nil {
			t.Errorf("%q: %v", dir, err)
		}
	}
}
