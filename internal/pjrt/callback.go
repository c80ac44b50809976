package pjrt

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

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
