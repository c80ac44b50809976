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

// A Memory is tensors in host memory: a Source and a Sink. The zero value holds none.
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

// Tensors implements Source and Sink.
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
	return m.move(name, box, dst, func(own, other []byte) { copy(other, own) })
}

// WriteSlice implements Sink.
func (m *Memory) WriteSlice(name string, box Box, src []byte) error {
	return m.move(name, box, src, func(own, other []byte) { copy(own, other) })
}

// move copies between a box of a tensor in memory and buf, in either direction.
func (m *Memory) move(name string, box Box, buf []byte, move func(own, other []byte)) error {
	i, ok := m.place[name]
	if !ok {
		return absent(name, m.list)
	}
	t, own := m.list[i], m.data[i]
	if err := checkSlice(t, box, buf); err != nil {
		return err
	}
	return t.eachRun(box, t.Box(), box, func(from, to, n int64) error {
		move(own[from:from+n], buf[to:to+n])
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

// Copy moves slices from a source into a sink; nil means every tensor of the sink, whole. The
// source must hold each with the same element type and shape, and may hold more.
func Copy(ctx context.Context, dst Sink, src Source, list []Slice) error {
	want, have := dst.Tensors(), src.Tensors()
	if list == nil {
		for _, t := range want {
			list = append(list, Slice{t.Name, t.Box()})
		}
	}
	tensors, err := match(list, want, have)
	if err != nil {
		return err
	}
	largest := int64(0)
	for i, t := range tensors {
		largest = max(largest, t.sized(list[i].Box.Size))
	}
	return spread(ctx, 0, len(list), min(largest, chunkBytes), func(i int, buf []byte) error {
		t := tensors[i]
		for box := range t.chunks(list[i].Box, int64(len(buf))) {
			part := buf[:t.sized(box.Size)]
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := src.ReadSlice(t.Name, box, part); err != nil {
				return err
			}
			if err := dst.WriteSlice(t.Name, box, part); err != nil {
				return err
			}
		}
		return nil
	})
}

// match finds the tensor of every slice and demands that both sides mean the same by it.
func match(list []Slice, want, have []Tensor) ([]Tensor, error) {
	wanted, held := byName(want), byName(have)
	tensors := make([]Tensor, len(list))
	for i, s := range list {
		w, ok := wanted[s.Name]
		if !ok {
			return nil, absent(s.Name, want)
		}
		h, ok := held[s.Name]
		if !ok {
			return nil, absent(s.Name, have)
		}
		if !w.same(h) {
			return nil, diag.New(diag.CheckpointTensor,
				"the checkpoint has %s as %v; %v is wanted", human.Quote(s.Name), h, w).
				Try("resume with the model and optimizer that wrote it")
		}
		if err := h.checkBox(s.Box); err != nil {
			return nil, diag.New(diag.CheckpointTensor, "%s", err)
		}
		tensors[i] = h
	}
	return tensors, nil
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
