package ckpt

import (
	"context"
	"runtime"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/parallel"
)

const (
	// chunkBytes is what one worker holds at a time. Chunks from 256 KiB to 32 MiB wrote equally fast
	// here, within noise; large ones cost fewer calls of a source.
	chunkBytes = 8 << 20
	// maxWorkers bounds the buffers; 8 workers hash about 10 GB/s, as much as four fast disks take.
	maxWorkers = 8
)

// A Memory is tensors in host memory, a Source. The zero value holds none.
type Memory struct {
	list  []Tensor
	data  [][]byte
	place map[string]int
}

// Add makes room for a tensor and gives its bytes, all zero. It must not run beside other methods.
func (m *Memory) Add(t Tensor) ([]byte, error) {
	if err := checkTensor(t); err != nil {
		return nil, diag.New(diag.CheckpointTensor, "%s", err)
	}
	if m.place == nil {
		m.place = map[string]int{}
	}
	if _, twice := m.place[t.Name]; twice {
		return nil, diag.New(diag.CheckpointTensor, "tensor %s stands twice", human.Quote(t.Name))
	}
	m.place[t.Name] = len(m.list)
	m.list = append(m.list, t)
	b := make([]byte, t.Bytes())
	m.data = append(m.data, b)
	return b, nil
}

// Only makes room for a tensor in place of all others, in the memory of the first if that is large
// enough, and gives its bytes, all zero.
func (m *Memory) Only(t Tensor) ([]byte, error) {
	var old []byte
	if len(m.data) > 0 {
		old = m.data[0]
	}
	if err := checkTensor(t); err != nil {
		return nil, diag.New(diag.CheckpointTensor, "%s", err)
	}
	n := int(t.Bytes())
	if cap(old) < n {
		old = make([]byte, n)
	}
	b := old[:n]
	clear(b)
	m.list, m.data, m.place = []Tensor{t}, [][]byte{b}, map[string]int{t.Name: 0}
	return b, nil
}

// Tensors implements Source.
func (m *Memory) Tensors() []Tensor { return m.list }

// Bytes gives a tensor's bytes, not a copy of them; nil if there is no such tensor.
func (m *Memory) Bytes(name string) []byte {
	if i, ok := m.place[name]; ok {
		return m.data[i]
	}
	return nil
}

// ReadSlice implements Source.
func (m *Memory) ReadSlice(name string, box Box, dst []byte) error {
	i, ok := m.place[name]
	if !ok {
		return absent(name, m.list)
	}
	t := m.list[i]
	if err := checkSlice(t, box, dst); err != nil {
		return err
	}
	return t.eachRun(box, t.Box(), box, func(from, to, n int64) error {
		copy(dst[to:to+n], m.data[i][from:from+n])
		return nil
	})
}

// checkSlice checks that a box lies in its tensor and that buf has its size.
func checkSlice(t Tensor, box Box, buf []byte) error {
	if err := t.checkBox(box); err != nil {
		return diag.New(diag.CheckpointTensor, "%s", err)
	}
	if want := t.sized(box.Size); int64(len(buf)) != want {
		return diag.New(diag.CheckpointTensor, "tensor %s: %v takes %d bytes, the buffer has %d",
			human.Quote(t.Name), box, want, len(buf))
	}
	return nil
}

// byName indexes tensors by name.
func byName(list []Tensor) map[string]Tensor {
	m := make(map[string]Tensor, len(list))
	for _, t := range list {
		m[t.Name] = t
	}
	return m
}

// spread does n tasks in order on a few workers, each with a buffer of its own. It gives the
// error of the earliest task that failed, so that the answer does not depend on timing.
func spread(ctx context.Context, workers, n int, buffer int64,
	task func(i int, buf []byte) error) error {
	if workers <= 0 {
		workers = min(runtime.GOMAXPROCS(0), maxWorkers)
	}
	err := parallel.Each(workers, n, func() func(int) error {
		buf := make([]byte, buffer)
		return func(i int) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return task(i, buf)
		}
	})
	if ctx.Err() != nil {
		return diag.New(diag.Canceled, "stopped between two slices").Wrap(ctx.Err())
	}
	return err
}
