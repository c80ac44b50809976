package engine

import (
	"context"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/program"
)

// An Array is something with a global name that lies in pieces on the devices of a module.
type Array struct {
	spec  program.Array
	local dtype.Shape
	parts []*pjrt.Buffer
}

// Name is the global name.
func (a *Array) Name() string { return a.spec.Name }

// Spec describes the array as the module that it was made for does.
func (a *Array) Spec() program.Array { return a.spec }

// Local is the shape of each piece.
func (a *Array) Local() dtype.Shape { return a.local }

// Parts is the number of pieces in this process.
func (a *Array) Parts() int { return len(a.parts) }

// Devices are the global numbers of the devices that the pieces in this process lie on.
func (a *Array) Devices() program.Devices {
	return lists.Map(a.parts, func(b *pjrt.Buffer) int { return b.Device().ID })
}

// Live reports whether every piece can still be used: a donated array is gone.
func (a *Array) Live() bool {
	return !slices.ContainsFunc(a.parts, func(b *pjrt.Buffer) bool { return !b.Live() })
}

// Free gives the memory of all pieces back.
func (a *Array) Free() {
	for _, b := range a.parts {
		b.Free()
	}
}

// Await waits until all pieces are there, and returns the error of the run that makes them.
func (a *Array) Await(ctx context.Context) error {
	for _, b := range a.parts {
		if err := b.Await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Read copies the i-th piece to the host.
func (a *Array) Read(ctx context.Context, i int) ([]byte, error) {
	dst := Aligned(int(a.local.Bytes()))
	if err := a.ReadInto(ctx, i, dst); err != nil {
		return nil, err
	}
	return dst, nil
}

// ReadInto copies the i-th piece into dst, which must have its size. If ctx ends first, the engine
// still writes to dst until the array is there: then dst must not be used for anything else before
// Await says so.
func (a *Array) ReadInto(ctx context.Context, i int, dst []byte) error {
	if i < 0 || i >= len(a.parts) {
		return diag.New(diag.ArgumentCount, "array %s has %d pieces; number %d was asked for",
			a.spec.Name, len(a.parts), i)
	}
	return a.parts[i].ToHost(ctx, dst)
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

// Place puts an array on the devices of a module that this process has: fill gives the dense
// row-major bytes of the piece for the module's i-th device. Pieces that the CPU engine can use in
// place, because they are lent or given and begin at a multiple of 64 bytes (see [Aligned]), are
// not copied.
func (e *Engine) Place(s *program.Module, spec program.Array, from Source,
	fill func(i int) ([]byte, error)) (*Array, error) {
	if from < 0 || int(from) >= len(hostModes) {
		return nil, diag.New(diag.BufferMismatch, "there is no source of host memory %d", from).
			Try("use engine.Copied, Lent or Given")
	}
	local, err := s.Local(spec)
	if err != nil {
		return nil, err
	}
	if len(s.Devices) == 0 {
		return nil, diag.New(diag.ProgramInvalid, "module %s has no devices", s.Name)
	}
	a := &Array{spec: spec, local: local}
	for i, id := range s.Devices {
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

// Copy makes the same array on other devices of the engine, piece by piece.
func (e *Engine) Copy(a *Array, to program.Devices) (*Array, error) {
	if len(to) != len(a.parts) {
		return nil, diag.New(diag.ArgumentCount, "array %s has %d pieces for %d devices",
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

// Aligned makes n bytes that begin at a multiple of 64, so that the CPU engine can use them
// without a copy.
func Aligned(n int) []byte { return pjrt.Aligned(n) }
