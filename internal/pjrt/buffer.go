package pjrt

import (
	"context"
	"runtime"
	"sync"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A Buffer is an array in the memory of one device. Free ends it; a run that donates it ends it
// too. Its methods may be called by several goroutines at the same time.
type Buffer struct {
	shape  dtype.Shape
	device *Device

	mu    sync.Mutex
	ptr   unsafe.Pointer
	state bufferState
	uses  int  // calls into C that hold ptr right now
	runs  int  // how many of them start a run
	freed bool // Free was called while a run was being started that was to consume the buffer
}

type bufferState uint8

const (
	bufferLive bufferState = iota
	bufferFreed
	bufferDonated
)

// Shape is the element type and dimensions.
func (b *Buffer) Shape() dtype.Shape { return b.shape }

// Device is the device that the buffer belongs to.
func (b *Buffer) Device() *Device { return b.device }

// Bytes is the dense size of the contents.
func (b *Buffer) Bytes() int64 { return b.shape.Bytes() }

func (d *Device) newBuffer(ptr unsafe.Pointer, shape dtype.Shape) *Buffer {
	d.client.hold()
	d.account(shape.Bytes())
	return &Buffer{shape: shape, device: d, ptr: ptr}
}

// acquire lends the C object to one call; release gives it back.
func (b *Buffer) acquire() (unsafe.Pointer, error) { return b.take(0, bufferLive) }

// open is acquire while the client is open; done ends both.
func (b *Buffer) open() (ptr unsafe.Pointer, done func(), err error) {
	c := b.device.client
	if err := c.enter(); err != nil {
		return nil, nil, err
	}
	if ptr, err = b.acquire(); err != nil {
		c.leave()
		return nil, nil, err
	}
	return ptr, func() {
		b.release()
		c.leave()
	}, nil
}

// lend is acquire for the start of a run; giveBack ends it.
func (b *Buffer) lend() (unsafe.Pointer, error) { return b.take(1, bufferLive) }

// donate lends the C object to a run that consumes it: from now on nobody else gets it. A buffer
// that another run is being started with cannot be consumed: some of that run's devices would find
// it and some not, and those that did would wait for the others.
func (b *Buffer) donate() (unsafe.Pointer, error) { return b.take(1, bufferDonated) }

// take lends the C object to a call, which may start a run, and leaves the buffer in a state.
func (b *Buffer) take(runs int, state bufferState) (unsafe.Pointer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state != bufferLive {
		return nil, b.gone()
	}
	if state == bufferDonated && b.runs > 0 {
		return nil, diag.New(diag.BufferGone,
			"a buffer %s of device %d is to be donated while another run is started with it",
			b.shape, b.device.ID).Try("donate it when that run has been started")
	}
	b.state = state
	b.uses++
	b.runs += runs
	return b.ptr, nil
}

// restore undoes donate after a run that did not consume the buffer.
func (b *Buffer) restore() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state != bufferDonated {
		return
	}
	b.state = bufferLive
	if b.freed {
		b.free()
	}
}

// giveBack ends lend or donate.
func (b *Buffer) giveBack() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.runs--
	b.uses--
	b.destroyIfUnused()
}

func (b *Buffer) gone() error {
	how := "freed"
	if b.state == bufferDonated {
		how = "donated to an earlier run"
	}
	return diag.New(diag.BufferGone, "a buffer %s of device %d was %s", b.shape, b.device.ID, how).
		Try("keep the result of that run instead")
}

func (b *Buffer) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uses--
	b.destroyIfUnused()
}

// destroyIfUnused ends the C object once it is neither live nor lent; b.mu is held.
func (b *Buffer) destroyIfUnused() {
	if b.state != bufferLive && b.uses == 0 && b.ptr != nil {
		b.device.client.plugin.destroy(bufferDestroy, b.ptr)
		b.ptr = nil
		b.device.client.leave()
	}
}

// Free gives the memory back; freeing twice, or after donation, does nothing.
func (b *Buffer) Free() {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch b.state {
	case bufferLive:
		b.free()
	case bufferDonated:
		b.freed = true // in case the run cannot be started
	case bufferFreed:
	}
}

