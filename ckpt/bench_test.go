package ckpt

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// The state of a model of about 22 million parameters with AdamW: 264 MB.
func benchState(b *testing.B) *Memory {
	var list []Tensor
	for _, kind := range []string{"", "m.", "v."} {
		list = append(list, Tensor{kind + "embed", dtype.F32, []int64{16384, 512}})
		for i := range 4 {
			list = append(list, Tensor{kind + "block." + string(rune('0'+i)), dtype.F32, []int64{6656, 512}})
		}
	}
	return state(b, 1, list...)
}

func size(m *Memory) (n int64) {
	for _, x := range m.Tensors() {
		n += x.Bytes()
	}
	return n
}

// BenchmarkPlain writes the same bytes into one file and syncs it: what the disk can do.
func BenchmarkPlain(b *testing.B) {
	m := benchState(b)
	b.SetBytes(size(m))
	for b.Loop() {
		path := filepath.Join(b.TempDir(), "x")
		f, err := os.Create(path)
		must(b, err)
		for _, x := range m.Tensors() {
			_, err := f.Write(m.Bytes(x.Name))
			must(b, err)
		}
		must(b, f.Sync())
		must(b, f.Close())
		must(b, os.Remove(path))
	}
}

func BenchmarkSave(b *testing.B) {
	m := benchState(b)
	b.SetBytes(size(m))
	b.ReportAllocs()
	for b.Loop() {
		dir := b.TempDir()
		must(b, Save(context.Background(), dir, 1, Meta{}, m, Options{}))
		must(b, os.RemoveAll(dir))
	}
}

func benchOpen(b *testing.B) (*Checkpoint, *Memory) {
	m, dir := benchState(b), b.TempDir()
	must(b, Save(context.Background(), dir, 1, Meta{}, m, Options{}))
	c, err := Open(filepath.Join(dir, stepName(1)))
	must(b, err)
	b.Cleanup(func() { c.Close() })
	b.SetBytes(size(m))
	return c, m
}

func BenchmarkVerify(b *testing.B) {
	c, _ := benchOpen(b)
	for b.Loop() {
		must(b, c.Verify(context.Background()))
	}
}

func BenchmarkLoad(b *testing.B) {
	c, m := benchOpen(b)
	for b.Loop() {
		for _, x := range m.Tensors() {
			must(b, c.ReadSlice(x.Name, x.Box(), m.Bytes(x.Name)))
		}
	}
}

// BenchmarkColumns reads a quarter of the columns: short runs, far apart.
func BenchmarkColumns(b *testing.B) {
	c, _ := benchOpen(b)
	box := Box{[]int64{0, 128}, []int64{16384, 128}}
	buf := make([]byte, 16384*128*4)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		must(b, c.ReadSlice("embed", box, buf))
	}
}
