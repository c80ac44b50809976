package pjrt

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepwell/deepwell/diag"
)

// An object is something of the plugin's that ends with free, and that nobody uses after it.
type object struct {
	plugin *Plugin
	what   string // for people: "event"
	mu     sync.RWMutex
	ptr    unsafe.Pointer
}

// use calls fn with the pointer, which is not freed meanwhile.
func (o *object) use(fn func(unsafe.Pointer) error) error {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if o.ptr == nil {
		return diag.New(diag.BufferGone, "the %s was freed", o.what)
	}
	return fn(o.ptr)
}

// free ends the object; a second free does nothing.
func (o *object) free(destroy slot) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.plugin.destroy(destroy, o.ptr)
	o.ptr = nil
}

// An Event is something that a device will finish. It must be freed.
type Event struct{ object }

func (p *Plugin) newEvent(ptr unsafe.Pointer) *Event {
	return &Event{object{plugin: p, what: "event", ptr: ptr}}
}

// OnReady calls fn once, with the error of what was waited for, from a thread of the plugin.
// fn must not block.
func (e *Event) OnReady(fn func(error)) error {
	return e.use(func(ptr unsafe.Pointer) error { return e.plugin.onReady(ptr, fn) })
}

// Await waits until the event has happened and returns the error of what it stands for. It
// returns early, with the context's error, when ctx ends; the work itself goes on.
func (e *Event) Await(ctx context.Context) error {
	if ctx.Done() == nil {
		return e.use(func(ptr unsafe.Pointer) error {
			return call(e.plugin, eventAwait, &one{object: ptr})
		})
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
func (e *Event) Free() { e.free(eventDestroy) }

// A flight is what is left to wait for of a run: an event for each of its devices. It does not
// keep the results alive.
type flight struct {
	x    *Loaded
	done chan struct{} // closed when all devices are done

	mu     sync.Mutex
	events []unsafe.Pointer // nil once somebody waits for them
	left   int
	failed error // the first error
}

func (x *Loaded) newFlight(events []unsafe.Pointer) *flight {
	f := &flight{x: x, done: make(chan struct{}), events: slices.Clone(events), left: len(events)}
	x.client.hold()
	x.flightsMu.Lock()
	defer x.flightsMu.Unlock()
	x.flights = append(x.flights, f)
	// Runs that nobody waited for are looked after when there are some: their events and their part
	// of the ledger must not pile up.
	keep := x.flights[:0]
	for i, old := range x.flights {
		if old.over() {
			continue
		}
		if i < len(x.flights)-unwatchedRuns {
			old.watch()
		}
		keep = append(keep, old)
	}
	clear(x.flights[len(keep):])
	x.flights = keep
	return f
}

// unwatchedRuns is how many runs of one executable may be under way before the oldest gets a
// callback, which costs about 2 µs a device and a run that is waited for does without.
const unwatchedRuns = 16

func (f *flight) over() bool {
	select {
	case <-f.done:
		return true
	default:
		return false
	}
}

// take gives the events to the first who asks.
func (f *flight) take() []unsafe.Pointer {
	f.mu.Lock()
	defer f.mu.Unlock()
	events := f.events
	f.events = nil
	return events
}

// landed records that device d is done.
func (f *flight) landed(d int, err error) {
	f.x.devices[d].account(-f.x.temp)
	f.mu.Lock()
	f.failed = cmp.Or(f.failed, err)
	f.left--
	last := f.left == 0
	f.mu.Unlock()
	if last {
		close(f.done)
		f.x.client.leave()
	}
}

// Wait waits until every local device is done and returns the first error, each time it is called.
// If ctx ends first, the run goes on and Wait may be called again.
func (f *flight) Wait(ctx context.Context) error {
	if ctx.Done() == nil {
		// The cheap way: this thread blocks in C.
		for d, event := range f.take() {
			err := call(f.x.client.plugin, eventAwait, &one{object: event})
			f.x.client.plugin.destroy(eventDestroy, event)
			f.landed(d, err)
		}
	} else {
		f.watch()
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		return diag.New(diag.Canceled, "stopped while waiting for a device").Wrap(ctx.Err())
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

// watch lets the plugin say when each device is done, unless somebody waits already.
func (f *flight) watch() {
	p := f.x.client.plugin
	for d, event := range f.take() {
		if err := p.onReady(event, func(err error) { f.landed(d, err) }); err != nil {
			f.landed(d, err)
		}
		p.destroy(eventDestroy, event)
	}
}

// callbacks are the Go functions that a plugin calls. purego can make 2,000 C entry points in a
// process and never frees one, so there is one entry point for each kind of call; the integer
// that C carries along finds the Go value.
type callbacks struct {
	ready     uintptr
	deleted   uintptr
	kvGet     uintptr
	kvTryGet  uintptr
	kvPut     uintptr
	kvRelease uintptr

	waiting handles[func(error)]
	viewed  handles[func()]
	stores  handles[KV]
	// patience is kvPatience, but for tests.
	patience time.Duration
	answers  answers
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
		c.deleted = purego.NewCallback(func(_ unsafe.Pointer, id uintptr) uintptr {
			if done, ok := c.viewed.take(id); ok {
				done()
			}
			return 0
		})
		c.patience = kvPatience
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
