package train

import (
	"runtime"
	"slices"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/spmd"
)

// slices lists the boxes of the state that this process writes where several share one client: of
// each distinct shard of an array, the process with its first replica has a box in every layer.
func (s *snapshot) slices() (list []ckpt.Slice) {
	list = []ckpt.Slice{} // nil would be everything
	for i := range s.arrays {
		pc := &s.arrays[i]
		a, h := s.arrayOf(pc)
		if a == nil {
			continue
		}
		for _, id := range a.Devices() {
			device := slices.Index(h.update.Devices, id)
			if pc.layout != nil && !first(h.mesh, pc.layout.Stored, device) {
				continue
			}
			for _, one := range pc.tensors {
				box := pc.box(h.mesh, device)
				list = append(list, ckpt.Slice{Name: one.Name, Box: ckpt.Box{Start: box.Start,
					Size: box.Size}})
			}
		}
	}
	return list
}

// arrayOf is an array of the state, and the rank's part that has it; nil if it is in another
// process.
func (s *snapshot) arrayOf(pc *stateTensor) (*engine.Array, *stateShard) {
	h := s.shards[pc.rank]
	if h == nil {
		return nil, nil
	}
	return h.state.Get(pc.name), h
}

// box is the region of a tensor, one layer of the array, that a device stores.
func (pc *stateTensor) box(mesh []ir.Axis, device int) spmd.Box {
	dims, part := pc.param.Dims, ir.Type{Dims: pc.param.Dims}
	if pc.layout != nil {
		dims, part = pc.layout.Whole, pc.layout.Stored
	}
	if pc.param.Stacked() { // the layer dimension comes first, and is not sharded
		dims, part.Dims = dims[1:], part.Dims[1:]
	}
	return spmd.BoxOf(mesh, dims, part, device)
}

// readBox reads a box of a tensor from the shards that have it. Where the box is one run of bytes
// in a shard, only they are read; else the layer of the shard is, and stays on the host until the
// whole tensor, or this process's part of it, was read.
func (s *snapshot) readBox(at place, one ckpt.Tensor, box ckpt.Box, dst []byte) error {
	pc := at.tensor
	a, h := s.arrayOf(pc)
	if a == nil {
		return diag.New(diag.CheckpointTensor, "the state has no %s", pc.name)
	}
	width := int64(one.DType.Bits() / 8)
	whole, found := spmd.Box{Start: box.Start, Size: box.Size}, int64(0)
	for i, id := range a.Devices() {
		device := slices.Index(h.update.Devices, id)
		if pc.layout != nil && !s.sliced && !first(h.mesh, pc.layout.Stored, device) {
			continue // a replica costs bandwidth and gives the same bytes
		}
		own := pc.box(h.mesh, device)
		part, ok := own.Overlap(box.Start, box.Size)
		if !ok {
			continue
		}
		from, to, dense := own.Span(part.Start, part.Size)
		n := times(part.Size)
		layer := a.Local().Bytes() / int64(len(pc.tensors))
		start := int64(at.layer) * layer
		var err error
		switch {
		case dense && n*width == int64(len(dst)):
			err = a.ReadAt(s.ctx, i, start+from*width, dst)
		case dense:
			buf := make([]byte, (to-from)*width)
			if err = a.ReadAt(s.ctx, i, start+from*width, buf); err == nil {
				own.Give(dst, whole, part, buf, from, width)
			}
		default:
			var data []byte
			if data, err = s.layer(a, i, at.layer, layer, times(own.Size)*width); err == nil {
				own.Give(dst, whole, part, data, 0, width)
				s.release(held{a.Name(), i, at.layer}, int(n*width))
			}
		}
		if err != nil {
			return err
		}
		if found += n; found*width >= int64(len(dst)) {
			return nil
		}
	}
	if len(dst) == 0 {
		return nil
	}
	return diag.New(diag.CheckpointTensor, "no device of this process has %s of %s", box, one.Name)
}

// A held layer is one of a shard of an array that is on the host.
type held struct {
	array string
	shard int
	layer int
}

// layer reads a layer of the i-th shard of an array, size bytes of which some are not padding.
func (s *snapshot) layer(a *engine.Array, i, layer int, size, some int64) ([]byte, error) {
	key := held{a.Name(), i, layer}
	s.mu.Lock()
	data := s.layers[key]
	s.mu.Unlock()
	if data != nil {
		return data, nil // one goroutine reads a tensor
	}
	data = make([]byte, size)
	if err := a.ReadAt(s.ctx, i, int64(layer)*size, data); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers[key], s.left[key] = data, int(some)
	return data, nil
}

// release counts bytes of a layer that were read, and drops it after the last.
func (s *snapshot) release(key held, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left[key] -= bytes; s.left[key] <= 0 {
		delete(s.layers, key)
		delete(s.left, key)
	}
}

// writers is how many tensors are written at a time, so that the layers that are held for them are
// not more than a shard of their stack; 0 leaves it to the writer.
func (s *snapshot) writers() int {
	least := int64(maxWriters)
	for i := range s.arrays {
		pc := &s.arrays[i]
		a, h := s.arrayOf(pc)
		if a == nil || len(pc.tensors) == 1 {
			continue
		}
		own := pc.box(h.mesh, slices.Index(h.update.Devices, a.Devices()[0]))
		if _, _, dense := own.Span(own.Start, own.Size); dense {
			continue
		}
		layer := pc.tensors[0].Bytes()
		if s.sliced {
			layer = a.Local().Bytes() / int64(len(pc.tensors))
		}
		least = min(least, max(1, a.Local().Bytes()/layer))
	}
	if least == maxWriters {
		return 0
	}
	return min(int(least), runtime.GOMAXPROCS(0))
}

// maxWriters is more than ckpt has.
const maxWriters = 1 << 10
