package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/event"
)

// A way is one way in which a file of a checkpoint goes wrong.
type way struct {
	name string
	do   func(a *attack, path string, text []byte) error
}

func rewrite(change func(a *attack, text []byte) []byte) func(*attack, string, []byte) error {
	return func(a *attack, path string, text []byte) error {
		return os.WriteFile(path, change(a, text), 0o666)
	}
}

var ways = []way{
	{"a bit flipped", rewrite(func(a *attack, b []byte) []byte {
		b[a.random.IntN(len(b))] ^= 1 << a.random.IntN(8)
		return b
	})},
	{"truncated", rewrite(func(a *attack, b []byte) []byte { return b[:a.random.IntN(len(b))] })},
	{"longer", rewrite(func(a *attack, b []byte) []byte {
		return append(b, make([]byte, 1+a.random.IntN(4096))...)
	})},
	{"a page of zeros", rewrite(func(a *attack, b []byte) []byte {
		at := a.random.IntN(len(b))
		page := b[at:min(len(b), at+4096)]
		page[0] ^= 0xff // pages of zeros there are
		clear(page[1:])
		return b
	})},
	{"two bytes swapped", rewrite(func(a *attack, b []byte) []byte {
		i, k := a.random.IntN(len(b)), a.random.IntN(len(b))
		if b[i] == b[k] {
			b[i] ^= 1
		}
		b[i], b[k] = b[k], b[i]
		return b
	})},
	{"gone", func(_ *attack, path string, _ []byte) error { return os.Remove(path) }},
	{"a folder", func(_ *attack, path string, _ []byte) error {
		return errors.Join(os.Remove(path), os.Mkdir(path, 0o777))
	}},
	{"a pipe", func(_ *attack, path string, _ []byte) error {
		return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o666))
	}},
	{"a link out", func(_ *attack, path string, _ []byte) error {
		return errors.Join(os.Remove(path), os.Symlink("/etc/hostname", path))
	}},
	{"empty", func(_ *attack, path string, _ []byte) error { return os.Truncate(path, 0) }},
}

// damage changes checkpoints and counts those that are taken all the same.
func (a *attack) damage(count int, _ map[bool]map[string][]byte) error {
	source := filepath.Join(a.work, "whole-false", "run", "checkpoints",
		fmt.Sprintf("step-%08d", steps))
	var files []string
	err := filepath.WalkDir(source, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			rel, _ := filepath.Rel(source, path)
			files = append(files, rel)
		}
		return err
	})
	if err != nil {
		return err
	}
	refused := 0
	for i := range count {
		dir := filepath.Join(a.work, "damaged")
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
		step := filepath.Join(dir, filepath.Base(source))
		if err := os.CopyFS(step, os.DirFS(source)); err != nil {
			return err
		}
		w, name := ways[i%len(ways)], files[a.random.IntN(len(files))]
		path := filepath.Join(step, name)
		text, err := os.ReadFile(path)
		if err == nil {
			err = w.do(a, path, text)
		}
		if err != nil {
			return err
		}
		c, err := ckpt.Latest(a.ctx, dir, event.Discard)
		if err == nil {
			_ = c.Close()
			a.harm("a checkpoint whose %s is %s was taken", name, w.name)
			continue
		}
		refused++
	}
	fmt.Printf("checkpoints: %d damaged in %d ways, %d refused\n", count, len(ways), refused)
	return nil
}
