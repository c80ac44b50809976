package pjrt

import (
	"context"
	"runtime"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

type rawToHostArgs struct {
	head
	buffer unsafe.Pointer
	dst    unsafe.Pointer
	offset int64
	size   int64
	event  unsafe.Pointer
}

type shapeSpec struct {
	head
	dims span
	kind int32
}

type createTransferArgs struct {
	head
	client     unsafe.Pointer
	specs      unsafe.Pointer
	numSpecs   uintptr
	layouts    unsafe.Pointer
	numLayouts uintptr
	memory     unsafe.Pointer
	manager    unsafe.Pointer
}

type transferDataArgs struct {
	head
	manager unsafe.Pointer
	index   int32
	data    unsafe.Pointer
	offset  int64
	size    int64
	last    bool
	event   unsafe.Pointer
}

type retrieveArgs struct {
	head
	manager unsafe.Pointer
	index   int32
	buffer  unsafe.Pointer
}

// RawToHost copies bytes of the buffer, from an offset on, into dst, and waits for them. Elements
// are as the device has them: row-major, whole bytes.
func (b *Buffer) RawToHost(ctx context.Context, offset int64, dst []byte) error {
	size := b.shape.Bytes()
	if offset < 0 || offset > size || int64(len(dst)) > size-offset || b.shape.Type.Bits() < 8 {
		return diag.New(diag.BufferMismatch, "%s has no %d bytes from %d", b.shape, len(dst), offset)
	}
	if len(dst) == 0 {
		return nil
	}
	ptr, done, err := b.open()
	if err != nil {
		return err
	}
	defer done()
	p := b.device.client.plugin
	a := rawToHostArgs{buffer: ptr, dst: bytesPointer(dst), offset: offset, size: int64(len(dst))}
	return p.transfer(ctx, dst, func() (unsafe.Pointer, error) {
		err := call(p, bufferRawToHost, &a)
		return a.event, err
	})
}

// transfer starts a copy from or to host memory and waits for it. The memory stays pinned until the
// plugin is done with it, even if ctx ends first.
func (p *Plugin) transfer(ctx context.Context, data []byte,
	start func() (unsafe.Pointer, error)) error {
	pin := new(runtime.Pinner)
	pin.Pin(unsafe.SliceData(data))
	event, err := start()
	if err != nil {
		pin.Unpin()
		return err
	}
	done := p.newEvent(event)
	defer done.Free()
	err = done.Await(ctx)
	if ctx.Err() == nil {
		pin.Unpin()
		return err
	}
	if later := done.OnReady(func(error) { pin.Unpin() }); later != nil {
		return later
	}
	return err
}

// A Filling is a buffer on a device that is written in parts.
type Filling struct {
	client  *Client
	manager unsafe.Pointer
	shape   dtype.Shape
	left    int64 // bytes
	buffer  *Buffer
}

// NewFilling allocates a buffer on device d, in memory of the given kind.
func (c *Client) NewFilling(shape dtype.Shape, d *Device, kind string) (*Filling, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	m, err := c.placeFor(d, kind)
	if err != nil {
		return nil, err
	}
	elementType, ok := bufferTypes[shape.Type]
	if !ok || shape.Type.Bits() < 8 || shape.Bytes() == 0 {
		return nil, diag.New(diag.BufferMismatch, "no %s is filled in parts", shape)
	}
	spec := &shapeSpec{dims: spanOf(shape.Dims), kind: elementType}
	spec.size = unsafe.Sizeof(*spec)
	a := createTransferArgs{client: c.ptr, specs: unsafe.Pointer(spec), numSpecs: 1, memory: m.ptr}
	if err := call(c.plugin, clientCreateTransfer, &a); err != nil {
		return nil, err
	}
	f := &Filling{client: c, manager: a.manager, shape: shape, left: shape.Bytes()}
	got := retrieveArgs{manager: f.manager}
	if err := call(c.plugin, transferRetrieve, &got); err != nil {
		c.plugin.destroy(transferDestroy, f.manager)
		return nil, err
	}
	f.buffer = d.newBuffer(got.buffer, shape)
	return f, nil
}

// Write copies bytes to an offset of the buffer, and waits until data may change. Every byte of the
// buffer is written once.
func (f *Filling) Write(ctx context.Context, offset int64, data []byte) error {
	size, n := f.shape.Bytes(), int64(len(data))
	if offset < 0 || offset > size || n > size-offset || n > f.left {
		return diag.New(diag.BufferMismatch, "%s takes no %d bytes at %d", f.shape, n, offset)
	}
	if n == 0 {
		return nil
	}
	if err := f.client.enter(); err != nil {
		return err
	}
	defer f.client.leave()
	p := f.client.plugin
	f.left -= n
	a := transferDataArgs{manager: f.manager, data: bytesPointer(data), offset: offset, size: n,
		last: f.left == 0}
	return p.transfer(ctx, data, func() (unsafe.Pointer, error) {
		err := call(p, transferData, &a)
		return a.event, err
	})
}

// Buffer ends the filling, and gives the buffer if all of it was written.
func (f *Filling) Buffer() (*Buffer, error) {
	if f.left > 0 || f.manager == nil {
		f.Abort()
		return nil, diag.New(diag.BufferMismatch, "%d of %d bytes of %s were not written", f.left,
			f.shape.Bytes(), f.shape)
	}
	f.end()
	return f.buffer, nil
}

// Abort ends a filling whose buffer was not taken; else it does nothing.
func (f *Filling) Abort() {
	if f.manager != nil {
		f.end()
		f.buffer.Free()
	}
}

func (f *Filling) end() {
	f.client.plugin.destroy(transferDestroy, f.manager)
	f.manager = nil
}
