package call

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
)

// A place is a block of shared memory and an offset in it, in bytes.
type place [2]int64

// What the engine needs to use memory where it is, in bytes: on the host, and on a GPU.
const (
	alignment    = 64
	gpuAlignment = 256
)

// device is the one that programs run on: a caller with several GPUs has a child for each, which
// sees that one alone.
const device = 0

// A block is memory of the caller: mapped, or of a GPU and imported, at an address of some bytes.
type block struct {
	data []byte
	gpu  uintptr
	size int64
}

// blocks are the blocks by number.
type blocks map[int64]block

// add maps the memory of a descriptor, which it closes.
func (b blocks) add(n int64, fd int, size int64) error {
	defer func() { _ = unix.Close(fd) }()
	if err := b.vacant(n, size); err != nil {
		return err
	}
	var at unix.Stat_t
	if err := unix.Fstat(fd, &at); err != nil || at.Size < size {
		return diag.New(diag.BadInput, "block %d has %d bytes, not %d", n, at.Size, size)
	}
	data, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return diag.New(diag.OutOfMemory, "block %d cannot be mapped", n).Wrap(err)
	}
	b[n] = block{data: data, size: size}
	return nil
}

func (b blocks) vacant(n, size int64) error {
	if _, there := b[n]; there || size <= 0 {
		return diag.New(diag.BadInput, "block %d of %d bytes is there, or of no size", n, size)
	}
	return nil
}

// bytes gives the mapped memory at a place.
func (b blocks) bytes(p place, size int64) ([]byte, error) {
	data := b[p[0]].data
	if p[1] < 0 || size < 0 || p[1]%alignment != 0 || p[1] > int64(len(data))-size {
		return nil, diag.New(diag.BadInput, "block %d has no %d bytes at %d", p[0], size, p[1])
	}
	return data[p[1] : p[1]+size : p[1]+size], nil
}

// has says whether memory is in a block, at any offset.
func (b blocks) has(p place, size int64) bool {
	return p[1] >= 0 && p[1] <= b[p[0]].size-size
}

// imported is the address of a GPU's memory at a place, which the engine can use where it is, or 0
// if the block is mapped.
func (b blocks) imported(p place, size int64) (uintptr, error) {
	gpu := b[p[0]].gpu
	if gpu == 0 {
		return 0, nil
	}
	if p[1]%gpuAlignment != 0 || !b.has(p, size) {
		return 0, diag.New(diag.BadInput, "block %d of a GPU has no %d bytes at %d", p[0], size, p[1])
	}
	return gpu + uintptr(p[1]), nil
}

// mapBlock takes a block of the caller: a descriptor of memory that the CPU engine reads, or a
// handle of a GPU's.
func (s *server) mapBlock(r *request) error {
	if onGPU := s.engine.Platform() == "cuda"; onGPU != (len(r.Handle) > 0) {
		if r.fd >= 0 {
			_ = unix.Close(r.fd)
		}
		return diag.New(diag.BadInput, "block %d is memory of another kind than the engine's: a GPU's"+
			" has a handle, the host's a descriptor", r.Block)
	}
	if len(r.Handle) == 0 {
		return s.blocks.add(r.Block, r.fd, r.Size)
	}
	if err := s.blocks.vacant(r.Block, r.Size); err != nil {
		return err
	}
	gpu, size, err := s.engine.Import(device, r.Handle)
	if err != nil {
		return err
	}
	if size < r.Size {
		_ = s.engine.Release(gpu)
		return diag.New(diag.BadInput, "block %d has %d bytes, not %d", r.Block, size, r.Size)
	}
	s.blocks[r.Block] = block{gpu: gpu, size: r.Size}
	return nil
}

// unit is what the offset of a place must be a multiple of.
func (s *server) unit(p place) int64 {
	if s.blocks[p[0]].gpu != 0 {
		return gpuAlignment
	}
	return alignment
}

// unmap gives blocks back to the caller. Calls that have saved something there are over, and
// parameters there are to be bound again.
func (s *server) unmap(list []int64) error {
	for _, n := range list {
		for number, p := range s.calls {
			if p.blocks[n] {
				p.free()
				delete(s.calls, number)
			}
		}
		for _, o := range s.programs {
			o.unmapped(n)
		}
		b := s.blocks[n]
		delete(s.blocks, n)
		if b.data != nil {
			_ = unix.Munmap(b.data)
		}
		if b.gpu != 0 {
			if err := s.engine.Release(b.gpu); err != nil {
				return err
			}
		}
	}
	return nil
}

// lend makes an array of the caller's memory.
func (s *server) lend(m *program.Module, a program.Array, at place, how engine.Source) (
	*engine.Array, error) {
	gpu, err := s.blocks.imported(at, bytesOf(a))
	if err != nil {
		return nil, err
	}
	if gpu != 0 {
		return s.engine.View(m, a, gpu)
	}
	data, err := s.blocks.bytes(at, bytesOf(a))
	if err != nil {
		return nil, err
	}
	return s.engine.Place(m, a, how, func(int) ([]byte, error) { return data, nil })
}

// store copies a result to where the caller wants it.
func (s *server) store(ctx context.Context, x *engine.Array, size int64, at place) error {
	gpu, err := s.blocks.imported(at, size)
	if err != nil {
		return err
	}
	if gpu != 0 {
		return s.engine.Export(ctx, x, gpu)
	}
	dst, err := s.blocks.bytes(at, size)
	if err != nil {
		return err
	}
	return x.ReadInto(ctx, 0, dst)
}

// gather makes an array of parts that do not follow each other in memory, each of the same size.
func (s *server) gather(ctx context.Context, m *program.Module, a program.Array, parts []place) (
	*engine.Array, error) {
	size := bytesOf(a) / int64(len(parts))
	whole := make([]byte, bytesOf(a))
	for i, p := range parts {
		if b := s.blocks[p[0]]; b.gpu == 0 {
			copy(whole[int64(i)*size:], b.data[p[1]:p[1]+size])
		}
	}
	x, err := s.engine.Place(m, a, engine.Copied, func(int) ([]byte, error) { return whole, nil })
	for i, p := range parts {
		if gpu := s.blocks[p[0]].gpu; gpu != 0 && err == nil {
			err = s.engine.Overwrite(ctx, x, int64(i)*size, gpu+uintptr(p[1]), size)
		}
	}
	if err != nil && x != nil {
		x.Free()
	}
	return x, err
}