// free ends a live buffer; b.mu is held.
func (b *Buffer) free() {
	b.state = bufferFreed
	b.device.account(-b.shape.Bytes())
	b.destroyIfUnused()
}

// Live reports whether the buffer can still be used.
func (b *Buffer) Live() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state == bufferLive
}

// A HostMode is what the caller promises about host memory that becomes a buffer.
type HostMode int32

// The modes, from the safest to the cheapest.
const (
	// HostCopied: the memory may change as soon as the call returns.
	HostCopied = HostMode(hostOnlyDuringCall)
	// HostShared: the buffer may be a view of the memory, which must not change while the
	// buffer lives. The engine never writes to it.
	HostShared = HostMode(hostImmutableZeroCopy)
	// HostGiven: like HostShared, but the engine may write to it, for example by donation.
	HostGiven = HostMode(hostMutableZeroCopy)
)

// FromHost makes a buffer on device d, in memory of the given kind ("" is the device's default),
// from dense row-major data. 4-bit elements come packed, the first in the low half of a byte.
func (c *Client) FromHost(data []byte, shape dtype.Shape, d *Device, kind string,
	mode HostMode) (*Buffer, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	m, err := c.placeFor(d, kind)
	if err != nil {
		return nil, err
	}
	if mode != HostCopied && mode != HostShared && mode != HostGiven {
		return nil, diag.New(diag.BufferMismatch, "no way to take host memory has the number %d", mode)
	}
	if int64(len(data)) != shape.Bytes() {
		return nil, diag.New(diag.BufferMismatch, "%s needs %d bytes; %d were given",
			shape, shape.Bytes(), len(data))
	}
	elementType, ok := bufferTypes[shape.Type]
	if !ok {
		return nil, diag.New(diag.BufferMismatch, "no buffer holds elements of type %s", shape.Type)
	}
	if shape.Type.Bits() < 8 {
		data, mode = unpackHalves(data, shape), HostCopied
	}
	done := func() {}
	switch {
	case len(data) == 0:
		data, mode = make([]byte, 1), HostCopied // C wants an address even for nothing
	case mode == HostCopied && c.platform == "cpu" && len(data) >= stagedBytes:
		data, done = c.staging.copy(data)
		mode = HostGiven
	case mode != HostCopied:
		pin := new(runtime.Pinner)
		pin.Pin(unsafe.SliceData(data))
		done = pin.Unpin
	}
	a := bufferFromHostArgs{client: c.ptr, data: bytesPointer(data), kind: elementType,
		dims: spanOf(shape.Dims), semantics: int32(mode)}
	if kind == "" {
		a.device = d.ptr
	} else {
		a.memory = m.ptr
	}
	if err := call(c.plugin, clientBufferFromHost, &a); err != nil {
		done()
		return nil, err
	}
	b := d.newBuffer(a.buffer, shape)
	if mode != HostCopied {
		err = c.plugin.onReady(a.done, func(error) { done() })
	}
	c.plugin.destroy(eventDestroy, a.done)
	if err != nil {
		// Nobody will say when the memory is free: the buffer goes, and the memory stays pinned.
		b.Free()
		return nil, err
	}
	return b, nil
}

func (c *Client) placeFor(d *Device, kind string) (*Memory, error) {
	switch {
	case d == nil || d.client != c:
		return nil, diag.New(diag.DeviceMismatch, "the device belongs to another client")
	case d.LocalID < 0:
		return nil, diag.New(diag.DeviceMismatch, "device %d belongs to process %d", d.ID, d.Process)
	case kind == "":
		return d.memory, nil
	}
	return d.findMemory(kind)
}

// ToHost copies the contents into dst, dense and row-major, and waits for it. If ctx ends first,
// the engine still writes to dst until the contents are there.
func (b *Buffer) ToHost(ctx context.Context, dst []byte) error {
	if int64(len(dst)) != b.shape.Bytes() {
		return diag.New(diag.BufferMismatch, "%s needs %d bytes; %d were given",
			b.shape, b.shape.Bytes(), len(dst))
	}
	if len(dst) == 0 {
		return nil
	}
	if b.shape.Type.Bits() < 8 {
		wide := make([]byte, b.shape.Elements())
		if err := b.toHost(ctx, wide); err != nil {
			return err
		}
		packHalves(dst, wide)
		return nil
	}
	return b.toHost(ctx, dst)
}

