package safetensors

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// sparse writes the header of a 1 GB file of 1,000 tensors and leaves the data to the file system.
func sparse(b testing.TB) string {
	b.Helper()
	var items []Item
	for i := range 1000 {
		items = append(items, Item{fmt.Sprintf("model.layers.%d.self_attn.q_proj.weight", i),
			dtype.Shape{Type: dtype.BF16, Dims: []int64{512, 1024}}, FromBytes(nil)})
	}
	l, err := arrange(items, map[string]string{"format": "pt"})
	if err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(b.TempDir(), "x.safetensors")
	if err := os.WriteFile(path, l.header, 0o644); err != nil {
		b.Fatal(err)
	}
	if err := os.Truncate(path, int64(len(l.header))+l.data); err != nil {
		b.Fatal(err)
	}
	return path
}

func BenchmarkOpen(b *testing.B) {
	path := sparse(b)
	b.ReportAllocs()
	for b.Loop() {
		set, err := Open(path)
		if err != nil {
			b.Fatal(err)
		}
		if err := set.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// Allocations must not grow with the number of tensors.
func TestOpenAllocatesLittle(t *testing.T) {
	path := sparse(t)
	got := testing.AllocsPerRun(10, func() {
		set, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := set.Close(); err != nil {
			t.Fatal(err)
		}
	})
	if got > 60 {
		t.Errorf("opening 1,000 tensors makes %v allocations", got)
	}
}

func BenchmarkReadSlice(b *testing.B) {
	set, err := Open(sparse(b))
	if err != nil {
		b.Fatal(err)
	}
	defer set.Close()
	t, err := set.Tensor("model.layers.7.self_attn.q_proj.weight")
	if err != nil {
		b.Fatal(err)
	}
	for _, columns := range []int64{1, 128, 1024} {
		b.Run(fmt.Sprint(columns), func(b *testing.B) {
			dst := make([]byte, 512*columns*2)
			b.SetBytes(int64(len(dst)))
			b.ReportAllocs()
			for b.Loop() {
				if err := t.ReadSlice(dst, []int64{0, 0}, []int64{512, columns}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWriteFile(b *testing.B) {
	const n = 256 << 20
	data := make([]byte, n)
	path := filepath.Join(b.TempDir(), "x.safetensors")
	items := []Item{{"a", dtype.Shape{Type: dtype.U8, Dims: []int64{n}}, FromBytes(data)}}
	b.SetBytes(n)
	for b.Loop() {
		if _, err := WriteFile(path, items, nil); err != nil {
			b.Fatal(err)
		}
	}
}
