package pjrt

import (
	"sync"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

type viewArgs struct {
	head
	client    unsafe.Pointer
	address   uintptr
	dims      span
	kind      int32
	layout    unsafe.Pointer
	device    unsafe.Pointer
	deleted   uintptr
	deleteArg uintptr
	stream    uintptr
	buffer    unsafe.Pointer
	memory    unsafe.Pointer
}

// View makes a buffer of memory that somebody else owns: dense and row-major, at an address as the
// device has it. What was written there before must be done, since the view is ready at once. A
// run that the view is donated to may write its result there. done is called once, from any thread,
// when the engine no longer uses the memory, and at once if there is an error; it must not block.
func (c *Client) View(address uintptr, shape dtype.Shape, d *Device, done func()) (b *Buffer,
	err error) {
	done = sync.OnceFunc(done)
	defer func() {
		if err != nil {
			done() // unless the plugin has done so already
		}
	}()
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	m, err := c.placeFor(d, "")
	if err != nil {
		return nil, err
	}
	elementType, ok := bufferTypes[shape.Type]
	if !ok || shape.Type.Bits() < 8 || shape.Bytes() == 0 || address == 0 {
		return nil, diag.New(diag.BufferMismatch, "no view of memory at %#x is %s", address, shape)
	}
	calls := c.plugin.calls()
	id := calls.viewed.put(done)
	a := viewArgs{client: c.ptr, address: address, dims: spanOf(shape.Dims), kind: elementType,
		device: d.ptr, deleted: calls.deleted, deleteArg: id, memory: m.ptr}
	if err := call(c.plugin, clientCreateView, &a); err != nil {
		calls.viewed.take(id)
		return nil, err
	}
	return d.newBuffer(a.buffer, shape), nil
}

// Address is where the contents are, as the device has it. Nobody may write there while a run may
// read, nor read while one may write.
func (b *Buffer) Address() (uintptr, error) {
	ptr, done, err := b.open()
	if err != nil {
		return 0, err
	}
	defer done()
	a := number{object: ptr}
	if err := call(b.device.client.plugin, bufferUnsafePointer, &a); err != nil {
		return 0, err
	}
	return uintptr(a.value), nil
}