func (b *Buffer) toHost(ctx context.Context, dst []byte) error {
	ptr, done, err := b.open()
	if err != nil {
		return err
	}
	defer done()
	p := b.device.client.plugin
	rank := len(b.shape.Dims)
	minorToMajor := make([]int64, rank)
	for i := range minorToMajor {
		minorToMajor[i] = int64(rank - 1 - i)
	}
	var layout layoutTiled
	layout.size = unsafe.Sizeof(layout)
	layout.tiled.size = unsafe.Sizeof(layout.tiled)
	layout.tiled.minorToMajor = spanOf(minorToMajor)
	a := toHostArgs{buffer: ptr, layout: unsafe.Pointer(&layout), dst: spanOf(dst)}
	return p.transfer(ctx, dst, func() (unsafe.Pointer, error) {
		err := call(p, bufferToHost, &a)
		return a.event, err
	})
}

// CopyTo makes a copy on another device of the same client, in its memory of the given kind.
func (b *Buffer) CopyTo(d *Device, kind string) (*Buffer, error) {
	ptr, done, err := b.open()
	if err != nil {
		return nil, err
	}
	defer done()
	m, err := b.device.client.placeFor(d, kind)
	if err != nil {
		return nil, err
	}
	s, target := bufferCopyToDevice, d.ptr
	if kind != "" {
		s, target = bufferCopyToMemory, m.ptr
	}
	a := copied{object: ptr, target: target}
	if err := call(b.device.client.plugin, s, &a); err != nil {
		return nil, err
	}
	return d.newBuffer(a.result, b.shape), nil
}

// Await waits until the contents are there, and returns the error of the run that makes them.
func (b *Buffer) Await(ctx context.Context) error {
	ptr, err := b.acquire()
	if err != nil {
		return err
	}
	defer b.release()
	p := b.device.client.plugin
	ready, err := p.readRelated(bufferReadyEvent, ptr)
	if err != nil {
		return err
	}
	e := p.newEvent(ready)
	defer e.Free()
	return e.Await(ctx)
}

// unpackHalves gives every 4-bit element a byte of its own, as PJRT takes them from a host.
func unpackHalves(packed []byte, shape dtype.Shape) []byte {
	wide := make([]byte, shape.Elements())
	for i := range wide {
		wide[i] = packed[i/2] >> (4 * (i % 2)) & 0xf
	}
	return wide
}

func packHalves(packed, wide []byte) {
	clear(packed)
	for i, v := range wide {
		packed[i/2] |= v & 0xf << (4 * (i % 2))
	}
}

// stagedBytes is the size from which host data is copied by us and not by XLA:CPU, whose fresh
// memory costs a page fault every 4 KiB: 256 MB took 160 ms by XLA and 25 ms by a plain copy.
const stagedBytes = 1 << 20

// staging keeps memory of buffers that were freed, for later buffers of the same size. What
// is not used again the garbage collector takes.
type staging struct{ bySize sync.Map } // int → *sync.Pool of *[]byte

// copy gives a pinned copy of data, and what to do when the engine is done with it.
func (s *staging) copy(data []byte) (staged []byte, done func()) {
	entry, _ := s.bySize.LoadOrStore(len(data), &sync.Pool{New: func() any {
		b := Aligned(len(data))
		return &b
	}})
	pool := entry.(*sync.Pool)
	kept := pool.Get().(*[]byte)
	pin := new(runtime.Pinner)
	pin.Pin(unsafe.SliceData(*kept))
	copy(*kept, data)
	return *kept, func() {
		pin.Unpin()
		pool.Put(kept)
	}
}

// bufferAlignment is what XLA:CPU asks of memory that it uses in place.
const bufferAlignment = 64

// Aligned makes n bytes of Go memory that begin where XLA:CPU can use them in place.
func Aligned(n int) []byte {
	b := make([]byte, n+bufferAlignment)
	skip := -int(uintptr(bytesPointer(b))) & (bufferAlignment - 1)
	return b[skip : skip+n : skip+n]
}
