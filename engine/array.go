package engine

import (
	"context"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/program"
)

// An Array is a tensor with a global name, in shards on the devices of a module: one on each. A
// replicated tensor has the whole on each device. Its methods may be called by several goroutines.
type Array struct {
	spec  program.Array
	local dtype.Shape
	parts []*pjrt.Buffer // one for each device of this process, in the order of the module's

	filling []filling // instead of parts, until they are written
}

// Name is the global name.
func (a *Array) Name() string { return a.spec.Name }

// Spec describes the array as the module that it was made for does.
func (a *Array) Spec() program.Array { return a.spec }

// Local is the shape of each shard.
func (a *Array) Local() dtype.Shape { return a.local }

// Parts is the number of shards in this process.
func (a *Array) Parts() int { return len(a.parts) }

// Devices are the global numbers of the devices that have this process's shards.
func (a *Array) Devices() program.Devices {
	return lists.Map(a.parts, func(b *pjrt.Buffer) int { return b.Device().ID })
}

// Live reports whether every shard can still be used: a donated array is gone.
func (a *Array) Live() bool {
	return !slices.ContainsFunc(a.parts, func(b *pjrt.Buffer) bool { return !b.Live() })
}

// Free releases the memory of all shards, when the runs that use them are done. It does not wait. A
// second Free does nothing.
func (a *Array) Free() {
	for _, b := range a.parts {
		b.Free()
	}
	for _, f := range a.filling {
		f.Abort()
	}
}

