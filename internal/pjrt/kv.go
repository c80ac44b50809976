package pjrt

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// A KV is the store through which the processes of a multi-process client find each other. Its
// methods are called from threads of the plugin and may run at the same time.
type KV interface {
	// Get waits up to timeout for a key to be put.
	Get(key string, timeout time.Duration) ([]byte, error)
	// TryGet answers at once; a missing key is fs.ErrNotExist.
	TryGet(key string) ([]byte, error)
	// Put stores a value.
	Put(key string, value []byte) error
}

// kvQuery is the end of what asks for a key: how to make an error, and the answer.
type kvQuery struct {
	makeError unsafe.Pointer
	userArg   uintptr
	// value is where C finds the answer. It is no Go pointer to the garbage collector: the slot is
	// C's, and what C left in it must not be looked at.
	value    uintptr
	valueLen uintptr
	release  uintptr
}

type kvGetArgs struct {
	head
	key       span
	timeoutMS int32
	kvQuery
}

type kvTryGetArgs struct {
	head
	key span
	kvQuery
}

type kvPutArgs struct {
	head
	key, value span
	makeError  unsafe.Pointer
	userArg    uintptr
}

const (
	// maxKVKey and maxKVValue bound what is copied for the plugin: a length that is not one must not
	// take the host's memory.
	maxKVKey   = 64 << 10
	maxKVValue = 256 << 20
	// kvPatience is how long a store may take beyond a call's own time-out.
	kvPatience = time.Minute
)

func (c *callbacks) get(a *kvGetArgs) uintptr {
	timeout := max(0, time.Duration(a.timeoutMS)*time.Millisecond)
	return c.answer(&a.kvQuery, a.key, timeout, func(store KV, key string) ([]byte, error) {
		return store.Get(key, timeout)
	})
}

func (c *callbacks) tryGet(a *kvTryGetArgs) uintptr {
	return c.answer(&a.kvQuery, a.key, 0, KV.TryGet)
}

func (c *callbacks) answer(q *kvQuery, key span, timeout time.Duration,
	get func(KV, string) ([]byte, error)) uintptr {
	value, status := c.ask(q.makeError, q.userArg, key, timeout, get)
	if status == 0 {
		q.value, q.valueLen, q.release = c.answers.keep(value), uintptr(len(value)), c.kvRelease
	}
	return status
}

func (c *callbacks) put(a *kvPutArgs) uintptr {
	if a.value.len > maxKVValue {
		return kvError(a.makeError, tooLong(a.value.len))
	}
	value := []byte(a.value.String())
	_, status := c.ask(a.makeError, a.userArg, a.key, 0, func(store KV, key string) ([]byte, error) {
		return nil, store.Put(key, value)
	})
	return status
}

// ask calls a store, and waits for it no longer than its time-out and kvPatience: the thread is the
// plugin's. An error, or a panic, becomes an error of the plugin's own making.
func (c *callbacks) ask(makeError unsafe.Pointer, id uintptr, key span, timeout time.Duration,
	call func(KV, string) ([]byte, error)) (value []byte, status uintptr) {
	store, ok := c.stores.get(id)
	switch {
	case !ok:
		return nil, kvError(makeError, errStoreGone)
	case key.len > maxKVKey:
		return nil, kvError(makeError, tooLong(key.len))
	}
	type result struct {
		value []byte
		err   error
	}
	name, done := key.String(), make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r = result{err: fmt.Errorf("the key-value store panicked: %v", p)}
			}
			done <- r
		}()
		r.value, r.err = call(store, name)
	}()
	late := time.NewTimer(timeout + c.patience)
	defer late.Stop()
	var r result
	select {
	case r = <-done:
	case <-late.C:
		r.err = fmt.Errorf("the key-value store does not answer: %w", context.DeadlineExceeded)
	}
	if r.err == nil && len(r.value) > maxKVValue {
		r.err = tooLong(uintptr(len(r.value)))
	}
	if r.err != nil {
		return nil, kvError(makeError, r.err)
	}
	return r.value, 0
}

func tooLong(n uintptr) error {
	return fmt.Errorf("%d bytes are too many for the key-value store", n)
}

var errStoreGone = errors.New("the client's key-value store is closed")

// kvError asks the plugin to make an error of its own; it tells a missing key and a time-out
// apart by their codes.
func kvError(makeError unsafe.Pointer, err error) uintptr {
	code := statusInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = statusNotFound
	case isTimeout(err):
		code = statusDeadline
	}
	message := []byte(err.Error())
	fn := *(*uintptr)(makeError)
	r := first(purego.SyscallN(fn, uintptr(code), uintptr(bytesPointer(message)),
		uintptr(len(message))))
	runtime.KeepAlive(message)
	return r
}

func isTimeout(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && t.Timeout()
}

// answers keeps the values that C reads after a callback has returned, until C releases them.
type answers struct {
	mu   sync.Mutex
	live map[unsafe.Pointer]*answer
}

type answer struct {
	pin   runtime.Pinner
	bytes []byte
}

func (a *answers) keep(value []byte) uintptr {
	// An empty answer needs an address of its own too, or its release would find another.
	kept := &answer{bytes: append(make([]byte, 0, len(value)+1), value...)[:len(value)]}
	ptr := unsafe.Pointer(unsafe.SliceData(kept.bytes))
	kept.pin.Pin(ptr)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.live == nil {
		a.live = map[unsafe.Pointer]*answer{}
	}
	a.live[ptr] = kept
	return uintptr(ptr)
}

func (a *answers) release(ptr unsafe.Pointer) uintptr {
	a.mu.Lock()
	defer a.mu.Unlock()
	if kept := a.live[ptr]; kept != nil {
		kept.pin.Unpin()
		delete(a.live, ptr)
	}
	return 0
}
