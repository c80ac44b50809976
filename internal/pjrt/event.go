package pjrt

import (
	"context"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"

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

// callbacks are the Go functions that a plugin calls. purego can make 2,000 C entry points in a
// process and never frees one, so there is one entry point for each kind of call; the integer
// that C carries along finds the Go value.
type callbacks struct {
	ready     uintptr
	kvGet     uintptr
	kvTryGet  uintptr
	kvPut     uintptr
	kvRelease uintptr

	waiting handles[func(error)]
	stores  handles[KV]
	answers answers
}

// handles gives Go values a number that C can hold.
type handles[T any] struct {
	next   atomic.Uint64
	values sync.Map // uint64 → T
}

func (h *handles[T]) put(v T) uintptr {
	id := h.next.Add(1)
	h.values.Store(id, v)
	return uintptr(id)
}

func (h *handles[T]) get(id uintptr) (v T, ok bool) {
	x, ok := h.values.Load(uint64(id))
	if ok {
		v = x.(T)
	}
	return v, ok
}

func (h *handles[T]) take(id uintptr) (v T, ok bool) {
	x, ok := h.values.LoadAndDelete(uint64(id))
	if ok {
		v = x.(T)
	}
	return v, ok
}

func (p *Plugin) calls() *callbacks {
	p.callbacksOnce.Do(func() {
		c := &p.callbacks
		c.ready = purego.NewCallback(func(status unsafe.Pointer, id uintptr) uintptr {
			fn, ok := c.waiting.take(id)
			var err error
			if status != nil {
				err = p.takeError(status)
			}
			if ok {
				fn(err)
			}
			return 0
		})
		c.kvGet = purego.NewCallback(c.get)
		c.kvTryGet = purego.NewCallback(c.tryGet)
		c.kvPut = purego.NewCallback(c.put)
		c.kvRelease = purego.NewCallback(c.answers.release)
	})
	return &p.callbacks
}

// onReady asks the plugin to call fn when the event has happened.
func (p *Plugin) onReady(event unsafe.Pointer, fn func(error)) error {
	c := p.calls()
	id := c.waiting.put(fn)
	err := call(p, eventOnReady, &onReadyArgs{event: event, callback: c.ready, userArg: id})
	if err != nil {
		c.waiting.take(id)
	}
	return err
}
