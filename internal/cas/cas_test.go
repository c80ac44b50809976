package cas

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
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
