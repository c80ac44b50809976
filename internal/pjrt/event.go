package pjrt

import (
	"context"
	"sync"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
)

// An Event is something that a device will finish. It must be freed.
type Event struct {
	plugin *Plugin
	mu     sync.Mutex
	ptr    unsafe.Pointer
}

// Ready reports whether the event has happened.
func (e *Event) Ready() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ptr == nil {
		return false, diag.New(diag.BufferGone, "the event was freed")
	}
	v, err := e.plugin.readNumber(eventIsReady, e.ptr)
	return v != 0, err
}

// OnReady calls fn once, with the error of what was waited for, from a thread of the plugin.
// fn must not block.
func (e *Event) OnReady(fn func(error)) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ptr == nil {
		return diag.New(diag.BufferGone, "the event was freed")
	}
	return e.plugin.onReady(e.ptr, fn)
}

// Await waits until the event has happened and returns the error of what it stands for. It
// returns early, with the context's error, when ctx ends; the work itself goes on.
func (e *Event) Await(ctx context.Context) error {
	if ctx.Done() == nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.ptr == nil {
			return diag.New(diag.BufferGone, "the event was freed")
		}
		return call(e.plugin, eventAwait, &one{object: e.ptr})
	}
	done := make(chan error, 1)
	if err := e.OnReady(func(err error) { done <- err }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return diag.New(diag.Canceled, "stopped while waiting for a device").Wrap(ctx.Err())
	}
}

// Free ends the event; a second Free does nothing.
func (e *Event) Free() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.plugin.destroy(eventDestroy, e.ptr)
	e.ptr = nil
}