// Await waits until all shards are computed, and returns the error of the run that computes them.
func (a *Array) Await(ctx context.Context) error {
	for _, b := range a.parts {
		if err := b.Await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Read waits for the i-th shard and copies it to the host: dense and row-major, little-endian,
// 4-bit elements packed with the first in the low half of a byte.
func (a *Array) Read(ctx context.Context, i int) ([]byte, error) {
	dst := Aligned(int(a.local.Bytes()))
	if err := a.ReadInto(ctx, i, dst); err != nil {
		return nil, err
	}
	return dst, nil
}

// ReadInto copies the i-th shard into dst, which must have its size in bytes. If ctx ends first,
// the engine may still write to dst until the array is computed: dst must not be used before Await
// returns.
func (a *Array) ReadInto(ctx context.Context, i int, dst []byte) error {
	if i < 0 || i >= len(a.parts) {
		return diag.New(diag.ArgumentCount, "array %s has %d shards here, and none with the number %d",
			a.spec.Name, len(a.parts), i)
	}
	return a.parts[i].ToHost(ctx, dst)
}

// ReadAt copies bytes of the i-th shard, from an offset on, into dst. The shard is row-major, of
// elements of whole bytes. A context that ends is as for ReadInto.
func (a *Array) ReadAt(ctx context.Context, i int, offset int64, dst []byte) error {
	if i < 0 || i >= len(a.parts) {
		return diag.New(diag.ArgumentCount, "array %s has %d shards here, and none with the number %d",
			a.spec.Name, len(a.parts), i)
	}
	return a.parts[i].RawToHost(ctx, offset, dst)
}

// Allocate makes room for an array on those devices of a module that this process has, to be
// written in parts, so that the host need not hold a shard. Every byte of each shard is to be
// written once by WriteAt; the array can be used after Filled, and is given up by Free.
func (e *Engine) Allocate(m *program.Module, spec program.Array) (*Array, error) {
	local, err := m.Local(spec)
	if err != nil {
		return nil, err
	}
	a := &Array{spec: spec, local: local}
	for i, id := range m.Devices {
		if e.remote(id) {
			continue
		}
		d, err := e.device(id)
		var f *pjrt.Filling
		if err == nil {
			f, err = e.client.NewFilling(local, d, spec.Memory)
		}
		if err != nil {
			a.Free()
			return nil, diag.From(err).At("array %s, device %d", spec.Name, id)
		}
		a.filling = append(a.filling, filling{i, f})
	}
	return a, nil
}

// A filling is a shard that is written in parts.
type filling struct {
	device int // its place in the module's list
	*pjrt.Filling
}

// WriteAt copies bytes to an offset of the shard on the module's i-th device, of an array from
// Allocate. data may change as soon as it returns, unless ctx has ended.
func (a *Array) WriteAt(ctx context.Context, i int, offset int64, data []byte) error {
	for _, f := range a.filling {
		if f.device == i {
			return f.Write(ctx, offset, data)
		}
	}
	return diag.New(diag.ArgumentCount, "array %s has no shard %d to be written in this process",
		a.spec.Name, i)
}

// Filled ends the writing of an array from Allocate; it is an error if a byte was not written.
func (a *Array) Filled() error {
	for _, f := range a.filling {
		b, err := f.Buffer()
		if err != nil {
			a.Free()
			return diag.From(err).At("array %s", a.spec.Name)
		}
		a.parts = append(a.parts, b)
	}
	a.filling = nil
	return nil
}

// A Source is the ownership of the host memory that an array is made from.
type Source int

// The sources, from the safest to the cheapest.
const (
	// Copied memory may change as soon as [Engine.Place] returns.
	Copied Source = iota
	// Lent memory may be used in place, without a copy: it must not change while the array lives.
	// The engine never writes to it.
	Lent
	// Given memory belongs to the array from now on: a run to which the array is donated writes
	// its result there.
	Given
)

// hostModes are PJRT's semantics of host memory, by Source.
var hostModes = []pjrt.HostMode{pjrt.HostCopied, pjrt.HostShared, pjrt.HostGiven}

// Place puts an array on those devices of a module that this process has. fill returns the dense
// row-major bytes of the shard on the module's i-th device; [program.Module.Start] tells where the
// shard begins in the global tensor. The CPU engine uses a shard in place, without a copy, if it is
// Lent or Given and starts at a multiple of 64 bytes (see [Aligned]).
func (e *Engine) Place(m *program.Module, spec program.Array, from Source,
	fill func(i int) ([]byte, error)) (*Array, error) {
	if from < 0 || int(from) >= len(hostModes) {
		return nil, diag.New(diag.BufferMismatch, "there is no source of host memory %d", from).
			Try("use engine.Copied, Lent or Given")
	}
	local, err := m.Local(spec)
	if err != nil {
		return nil, err
	}
	if len(m.Devices) == 0 {
		return nil, diag.New(diag.ProgramInvalid, "module %s has no devices", m.Name)
	}
	a := &Array{spec: spec, local: local}
	for i, id := range m.Devices {
		if e.remote(id) {
			continue
		}
		d, err := e.device(id)
		if err != nil {
			a.Free()
			return nil, err
		}
		data, err := fill(i)
		if err != nil {
			a.Free()
			return nil, err
		}
		b, err := e.client.FromHost(data, local, d, spec.Memory, hostModes[from])
		if err != nil {
			a.Free()
			return nil, diag.From(err).At("array %s, device %d", spec.Name, id)
		}
		a.parts = append(a.parts, b)
	}
	return a, nil
}

// Copy copies an array to other devices of the engine: its i-th shard to the i-th device. It
// returns when the copies are queued.
func (e *Engine) Copy(a *Array, to program.Devices) (*Array, error) {
	if len(to) != len(a.parts) {
		return nil, diag.New(diag.ArgumentCount, "array %s has %d shards for %d devices",
			a.spec.Name, len(a.parts), len(to))
	}
	c := &Array{spec: a.spec, local: a.local}
	for i, id := range to {
		d, err := e.device(id)
		if err != nil {
			c.Free()
			return nil, err
		}
		b, err := a.parts[i].CopyTo(d, a.spec.Memory)
		if err != nil {
			c.Free()
			return nil, err
		}
		c.parts = append(c.parts, b)
	}
	return c, nil
}

// imports are the allocations of other processes that are open, by where this process has them.
type imports struct {
	mu   sync.Mutex
	open map[uintptr]*imported
}

type imported struct {
	device int
	shared *pjrt.Shared
	times  int            // that it was imported
	views  []*pjrt.Buffer // that may be live
	held   sync.WaitGroup // views that the plugin has not given back
}

// Import opens memory of a GPU of this process that another process owns, by its CUDA IPC handle
// of 64 bytes. It gives the address and the size in bytes of the whole allocation, which its owner
// must keep until Release has returned. Memory that is open already is at the same address.
func (e *Engine) Import(device int, handle []byte) (at uintptr, size int64, err error) {
	if e.platform != "cuda" {
		return 0, 0, diag.New(diag.NotSupported, "engine %s has no GPUs whose memory it could import",
			e.name)
	}
	d, err := e.device(device)
	if err != nil {
		return 0, 0, err
	}
	shared, err := pjrt.OpenShared(d, handle)
	if err != nil {
		return 0, 0, err
	}
	e.imports.mu.Lock()
	defer e.imports.mu.Unlock()
	p := e.imports.open[shared.Address]
	if p == nil {
		p = &imported{device: device, shared: shared}
		if e.imports.open == nil {
			e.imports.open = map[uintptr]*imported{}
		}
		e.imports.open[shared.Address] = p
	}
	p.times++
	return shared.Address, shared.Size, nil
}

// Release ends one Import; after the last one the memory is its owner's alone. Until then all
// arrays in it must be freed or donated, also results that took the memory of a donated one; for
// the latter Release waits.
func (e *Engine) Release(at uintptr) error {
	e.imports.mu.Lock()
	defer e.imports.mu.Unlock()
	p := e.imports.open[at]
	if p == nil {
		return diag.New(diag.BadInput, "no memory was imported at %#x", at)
	}
	if p.times == 1 {
		if slices.ContainsFunc(p.views, (*pjrt.Buffer).Live) {
			return diag.New(diag.BadInput, "imported memory of device %d has arrays in it", p.device).
				Try("free them before the memory")
		}
		p.held.Wait()
		delete(e.imports.open, at)
	}
	p.times--
	return p.shared.Close()
}

// find gives the allocation that has some bytes; the lock is held.
func (i *imports) find(at uintptr, bytes int64) (*imported, error) {
	for start, p := range i.open {
		if at >= start && int64(at-start) <= p.shared.Size-bytes && bytes >= 0 {
			return p, nil
		}
	}
	return nil, diag.New(diag.BadInput, "no memory of %d bytes was imported at %#x", bytes, at)
}

// View makes an array of imported memory, without a copy, for a module on the one device that has
// it. What the owner has queued to write there must be done. If the array is donated, the result
// is written there; else the engine only reads.
func (e *Engine) View(m *program.Module, spec program.Array, at uintptr) (*Array, error) {
	local, err := m.Local(spec)
	if err != nil {
		return nil, err
	}
	if local.Bytes() == 0 {
		return e.Place(m, spec, Copied, func(int) ([]byte, error) { return nil, nil })
	}
	e.imports.mu.Lock()
	defer e.imports.mu.Unlock()
	p, err := e.imports.find(at, local.Bytes())
	if err != nil {
		return nil, diag.From(err).At("array %s", spec.Name)
	}
	if len(m.Devices) != 1 || m.Devices[0] != p.device {
		return nil, diag.New(diag.DeviceMismatch, "array %s is in memory of device %d, and module %s"+
			" runs on %v", spec.Name, p.device, m.Name, m.Devices)
	}
	d, err := e.device(p.device)
	if err != nil {
		return nil, err
	}
	p.held.Add(1)
	b, err := e.client.View(at, local, d, p.held.Done)
	if err != nil {
		return nil, diag.From(err).At("array %s, device %d", spec.Name, p.device)
	}
	p.views = append(slices.DeleteFunc(p.views, func(b *pjrt.Buffer) bool { return !b.Live() }), b)
	return &Array{spec: spec, local: local, parts: []*pjrt.Buffer{b}}, nil
}

// Export waits for an array and copies it to imported memory of its device.
func (e *Engine) Export(ctx context.Context, a *Array, at uintptr) error {
	return e.copyImported(ctx, a, at, a.local.Bytes(), func(array, memory uintptr) (to, from uintptr) {
		return memory, array
	})
}

// Overwrite copies bytes of imported memory over an array of its device, from an offset on.
func (e *Engine) Overwrite(ctx context.Context, a *Array, offset int64, at uintptr,
	bytes int64) error {
	if offset < 0 || offset > a.local.Bytes()-bytes {
		return diag.New(diag.BufferMismatch, "array %s has no %d bytes at %d", a.spec.Name, bytes, offset)
	}
	return e.copyImported(ctx, a, at, bytes, func(array, memory uintptr) (to, from uintptr) {
		return array + uintptr(offset), memory
	})
}

// copyImported copies between an array and imported memory, as way says.
func (e *Engine) copyImported(ctx context.Context, a *Array, at uintptr, bytes int64,
	way func(array, memory uintptr) (to, from uintptr)) error {
	if bytes == 0 {
		return nil
	}
	e.imports.mu.Lock()
	defer e.imports.mu.Unlock()
	p, err := e.imports.find(at, bytes)
	if err != nil {
		return err
	}
	array, err := a.address(ctx, p.device)
	if err != nil {
		return err
	}
	to, from := way(array, at)
	return p.shared.Copy(to, from, bytes)
}

// address is where the one shard is, on a device, when it is computed.
func (a *Array) address(ctx context.Context, device int) (uintptr, error) {
	if len(a.parts) != 1 || a.parts[0].Device().ID != device {
		return 0, diag.New(diag.DeviceMismatch, "array %s is not on device %d alone", a.spec.Name,
			device)
	}
	if err := a.Await(ctx); err != nil {
		return 0, err
	}
	return a.parts[0].Address()
}

// Aligned allocates n bytes that start at a multiple of 64, the alignment that XLA:CPU needs to use
// host memory without a copy.
func Aligned(n int) []byte { return pjrt.Aligned(n) }
