package train

import (
	"fmt"
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

// readShard reads a box that one of this process's shards has. A shard stays on the host until the
// next but one is read.
func (s *snapshot) readShard(at place, one ckpt.Tensor, box ckpt.Box, dst []byte) error {
	pc := at.tensor
	a, h := s.arrayOf(pc)
	if a == nil {
		return diag.New(diag.CheckpointTensor, "the state has no %s", pc.name)
	}
	for i, id := range a.Devices() {
		own := pc.box(h.mesh, slices.Index(h.update.Devices, id))
		if !own.Contains(box.Start, box.Size) {
			continue
		}
		shard, err := s.shard(a, i)
		if err != nil {
			return err
		}
		layer := int64(len(shard) / len(pc.tensors))
		own.Give(dst, shard[int64(at.layer)*layer:][:layer], box.Start, box.Size,
			int64(one.DType.Bits()/8))
		return nil
	}
	return diag.New(diag.CheckpointTensor, "no device of this process has %s of %s", box, one.Name)
}

// shard reads the i-th shard of an array.
func (s *snapshot) shard(a *engine.Array, i int) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := fmt.Sprintf("%s %d", a.Name(), i)
	if data := s.held[key]; data != nil {
		return data, nil
	}
	data, err := a.Read(s.ctx, i)
	if err != nil {
		return nil, err
	}
	if len(s.held) > 1 { // chunks of two shards may be read at once
		clear(s.held)
	}
	s.held[key] = data
	return data, nil
}
