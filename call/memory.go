package call

import (
	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

// A place is a block of shared memory and an offset in it, in bytes.
type place [2]int64

// alignment is what the engine needs to use memory where it is, in bytes.
const alignment = 64

// blocks are the mapped blocks by number.
type blocks map[int64][]byte

// add maps the memory of a descriptor, which it closes.
func (b blocks) add(n int64, fd int, size int64) error {
	defer func() { _ = unix.Close(fd) }()
	if _, there := b[n]; there || size <= 0 {
		return diag.New(diag.BadInput, "block %d of %d bytes is there, or of no size", n, size)
	}
	var at unix.Stat_t
	if err := unix.Fstat(fd, &at); err != nil || at.Size < size {
		return diag.New(diag.BadInput, "block %d has %d bytes, not %d", n, at.Size, size)
	}
	data, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return diag.New(diag.OutOfMemory, "block %d cannot be mapped", n).Wrap(err)
	}
	b[n] = data
	return nil
}

// drop unmaps blocks.
func (b blocks) drop(list []int64) {
	for _, n := range list {
		if data := b[n]; data != nil {
			_ = unix.Munmap(data)
			delete(b, n)
		}
	}
}

// bytes gives the memory at a place.
func (b blocks) bytes(p place, size int64) ([]byte, error) {
	data := b[p[0]]
	if p[1] < 0 || size < 0 || p[1]%alignment != 0 || p[1] > int64(len(data))-size {
		return nil, diag.New(diag.BadInput, "block %d has no %d bytes at %d", p[0], size, p[1])
	}
	return data[p[1] : p[1]+size : p[1]+size], nil
}
